// libcusolver.so.11: dense linear algebra by LAPACK: getrf, getrs, potrf, potrs, geqrf, orgqr, gesvd, syevd,
// syevj.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <vector>
#include "../cuda/virtual_gpu.h"

using ComplexFloat = std::complex<float>;
using ComplexDouble = std::complex<double>;
enum Status { SUCCESS = 0, NOT_SUPPORTED = 9 };
const int COLUMNS = 102;  // LAPACK_COL_MAJOR

struct Handle {
  void* stream = nullptr;
};

// LAPACKE's functions as overloads.
#define DECLARE_LAPACK(LETTER, T, R, ORGQR, SYEVD)                                                        \
  extern "C" int scipy_LAPACKE_##LETTER##getrf(int, int m, int n, T* a, int lda, int* pivots);            \
  extern "C" int scipy_LAPACKE_##LETTER##getrs(int, char t, int n, int columns, const T* a, int lda,      \
                                               const int* pivots, T* b, int ldb);                         \
  extern "C" int scipy_LAPACKE_##LETTER##potrf(int, char part, int n, T* a, int lda);                     \
  extern "C" int scipy_LAPACKE_##LETTER##potrs(int, char part, int n, int columns, const T* a, int lda,   \
                                               T* b, int ldb);                                            \
  extern "C" int scipy_LAPACKE_##LETTER##geqrf(int, int m, int n, T* a, int lda, T* tau);                 \
  extern "C" int scipy_LAPACKE_##ORGQR(int, int m, int n, int k, T* a, int lda, const T* tau);            \
  extern "C" int scipy_LAPACKE_##SYEVD(int, char job, char part, int n, T* a, int lda, R* w);             \
  extern "C" int scipy_LAPACKE_##LETTER##gesvd(int, char job_u, char job_vt, int m, int n, T* a, int lda, \
                                               R* s, T* u, int ldu, T* vt, int ldvt, R* superb);          \
  static int getrf(int m, int n, T* a, int lda, int* pivots) {                                            \
    return scipy_LAPACKE_##LETTER##getrf(COLUMNS, m, n, a, lda, pivots);                                  \
  }                                                                                                       \
  static int getrs(char t, int n, int columns, const T* a, int lda, const int* pivots, T* b, int ldb) {   \
    return scipy_LAPACKE_##LETTER##getrs(COLUMNS, t, n, columns, a, lda, pivots, b, ldb);                 \
  }                                                                                                       \
  static int potrf(char part, int n, T* a, int lda) {                                                     \
    return scipy_LAPACKE_##LETTER##potrf(COLUMNS, part, n, a, lda);                                       \
  }                                                                                                       \
  static int potrs(char part, int n, int columns, const T* a, int lda, T* b, int ldb) {                   \
    return scipy_LAPACKE_##LETTER##potrs(COLUMNS, part, n, columns, a, lda, b, ldb);                      \
  }                                                                                                       \
  static int geqrf(int m, int n, T* a, int lda, T* tau) {                                                 \
    return scipy_LAPACKE_##LETTER##geqrf(COLUMNS, m, n, a, lda, tau);                                     \
  }                                                                                                       \
  static int orgqr(int m, int n, int k, T* a, int lda, const T* tau) {                                    \
    return scipy_LAPACKE_##ORGQR(COLUMNS, m, n, k, a, lda, tau);                                          \
  }                                                                                                       \
  static int syevd(char job, char part, int n, T* a, int lda, R* w) {                                     \
    return scipy_LAPACKE_##SYEVD(COLUMNS, job, part, n, a, lda, w);                                       \
  }                                                                                                       \
  static int gesvd(char job_u, char job_vt, int m, int n, T* a, int lda, R* s, T* u, int ldu, T* vt,      \
                   int ldvt) {                                                                            \
    std::vector<R> superb(std::max(1, std::min(m, n)));                                                   \
    return scipy_LAPACKE_##LETTER##gesvd(COLUMNS, job_u, job_vt, m, n, a, lda, s, u, ldu, vt, ldvt,       \
                                         superb.data());                                                  \
  }
DECLARE_LAPACK(s, float, float, sorgqr, ssyevd);
DECLARE_LAPACK(d, double, double, dorgqr, dsyevd);
DECLARE_LAPACK(c, ComplexFloat, float, cungqr, cheevd);
DECLARE_LAPACK(z, ComplexDouble, double, zungqr, zheevd);
extern "C" void scipy_LAPACKE_set_nancheck(int);

