// libcublas.so.12: handles and their settings.
#include "cublas.h"

API int cublasCreate_v2(Handle** out) {
  scipy_openblas_set_num_threads(1);
  *out = new Handle;
  return SUCCESS;
}
API int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return SUCCESS;
}
API int cublasGetVersion_v2(Handle*, int* version) {
  *version = 120900;
  return SUCCESS;
}
API int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return SUCCESS;
}
API int cublasGetStream_v2(Handle* handle, void** stream) {
  *stream = handle->stream;
  return SUCCESS;
}
API int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return SUCCESS;
}
API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return SUCCESS;
}
API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return SUCCESS;
}
API int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return SUCCESS;
}
