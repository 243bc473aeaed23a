// libnccl.so.2: collectives and messages between processes of one machine, through shared memory.
//
// The ranks compare their calls. Where they differ, NCCL would hang or mix up memory; here the process ends
// with a message that shows both calls.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include "../cuda/virtual_gpu.h"
#include "nccl_reduction.h"

enum Result { SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE };
enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
static const char* kind_names[] = {"AllReduce",     "Reduce", "Broadcast", "AllGather",
                                   "ReduceScatter", "Send",   "Recv"};
const size_t CHUNK = 1 << 20;      // bytes of a collective that are exchanged at once
const size_t MESSAGE = 256 << 10;  // bytes of a message
const int MAX_RANKS = 64;

struct Call {
  int kind;
  unsigned long long count;
  int type, operation;
  int peer;  // the root, or the other rank of a message
  bool operator==(const Call& other) const {
    return kind == other.kind && count == other.count && type == other.type && operation == other.operation &&
           peer == other.peer;
  }
  size_t bytes() const { return count * size_of(type); }
};

// What the ranks of a communicator share. A memory segment starts with it; the data of all chunks and
// messages follow.
struct SharedRank {
  std::atomic<uint64_t> published, consumed;  // steps of collectives
  Call call;
  char bus[32], host[96];
  int color, key;  // of ncclCommSplit
};
struct Mailbox {
  std::atomic<uint64_t> written, read;
  unsigned long long total;  // bytes of the message
};
struct SharedState {
  std::atomic<int> joined;
  std::atomic<int> connecting[SEND];  // ranks that began a collective, by kind
  SharedRank ranks[MAX_RANKS];
  Mailbox mailboxes[MAX_RANKS][MAX_RANKS];
};

struct Communicator {
  int rank, size, device;
  char id[128];
  SharedState* shared;
  char* chunks;
  char* messages;
  size_t mapped;  // bytes
  uint64_t step = 0;
  int splits = 0;
  bool connected[SEND] = {};
  std::atomic<bool> aborted{false};
  virtual_gpu::Position last;  // of its calls
  SharedRank& of(int r) { return shared->ranks[r]; }
  char* chunk(int r) { return chunks + r * CHUNK; }
  char* message(int from, int to) { return messages + (size_t(from) * size + to) * MESSAGE; }
};

[[noreturn]] static void die_of_mismatch(int rank, const Call& a, int other, const Call& b) {
  fprintf(stderr,
          "vgpu: NCCL calls differ: rank %d: %s of %llu elements, type %d, operation %d, root %d; rank %d: "
          "%s of %llu "
          "elements, type %d, operation %d, root %d\n",
          rank, kind_names[a.kind], a.count, a.type, a.operation, a.peer, other, kind_names[b.kind], b.count,
          b.type, b.operation, b.peer);
  abort();
}

enum Progress { WAITING, ADVANCED, COMPLETE };

// A call in progress.
class Task {
 public:
  Communicator* comm;
  Call call;
  const char* send;
  char* recv;
  bool complete = false;
  Task(Communicator* comm, Call call, const void* send, void* recv)
      : comm(comm), call(call), send((const char*)send), recv((char*)recv) {}

  bool is_message() const { return call.kind >= SEND; }
  // Whether this has to wait for an earlier call of the same group.
  bool comes_after(const Task& earlier) const {
    if (comm != earlier.comm || is_message() != earlier.is_message()) return false;
    return !is_message() || (call.kind == earlier.call.kind && call.peer == earlier.call.peer);
  }
  // Goes on for some microseconds. Returns whether the call is complete.
  bool poll() {
    auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    for (;;) {
      if (comm->aborted) return true;
      Progress progress = is_message() ? exchange_message() : exchange_chunk();
      if (progress == COMPLETE) return true;
      if (progress == ADVANCED) continue;
      if (std::chrono::steady_clock::now() > end) return false;
      sched_yield();
    }
  }

 private:
  size_t done = 0;  // bytes, of a section
  int section = 0;  // of a ReduceScatter: the rank that receives it
  bool published = false;

