// libcublas.so.12: functions of matrices: gemv, ger, gemm, trsm, syrk, geam, dgmm.
#include <algorithm>
#include <vector>
#include "cublas.h"

static CBLAS_TRANSPOSE transpose_of(int t) {
  return t == NO_TRANSPOSE ? CblasNoTrans : t == TRANSPOSE ? CblasTrans : CblasConjTrans;
}
// OpenBLAS takes complex scalars by address.
#define DEFINE_BLAS(LETTER, T, REFERENCE)                                                                   \
  void gemm(int ta, int tb, int m, int n, int k, T alpha, const T* a, int lda, const T* b, int ldb, T beta, \
            T* c, int ldc) {                                                                                \
    scipy_cblas_##LETTER##gemm(CblasColMajor, transpose_of(ta), transpose_of(tb), m, n, k, REFERENCE alpha, \
                               a, lda, b, ldb, REFERENCE beta, c, ldc);                                     \
  }                                                                                                         \
  void trsm(int right, int upper, int ta, int unit, int m, int n, T alpha, const T* a, int lda, T* b,       \
            int ldb) {                                                                                      \
    scipy_cblas_##LETTER##trsm(CblasColMajor, right ? CblasRight : CblasLeft,                               \
                               upper ? CblasUpper : CblasLower, transpose_of(ta),                           \
                               unit ? CblasUnit : CblasNonUnit, m, n, REFERENCE alpha, a, lda, b, ldb);     \
  }
DEFINE_BLAS(s, float, );
DEFINE_BLAS(d, double, );
DEFINE_BLAS(c, ComplexFloat, &);
DEFINE_BLAS(z, ComplexDouble, &);

bool are_sizes_wrong(int ta, int tb, int m, int n, int k, int lda, int ldb, int ldc) {
  return m < 0 || n < 0 || k < 0 || lda < std::max(1, ta ? k : m) || ldb < std::max(1, tb ? n : k) ||
         ldc < std::max(1, m);
}

// out = alpha * product + beta * out. NaN in out does not count if beta is 0.
template <class T>
static void update(T& out, T alpha, T product, T beta) {
  out = beta == T(0) ? alpha * product : alpha * product + beta * out;
}
template <class T>
static T element(const T* a, long lda, int transpose, int i, int j) {
  return transpose ? conj_if(a[j + i * lda], transpose == CONJUGATE_TRANSPOSE) : a[i + j * lda];
}

