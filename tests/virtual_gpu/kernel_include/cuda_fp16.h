#pragma once
#include "vgpu_kernel.h"
struct __half_raw {
  unsigned short x;
};
struct __half {
  _Float16 v;
  __half() = default;
  __half(float x) : v(x) {}
  __half(double x) : v(x) {}
  __half(int x) : v(x) {}
  __half(unsigned x) : v(x) {}
  __half(long long x) : v(x) {}
  __half(unsigned long long x) : v(x) {}
  __half(long x) : v(x) {}
  __half(unsigned long x) : v(x) {}
  __half(short x) : v(x) {}
  __half(const __half_raw& x) { memcpy(&v, &x, 2); }
  operator float() const { return v; }
  operator __half_raw() const {
    __half_raw r;
    memcpy(&r, &v, 2);
    return r;
  }
  __half& operator+=(__half o) {
    v += o.v;
    return *this;
  }
};
typedef __half half;
static inline half __float2half(float x) { return half(x); }
static inline half __float2half_rn(float x) { return half(x); }
static inline half __double2half(double x) { return half(x); }
static inline float __half2float(half x) { return x.v; }
static inline unsigned short __half_as_ushort(half x) { return __half_raw(x).x; }
static inline half __ushort_as_half(unsigned short x) { return half(__half_raw{x}); }
static inline bool __hisnan(half x) { return x.v != x.v; }
