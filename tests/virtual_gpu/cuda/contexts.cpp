// The driver's functions for errors and contexts: cuInit, cuCtx*. Each device has one context.
#include <cstdio>
#include <cstdlib>
#include "scheduler.h"
using namespace virtual_gpu;

struct DriverErrorText {
  CUresult error;
  const char *name, *text;
};
static const DriverErrorText error_texts[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};
API CUresult cuGetErrorName(CUresult error, const char** out) {
  *out = "CUDA_ERROR_UNKNOWN";
  for (auto& e : error_texts)
    if (e.error == error) *out = e.name;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** out) {
  *out = "unknown error";
  for (auto& e : error_texts)
    if (e.error == error) *out = e.text;
  return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned) {
  Lock lock;
  return state().forked ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

void virtual_gpu::use_context() {
  has_context = true;
  state().contexts.insert(device_now);
}
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x1000 + device); }

// Not initialized before the first use of CUDA, and in children of a process that used it.
API CUresult cuCtxGetCurrent(CUcontext* out) {
  if (!state().started || state().forked) return CUDA_ERROR_NOT_INITIALIZED;
  *out = has_context ? context_of(device_now) : nullptr;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  if (!state().started || state().forked) return CUDA_ERROR_NOT_INITIALIZED;
  has_context = context;
  if (context) device_now = (uintptr_t)context - 0x1000;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* out) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  *out = device_now;
  return CUDA_SUCCESS;
}
API CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
  Lock lock;
  auto stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *out = context_of(stream->device);
  return CUDA_SUCCESS;
}
#undef cuCtxCreate
API CUresult cuCtxCreate_v2(CUcontext* out, unsigned, CUdevice device) {
  *out = context_of(device);
  return cuCtxSetCurrent(*out);
}
#undef cuCtxDestroy
API CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  Lock lock;
  *flags = 0;
  *is_active = state().contexts.count(device);
  return CUDA_SUCCESS;
}
#undef cuDevicePrimaryCtxRelease
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

// Only CUDA's own runtime calls these. CuPy's modules with compiled device code include it.
static CUresult compiled_code() {
  fputs("vgpu: CuPy's wheel has compiled device code for this (cub or others), which cannot run on a CPU\n",
        stderr);
  abort();
}
#undef cuGetProcAddress
API CUresult cuGetProcAddress(const char*, void**, int, cuuint64_t) { return compiled_code(); }
API CUresult cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  return compiled_code();
}
API CUresult cuGetExportTable(const void**, const CUuuid*) { return compiled_code(); }
