// Conversions of 16-bit floating-point numbers on the host.
#pragma once
#include <cstdint>
#include <cstring>

static inline float half_to_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint16_t float_to_half(float value) {
  _Float16 half = value;
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}
static inline float bfloat_to_float(uint16_t bits) {
  uint32_t all = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &all, sizeof value);
  return value;
}
// Rounds to the nearest, halfway cases to even.
static inline uint16_t float_to_bfloat(float value) {
  if (value != value) return 0x7fff;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
