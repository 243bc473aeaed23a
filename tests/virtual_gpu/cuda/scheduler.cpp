#include "scheduler.h"
#include <pthread.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include "memory.h"

namespace virtual_gpu {
thread_local int device_now = 0;
thread_local bool has_context = false;
thread_local bool in_callback = false;

State& state() {
  static State* s = new State;
  return *s;
}

// Libraries and kernels become unusable while the process ends: let a running operation end, and start no
// other.
static void stop() {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.stopped = true;
  s.changed.wait_for(lock, std::chrono::seconds(5), [&] { return !s.thread_runs_work; });
}

static void start() {
  State& s = state();
  if (s.started) return;
  s.started = true;
  s.settings = read_settings();
  s.random.seed(s.settings.seed);
  for (int device = 0; device < s.settings.devices; ++device) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    s.null_streams.push_back(stream);
  }
  start_memory();
  atexit(stop);
  pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
}

Lock::Lock() : std::unique_lock<std::mutex>(state().mutex) { start(); }

bool is_reached(const Position& p) { return !p.stream || p.stream->done >= p.number; }

// Runs the first operation of a queue, which is ready. Returns whether it is complete.
static bool run_first(const StreamPointer& stream, Lock& lock) {
  State& s = state();
  stream->busy = true;
  Operation& operation = stream->queue.front();
  lock.unlock();
  bool complete;
  {
    MemoryAccess access;
    complete = operation.work();
  }
  lock.lock();
  stream->busy = false;
  if (!complete) return false;
  if (s.settings.trace)
    fprintf(stderr, "[vgpu %d] %s on %p\n", getpid(), operation.name, (void*)stream.get());
  Operation finished = std::move(operation);
  stream->queue.pop_front();
  ++stream->done;
  if (stream->destroyed && stream->queue.empty()) s.streams.erase(stream);
  s.changed.notify_all();
  lock.unlock();  // what the operation holds may call us when it is freed
  finished = {};
  lock.lock();
  return true;
}

static bool is_ready(const StreamPointer& stream) {
  if (stream->busy || stream->queue.empty()) return false;
  auto& after = stream->queue.front().after;
  return std::all_of(after.begin(), after.end(), is_reached);
}

// Collects streams whose first operations are ready and have to run, for a position to be reached.
static void collect(const Position& position, std::set<Stream*>& seen, std::vector<StreamPointer>& ready) {
  const StreamPointer& stream = position.stream;
  if (is_reached(position) || !seen.insert(stream.get()).second) return;
  if (stream->busy || stream->queue.empty()) return;
  if (is_ready(stream))
    ready.push_back(stream);
  else
    for (auto& other : stream->queue.front().after) collect(other, seen, ready);
}
static std::vector<StreamPointer> needed(const Position& position) {
  std::set<Stream*> seen;
  std::vector<StreamPointer> ready;
  collect(position, seen, ready);
  std::shuffle(ready.begin(), ready.end(), state().random);
  return ready;
}

// Runs the first operation that completes. Returns whether there is one.
static bool run_one(const std::vector<StreamPointer>& streams, Lock& lock) {
  for (auto& stream : streams)
    if (is_ready(stream) && run_first(stream, lock)) return true;
  return false;
}

void wait(const Position& position, Lock& lock) {
  if (is_reached(position)) return;
  MemoryAccess access(lock);  // once for all operations
  std::chrono::microseconds pause(50);
  while (!is_reached(position)) {
    if (run_one(needed(position), lock) || is_reached(position)) continue;
    pause = std::min(2 * pause, std::chrono::microseconds(2000));
    state().changed.wait_for(lock, pause);
  }
}

void wait_for_device(int device, Lock& lock) {
  State& s = state();
  std::vector<Position> ends{s.null_streams[device]->end()};
  for (auto& stream : s.streams)
    if (stream->device == device) ends.push_back(stream->end());
  std::shuffle(ends.begin(), ends.end(), s.random);
  for (auto& end : ends) wait(end, lock);
}

bool query(const Position& position, Lock& lock) {
  State& s = state();
  if (!is_reached(position) && s.random() % 4 == 0) run_one(needed(position), lock);
  return is_reached(position);
}

// What the background thread may run now.
static std::vector<StreamPointer> in_background() {
  State& s = state();
  std::vector<StreamPointer> streams(s.null_streams);
  streams.insert(streams.end(), s.streams.begin(), s.streams.end());
  std::vector<StreamPointer> ready;
  auto long_ago = Clock::now() - std::chrono::milliseconds(s.settings.lag);
  for (auto& stream : streams) {
    if (s.settings.mode != LAZY) {
      if (is_ready(stream)) ready.push_back(stream);
      continue;
    }
    uint64_t number = stream->done;
    for (auto& operation : stream->queue) {
      ++number;
      if (!operation.other_ranks_wait || operation.since > long_ago) continue;
      for (auto& needs : needed({stream, number})) ready.push_back(needs);
      break;
    }
  }
  std::shuffle(ready.begin(), ready.end(), s.random);
  return ready;
}

static void background() {
  State& s = state();
  unsigned idle = 100;  // microseconds
  for (;;) {
    unsigned pause;
    {
      Lock lock;
      if (s.stopped) return;
      s.thread_runs_work = true;
      bool progress = run_one(in_background(), lock);
      s.thread_runs_work = false;
      if (s.stopped) s.changed.notify_all();
      idle = progress ? 100 : std::min(idle * 2, 2000u);
      pause = s.settings.mode == RANDOM ? s.random() % 2000 : progress ? 0 : idle;
    }
    if (pause) std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }
}

Position enqueue(const StreamPointer& stream, const char* name, Work work, std::vector<Position> after,
                 Lock& lock, bool other_ranks_wait) {
  State& s = state();
  // The legacy default stream and the blocking streams of its device wait for each other.
  auto& null_stream = s.null_streams[stream->device];
  if (stream == null_stream) {
    for (auto& other : s.streams)
      if (!other->nonblocking && other->device == stream->device && !is_reached(other->end()))
        after.push_back(other->end());
  } else if (!stream->nonblocking && !is_reached(null_stream->end())) {
    after.push_back(null_stream->end());
  }
  stream->queue.push_back({name, std::move(work), std::move(after), Clock::now(), other_ranks_wait});
  ++stream->enqueued;
  Position position = stream->end();
  if (!s.has_thread) {
    s.has_thread = true;
    std::thread(background).detach();
  }
  if (s.settings.mode == EAGER && !in_callback)
    while (run_one(needed(position), lock)) {
    }
  return position;
}

Position enqueue(void* handle, const char* name, Work work, std::vector<Position> after,
                 bool other_ranks_wait) {
  Lock lock;
  StreamPointer stream = find_stream(handle);
  if (!stream) {
    fprintf(stderr, "vgpu: %s on a stream that does not exist\n", name);
    abort();
  }
  return enqueue(stream, name, std::move(work), std::move(after), lock, other_ranks_wait);
}

Position compute(void* stream, const char* name, std::function<void()> work) {
  count(library_calls);
  return enqueue(stream, name, [work] {
    std::lock_guard<std::recursive_mutex> alone(state().one_computation);
    work();
    return true;
  });
}

void wait(const Position& position) {
  Lock lock;
  wait(position, lock);
}

int current_device() { return device_now; }

StreamPointer find_stream(void* handle) {
  State& s = state();
  if ((uintptr_t)handle <= 2) return s.null_streams[device_now];  // also cudaStreamPerThread
  for (auto& stream : s.streams)
    if (stream.get() == handle && !stream->destroyed) return stream;
  return nullptr;
}
}  // namespace virtual_gpu
