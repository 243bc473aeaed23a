// The environment variables.
#pragma once
#include <cstddef>

namespace virtual_gpu {
enum Mode { EAGER, LAZY, RANDOM };

struct Settings {
  /// VGPU_MODE: when operations run.
  /// eager: when they are enqueued, if nothing precedes them.
  /// lazy: when something waits for them. Those that other ranks may wait for, after VGPU_LAG ms at the
  /// latest. random: at random times, on random streams. Blocks and threads of kernels run in random order.
  Mode mode = EAGER;
  /// VGPU_SEED: of the random choices.
  int seed = 0;
  /// VGPU_LAG: milliseconds before a lazy operation of NCCL runs, although nothing on this rank waits for it.
  int lag = 20;
  /// VGPU_DEVICES: their number.
  int devices = 1;
  /// VGPU_MEMORY: bytes of each device.
  size_t memory = size_t(4) << 30;
  /// VGPU_POISON=1: new and freed memory is filled with NaN (0xff).
  bool poison = false;
  /// VGPU_PROTECT=1: if the host accesses memory of a device, it is a segmentation fault.
  bool protect = false;
  /// VGPU_TRACE=1: print operations as they run.
  bool trace = false;
};

Settings read_settings();
}  // namespace virtual_gpu
