// Between a compiled kernel, which is a shared object, and libcuda.so.1.
#pragma once
#include <stddef.h>

struct vgpu_uint3 {
  unsigned x, y, z;
};
struct vgpu_launch {
  vgpu_uint3 grid, block;
  void** arguments;
  unsigned shuffle;  // a random number, which orders blocks and threads; 0: in order
};
/// What libcuda.so.1 offers the kernel.
struct vgpu_api {
  /// Runs threads that wait for each other with sync_*; calls resume(thread) each time that one goes on.
  void (*run_threads)(unsigned threads, void (*body)(void*), void* data, void (*resume)(unsigned),
                      unsigned shuffle);
  void (*sync_block)();
  void (*sync_warp)(unsigned mask);
  void* (*slot)(unsigned thread);  // 16 bytes of a thread, to exchange values
  void (*fail)(const char* message);
};
/// What the kernel offers: a variable vgpu_kernel_NAME.
struct vgpu_kernel {
  const char* name;
  void (*launch)(const vgpu_launch*);
  unsigned n_arguments;
  const unsigned* argument_sizes;
};

// Visits 0 to n-1, each once, in an order that depends on shuffle.
struct vgpu_order {
  unsigned long long n, at, step, left;
  vgpu_order(unsigned long long n, unsigned shuffle) : n(n), at(0), step(1), left(n) {
    if (!shuffle || n < 2) return;
    at = shuffle % n;
    step = shuffle / n % n;
    while (gcd(step, n) != 1) step = (step + 1) % n;
  }
  static unsigned long long gcd(unsigned long long a, unsigned long long b) { return b ? gcd(b, a % b) : a; }
  bool next(unsigned long long* out) {
    if (!left) return false;
    --left;
    *out = at;
    at = (at + step) % n;
    return true;
  }
};
