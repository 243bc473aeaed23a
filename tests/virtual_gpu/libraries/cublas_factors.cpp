// libcublas.so.12: many small systems of equations: getrfBatched, getrsBatched, getriBatched.
#include <utility>
#include "cublas.h"

// LU factors of a matrix in its place. Returns the first column without a pivot, from 1, or 0.
template <class T>
static int getrf(int n, T* a, long lda, int* pivots) {
  int info = 0;
  for (int k = 0; k < n; ++k) {
    int pivot = k;
    if (pivots) {
      for (int i = k + 1; i < n; ++i)
        if (magnitude(a[i + k * lda]) > magnitude(a[pivot + k * lda])) pivot = i;
      pivots[k] = pivot + 1;
    }
    if (pivot != k)
      for (int j = 0; j < n; ++j) std::swap(a[k + j * lda], a[pivot + j * lda]);
    if (a[k + k * lda] == T(0)) {
      if (!info) info = k + 1;
      continue;
    }
    for (int i = k + 1; i < n; ++i) {
      T factor = a[i + k * lda] /= a[k + k * lda];
      for (int j = k + 1; j < n; ++j) a[i + j * lda] -= factor * a[k + j * lda];
    }
  }
  return info;
}

template <class T>
static void swap_rows(int k, const int* pivots, int columns, T* b, long ldb) {
  if (pivots[k] - 1 == k) return;
  for (int j = 0; j < columns; ++j) std::swap(b[k + j * ldb], b[pivots[k] - 1 + j * ldb]);
}
// Solves systems of equations, given the factors.
template <class T>
static void getrs(int t, int n, int columns, const T* a, int lda, const int* pivots, T* b, int ldb) {
  const int LEFT = 0, LOWER = 0, UPPER = 1, UNIT = 1;
  if (t == NO_TRANSPOSE) {
    for (int k = 0; pivots && k < n; ++k) swap_rows(k, pivots, columns, b, ldb);
    trsm(LEFT, LOWER, t, UNIT, n, columns, T(1), a, lda, b, ldb);
    trsm(LEFT, UPPER, t, !UNIT, n, columns, T(1), a, lda, b, ldb);
  } else {
    trsm(LEFT, UPPER, t, !UNIT, n, columns, T(1), a, lda, b, ldb);
    trsm(LEFT, LOWER, t, UNIT, n, columns, T(1), a, lda, b, ldb);
    for (int k = n - 1; pivots && k >= 0; --k) swap_rows(k, pivots, columns, b, ldb);
  }
}
// The inverse, given the factors. Returns the first column without a pivot, from 1, or 0.
template <class T>
static int getri(int n, const T* a, long lda, const int* pivots, T* c, long ldc) {
  for (int k = 0; k < n; ++k)
    if (a[k + k * lda] == T(0)) return k + 1;
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < n; ++i) c[i + j * ldc] = i == j;
  getrs(NO_TRANSPOSE, n, n, a, lda, pivots, c, ldc);
  return 0;
}

static const int* pivots_of(int i, int n, const int* pivots) {
  return pivots ? pivots + (long)i * n : nullptr;
}

#define DEFINE_FACTORS(LETTER, T)                                                                          \
  API int cublas##LETTER##getrfBatched(Handle* h, int n, T** a, int lda, int* pivots, int* info,           \
                                       int count) {                                                        \
    return submit(h, "getrfBatched", [=] {                                                                 \
      for (int i = 0; i < count; ++i) info[i] = getrf(n, a[i], lda, (int*)pivots_of(i, n, pivots));        \
    });                                                                                                    \
  }                                                                                                        \
  API int cublas##LETTER##getrsBatched(Handle* h, int t, int n, int columns, const T** a, int lda,         \
                                       const int* pivots, T** b, int ldb, int* info, int count) {          \
    *info = 0;                                                                                             \
    return submit(h, "getrsBatched", [=] {                                                                 \
      for (int i = 0; i < count; ++i) getrs(t, n, columns, a[i], lda, pivots_of(i, n, pivots), b[i], ldb); \
    });                                                                                                    \
  }                                                                                                        \
  API int cublas##LETTER##getriBatched(Handle* h, int n, const T** a, int lda, const int* pivots, T** c,   \
                                       int ldc, int* info, int count) {                                    \
    return submit(h, "getriBatched", [=] {                                                                 \
      for (int i = 0; i < count; ++i) info[i] = getri(n, a[i], lda, pivots_of(i, n, pivots), c[i], ldc);   \
    });                                                                                                    \
  }
DEFINE_FACTORS(S, float);
DEFINE_FACTORS(D, double);
DEFINE_FACTORS(C, ComplexFloat);
DEFINE_FACTORS(Z, ComplexDouble);
