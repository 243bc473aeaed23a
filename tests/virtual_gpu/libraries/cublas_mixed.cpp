// libcublas.so.12: products of matrices with various types: GemmEx, SgemmEx, GemmStridedBatchedEx.
#include <cstdint>
#include <cstdio>
#include <algorithm>
#include <vector>
#include "cublas.h"
#include "half.h"

enum DataType { FLOAT = 0, DOUBLE = 1, HALF = 2, COMPLEX_FLOAT = 4, COMPLEX_DOUBLE = 5, BFLOAT = 14 };
enum ComputeType {
  COMPUTE_HALF = 64,
  COMPUTE_HALF_PEDANTIC,
  COMPUTE_FLOAT = 68,
  COMPUTE_DOUBLE = 70,
  COMPUTE_DOUBLE_PEDANTIC
};

static long long size_of(int type) {
  switch (type) {
    case HALF:
    case BFLOAT: return 2;
    case FLOAT: return 4;
    case DOUBLE:
    case COMPLEX_FLOAT: return 8;
    default: return 16;
  }
}

static double read(const void* p, int type, size_t i) {
  switch (type) {
    case FLOAT: return ((const float*)p)[i];
    case HALF: return half_to_float(((const uint16_t*)p)[i]);
    case BFLOAT: return bfloat_to_float(((const uint16_t*)p)[i]);
    default: return ((const double*)p)[i];
  }
}
static void write(void* p, int type, size_t i, double value) {
  switch (type) {
    case FLOAT: ((float*)p)[i] = value; break;
    case HALF: ((uint16_t*)p)[i] = float_to_half(value); break;
    case BFLOAT: ((uint16_t*)p)[i] = float_to_bfloat(value); break;
    default: ((double*)p)[i] = value;
  }
}
// A matrix of T without gaps.
template <class T>
static std::vector<T> read(const void* p, int type, int rows, int columns, int ld) {
  std::vector<T> matrix((size_t)rows * columns);
  for (int j = 0; j < columns; ++j)
    for (int i = 0; i < rows; ++i) matrix[i + (size_t)j * rows] = read(p, type, i + (size_t)j * ld);
  return matrix;
}

struct Matrix {
  const void* start;
  int type, ld;
  long long step;  // elements between the matrices of a batch
  const char* of(int i) const { return (const char*)start + i * step * size_of(type); }
};
struct Shape {
  int ta, tb, m, n, k;
};

// C = alpha * A * B + beta * C, computed in T.
template <class T>
static void multiply(Shape s, T alpha, const Matrix& a, const Matrix& b, T beta, const Matrix& c, int batch) {
  int a_rows = s.ta ? s.k : s.m, a_columns = s.ta ? s.m : s.k;
  int b_rows = s.tb ? s.n : s.k, b_columns = s.tb ? s.k : s.n;
  auto x = read<T>(a.of(batch), a.type, a_rows, a_columns, a.ld);
  auto y = read<T>(b.of(batch), b.type, b_rows, b_columns, b.ld);
  void* out = (void*)c.of(batch);
  auto z = beta != 0 ? read<T>(out, c.type, s.m, s.n, c.ld) : std::vector<T>((size_t)s.m * s.n);
  gemm(s.ta, s.tb, s.m, s.n, s.k, alpha, x.data(), std::max(a_rows, 1), y.data(), std::max(b_rows, 1), beta,
       z.data(), std::max(s.m, 1));
  for (int j = 0; j < s.n; ++j)
    for (int i = 0; i < s.m; ++i) write(out, c.type, i + (size_t)j * c.ld, z[i + (size_t)j * s.m]);
}

template <class T>
static int multiply_complex(Handle* h, Shape s, const void* alpha, Matrix a, Matrix b, const void* beta,
                            Matrix c, int count) {
  Scalar<T> al(h, (const T*)alpha), be(h, (const T*)beta);
  return submit(h, "gemmEx", [=] {
    for (int i = 0; i < count; ++i)
      gemm(s.ta, s.tb, s.m, s.n, s.k, al.get(), (const T*)a.of(i), a.ld, (const T*)b.of(i), b.ld, be.get(),
           (T*)c.of(i), c.ld);
  });
}

static int multiply(Handle* h, Shape s, const void* alpha, Matrix a, Matrix b, const void* beta, Matrix c,
                    int count, int compute) {
  if (are_sizes_wrong(s.ta, s.tb, s.m, s.n, s.k, a.ld, b.ld, c.ld)) return INVALID_VALUE;
  switch (a.type) {
    case COMPLEX_FLOAT: return multiply_complex<ComplexFloat>(h, s, alpha, a, b, beta, c, count);
    case COMPLEX_DOUBLE: return multiply_complex<ComplexDouble>(h, s, alpha, a, b, beta, c, count);
    case FLOAT:
    case DOUBLE:
    case HALF:
    case BFLOAT: break;
    default: fprintf(stderr, "vgpu: cublasGemmEx of cudaDataType %d\n", a.type); return NOT_SUPPORTED;
  }
  // CuPy 13 passes cudaDataType, later ones cublasComputeType_t.
  bool in_half = compute == COMPUTE_HALF || compute == COMPUTE_HALF_PEDANTIC || compute == HALF;
  bool in_double = compute == COMPUTE_DOUBLE || compute == COMPUTE_DOUBLE_PEDANTIC || compute == DOUBLE;
  int scalar_type = in_half ? HALF : in_double ? DOUBLE : FLOAT;
  bool on_device = h->pointer_mode;
  double alpha_now = on_device ? 0 : read(alpha, scalar_type, 0),
         beta_now = on_device ? 0 : read(beta, scalar_type, 0);
  return submit(h, "gemmEx", [=] {
    double al = on_device ? read(alpha, scalar_type, 0) : alpha_now;
    double be = on_device ? read(beta, scalar_type, 0) : beta_now;
    for (int i = 0; i < count; ++i)
      if (in_double)
        multiply<double>(s, al, a, b, be, c, i);
      else
        multiply<float>(s, al, a, b, be, c, i);
  });
}

API int cublasGemmEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                     int a_type, int lda, const void* b, int b_type, int ldb, const void* beta, void* c,
                     int c_type, int ldc, int compute, int) {
  return multiply(h, {ta, tb, m, n, k}, alpha, {a, a_type, lda, 0}, {b, b_type, ldb, 0}, beta,
                  {c, c_type, ldc, 0}, 1, compute);
}
API int cublasSgemmEx(Handle* h, int ta, int tb, int m, int n, int k, const float* alpha, const void* a,
                      int a_type, int lda, const void* b, int b_type, int ldb, const float* beta, void* c,
                      int c_type, int ldc) {
  return multiply(h, {ta, tb, m, n, k}, alpha, {a, a_type, lda, 0}, {b, b_type, ldb, 0}, beta,
                  {c, c_type, ldc, 0}, 1, COMPUTE_FLOAT);
}
API int cublasGemmStridedBatchedEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha,
                                   const void* a, int a_type, int lda, long long a_step, const void* b,
                                   int b_type, int ldb, long long b_step, const void* beta, void* c,
                                   int c_type, int ldc, long long c_step, int count, int compute, int) {
  return multiply(h, {ta, tb, m, n, k}, alpha, {a, a_type, lda, a_step}, {b, b_type, ldb, b_step}, beta,
                  {c, c_type, ldc, c_step}, count, compute);
}