template <class T>
static int gemv(Handle* handle, int t, int m, int n, const T* alpha, const T* a, int lda, const T* x,
                long x_step, const T* beta, T* y, long y_step) {
  Scalar<T> al(handle, alpha), be(handle, beta);
  int rows = t ? n : m, columns = t ? m : n;
  return submit(handle, "gemv", [=] {
    for (int i = 0; i < rows; ++i) {
      T sum = 0;
      for (int j = 0; j < columns; ++j) sum += element(a, lda, t, i, j) * x[j * x_step];
      update(y[i * y_step], al.get(), sum, be.get());
    }
  });
}
template <class T>
static int ger(Handle* handle, bool conjugate, int m, int n, const T* alpha, const T* x, long x_step,
               const T* y, long y_step, T* a, long lda) {
  Scalar<T> scalar(handle, alpha);
  return submit(handle, "ger", [=] {
    T factor = scalar.get();
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i)
        a[i + j * lda] += factor * x[i * x_step] * conj_if(y[j * y_step], conjugate);
  });
}
template <class T>
static int gemm(Handle* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda,
                const T* b, int ldb, const T* beta, T* c, int ldc) {
  if (are_sizes_wrong(ta, tb, m, n, k, lda, ldb, ldc)) return INVALID_VALUE;
  Scalar<T> al(handle, alpha), be(handle, beta);
  return submit(handle, "gemm", [=] { gemm(ta, tb, m, n, k, al.get(), a, lda, b, ldb, be.get(), c, ldc); });
}
template <class T>
static int gemm_batched(Handle* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T** a,
                        int lda, const T** b, int ldb, const T* beta, T** c, int ldc, int count) {
  Scalar<T> al(handle, alpha), be(handle, beta);
  return submit(handle, "gemmBatched", [=] {
    for (int i = 0; i < count; ++i)
      gemm(ta, tb, m, n, k, al.get(), a[i], lda, b[i], ldb, be.get(), c[i], ldc);
  });
}
template <class T>
static int gemm_strided(Handle* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a,
                        int lda, long long a_step, const T* b, int ldb, long long b_step, const T* beta, T* c,
                        int ldc, long long c_step, int count) {
  if (are_sizes_wrong(ta, tb, m, n, k, lda, ldb, ldc)) return INVALID_VALUE;
  Scalar<T> al(handle, alpha), be(handle, beta);
  return submit(handle, "gemmStridedBatched", [=] {
    for (int i = 0; i < count; ++i)
      gemm(ta, tb, m, n, k, al.get(), a + i * a_step, lda, b + i * b_step, ldb, be.get(), c + i * c_step,
           ldc);
  });
}
template <class T>
static int trsm(Handle* handle, int right, int upper, int ta, int unit, int m, int n, const T* alpha,
                const T* a, int lda, T* b, int ldb) {
  Scalar<T> al(handle, alpha);
  return submit(handle, "trsm", [=] { trsm(right, upper, ta, unit, m, n, al.get(), a, lda, b, ldb); });
}
template <class T>
static int trsm_batched(Handle* handle, int right, int upper, int ta, int unit, int m, int n, const T* alpha,
                        const T* const* a, int lda, T* const* b, int ldb, int count) {
  Scalar<T> al(handle, alpha);
  return submit(handle, "trsmBatched", [=] {
    for (int i = 0; i < count; ++i) trsm(right, upper, ta, unit, m, n, al.get(), a[i], lda, b[i], ldb);
  });
}
template <class T>
static int syrk(Handle* handle, int upper, int t, int n, int k, const T* alpha, const T* a, int lda,
                const T* beta, T* c, long ldc) {
  Scalar<T> al(handle, alpha), be(handle, beta);
  int plain = t ? TRANSPOSE : NO_TRANSPOSE;  // never conjugate
  return submit(handle, "syrk", [=] {
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < n; ++i) {
        if (upper ? i > j : i < j) continue;
        T sum = 0;
        for (int l = 0; l < k; ++l) sum += element(a, lda, plain, i, l) * element(a, lda, plain, j, l);
        update(c[i + j * ldc], al.get(), sum, be.get());
      }
  });
}
// c = alpha * a + beta * b; c may be a or b.
template <class T>
static int geam(Handle* handle, int ta, int tb, int m, int n, const T* alpha, const T* a, int lda,
                const T* beta, const T* b, int ldb, T* c, long ldc) {
  Scalar<T> al(handle, alpha), be(handle, beta);
  return submit(handle, "geam", [=] {
    std::vector<T> sums;
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) {
        T sum = 0;
        if (al.get() != T(0)) sum += al.get() * element(a, lda, ta, i, j);
        if (be.get() != T(0)) sum += be.get() * element(b, ldb, tb, i, j);
        sums.push_back(sum);
      }
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) c[i + j * ldc] = sums[i + (size_t)j * m];
  });
}
// Multiplies columns (right) or rows by the elements of x.
template <class T>
static int dgmm(Handle* handle, int right, int m, int n, const T* a, long lda, const T* x, long step, T* c,
                long ldc) {
  return submit(handle, "dgmm", [=] {
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) c[i + j * ldc] = a[i + j * lda] * x[(right ? j : i) * step];
  });
}

