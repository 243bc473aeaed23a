// What libcuda.so.1 offers the other stand-ins: streams, device memory and counters.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// The stand-ins export the functions of CUDA's libraries, and nothing else by default.
#define API extern "C" __attribute__((visibility("default")))
#define SHARED __attribute__((visibility("default")))

namespace virtual_gpu {
struct Stream;

/// A part of an operation. Returns whether the operation is complete; if not, it is called again later.
using Work = std::function<bool()>;

/// A place in a stream, which is reached when all operations up to it are complete.
struct Position {
  std::shared_ptr<Stream> stream;  // null: reached
  uint64_t number = 0;
};

/// Appends an operation to a stream (a cudaStream_t), to run after some other positions.
/// other_ranks_wait: other processes may wait for it, so that it runs soon in every mode.
SHARED Position enqueue(void* stream, const char* name, Work work, std::vector<Position> after = {},
                        bool other_ranks_wait = false);
/// Appends a computation that is done by one call, alone on the devices.
SHARED Position compute(void* stream, const char* name, std::function<void()> work);
/// Runs operations until a position is reached.
SHARED void wait(const Position& position);

SHARED bool is_device_memory(const void* address);
SHARED int current_device();

#define VGPU_COUNTERS(X)                                                                                     \
  X(launches)      /* of kernels */                                                                          \
  X(library_calls) /* of cuBLAS, cuRAND, cuSOLVER, cuFFT and sorting */                                      \
  X(copies_to_device)                                                                                        \
  X(bytes_to_device)                                                                                         \
  X(copies_to_host)                                                                                          \
  X(bytes_to_host) X(copies_within_device) X(bytes_within_device) X(fills) /* cudaMemset */                  \
      X(nccl_calls) X(nccl_bytes) X(synchronizations) /* the host waits: for a device, stream or event, or a \
                                                         copy from or to its memory */                       \
      X(queries)                                      /* of streams and events */                            \
      X(event_waits)                                  /* a stream waits for an event */                      \
      X(allocations) X(allocated_bytes)               /* on a device */                                      \
      X(host_allocations)                             /* of pinned memory */
enum Counter {
#define X(name) name,
  VGPU_COUNTERS(X)
#undef X
      N_COUNTERS
};
SHARED void count(Counter counter, uint64_t by = 1);
}  // namespace virtual_gpu
