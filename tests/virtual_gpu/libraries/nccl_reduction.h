// NCCL's data types and reductions.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include "half.h"

enum DataType { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT, N_TYPES };
enum Reduction { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

static size_t size_of(int type) {
  static const size_t sizes[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}

struct NoConversion {
  template <class T>
  static T read(T x) {
    return x;
  }
  template <class T>
  static T write(T x) {
    return x;
  }
};
struct HalfConversion {
  static float read(uint16_t bits) { return half_to_float(bits); }
  static uint16_t write(float x) { return float_to_half(x); }
};
struct BfloatConversion {
  static float read(uint16_t bits) { return bfloat_to_float(bits); }
  static uint16_t write(float x) { return float_to_bfloat(x); }
};

// Calls f with a pointer of the type, and the conversion to numbers.
template <class F>
static void with_type(int type, void* p, F f) {
  switch (type) {
    case INT8: return f((int8_t*)p, NoConversion());
    case UINT8: return f((uint8_t*)p, NoConversion());
    case INT32: return f((int32_t*)p, NoConversion());
    case UINT32: return f((uint32_t*)p, NoConversion());
    case INT64: return f((int64_t*)p, NoConversion());
    case UINT64: return f((uint64_t*)p, NoConversion());
    case HALF: return f((uint16_t*)p, HalfConversion());
    case FLOAT: return f((float*)p, NoConversion());
    case DOUBLE: return f((double*)p, NoConversion());
    case BFLOAT: return f((uint16_t*)p, BfloatConversion());
  }
}

// a = a op b
static void combine(void* a, const void* b, size_t n, int type, int operation) {
  with_type(type, a, [&](auto* to, auto conversion) {
    auto* from = (decltype(to))b;
    for (size_t i = 0; i < n; ++i) {
      auto x = conversion.read(to[i]), y = conversion.read(from[i]);
      auto result = operation == PRODUCT   ? x * y
                    : operation == MAXIMUM ? std::max(x, y)
                    : operation == MINIMUM ? std::min(x, y)
                                           : x + y;
      to[i] = conversion.write(result);
    }
  });
}
static void divide(void* a, size_t n, int type, int divisor) {
  with_type(type, a, [&](auto* to, auto conversion) {
    for (size_t i = 0; i < n; ++i) to[i] = conversion.write(conversion.read(to[i]) / divisor);
  });
}
