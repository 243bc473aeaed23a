#pragma once
#include "vgpu_kernel.h"
struct __nv_bfloat16 {
  unsigned short x;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    x = f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  operator float() const {
    unsigned u = unsigned(x) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
  __nv_bfloat16 r;
  r.x = x;
  return r;
}
static inline bool __hisnan(__nv_bfloat16 v) {
  float f = v;
  return f != f;
}
static inline bool __hisinf(__nv_bfloat16 v) { return (v.x & 0x7fff) == 0x7f80; }
