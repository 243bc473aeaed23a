// Threads of a block wait for each other and exchange values: __syncthreads, __shfl_sync, __ballot_sync...
#pragma once
#include "vgpu_language.h"

static inline unsigned vgpu_thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
static inline void vgpu_check_can_wait() {
  if (!vgpu_threads_can_wait) vgpu->fail("a kernel synchronizes, which its source did not show");
}
static inline void __syncthreads() {
  vgpu_check_can_wait();
  vgpu->sync_block();
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  vgpu_check_can_wait();
  vgpu->sync_warp(mask);
}
template <class T>
static T vgpu_exchange(unsigned mask, T v, unsigned from) {
  static_assert(sizeof(T) <= 16, "");
  unsigned me = vgpu_thread(), n = blockDim.x * blockDim.y * blockDim.z;
  memcpy(vgpu->slot(me), &v, sizeof v);
  __syncwarp(mask);
  T r = v;
  if (from < n) memcpy(&r, vgpu->slot(from), sizeof r);
  __syncwarp(mask);
  return r;
}
template <class T>
static T __shfl_sync(unsigned m, T v, int lane, int width = 32) {
  unsigned t = vgpu_thread(), l = t % 32;
  return vgpu_exchange(m, v, t - l + (l & ~(width - 1)) + (lane & (width - 1)));
}
template <class T>
static T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32) {
  unsigned t = vgpu_thread(), l = t % 32;
  return vgpu_exchange(m, v, (l & (width - 1)) < d ? t : t - d);
}
template <class T>
static T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32) {
  unsigned t = vgpu_thread(), l = t % 32;
  return vgpu_exchange(m, v, (l & (width - 1)) + d >= (unsigned)width ? t : t + d);
}
template <class T>
static T __shfl_xor_sync(unsigned m, T v, int x, int = 32) {
  return vgpu_exchange(m, v, vgpu_thread() ^ x);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
  unsigned t = vgpu_thread(), base = t - t % 32, n = blockDim.x * blockDim.y * blockDim.z, r = 0;
  *(int*)vgpu->slot(t) = p;
  __syncwarp(mask);
  for (unsigned i = 0; i < 32 && base + i < n; ++i)
    if (mask >> i & 1 && *(int*)vgpu->slot(base + i)) r |= 1u << i;
  __syncwarp(mask);
  return r;
}
static inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
static inline int __syncthreads_count(int p) {
  unsigned n = blockDim.x * blockDim.y * blockDim.z;
  int r = 0;
  *(int*)vgpu->slot(vgpu_thread()) = p;
  __syncthreads();
  for (unsigned i = 0; i < n; ++i) r += *(int*)vgpu->slot(i) != 0;
  __syncthreads();
  return r;
}
static inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
static inline int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __trap() { vgpu->fail("__trap"); }
static inline long long clock64() { return 0; }
