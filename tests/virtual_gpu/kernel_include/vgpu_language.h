// Keywords, built-in variables and types of CUDA C++.
#pragma once
#include <climits>
#include <cmath>
#include <math.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cassert>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <algorithm>
#include "kernel_abi.h"

#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ __attribute__((visibility("default")))
#define __managed__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
#define __grid_constant__
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif

typedef vgpu_uint3 uint3;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;
static const vgpu_api* vgpu;
static bool vgpu_threads_can_wait = false;  // of the running kernel
alignas(256) static char vgpu_dynamic_shared[232448];

#define VGPU_VECTOR(T, N)                                                         \
  struct N##1 { T x; };                                                           \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; };                                 \
  struct N##3 { T x, y, z; };                                                     \
  struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) N##4 { T x, y, z, w; }; \
  static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                     \
  static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VGPU_VECTOR(char, char);
VGPU_VECTOR(unsigned char, uchar);
VGPU_VECTOR(short, short);
VGPU_VECTOR(unsigned short, ushort);
VGPU_VECTOR(int, int);
VGPU_VECTOR(float, float);
VGPU_VECTOR(double, double);
VGPU_VECTOR(long long, longlong);
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
