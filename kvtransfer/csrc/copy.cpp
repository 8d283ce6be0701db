// Copies many runs of bytes between two pools in one call, so that neither Python nor its lock is in the way.
//
// Stores go around the caches (non-temporal): the target is not read first, which saves a third of the memory traffic,
// and what a compute thread beside it has in its caches stays there. On processors other than x86-64: memcpy.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kStepBytes = 1 << 20;  // between two looks at the stop flag
constexpr int64_t kAheadBytes = 1024;    // how far a copy looks ahead within a long run
constexpr int64_t kNearBytes = 16384;    // a run that is shorter brings the next one in meanwhile: both fit into L1
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPagesAhead = 4;       // runs
constexpr int64_t kStreamFrom = 2048;    // shorter runs are not worth the fence

#if defined(__x86_64__)
// Looks `ahead` of what it copies. Beyond the end that is harmless: a prefetch never faults.
template <int kHint>
void CopyStreaming(char* target, const char* source, int64_t num_bytes, const char* ahead) {
  const int64_t head = -reinterpret_cast<intptr_t>(target) & 63;
  std::memcpy(target, source, head);
  int64_t at = head;
  for (; at + 64 <= num_bytes; at += 64) {
    _mm_prefetch(ahead + at, static_cast<_mm_hint>(kHint));
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(target + at, source + at, num_bytes - at);
}
#endif

// Copies into the caches, where somebody reads it next.
void CopyCached(char* target, const char* source, int64_t num_bytes, const char* next) {
#if defined(__x86_64__)
  if (num_bytes < kNearBytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
  }
#endif
  std::memcpy(target, source, num_bytes);
}

// next: where the run after this one begins.
void Copy(char* target, const char* source, int64_t num_bytes, const char* next) {
#if defined(__x86_64__)
  if (num_bytes >= kStreamFrom) {
    if (num_bytes < kNearBytes) {
      CopyStreaming<_MM_HINT_T0>(target, source, num_bytes, next);
    } else {
      CopyStreaming<_MM_HINT_NTA>(target, source, num_bytes, source + kAheadBytes);
    }
    return;
  }
#endif
  std::memcpy(target, source, num_bytes);
}

// Has the page tables read for a run that comes soon: in random order each run would otherwise wait for them.
void Announce(const char* target, const char* source, int64_t num_bytes) {
#if defined(__x86_64__)
  for (int64_t at = 0; at < num_bytes && at <= kNearBytes; at += kPageBytes) {
    _mm_prefetch(source + at, _MM_HINT_NTA);
    _mm_prefetch(target + at, _MM_HINT_NTA);
  }
#endif
}

void Fence() {
#if defined(__x86_64__)
  _mm_sfence();  // streaming stores are visible to other threads before "done" is
#endif
}

}  // namespace

extern "C" {

// runs: num_runs times (source offset, target offset, bytes). is_streaming: around the caches. Returns 0, or 1 if `stop`
// became non-zero on the way.
int32_t baton_copy_runs(const char* source, char* target, const int64_t* runs, int64_t num_runs, int32_t is_streaming,
                        const volatile uint8_t* stop) {
  int64_t since_look = 0;
  for (int64_t i = 0; i < num_runs; ++i) {
    const int64_t* run = runs + 3 * i;
    const int64_t* soon = run + 3 * kPagesAhead;
    if (i + kPagesAhead < num_runs) Announce(target + soon[1], source + soon[0], soon[2]);
    const char* next = source + (i + 1 < num_runs ? run[3] : run[0]);
    for (int64_t at = 0; at < run[2]; at += kStepBytes) {
      const int64_t size = run[2] - at < kStepBytes ? run[2] - at : kStepBytes;
      if ((since_look += size) >= kStepBytes) {
        since_look = 0;
        if (*stop) {
          Fence();
          return 1;
        }
      }
      const auto copy = is_streaming ? Copy : CopyCached;
      copy(target + run[1] + at, source + run[0] + at, size, next);
    }
  }
  Fence();
  return 0;
}
}