#define DEFINE_MATRICES(LETTER, T)                                                                           \
  API int cublas##LETTER##gemv_v2(Handle* h, int t, int m, int n, const T* alpha, const T* a, int lda,       \
                                  const T* x, int x_step, const T* beta, T* y, int y_step) {                 \
    return gemv(h, t, m, n, alpha, a, lda, x, x_step, beta, y, y_step);                                      \
  }                                                                                                          \
  API int cublas##LETTER##gemm_v2(Handle* h, int ta, int tb, int m, int n, int k, const T* alpha,            \
                                  const T* a, int lda, const T* b, int ldb, const T* beta, T* c, int ldc) {  \
    return gemm(h, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                                    \
  }                                                                                                          \
  API int cublas##LETTER##gemmBatched(Handle* h, int ta, int tb, int m, int n, int k, const T* alpha,        \
                                      const T** a, int lda, const T** b, int ldb, const T* beta, T** c,      \
                                      int ldc, int count) {                                                  \
    return gemm_batched(h, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count);                     \
  }                                                                                                          \
  API int cublas##LETTER##gemmStridedBatched(                                                                \
      Handle* h, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, long long a_step, \
      const T* b, int ldb, long long b_step, const T* beta, T* c, int ldc, long long c_step, int count) {    \
    return gemm_strided(h, ta, tb, m, n, k, alpha, a, lda, a_step, b, ldb, b_step, beta, c, ldc, c_step,     \
                        count);                                                                              \
  }                                                                                                          \
  API int cublas##LETTER##trsm_v2(Handle* h, int right, int upper, int ta, int unit, int m, int n,           \
                                  const T* alpha, const T* a, int lda, T* b, int ldb) {                      \
    return trsm(h, right, upper, ta, unit, m, n, alpha, a, lda, b, ldb);                                     \
  }                                                                                                          \
  API int cublas##LETTER##trsmBatched(Handle* h, int right, int upper, int ta, int unit, int m, int n,       \
                                      const T* alpha, const T* const* a, int lda, T* const* b, int ldb,      \
                                      int count) {                                                           \
    return trsm_batched(h, right, upper, ta, unit, m, n, alpha, a, lda, b, ldb, count);                      \
  }                                                                                                          \
  API int cublas##LETTER##syrk_v2(Handle* h, int upper, int t, int n, int k, const T* alpha, const T* a,     \
                                  int lda, const T* beta, T* c, int ldc) {                                   \
    return syrk(h, upper, t, n, k, alpha, a, lda, beta, c, ldc);                                             \
  }                                                                                                          \
  API int cublas##LETTER##geam(Handle* h, int ta, int tb, int m, int n, const T* alpha, const T* a, int lda, \
                               const T* beta, const T* b, int ldb, T* c, int ldc) {                          \
    return geam(h, ta, tb, m, n, alpha, a, lda, beta, b, ldb, c, ldc);                                       \
  }                                                                                                          \
  API int cublas##LETTER##dgmm(Handle* h, int right, int m, int n, const T* a, int lda, const T* x,          \
                               int step, T* c, int ldc) {                                                    \
    return dgmm(h, right, m, n, a, lda, x, step, c, ldc);                                                    \
  }
DEFINE_MATRICES(S, float);
DEFINE_MATRICES(D, double);
DEFINE_MATRICES(C, ComplexFloat);
DEFINE_MATRICES(Z, ComplexDouble);

#define DEFINE_GER(NAME, T, CONJUGATE)                                                                   \
  API int cublas##NAME##_v2(Handle* h, int m, int n, const T* alpha, const T* x, int x_step, const T* y, \
                            int y_step, T* a, int lda) {                                                 \
    return ger(h, CONJUGATE, m, n, alpha, x, x_step, y, y_step, a, lda);                                 \
  }
DEFINE_GER(Sger, float, false);
DEFINE_GER(Dger, double, false);
DEFINE_GER(Cgeru, ComplexFloat, false);
DEFINE_GER(Cgerc, ComplexFloat, true);
DEFINE_GER(Zgeru, ComplexDouble, false);
DEFINE_GER(Zgerc, ComplexDouble, true);