  Progress exchange_message() {
    bool sends = call.kind == SEND;
    int from = sends ? comm->rank : call.peer, to = sends ? call.peer : comm->rank;
    Mailbox& box = comm->shared->mailboxes[from][to];
    if (done == call.bytes()) return COMPLETE;
    size_t n = std::min(MESSAGE, call.bytes() - done);
    bool full = box.written.load() != box.read.load();
    if (full == sends) return WAITING;
    if (sends) {
      box.total = call.bytes();
      memcpy(comm->message(from, to), send + done, n);
      ++box.written;
    } else {
      if (box.total != call.bytes()) {
        fprintf(stderr, "vgpu: rank %d receives %zu bytes from rank %d, which sends %llu\n", to, call.bytes(),
                from, box.total);
        abort();
      }
      memcpy(recv + done, comm->message(from, to), n);
      ++box.read;
    }
    done += n;
    return done == call.bytes() ? COMPLETE : ADVANCED;
  }

  Progress exchange_chunk() {
    if (call.bytes() == 0) return COMPLETE;
    size_t n = std::min(CHUNK, call.bytes() - done);
    if (!published) {
      for (int r = 0; r < comm->size; ++r)
        if (comm->of(r).consumed.load() < comm->step) return WAITING;
      publish(n);
      return ADVANCED;
    }
    for (int r = 0; r < comm->size; ++r)
      if (comm->of(r).published.load() < comm->step) return WAITING;
    for (int r = 0; r < comm->size; ++r)
      if (!(comm->of(r).call == call)) die_of_mismatch(comm->rank, call, r, comm->of(r).call);
    consume(n);
    done += n;
    if (done < call.bytes()) return ADVANCED;
    done = 0;
    ++section;
    return section == (call.kind == REDUCE_SCATTER ? comm->size : 1) ? COMPLETE : ADVANCED;
  }
  void publish(size_t n) {
    ++comm->step;
    SharedRank& me = comm->of(comm->rank);
    me.call = call;
    if (call.kind != BROADCAST || call.peer == comm->rank)
      memcpy(comm->chunk(comm->rank), send + section * call.bytes() + done, n);
    me.published.store(comm->step);
    published = true;
  }
  void consume(size_t n) {
    int receiver = call.kind == REDUCE ? call.peer : call.kind == REDUCE_SCATTER ? section : comm->rank;
    switch (call.kind) {
      case ALL_REDUCE:
      case REDUCE:
      case REDUCE_SCATTER:
        if (receiver == comm->rank) reduce(n);
        break;
      case BROADCAST: memcpy(recv + done, comm->chunk(call.peer), n); break;
      case ALL_GATHER:
        for (int r = 0; r < comm->size; ++r) memcpy(recv + r * call.bytes() + done, comm->chunk(r), n);
    }
    comm->of(comm->rank).consumed.store(comm->step);
    published = false;
  }
  // The sum of each chunk starts at another rank, as in a ring; it is the same on all ranks.
  void reduce(size_t n) {
    size_t elements = n / size_of(call.type);
    int first = done / CHUNK % comm->size;
    std::vector<char> sum(comm->chunk(first), comm->chunk(first) + n);
    for (int i = 1; i < comm->size; ++i)
      combine(sum.data(), comm->chunk((first + i) % comm->size), elements, call.type, call.operation);
    if (call.operation == AVERAGE) divide(sum.data(), elements, call.type, comm->size);
    memcpy(recv + done, sum.data(), n);
  }
};

using Tasks = std::vector<Task>;
static thread_local int group_depth = 0;
static thread_local std::vector<std::pair<cudaStream_t, Task>> group;
static std::mutex submitting;