static char part_of(int fill) { return fill == 0 ? 'L' : 'U'; }                // cublasFillMode_t
static char job_of(int mode) { return mode == 0 ? 'N' : 'V'; }                 // cusolverEigMode_t
static char transpose_of(int t) { return t == 0 ? 'N' : t == 1 ? 'T' : 'C'; }  // cublasOperation_t

template <class F>
static int submit(Handle* handle, const char* name, F work) {
  virtual_gpu::compute(handle->stream, name, work);
  return SUCCESS;
}
// LAPACK allocates its own memory.
static int no_buffer(int* size) {
  *size = 1;
  return SUCCESS;
}

API int cusolverDnCreate(Handle** out) {
  scipy_LAPACKE_set_nancheck(0);
  *out = new Handle;
  return SUCCESS;
}
API int cusolverDnDestroy(Handle* h) {
  delete h;
  return SUCCESS;
}
API int cusolverDnSetStream(Handle* h, void* stream) {
  h->stream = stream;
  return SUCCESS;
}
API int cusolverDnGetStream(Handle* h, void** stream) {
  *stream = h->stream;
  return SUCCESS;
}
API int cusolverGetProperty(int type, int* value) {
  const int version[] = {11, 7, 5};
  *value = version[type];
  return SUCCESS;
}

// Parameters of the Jacobi method, which is replaced by another one.
API int cusolverDnCreateSyevjInfo(void** out) {
  *out = new char;
  return SUCCESS;
}
API int cusolverDnDestroySyevjInfo(char* info) {
  delete info;
  return SUCCESS;
}
API int cusolverDnXsyevjSetTolerance(void*, double) { return SUCCESS; }
API int cusolverDnXsyevjSetMaxSweeps(void*, int) { return SUCCESS; }
API int cusolverDnXsyevjSetSortEig(void*, int) { return SUCCESS; }
API int cusolverDnCreateParams(void** out) { return cusolverDnCreateSyevjInfo(out); }
API int cusolverDnDestroyParams(char* params) { return cusolverDnDestroySyevjInfo(params); }

