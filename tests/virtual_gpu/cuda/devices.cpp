// The runtime's functions for errors, versions and devices: cudaGetLastError, cudaSetDevice,
// cudaDeviceGetAttribute...
#include <cstdio>
#include <cstring>
#include "scheduler.h"
using namespace virtual_gpu;

static thread_local cudaError_t last_error = cudaSuccess;
cudaError_t virtual_gpu::fail(cudaError_t error) { return last_error = error; }

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
static const ErrorText error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
API const char* cudaGetErrorName(cudaError_t error) {
  for (auto& e : error_texts)
    if (e.error == error) return e.name;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t error) {
  for (auto& e : error_texts)
    if (e.error == error) return e.text;
  return "unknown error";
}
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceCount(int* n) {
  BEGIN_WITHOUT_CONTEXT;
  *n = s.settings.devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = device_now;
  return cudaSuccess;
}

#define BEGIN_DEVICE(device) \
  BEGIN_WITHOUT_CONTEXT;     \
  if (device < 0 || device >= s.settings.devices) return fail(cudaErrorInvalidDevice)

API cudaError_t cudaSetDevice(int device) {
  BEGIN_DEVICE(device);
  device_now = device;
  use_context();  // since CUDA 12
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  BEGIN_DEVICE(device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrPciBusId: *value = device + 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  BEGIN_DEVICE(device);
  snprintf(id, length, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  BEGIN_WITHOUT_CONTEXT;
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 1 || int(bus) > s.settings.devices)
    return fail(cudaErrorInvalidValue);
  *device = bus - 1;
  return cudaSuccess;
}
#undef cudaGetDeviceProperties
API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* p, int device) {
  BEGIN_DEVICE(device);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Virtual GPU");
  p->uuid.bytes[0] = 'v';
  p->uuid.bytes[15] = device;
  p->major = 9;
  p->multiProcessorCount = 4;
  p->maxThreadsPerMultiProcessor = 2048;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalGlobalMem = s.settings.memory;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerBlock = 65536;
  p->totalConstMem = 65536;
  p->l2CacheSize = 1 << 20;
  p->pciBusID = device + 1;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  return cudaGetDeviceProperties_v2(p, device);
}

// The devices share one address space.
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
API cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1 << 20;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