static bool poll_all(Tasks& tasks) {
  bool all = true;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].complete) continue;
    bool blocked = std::any_of(tasks.begin(), tasks.begin() + i,
                               [&](const Task& t) { return !t.complete && tasks[i].comes_after(t); });
    tasks[i].complete = !blocked && tasks[i].poll();
    all = all && tasks[i].complete;
  }
  return all;
}
// Since NCCL 2.22, the first collective of a kind blocks the host until all ranks call it.
static void connect(const Task& task) {
  const char* when = getenv("NCCL_RUNTIME_CONNECT");
  if (task.is_message() || (when && !strcmp(when, "0")) || task.comm->connected[task.call.kind]) return;
  task.comm->connected[task.call.kind] = true;
  std::atomic<int>& ranks = task.comm->shared->connecting[task.call.kind];
  ++ranks;
  while (ranks.load() < task.comm->size && !task.comm->aborted) usleep(100);
}
// Enqueues calls, as one operation on each stream.
static void submit(std::vector<std::pair<cudaStream_t, Task>> calls) {
  for (auto& call : calls) connect(call.second);
  std::lock_guard<std::mutex> lock(submitting);
  while (!calls.empty()) {
    cudaStream_t stream = calls.front().first;
    auto tasks = std::make_shared<Tasks>();
    std::vector<std::pair<cudaStream_t, Task>> rest;
    std::vector<virtual_gpu::Position> after;  // the calls of a communicator run in order, on any stream
    for (auto& call : calls) {
      if (call.first != stream) {
        rest.push_back(call);
        continue;
      }
      tasks->push_back(call.second);
      if (call.second.comm->last.stream) after.push_back(call.second.comm->last);
    }
    const char* name = kind_names[tasks->front().call.kind];
    auto position = virtual_gpu::enqueue(stream, name, [tasks] { return poll_all(*tasks); }, after, true);
    for (auto& task : *tasks) task.comm->last = position;
    calls = rest;
  }
}
static int call(Communicator* comm, Kind kind, const void* send, void* recv, size_t count, int type,
                int operation, int peer, cudaStream_t stream) {
  if (!comm || type < 0 || type >= N_TYPES || operation < 0 || operation > AVERAGE || peer < 0 ||
      peer >= comm->size)
    return INVALID_ARGUMENT;
  auto is_wrong = [&](const void* p) { return p && count && !virtual_gpu::is_device_memory(p); };
  if (is_wrong(send) || is_wrong(recv)) {
    fprintf(stderr, "vgpu: nccl%s of memory that is not on a device\n", kind_names[kind]);
    return INVALID_ARGUMENT;
  }
  virtual_gpu::count(virtual_gpu::nccl_calls);
  virtual_gpu::count(virtual_gpu::nccl_bytes, count * size_of(type));
  Task task(comm, {kind, count, type, operation, peer}, send, recv);
  if (group_depth)
    group.push_back({stream, task});
  else
    submit({{stream, task}});
  return SUCCESS;
}

API int ncclAllReduce(const void* send, void* recv, size_t n, int type, int op, Communicator* c,
                      cudaStream_t stream) {
  return call(c, ALL_REDUCE, send, recv, n, type, op, 0, stream);
}
API int ncclReduce(const void* send, void* recv, size_t n, int type, int op, int root, Communicator* c,
                   cudaStream_t stream) {
  return call(c, REDUCE, send, c && c->rank == root ? recv : nullptr, n, type, op, root, stream);
}
API int ncclBroadcast(const void* send, void* recv, size_t n, int type, int root, Communicator* c,
                      cudaStream_t stream) {
  return call(c, BROADCAST, c && c->rank == root ? send : nullptr, recv, n, type, 0, root, stream);
}
API int ncclBcast(void* buffer, size_t n, int type, int root, Communicator* c, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, n, type, root, c, stream);
}
API int ncclAllGather(const void* send, void* recv, size_t n, int type, Communicator* c,
                      cudaStream_t stream) {
  return call(c, ALL_GATHER, send, recv, n, type, 0, 0, stream);
}
API int ncclReduceScatter(const void* send, void* recv, size_t n, int type, int op, Communicator* c,
                          cudaStream_t stream) {
  return call(c, REDUCE_SCATTER, send, recv, n, type, op, 0, stream);
}
API int ncclSend(const void* send, size_t n, int type, int peer, Communicator* c, cudaStream_t stream) {
  return call(c, SEND, send, nullptr, n, type, 0, peer, stream);
}
API int ncclRecv(void* recv, size_t n, int type, int peer, Communicator* c, cudaStream_t stream) {
  return call(c, RECV, nullptr, recv, n, type, 0, peer, stream);
}
API int ncclGroupStart() {
  ++group_depth;
  return SUCCESS;
}
API int ncclGroupEnd() {
  if (!group_depth) return INVALID_USAGE;
  if (--group_depth == 0) {
    auto calls = std::move(group);
    group.clear();
    submit(calls);
  }
  return SUCCESS;
}

// Communicators.
struct UniqueId {
  char text[128];
};
static const char ID_PREFIX[] = "/vgpu-nccl-";

API int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "%s%d-%lld-%u", ID_PREFIX, getpid(), (long long)time(nullptr),
           random());
  return SUCCESS;
}

// Two ranks may not share a device, unless they are on different hosts, as NCCL sees them.
static bool shares_device(Communicator* comm) {
  SharedRank& me = comm->of(comm->rank);
  for (int r = 0; r < comm->size; ++r) {
    if (r == comm->rank || strcmp(comm->of(r).bus, me.bus) || strcmp(comm->of(r).host, me.host)) continue;
    fprintf(stderr, "vgpu: Duplicate GPU detected : rank %d and rank %d both on CUDA device %s\n", comm->rank,
            r, me.bus);
    return true;
  }
  return false;
}

