// Sorting: the functions that CuPy's module cupy.cuda.thrust calls. In the wheel they are compiled device
// code.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <numeric>
#include <vector>
#include "../cuda/virtual_gpu.h"
#include "half.h"

struct Half {
  uint16_t bits;
};

// NaN comes last.
template <class T>
static bool less(const T& a, const T& b) {
  return a < b || (b != b && a == a);
}
static bool less(const Half& a, const Half& b) { return less(half_to_float(a.bits), half_to_float(b.bits)); }
template <class T>
static bool less(const std::complex<T>& a, const std::complex<T>& b) {
  auto is_nan = [](const std::complex<T>& x) { return std::isnan(x.real()) || std::isnan(x.imag()); };
  if (is_nan(a) || is_nan(b)) return !is_nan(a) && is_nan(b);
  return a.real() != b.real() ? a.real() < b.real() : a.imag() < b.imag();
}

// Calls f with a null pointer of CuPy's type number.
template <class F>
static void with_type(int type, F f) {
  switch (type) {
    case 0: return f((int8_t*)0);
    case 1: return f((uint8_t*)0);
    case 2: return f((int16_t*)0);
    case 3: return f((uint16_t*)0);
    case 4: return f((int32_t*)0);
    case 5: return f((uint32_t*)0);
    case 6: return f((int64_t*)0);
    case 7: return f((uint64_t*)0);
    case 8: return f((Half*)0);
    case 9: return f((float*)0);
    case 10: return f((double*)0);
    case 11: return f((std::complex<float>*)0);
    case 12: return f((std::complex<double>*)0);
    case 13: return f((bool*)0);
  }
}

static size_t rows_of(const std::vector<ptrdiff_t>& shape) {
  return std::accumulate(shape.begin(), shape.end() - 1, size_t(1), std::multiplies<size_t>());
}

// Sorts each row.
void thrust_sort(int type, void* data, size_t*, const std::vector<ptrdiff_t>& shape, intptr_t stream, void*) {
  size_t n = shape.back(), rows = rows_of(shape);
  virtual_gpu::compute((void*)stream, "sort", [=] {
    with_type(type, [=](auto* null) {
      auto p = (decltype(null))data;
      for (size_t i = 0; i < rows; ++i)
        std::stable_sort(p + i * n, p + (i + 1) * n, [](auto& a, auto& b) { return less(a, b); });
    });
  });
}
// Sorts the indices of the columns of keys; the last key is the first to compare.
void thrust_lexsort(int type, size_t* indices, void* keys, size_t n_keys, size_t n, intptr_t stream, void*) {
  virtual_gpu::compute((void*)stream, "lexsort", [=] {
    std::iota(indices, indices + n, 0);
    with_type(type, [=](auto* null) {
      for (size_t i = 0; i < n_keys; ++i) {
        auto p = (decltype(null))keys + i * n;
        std::stable_sort(indices, indices + n, [p](size_t a, size_t b) { return less(p[a], p[b]); });
      }
    });
  });
}
// Sorts the indices of each row.
void thrust_argsort(int type, size_t* indices, void* data, void*, const std::vector<ptrdiff_t>& shape,
                    intptr_t stream, void*) {
  size_t n = shape.back(), rows = rows_of(shape);
  virtual_gpu::compute((void*)stream, "argsort", [=] {
    with_type(type, [=](auto* null) {
      for (size_t i = 0; i < rows; ++i) {
        auto p = (decltype(null))data + i * n;
        size_t* row = indices + i * n;
        std::iota(row, row + n, 0);
        std::stable_sort(row, row + n, [p](size_t a, size_t b) { return less(p[a], p[b]); });
      }
    });
  });
}
