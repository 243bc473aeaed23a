// Blocks of memory of the devices, and of pinned memory of the host. Internal to libcuda.so.1.
#pragma once
#include <cstddef>
#include <cstdint>
#include "scheduler.h"

namespace virtual_gpu {
enum Kind { HOST, PINNED, DEVICE, MANAGED };

struct Block {
  size_t size;
  int device;
  Kind kind;
};

/// The block of an address, or null. The lock is held.
const Block* find_block(const void* address);
/// Where an address is: HOST if nothing is known of it. The lock is held.
Kind kind_of(const void* address);

/// Adds memory that was not allocated here: registered host memory, and variables of kernels.
void add_block(void* address, Block block);
void start_memory();

/// While there is one, protected memory of the devices can be accessed.
struct MemoryAccess {
  MemoryAccess();
  explicit MemoryAccess(Lock&);  // the lock is held, now and at the end
  ~MemoryAccess();

 private:
  bool locked;
};
}  // namespace virtual_gpu
