// Runs a kernel: one block after the other, one thread after the other or in turns.
#pragma once
#include "vgpu_language.h"

namespace vgpu_detail {
// A kernel with its arguments.
struct Call {
  void (*run_thread)(void*);
  void* data;
};

static inline void set_thread(unsigned i) {
  threadIdx.x = i % blockDim.x;
  threadIdx.y = i / blockDim.x % blockDim.y;
  threadIdx.z = i / (blockDim.x * blockDim.y);
}
static inline void set_block(unsigned long long i) {
  blockIdx.x = i % gridDim.x;
  blockIdx.y = i / gridDim.x % gridDim.y;
  blockIdx.z = i / ((unsigned long long)gridDim.x * gridDim.y);
}

static void run_block_in_order(const Call& call) {
  for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) call.run_thread(call.data);
}
static void run_block_shuffled(const Call& call, unsigned n_threads, unsigned shuffle) {
  unsigned long long i;
  for (vgpu_order order(n_threads, shuffle); order.next(&i);) {
    set_thread(i);
    call.run_thread(call.data);
  }
}

static void run(const vgpu_launch* launch, Call call, bool threads_wait) {
  gridDim = dim3(launch->grid.x, launch->grid.y, launch->grid.z);
  blockDim = dim3(launch->block.x, launch->block.y, launch->block.z);
  unsigned n_threads = blockDim.x * blockDim.y * blockDim.z;
  vgpu_threads_can_wait = threads_wait;
  unsigned long long i;
  for (vgpu_order blocks((unsigned long long)gridDim.x * gridDim.y * gridDim.z, launch->shuffle);
       blocks.next(&i);) {
    set_block(i);
    if (threads_wait)
      vgpu->run_threads(n_threads, call.run_thread, call.data, set_thread, launch->shuffle);
    else if (launch->shuffle)
      run_block_shuffled(call, n_threads, launch->shuffle);
    else
      run_block_in_order(call);
  }
}

template <bool threads_wait, class... A, size_t... I>
static void launch(void (*kernel)(A...), const vgpu_launch* l, std::index_sequence<I...>) {
  struct Data {
    void (*kernel)(A...);
    void** arguments;
  } data{kernel, l->arguments};
  auto run_thread = [](void* p) {
    auto* d = (Data*)p;
    d->kernel(*(std::remove_reference_t<A>*)d->arguments[I]...);
  };
  run(l, {run_thread, &data}, threads_wait);
}
template <bool threads_wait, class... A>
static void launch(void (*kernel)(A...), const vgpu_launch* l) {
  launch<threads_wait>(kernel, l, std::index_sequence_for<A...>());
}

template <class... A>
struct Sizes {
  static const unsigned value[sizeof...(A) + 1];
  static const unsigned count = sizeof...(A);
};
template <class... A>
const unsigned Sizes<A...>::value[sizeof...(A) + 1] = {sizeof(A)..., 0};
template <class... A>
static constexpr Sizes<A...> sizes(void (*)(A...)) {
  return {};
}
}  // namespace vgpu_detail

// Defines what libcuda.so.1 finds of a kernel. The stand-in for NVRTC appends this to the source.
#define VGPU_KERNEL(EXPRESSION, SYMBOL, THREADS_WAIT)                                          \
  extern "C" __attribute__((visibility("default"))) const vgpu_kernel vgpu_kernel_##SYMBOL = { \
      #SYMBOL, [](const vgpu_launch* l) { vgpu_detail::launch<THREADS_WAIT>(EXPRESSION, l); }, \
      decltype(vgpu_detail::sizes(EXPRESSION))::count, decltype(vgpu_detail::sizes(EXPRESSION))::value};
