// Streams as queues of operations, and the scheduler that runs them. Internal to libcuda.so.1.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>
#include "settings.h"
#include "virtual_gpu.h"

namespace virtual_gpu {
using Clock = std::chrono::steady_clock;
using StreamPointer = std::shared_ptr<Stream>;

struct Operation {
  const char* name;
  Work work;
  std::vector<Position> after;
  Clock::time_point since;
  bool other_ranks_wait;
};

struct Stream : std::enable_shared_from_this<Stream> {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool nonblocking = false;
  bool busy = false;       // its first operation is running
  bool destroyed = false;  // by cudaStreamDestroy; the queue still runs
  std::deque<Operation> queue;
  uint64_t enqueued = 0, done = 0;  // numbers of operations
  Position end() { return {shared_from_this(), enqueued}; }
};

/// All that is shared by threads. Never freed, since other threads may run until the process is gone.
struct State {
  std::mutex mutex;
  std::condition_variable changed;       // an operation is complete
  std::recursive_mutex one_computation;  // kernels have static variables
  Settings settings;
  std::mt19937 random;
  std::vector<StreamPointer> null_streams;  // of each device
  std::set<StreamPointer> streams;          // the others, until they are destroyed and complete
  std::set<int> contexts;  // devices with a primary context, which takes memory on a real one
  bool started = false, has_thread = false, thread_runs_work = false;
  bool forked = false;   // this is a child of the process that started; CUDA does not work there
  bool stopped = false;  // the process ends
};
State& state();

/// Holds the mutex, and starts the devices at first use.
struct Lock : std::unique_lock<std::mutex> {
  Lock();
};

extern thread_local int device_now;
extern thread_local bool has_context;  // this thread has a current CUDA context
extern thread_local bool in_callback;

Position enqueue(const StreamPointer& stream, const char* name, Work work, std::vector<Position> after,
                 Lock& lock, bool other_ranks_wait = false);
void wait(const Position& position, Lock& lock);
void wait_for_device(int device, Lock& lock);
/// Whether a position is reached. A program that asks often enough finds it reached at last.
bool query(const Position& position, Lock& lock);
bool is_reached(const Position& position);

/// The stream of a handle, of the current device for 0 to 2; null if there is none.
StreamPointer find_stream(void* handle);

/// Makes the current device's primary context the thread's context, and creates it if need be.
void use_context();

/// Sets the thread's last error.
cudaError_t fail(cudaError_t error);
}  // namespace virtual_gpu

/// Begins a function of the runtime: takes the lock. Children of a fork get an error, as from CUDA.
#define BEGIN_WITHOUT_CONTEXT                   \
  virtual_gpu::Lock lock;                       \
  virtual_gpu::State& s = virtual_gpu::state(); \
  (void)s;                                      \
  if (s.forked) return virtual_gpu::fail(cudaErrorInitializationError)
/// The same for most functions, which create the primary context of the current device.
#define BEGIN            \
  BEGIN_WITHOUT_CONTEXT; \
  virtual_gpu::use_context()
