// Precedes the source of each kernel: CUDA C++ for the host's compiler.
#pragma once
#include "vgpu_language.h"
#include "vgpu_threads.h"
#include "vgpu_atomics.h"
#include "vgpu_intrinsics.h"
#include "vgpu_math.h"
#include "vgpu_launch.h"
