// The runtime's functions that allocate and free memory: cudaMalloc, cudaHostAlloc, cudaMemPool* and others.
#include "memory.h"
#include <sys/mman.h>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace virtual_gpu {
namespace {
// With VGPU_PROTECT, all memory of the devices is in one range of addresses.
struct Arena {
  char* start = nullptr;
  size_t size = 0;
  std::map<uintptr_t, size_t> holes;  // free parts: address, size
  int accesses = 0;                   // instances of MemoryAccess

  bool contains(void* p) const { return start && (char*)p >= start && (char*)p < start + size; }
  void* take(size_t bytes);
  void give_back(void* p, size_t bytes);
};
struct Memory {
  Arena arena;
  std::map<uintptr_t, Block> blocks;
  std::vector<size_t> used;  // bytes of each device
};
Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

void* Arena::take(size_t bytes) {
  for (auto& [address, available] : holes) {
    if (available < bytes) continue;
    uintptr_t p = address;
    size_t rest = available - bytes;
    holes.erase(p);
    if (rest) holes[p + bytes] = rest;
    return (void*)p;
  }
  return nullptr;
}
void Arena::give_back(void* p, size_t bytes) {
  auto hole = holes.emplace((uintptr_t)p, bytes).first;
  auto next = std::next(hole);
  if (next != holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes.erase(next);
  }
  if (hole == holes.begin()) return;
  auto before = std::prev(hole);
  if (before->first + before->second == hole->first) {
    before->second += hole->second;
    holes.erase(hole);
  }
}

size_t rounded(size_t size) { return std::max<size_t>((size + 511) / 512 * 512, 512); }

cudaError_t allocate(void** out, size_t size, Kind kind) {
  State& s = state();
  Memory& m = memory();
  *out = nullptr;
  if (kind == PINNED) {
    count(host_allocations);
  } else {
    if (m.used[device_now] + size > s.settings.memory) return fail(cudaErrorMemoryAllocation);
    count(allocations);
    count(allocated_bytes, size);
  }
  if (s.settings.protect && kind == DEVICE)
    *out = m.arena.take(rounded(size));
  else if (posix_memalign(out, 512, size))  // not rounded, so that the address sanitizer knows the end
    *out = nullptr;
  if (!*out) return fail(cudaErrorMemoryAllocation);
  if (kind != PINNED) m.used[device_now] += size;
  m.blocks[(uintptr_t)*out] = {size, device_now, kind};
  return cudaSuccess;
}

void poison(void* p, size_t size, Lock& lock) {
  if (!state().settings.poison) return;
  MemoryAccess access(lock);
  memset(p, 0xff, size);
}

cudaError_t allocate(void** out, size_t size, Kind kind, Lock& lock) {
  cudaError_t error = allocate(out, size, kind);
  if (!error) poison(*out, size, lock);
  return error;
}

cudaError_t release(void* p, Lock& lock) {
  Memory& m = memory();
  auto found = m.blocks.find((uintptr_t)p);
  if (found == m.blocks.end()) return fail(cudaErrorInvalidValue);
  Block block = found->second;
  poison(p, block.size, lock);
  m.blocks.erase(found);
  if (block.kind != PINNED) m.used[block.device] -= block.size;
  if (m.arena.contains(p))
    m.arena.give_back(p, rounded(block.size));
  else
    free(p);
  return cudaSuccess;
}

// The lock is held.
void change_accesses(int by) {
  Arena& arena = memory().arena;
  bool was_open = arena.accesses > 0;
  arena.accesses += by;
  bool open = arena.accesses > 0;
  if (was_open != open) mprotect(arena.start, arena.size, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}
}  // namespace

void start_memory() {
  const Settings& settings = state().settings;
  Memory& m = memory();
  m.used.resize(settings.devices);
  if (!settings.protect) return;
  m.arena.size = settings.memory * settings.devices;
  void* p = mmap(nullptr, m.arena.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  m.arena.start = (char*)p;
  m.arena.holes[(uintptr_t)p] = m.arena.size;
}

MemoryAccess::MemoryAccess() : locked(false) {
  if (!state().settings.protect) return;
  Lock lock;
  change_accesses(1);
}
MemoryAccess::MemoryAccess(Lock&) : locked(true) {
  if (state().settings.protect) change_accesses(1);
}
MemoryAccess::~MemoryAccess() {
  if (!state().settings.protect) return;
  if (locked) {
    change_accesses(-1);
  } else {
    Lock lock;
    change_accesses(-1);
  }
}

const Block* find_block(const void* address) {
  auto& blocks = memory().blocks;
  auto after = blocks.upper_bound((uintptr_t)address);
  if (after == blocks.begin()) return nullptr;
  auto& [start, block] = *std::prev(after);
  return (uintptr_t)address < start + std::max<size_t>(block.size, 1) ? &block : nullptr;
}
Kind kind_of(const void* address) {
  const Block* block = find_block(address);
  return block ? block->kind : HOST;
}
void add_block(void* address, Block block) { memory().blocks[(uintptr_t)address] = block; }

bool is_device_memory(const void* address) {
  Lock lock;
  return kind_of(address) >= DEVICE;
}
}  // namespace virtual_gpu
using namespace virtual_gpu;

API cudaError_t cudaMalloc(void** p, size_t size) {
  BEGIN;
  if (size) return allocate(p, size, DEVICE, lock);
  *p = nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMallocManaged(void** p, size_t size, unsigned) {
  BEGIN;
  return allocate(p, size, MANAGED, lock);
}
API cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) {
  BEGIN;
  return allocate(p, size, PINNED, lock);
}
API cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  BEGIN;
  add_block(p, {size, device_now, PINNED});
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  BEGIN;
  wait_for_device(device_now, lock);
  memory().blocks.erase((uintptr_t)p);
  return cudaSuccess;
}

