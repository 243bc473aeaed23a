// Atomic functions. Only one thread runs at a time, so that they need no protection.
#pragma once
#include "vgpu_language.h"

#define VGPU_ATOMICS(T)                       \
  static inline T atomicAdd(T* p, T v) {      \
    T o = *p;                                 \
    *p = o + v;                               \
    return o;                                 \
  }                                           \
  static inline T atomicSub(T* p, T v) {      \
    T o = *p;                                 \
    *p = o - v;                               \
    return o;                                 \
  }                                           \
  static inline T atomicExch(T* p, T v) {     \
    T o = *p;                                 \
    *p = v;                                   \
    return o;                                 \
  }                                           \
  static inline T atomicCAS(T* p, T c, T v) { \
    T o = *p;                                 \
    if (o == c) *p = v;                       \
    return o;                                 \
  }
#define VGPU_INTEGER_ATOMICS(T)          \
  VGPU_ATOMICS(T)                        \
  static inline T atomicMax(T* p, T v) { \
    T o = *p;                            \
    if (v > o) *p = v;                   \
    return o;                            \
  }                                      \
  static inline T atomicMin(T* p, T v) { \
    T o = *p;                            \
    if (v < o) *p = v;                   \
    return o;                            \
  }                                      \
  static inline T atomicAnd(T* p, T v) { \
    T o = *p;                            \
    *p = o & v;                          \
    return o;                            \
  }                                      \
  static inline T atomicOr(T* p, T v) {  \
    T o = *p;                            \
    *p = o | v;                          \
    return o;                            \
  }                                      \
  static inline T atomicXor(T* p, T v) { \
    T o = *p;                            \
    *p = o ^ v;                          \
    return o;                            \
  }
VGPU_INTEGER_ATOMICS(int);
VGPU_INTEGER_ATOMICS(unsigned);
VGPU_INTEGER_ATOMICS(unsigned long long);
static inline long long atomicMax(long long* p, long long v) {
  auto o = *p;
  if (v > o) *p = v;
  return o;
}
static inline long long atomicMin(long long* p, long long v) {
  auto o = *p;
  if (v < o) *p = v;
  return o;
}
static inline float atomicAdd(float* p, float v) {
  float o = *p;
  *p = o + v;
  return o;
}
static inline double atomicAdd(double* p, double v) {
  double o = *p;
  *p = o + v;
  return o;
}
static inline float atomicExch(float* p, float v) {
  float o = *p;
  *p = v;
  return o;
}
static inline unsigned short atomicCAS(unsigned short* p, unsigned short c, unsigned short v) {
  auto o = *p;
  if (o == c) *p = v;
  return o;
}
static inline unsigned atomicInc(unsigned* p, unsigned v) {
  auto o = *p;
  *p = o >= v ? 0 : o + 1;
  return o;
}
