// Gathers pieces of paged blocks into one stretch of memory, or scatters them out of it: many runs in one launch.
//
// NVRTC compiles this file where there is a GPU; on_cpu.cpp compiles the same file for the CPU, where tests compare it
// with numpy. So it uses nothing but the built-in variables, no shared memory and no barrier.
//
// Tiling: blockIdx.y walks over the runs, blockIdx.x and the threads over the words of one run, so that neighbouring
// threads touch neighbouring words. Words are as wide as the run's alignment allows: 16 bytes where both ends and the
// length are multiples of 16, as they are for every layout in use; else 4, else single bytes. Four words are loaded
// before the first is stored, which keeps enough reads under way to hide the memory's latency.

struct __align__(16) Word16 {
  unsigned int part[4];
};

template <typename Word>
static __device__ void CopyRun(const char* source, char* target, long long num_bytes) {
  const Word* from = reinterpret_cast<const Word*>(source);
  Word* to = reinterpret_cast<Word*>(target);
  const long long count = num_bytes / static_cast<long long>(sizeof(Word));
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const Word a = from[i];
    const Word b = from[i + step];
    const Word c = from[i + 2 * step];
    const Word d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < count; i += step) {
    to[i] = from[i];
  }
}

// runs: num_runs times (source offset, target offset, bytes), as in csrc/copy.cpp. No two runs may share target bytes.
extern "C" __global__ void baton_copy_runs(const char* source, char* target, const long long* runs, int num_runs) {
  for (int run = blockIdx.y; run < num_runs; run += gridDim.y) {
    const char* from = source + runs[3 * run];
    char* to = target + runs[3 * run + 1];
    const long long num_bytes = runs[3 * run + 2];
    const unsigned long long bits = reinterpret_cast<unsigned long long>(from) |
                                    reinterpret_cast<unsigned long long>(to) |
                                    static_cast<unsigned long long>(num_bytes);
    if (bits % 16 == 0) {
      CopyRun<Word16>(from, to, num_bytes);
    } else if (bits % 4 == 0) {
      CopyRun<unsigned int>(from, to, num_bytes);
    } else {
      CopyRun<char>(from, to, num_bytes);
    }
  }
}
