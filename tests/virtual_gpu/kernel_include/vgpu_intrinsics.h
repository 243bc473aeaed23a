// Functions that are one instruction on a GPU: __popc, __float_as_int, __fmul_rn...
#pragma once
#include "vgpu_language.h"

template <class T>
static inline T __ldg(const T* p) {
  return *p;
}
template <class R, class T>
static inline R vgpu_bits(T v) {
  R r;
  static_assert(sizeof(R) == sizeof(T), "");
  memcpy(&r, &v, sizeof r);
  return r;
}
static inline int __float_as_int(float v) { return vgpu_bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return vgpu_bits<unsigned>(v); }
static inline float __int_as_float(int v) { return vgpu_bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return vgpu_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return vgpu_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return vgpu_bits<double>(v); }
static inline int __double2hiint(double v) { return int(vgpu_bits<unsigned long long>(v) >> 32); }
static inline int __double2loint(double v) { return int(vgpu_bits<unsigned long long>(v)); }
static inline double __hiloint2double(int h, int l) {
  return vgpu_bits<double>((unsigned long long)(unsigned)h << 32 | (unsigned)l);
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
static inline long long __mul64hi(long long a, long long b) { return (__int128)a * b >> 64; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
#define __expf vgpu_expf
#define __logf vgpu_logf
#define __sinf vgpu_sinf
#define __cosf vgpu_cosf
#define __powf vgpu_powf
static inline float vgpu_expf(float x) { return expf(x); }
static inline float vgpu_logf(float x) { return logf(x); }
static inline float vgpu_sinf(float x) { return sinf(x); }
static inline float vgpu_cosf(float x) { return cosf(x); }
static inline float vgpu_powf(float x, float y) { return powf(x, y); }
static inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __float2int_ru(float x) { return (int)ceilf(x); }