// These wait for all work of the device.
API cudaError_t cudaFree(void* p) {
  BEGIN;
  if (!p) return cudaSuccess;
  const Block* block = find_block(p);
  if (!block) return fail(cudaErrorInvalidValue);
  count(synchronizations);
  wait_for_device(block->device, lock);
  return release(p, lock);
}
API cudaError_t cudaFreeHost(void* p) {
  BEGIN;
  if (!p) return cudaSuccess;
  count(synchronizations);
  wait_for_device(device_now, lock);
  return release(p, lock);
}

// Memory that is allocated in the order of a stream: it is allocated now, and freed when the stream comes to
// it.
API cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t) {
  BEGIN;
  return allocate(p, size, DEVICE, lock);
}
API cudaError_t cudaMallocFromPoolAsync(void** p, size_t size, cudaMemPool_t, cudaStream_t) {
  BEGIN;
  return allocate(p, size, DEVICE, lock);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t handle) {
  BEGIN;
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto work = [p] {
    Lock lock;
    release(p, lock);
    return true;
  };
  enqueue(stream, "cudaFreeAsync", work, {}, lock);
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  BEGIN;
  *total = s.settings.memory;
  *available = s.settings.memory - memory().used[device_now];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  BEGIN;
  memset(out, 0, sizeof *out);
  const Block* block = find_block(p);
  if (!block) {
    out->type = cudaMemoryTypeUnregistered;
    out->device = -1;
    out->hostPointer = (void*)p;
    return cudaSuccess;
  }
  out->type = block->kind == PINNED   ? cudaMemoryTypeHost
              : block->kind == DEVICE ? cudaMemoryTypeDevice
                                      : cudaMemoryTypeManaged;
  out->device = block->device;
  out->devicePointer = (void*)p;
  out->hostPointer = block->kind == DEVICE ? nullptr : (void*)p;
  return cudaSuccess;
}

// Pools have no settings here: each device has one.
static cudaMemPool_t pool_of(int device) { return (cudaMemPool_t)(uintptr_t)(device + 1); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int device) {
  *out = pool_of(device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* out, int device) {
  *out = pool_of(device);
  return cudaSuccess;
}
API cudaError_t cudaMemPoolCreate(cudaMemPool_t* out, const cudaMemPoolProps*) {
  *out = pool_of(0);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* out) {
  *(uint64_t*)out = 0;
  return cudaSuccess;
}
// Hints.
API cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
