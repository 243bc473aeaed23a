// What the files of libcublas.so.12 share.
#pragma once
#include <cblas.h>
#include <cmath>
#include <complex>
#include "../cuda/virtual_gpu.h"

using ComplexFloat = std::complex<float>;
using ComplexDouble = std::complex<double>;
enum Status { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };  // of cublasStatus_t
enum Transpose { NO_TRANSPOSE, TRANSPOSE, CONJUGATE_TRANSPOSE };     // cublasOperation_t

struct Handle {  // what a cublasHandle_t points to
  void* stream = nullptr;
  int pointer_mode = 0;  // 1: scalars are on the device
  int math_mode = 0;
};

template <class F>
int submit(Handle* handle, const char* name, F work) {
  virtual_gpu::compute(handle->stream, name, work);
  return SUCCESS;
}
// For a function with a scalar result, which is on the host unless pointer_mode is 1.
template <class F>
int submit_with_result(Handle* handle, const char* name, F work) {
  auto position = virtual_gpu::compute(handle->stream, name, work);
  if (!handle->pointer_mode) {
    virtual_gpu::count(virtual_gpu::synchronizations);
    virtual_gpu::wait(position);
  }
  return SUCCESS;
}

// A scalar argument: read from the host now, or from the device when the operation runs.
template <class T>
struct Scalar {
  const T* address;
  T value;
  Scalar(Handle* handle, const T* p)
      : address(handle->pointer_mode ? p : nullptr), value(handle->pointer_mode ? T() : *p) {}
  T get() const { return address ? *address : value; }
};

template <class T>
T conj_if(T x, bool) {
  return x;
}
inline ComplexFloat conj_if(ComplexFloat x, bool yes) { return yes ? std::conj(x) : x; }
inline ComplexDouble conj_if(ComplexDouble x, bool yes) { return yes ? std::conj(x) : x; }

// |x|, for complex numbers as BLAS defines it.
template <class T>
double magnitude(T x) {
  return std::fabs(x);
}
inline double magnitude(ComplexFloat x) { return std::fabs(x.real()) + std::fabs(x.imag()); }
inline double magnitude(ComplexDouble x) { return std::fabs(x.real()) + std::fabs(x.imag()); }

// OpenBLAS's functions as overloads, for matrices in column-major order. A is m x k, B is k x n, C is m x n.
void gemm(int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda, const float* b, int ldb,
          float beta, float* c, int ldc);
void gemm(int ta, int tb, int m, int n, int k, double alpha, const double* a, int lda, const double* b,
          int ldb, double beta, double* c, int ldc);
void gemm(int ta, int tb, int m, int n, int k, ComplexFloat alpha, const ComplexFloat* a, int lda,
          const ComplexFloat* b, int ldb, ComplexFloat beta, ComplexFloat* c, int ldc);
void gemm(int ta, int tb, int m, int n, int k, ComplexDouble alpha, const ComplexDouble* a, int lda,
          const ComplexDouble* b, int ldb, ComplexDouble beta, ComplexDouble* c, int ldc);
void trsm(int side, int upper, int ta, int unit, int m, int n, float alpha, const float* a, int lda, float* b,
          int ldb);
void trsm(int side, int upper, int ta, int unit, int m, int n, double alpha, const double* a, int lda,
          double* b, int ldb);
void trsm(int side, int upper, int ta, int unit, int m, int n, ComplexFloat alpha, const ComplexFloat* a,
          int lda, ComplexFloat* b, int ldb);
void trsm(int side, int upper, int ta, int unit, int m, int n, ComplexDouble alpha, const ComplexDouble* a,
          int lda, ComplexDouble* b, int ldb);

// Whether cuBLAS would refuse these sizes.
bool are_sizes_wrong(int ta, int tb, int m, int n, int k, int lda, int ldb, int ldc);
