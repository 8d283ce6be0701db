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
constexpr int64_t kAheadBytes = 1024;    // of the next run, as far as a copy looks ahead within one
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kStreamFrom = 2048;    // shorter runs are not worth the fence

#if defined(__x86_64__)
void CopyStreaming(char* target, const char* source, int64_t num_bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(target) & 63;
  std::memcpy(target, source, head);
  int64_t at = head;
  for (; at + 64 <= num_bytes; at += 64) {
    _mm_prefetch(source + at + 1024, _MM_HINT_NTA);  // beyond the end is harmless: a prefetch never faults
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

void Copy(char* target, const char* source, int64_t num_bytes) {
#if defined(__x86_64__)
  if (num_bytes >= kStreamFrom) {
    CopyStreaming(target, source, num_bytes);
    return;
  }
#endif
  std::memcpy(target, source, num_bytes);
}

// Begins to bring in what the next run reads first, and the pages that it reads and writes: small runs in random order
// would otherwise wait for memory and page tables at each beginning.
void Announce(const char* target, const char* source, int64_t num_bytes) {
#if defined(__x86_64__)
  const int64_t ahead = num_bytes < kAheadBytes ? num_bytes : kAheadBytes;
  for (int64_t at = 0; at < ahead; at += 64) _mm_prefetch(source + at, _MM_HINT_NTA);
  for (int64_t at = 0; at < num_bytes && at <= 2 * kPageBytes; at += kPageBytes) {
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

// runs: num_runs times (source offset, target offset, bytes). Returns 0, or 1 if `stop` became non-zero on the way.
int32_t baton_copy_runs(const char* source, char* target, const int64_t* runs, int64_t num_runs,
                        const volatile uint8_t* stop) {
  int64_t since_look = 0;
  for (int64_t i = 0; i < num_runs; ++i) {
    const int64_t* run = runs + 3 * i;
    if (i + 1 < num_runs) Announce(target + run[4], source + run[3], run[5]);
    for (int64_t at = 0; at < run[2]; at += kStepBytes) {
      const int64_t size = run[2] - at < kStepBytes ? run[2] - at : kStepBytes;
      if ((since_look += size) >= kStepBytes) {
        since_look = 0;
        if (*stop) {
          Fence();
          return 1;
        }
      }
      Copy(target + run[1] + at, source + run[0] + at, size);
    }
  }
  Fence();
  return 0;
}
}
