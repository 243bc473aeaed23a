// libcublas.so.12: functions of vectors: amax, amin, asum, nrm2, axpy, dot, scal.
#include "cublas.h"

// The index from 1 of the best element, 0 if there is none.
template <class T, class Better>
static int best(Handle* handle, const char* name, int n, const T* x, long step, int* result, Better better) {
  return submit_with_result(handle, name, [=] {
    int best = 0;
    for (int i = 1; i < n; ++i)
      if (better(magnitude(x[i * step]), magnitude(x[best * step]))) best = i;
    *result = n > 0 ? best + 1 : 0;
  });
}
template <class T, class R>
static int asum(Handle* handle, int n, const T* x, long step, R* result) {
  return submit_with_result(handle, "asum", [=] {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += magnitude(x[i * step]);
    *result = sum;
  });
}
template <class T, class R>
static int nrm2(Handle* handle, int n, const T* x, long step, R* result) {
  return submit_with_result(handle, "nrm2", [=] {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::norm(x[i * step]);
    *result = std::sqrt(sum);
  });
}
template <class T>
static int axpy(Handle* handle, int n, const T* a, const T* x, long x_step, T* y, long y_step) {
  Scalar<T> scalar(handle, a);
  return submit(handle, "axpy", [=] {
    T factor = scalar.get();
    for (int i = 0; i < n; ++i) y[i * y_step] += factor * x[i * x_step];
  });
}
template <class T>
static int dot(Handle* handle, bool conjugate, int n, const T* x, long x_step, const T* y, long y_step,
               T* result) {
  return submit_with_result(handle, "dot", [=] {
    T sum = 0;
    for (int i = 0; i < n; ++i) sum += conj_if(x[i * x_step], conjugate) * y[i * y_step];
    *result = sum;
  });
}
template <class A, class T>
static int scal(Handle* handle, int n, const A* a, T* x, long step) {
  Scalar<A> scalar(handle, a);
  return submit(handle, "scal", [=] {
    A factor = scalar.get();
    for (int i = 0; i < n; ++i) x[i * step] *= factor;
  });
}

#define DEFINE_NORMS(LETTER, T, R, ASUM, NRM2)                                            \
  API int cublasI##LETTER##amax_v2(Handle* h, int n, const T* x, int step, int* result) { \
    return best(h, "amax", n, x, step, result, [](double a, double b) { return a > b; }); \
  }                                                                                       \
  API int cublasI##LETTER##amin_v2(Handle* h, int n, const T* x, int step, int* result) { \
    return best(h, "amin", n, x, step, result, [](double a, double b) { return a < b; }); \
  }                                                                                       \
  API int cublas##ASUM##_v2(Handle* h, int n, const T* x, int step, R* result) {          \
    return asum(h, n, x, step, result);                                                   \
  }                                                                                       \
  API int cublas##NRM2##_v2(Handle* h, int n, const T* x, int step, R* result) {          \
    return nrm2(h, n, x, step, result);                                                   \
  }
DEFINE_NORMS(s, float, float, Sasum, Snrm2);
DEFINE_NORMS(d, double, double, Dasum, Dnrm2);
DEFINE_NORMS(c, ComplexFloat, float, Scasum, Scnrm2);
DEFINE_NORMS(z, ComplexDouble, double, Dzasum, Dznrm2);

#define DEFINE_AXPY(NAME, T)                                                                          \
  API int cublas##NAME##_v2(Handle* h, int n, const T* a, const T* x, int x_step, T* y, int y_step) { \
    return axpy(h, n, a, x, x_step, y, y_step);                                                       \
  }
DEFINE_AXPY(Saxpy, float);
DEFINE_AXPY(Daxpy, double);
DEFINE_AXPY(Caxpy, ComplexFloat);
DEFINE_AXPY(Zaxpy, ComplexDouble);

#define DEFINE_DOT(NAME, T, CONJUGATE)                                                                     \
  API int cublas##NAME##_v2(Handle* h, int n, const T* x, int x_step, const T* y, int y_step, T* result) { \
    return dot(h, CONJUGATE, n, x, x_step, y, y_step, result);                                             \
  }
DEFINE_DOT(Sdot, float, false);
DEFINE_DOT(Ddot, double, false);
DEFINE_DOT(Cdotu, ComplexFloat, false);
DEFINE_DOT(Cdotc, ComplexFloat, true);
DEFINE_DOT(Zdotu, ComplexDouble, false);
DEFINE_DOT(Zdotc, ComplexDouble, true);

#define DEFINE_SCAL(NAME, A, T) \
  API int cublas##NAME##_v2(Handle* h, int n, const A* a, T* x, int step) { return scal(h, n, a, x, step); }
DEFINE_SCAL(Sscal, float, float);
DEFINE_SCAL(Dscal, double, double);
DEFINE_SCAL(Cscal, ComplexFloat, ComplexFloat);
DEFINE_SCAL(Csscal, float, ComplexFloat);
DEFINE_SCAL(Zscal, ComplexDouble, ComplexDouble);
DEFINE_SCAL(Zdscal, double, ComplexDouble);
