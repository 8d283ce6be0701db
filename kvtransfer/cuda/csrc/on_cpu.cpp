// Runs paged_copy.cu on the CPU, thread after thread: the kernel has no barrier, so any order of its threads is one
// that a GPU could have taken. For tests: a check of the kernel's arithmetic where there is no GPU.

struct Dim3 {
  unsigned int x, y;
};
static thread_local Dim3 gridDim, blockDim, blockIdx, threadIdx;

#define __global__
#define __device__
#define __align__(bytes) alignas(bytes)

#include "paged_copy.cu"

extern "C" void baton_launch_on_cpu(unsigned int grid_x, unsigned int grid_y, unsigned int block_x, const char* source,
                                    char* target, const long long* runs, int num_runs) {
  gridDim = {grid_x, grid_y};
  blockDim = {block_x, 1};
  for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < block_x; ++threadIdx.x) {
        baton_copy_runs(source, target, runs, num_runs);
      }
    }
  }
}
