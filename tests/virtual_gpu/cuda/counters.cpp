// Counts of what CUDA's libraries were asked to do. tests/virtual_gpu/counters.py reads them.
#include <atomic>
#include "virtual_gpu.h"

namespace virtual_gpu {
static std::atomic<uint64_t> counts[N_COUNTERS];
void count(Counter counter, uint64_t by) { counts[counter] += by; }
}  // namespace virtual_gpu

/// The names of all counters, separated by spaces.
API const char* virtual_gpu_counter_names() {
#define X(name) #name " "
  return VGPU_COUNTERS(X);
#undef X
}
/// Copies the values of all counters since the start of the process.
API void virtual_gpu_counts(uint64_t* out) {
  for (int i = 0; i < virtual_gpu::N_COUNTERS; ++i) out[i] = virtual_gpu::counts[i];
}
