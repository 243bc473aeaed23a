// Threads of a block that wait for each other (__syncthreads, shuffles): each has a stack, and they take
// turns.
#include "threads.h"
#include <sys/mman.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Saves the registers that a call keeps and the stack pointer, and continues on another stack.
extern "C" void vgpu_switch_stack(void** save, void* to);
asm(R"(
.text
.globl vgpu_switch_stack
.hidden vgpu_switch_stack
.type vgpu_switch_stack,@function
vgpu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace {
const size_t STACK = 256 << 10;
const unsigned WARP = 32;
enum ThreadState { RUNNABLE, WAITS_FOR_BLOCK, WAITS_FOR_WARP, FINISHED };

struct Thread {
  char* stack;
  void* stack_pointer = nullptr;
  ThreadState state = FINISHED;
  unsigned mask = 0;  // the lanes that it waits for
  alignas(16) char slot[16] = {};
};

// The threads of the block that runs now. Only one kernel runs at a time.
struct CurrentBlock {
  std::vector<Thread> threads;
  unsigned n = 0, current = 0;
  void* scheduler = nullptr;  // its stack pointer
  void (*body)(void*) = nullptr;
  void* data = nullptr;
};
CurrentBlock& block = *new CurrentBlock;

void fail(const char* message) {
  fprintf(stderr, "vgpu: %s\n", message);
  abort();
}

void thread_main() {
  block.body(block.data);
  Thread& thread = block.threads[block.current];
  thread.state = FINISHED;
  vgpu_switch_stack(&thread.stack_pointer, block.scheduler);
  abort();
}

void pause(ThreadState state, unsigned mask) {
  Thread& thread = block.threads[block.current];
  thread.state = state;
  thread.mask = mask;
  vgpu_switch_stack(&thread.stack_pointer, block.scheduler);
}

void start(Thread& thread) {
  void** top = (void**)(thread.stack + STACK);
  *--top = nullptr;                              // aligns the stack as at the entry of a function
  *--top = (void*)thread_main;                   // where vgpu_switch_stack returns to
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // registers
  thread.stack_pointer = top;
  thread.state = RUNNABLE;
}

// Lets lanes go on whose lanes all wait. Returns whether there are such.
bool release_warps() {
  bool released = false;
  for (unsigned first = 0; first < block.n; first += WARP) {
    Thread* lanes = &block.threads[first];
    unsigned n = std::min(WARP, block.n - first);
    auto arrived = [&](unsigned mask) {
      for (unsigned i = 0; i < n; ++i)
        if ((mask >> i & 1) && lanes[i].state != WAITS_FOR_WARP && lanes[i].state != FINISHED) return false;
      return true;
    };
    for (unsigned i = 0; i < n; ++i) {
      if (lanes[i].state != WAITS_FOR_WARP || !arrived(lanes[i].mask)) continue;
      unsigned mask = lanes[i].mask;
      for (unsigned j = 0; j < n; ++j)
        if ((mask >> j & 1) && lanes[j].state == WAITS_FOR_WARP) lanes[j].state = RUNNABLE;
      released = true;
    }
  }
  return released;
}

// Lets all go on if all wait for the block.
bool release_block() {
  for (unsigned i = 0; i < block.n; ++i)
    if (block.threads[i].state != WAITS_FOR_BLOCK && block.threads[i].state != FINISHED) return false;
  for (unsigned i = 0; i < block.n; ++i)
    if (block.threads[i].state == WAITS_FOR_BLOCK) block.threads[i].state = RUNNABLE;
  return true;
}

void run_threads(unsigned n, void (*body)(void*), void* data, void (*resume)(unsigned), unsigned shuffle) {
  while (block.threads.size() < n) {
    void* stack =
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for the stack of a thread");
    block.threads.push_back({(char*)stack});
  }
  block.n = n;
  block.body = body;
  block.data = data;
  for (unsigned i = 0; i < n; ++i) start(block.threads[i]);
  auto finished = [&] {
    return std::all_of(block.threads.begin(), block.threads.begin() + n,
                       [](const Thread& thread) { return thread.state == FINISHED; });
  };
  while (!finished()) {
    bool progress = false;
    unsigned long long i;
    for (vgpu_order order(n, shuffle); order.next(&i);) {
      if (block.threads[i].state != RUNNABLE) continue;
      progress = true;
      block.current = i;
      resume(i);
      vgpu_switch_stack(&block.scheduler, block.threads[i].stack_pointer);
    }
    if (release_warps() || finished() || release_block()) progress = true;
    if (!progress) fail("threads of a block wait for each other forever");
  }
}
}  // namespace

const vgpu_api virtual_gpu::kernel_api = {
    run_threads,
    [] { pause(WAITS_FOR_BLOCK, 0); },
    [](unsigned mask) { pause(WAITS_FOR_WARP, mask); },
    [](unsigned thread) -> void* { return block.threads[thread].slot; },
    fail,
};
