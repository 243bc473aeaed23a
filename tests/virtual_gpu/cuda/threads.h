// Threads of a block that wait for each other. Internal to libcuda.so.1.
#pragma once
#include "../kernel_include/kernel_abi.h"

namespace virtual_gpu {
extern const vgpu_api kernel_api;
}
