// The runtime's functions for streams and events: cudaStream*, cudaEvent*, cudaLaunchHostFunc.
#include <algorithm>
#include "scheduler.h"
using namespace virtual_gpu;

static cudaError_t create(cudaStream_t* out, unsigned flags, int priority) {
  BEGIN;
  auto stream = std::make_shared<Stream>();
  stream->device = device_now;
  stream->flags = flags;
  stream->priority = priority;
  stream->nonblocking = flags & cudaStreamNonBlocking;
  s.streams.insert(stream);
  *out = (cudaStream_t)stream.get();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return create(out, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return create(out, flags, 0); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  return create(out, flags, priority);
}
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  BEGIN;
  auto stream = find_stream(handle);
  if (!stream || (uintptr_t)handle <= 2) return fail(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;
  if (stream->queue.empty()) s.streams.erase(stream);
  return cudaSuccess;
}

#define FIND_STREAM(handle)          \
  BEGIN;                             \
  auto stream = find_stream(handle); \
  if (!stream) return fail(cudaErrorInvalidResourceHandle)

API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  FIND_STREAM(handle);
  *flags = stream->flags;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  FIND_STREAM(handle);
  *priority = stream->priority;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static bool nothing() { return true; }
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FIND_STREAM(handle);
  count(synchronizations);
  // The null stream also waits for blocking streams.
  bool is_null = stream == s.null_streams[stream->device];
  wait(is_null ? enqueue(stream, "synchronize", nothing, {}, lock) : stream->end(), lock);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  FIND_STREAM(handle);
  count(queries);
  return query(stream->end(), lock) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaDeviceSynchronize() {
  BEGIN;
  count(synchronizations);
  wait_for_device(device_now, lock);
  return cudaSuccess;
}

template <class F>
static Work callback(F function) {
  return [=] {
    in_callback = true;
    function();
    in_callback = false;
    return true;
  };
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  FIND_STREAM(handle);
  enqueue(stream, "host function", callback([=] { function(data); }), {}, lock);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data,
                                      unsigned) {
  FIND_STREAM(handle);
  enqueue(stream, "callback", callback([=] { function(handle, cudaSuccess, data); }), {}, lock);
  return cudaSuccess;
}

// Events.
namespace {
struct Event {
  int device = 0;
  bool timing = true, recorded = false;
  Position position;
  std::shared_ptr<Clock::time_point> time;
};
std::set<Event*>& events() {
  static auto* all = new std::set<Event*>;
  return *all;
}
}  // namespace
#define FIND_EVENT(handle)      \
  BEGIN;                        \
  auto* event = (Event*)handle; \
  if (!events().count(event)) return fail(cudaErrorInvalidResourceHandle)

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  BEGIN;
  auto* event = new Event;
  event->device = device_now;
  event->timing = !(flags & cudaEventDisableTiming);
  events().insert(event);
  *out = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  FIND_EVENT(handle);
  events().erase(event);
  delete event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  FIND_EVENT(handle);
  auto stream = find_stream(stream_handle);
  if (!stream || stream->device != event->device) return fail(cudaErrorInvalidResourceHandle);
  auto time = event->time = std::make_shared<Clock::time_point>();
  auto work = [time] {
    *time = Clock::now();
    return true;
  };
  event->recorded = true;
  event->position = enqueue(stream, "record event", work, {}, lock);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  FIND_EVENT(handle);
  auto stream = find_stream(stream_handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  count(event_waits);
  if (event->recorded) enqueue(stream, "wait for event", nothing, {event->position}, lock);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  FIND_EVENT(handle);
  count(queries);
  return query(Position(event->position), lock) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  FIND_EVENT(handle);
  count(synchronizations);
  wait(Position(event->position), lock);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  FIND_EVENT(end);
  auto* first = (Event*)start;
  if (!events().count(first) || !first->recorded || !event->recorded || !first->timing || !event->timing)
    return fail(cudaErrorInvalidResourceHandle);
  if (!is_reached(first->position) || !is_reached(event->position)) return fail(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(*event->time - *first->time).count();
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, start, end);
}