#define DEFINE_SOLVER(LETTER, T, R, ORGQR, SYEVD, SYEVJ)                                                     \
  API int cusolverDn##LETTER##getrf_bufferSize(Handle*, int, int, T*, int, int* size) {                      \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##LETTER##getrf(Handle* h, int m, int n, T* a, int lda, T*, int* pivots, int* info) {    \
    if (!pivots) return NOT_SUPPORTED;                                                                       \
    return submit(h, "getrf", [=] { *info = getrf(m, n, a, lda, pivots); });                                 \
  }                                                                                                          \
  API int cusolverDn##LETTER##getrs(Handle* h, int t, int n, int columns, const T* a, int lda,               \
                                    const int* pivots, T* b, int ldb, int* info) {                           \
    return submit(h, "getrs", [=] { *info = getrs(transpose_of(t), n, columns, a, lda, pivots, b, ldb); });  \
  }                                                                                                          \
  API int cusolverDn##LETTER##potrf_bufferSize(Handle*, int, int, T*, int, int* size) {                      \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##LETTER##potrf(Handle* h, int fill, int n, T* a, int lda, T*, int, int* info) {         \
    return submit(h, "potrf", [=] { *info = potrf(part_of(fill), n, a, lda); });                             \
  }                                                                                                          \
  API int cusolverDn##LETTER##potrfBatched(Handle* h, int fill, int n, T** a, int lda, int* info,            \
                                           int count) {                                                      \
    return submit(h, "potrfBatched", [=] {                                                                   \
      for (int i = 0; i < count; ++i) info[i] = potrf(part_of(fill), n, a[i], lda);                          \
    });                                                                                                      \
  }                                                                                                          \
  API int cusolverDn##LETTER##potrs(Handle* h, int fill, int n, int columns, const T* a, int lda, T* b,      \
                                    int ldb, int* info) {                                                    \
    return submit(h, "potrs", [=] { *info = potrs(part_of(fill), n, columns, a, lda, b, ldb); });            \
  }                                                                                                          \
  API int cusolverDn##LETTER##geqrf_bufferSize(Handle*, int, int, T*, int, int* size) {                      \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##LETTER##geqrf(Handle* h, int m, int n, T* a, int lda, T* tau, T*, int, int* info) {    \
    return submit(h, "geqrf", [=] { *info = geqrf(m, n, a, lda, tau); });                                    \
  }                                                                                                          \
  API int cusolverDn##ORGQR##_bufferSize(Handle*, int, int, int, const T*, int, const T*, int* size) {       \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##ORGQR(Handle* h, int m, int n, int k, T* a, int lda, const T* tau, T*, int,            \
                            int* info) {                                                                     \
    return submit(h, "orgqr", [=] { *info = orgqr(m, n, k, a, lda, tau); });                                 \
  }                                                                                                          \
  API int cusolverDn##LETTER##gesvd_bufferSize(Handle*, int, int, int* size) { return no_buffer(size); }     \
  API int cusolverDn##LETTER##gesvd(Handle* h, signed char job_u, signed char job_vt, int m, int n, T* a,    \
                                    int lda, R* s, T* u, int ldu, T* vt, int ldvt, T*, int, R*, int* info) { \
    return submit(h, "gesvd", [=] { *info = gesvd(job_u, job_vt, m, n, a, lda, s, u, ldu, vt, ldvt); });     \
  }                                                                                                          \
  API int cusolverDn##SYEVD##_bufferSize(Handle*, int, int, int, const T*, int, const R*, int* size) {       \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##SYEVD(Handle* h, int job, int fill, int n, T* a, int lda, R* w, T*, int, int* info) {  \
    return submit(h, "syevd", [=] { *info = syevd(job_of(job), part_of(fill), n, a, lda, w); });             \
  }                                                                                                          \
  API int cusolverDn##SYEVJ##_bufferSize(Handle*, int, int, int, const T*, int, const R*, int* size,         \
                                         void*) {                                                            \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##SYEVJ(Handle* h, int job, int fill, int n, T* a, int lda, R* w, T*, int, int* info,    \
                            void*) {                                                                         \
    return submit(h, "syevj", [=] { *info = syevd(job_of(job), part_of(fill), n, a, lda, w); });             \
  }                                                                                                          \
  API int cusolverDn##SYEVJ##Batched_bufferSize(Handle*, int, int, int, const T*, int, const R*, int* size,  \
                                                void*, int) {                                                \
    return no_buffer(size);                                                                                  \
  }                                                                                                          \
  API int cusolverDn##SYEVJ##Batched(Handle* h, int job, int fill, int n, T* a, int lda, R* w, T*, int,      \
                                     int* info, void*, int count) {                                          \
    return submit(h, "syevjBatched", [=] {                                                                   \
      for (int i = 0; i < count; ++i)                                                                        \
        info[i] = syevd(job_of(job), part_of(fill), n, a + (size_t)i * lda * n, lda, w + (size_t)i * n);     \
    });                                                                                                      \
  }
DEFINE_SOLVER(S, float, float, Sorgqr, Ssyevd, Ssyevj);
DEFINE_SOLVER(D, double, double, Dorgqr, Dsyevd, Dsyevj);
DEFINE_SOLVER(C, ComplexFloat, float, Cungqr, Cheevd, Cheevj);
DEFINE_SOLVER(Z, ComplexDouble, double, Zungqr, Zheevd, Zheevj);

// The same for any type, which is a cudaDataType.
API int cusolverDnXsyevd_bufferSize(Handle*, void*, int, int, int64_t, int, const void*, int64_t, int,
                                    const void*, int, size_t* on_device, size_t* on_host) {
  *on_device = *on_host = 1;
  return SUCCESS;
}
API int cusolverDnXsyevd(Handle* h, void*, int job, int fill, int64_t n, int type, void* a, int64_t lda, int,
                         void* w, int, void*, size_t, void*, size_t, int* info) {
  switch (type) {
    case 0: return cusolverDnSsyevd(h, job, fill, n, (float*)a, lda, (float*)w, nullptr, 0, info);
    case 1: return cusolverDnDsyevd(h, job, fill, n, (double*)a, lda, (double*)w, nullptr, 0, info);
    case 4: return cusolverDnCheevd(h, job, fill, n, (ComplexFloat*)a, lda, (float*)w, nullptr, 0, info);
    case 5: return cusolverDnZheevd(h, job, fill, n, (ComplexDouble*)a, lda, (double*)w, nullptr, 0, info);
    default: return NOT_SUPPORTED;
  }
}