static int create(Communicator** out, int size, const char* id, int rank) {
  size_t head = (sizeof(SharedState) + 4095) / 4096 * 4096;
  size_t bytes = head + size * CHUNK + size_t(size) * size * MESSAGE;
  int file = shm_open(id, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return SYSTEM_ERROR;
  char* p = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (p == MAP_FAILED) return SYSTEM_ERROR;
  auto* comm = new Communicator;
  comm->rank = rank;
  comm->size = size;
  comm->device = virtual_gpu::current_device();
  snprintf(comm->id, sizeof comm->id, "%s", id);
  comm->shared = (SharedState*)p;
  comm->chunks = p + head;
  comm->messages = comm->chunks + size * CHUNK;
  comm->mapped = bytes;
  SharedRank& me = comm->of(rank);
  cudaDeviceGetPCIBusId(me.bus, sizeof me.bus, comm->device);
  const char* host = getenv("NCCL_HOSTID");
  snprintf(me.host, sizeof me.host, "%s", host ? host : "");
  ++comm->shared->joined;
  while (comm->shared->joined.load() < size) usleep(100);
  if (rank == 0) shm_unlink(id);
  if (shares_device(comm)) return INVALID_USAGE;
  *out = comm;
  return SUCCESS;
}
API int ncclCommInitRank(Communicator** out, int size, UniqueId id, int rank) {
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  if (strncmp(id.text, ID_PREFIX, strlen(ID_PREFIX))) return INVALID_ARGUMENT;
  return create(out, size, id.text, rank);
}
API int ncclCommInitRankConfig(Communicator** out, int size, UniqueId id, int rank, void*) {
  return ncclCommInitRank(out, size, id, rank);
}

// All ranks publish their color and key, as one more step of a collective.
API int ncclCommSplit(Communicator* comm, int color, int key, Communicator** out, void*) {
  virtual_gpu::wait(comm->last);
  *out = nullptr;
  SharedRank& me = comm->of(comm->rank);
  auto wait_for = [&](std::atomic<uint64_t> SharedRank::* steps) {
    for (int r = 0; r < comm->size; ++r)
      while ((comm->of(r).*steps).load() < comm->step) usleep(100);
  };
  wait_for(&SharedRank::consumed);
  me.color = color;
  me.key = key;
  me.published.store(++comm->step);
  wait_for(&SharedRank::published);
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int r = 0; r < comm->size; ++r)
    if (comm->of(r).color == color) members.push_back({comm->of(r).key, r});
  me.consumed.store(comm->step);
  std::string id = std::string(comm->id) + "." + std::to_string(comm->splits++) + "." + std::to_string(color);
  if (color < 0) return SUCCESS;  // NCCL_SPLIT_NOCOLOR
  std::sort(members.begin(), members.end());
  int rank = std::find(members.begin(), members.end(), std::make_pair(key, comm->rank)) - members.begin();
  return create(out, members.size(), id.c_str(), rank);
}

static int destroy(Communicator* comm) {
  virtual_gpu::wait(comm->last);
  munmap(comm->shared, comm->mapped);
  delete comm;
  return SUCCESS;
}
API int ncclCommDestroy(Communicator* comm) { return comm ? destroy(comm) : SUCCESS; }
API int ncclCommAbort(Communicator* comm) {
  comm->aborted = true;
  return destroy(comm);
}
API int ncclCommFinalize(Communicator* comm) {
  virtual_gpu::wait(comm->last);
  return SUCCESS;
}
API int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = SUCCESS;
  return SUCCESS;
}
API int ncclCommCount(Communicator* comm, int* n) {
  *n = comm->size;
  return SUCCESS;
}
API int ncclCommUserRank(Communicator* comm, int* rank) {
  *rank = comm->rank;
  return SUCCESS;
}
API int ncclCommCuDevice(Communicator* comm, int* device) {
  *device = comm->device;
  return SUCCESS;
}

API int ncclGetVersion(int* version) {
  *version = 22501;
  return SUCCESS;
}
API const char* ncclGetLastError(Communicator*) { return ""; }
API const char* ncclGetErrorString(int error) {
  static const char* texts[] = {"no error",
                                "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                "internal error - please report this issue to the NCCL developers",
                                "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return error >= 0 && error < 8 ? texts[error] : "unknown result code";
}
