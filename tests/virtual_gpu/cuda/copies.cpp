// The runtime's functions that copy and fill memory: cudaMemcpy*, cudaMemset*.
#include <cstdio>
#include <cstring>
#include "memory.h"
using namespace virtual_gpu;

namespace {
bool on_device(Kind kind) { return kind >= DEVICE; }

// Whether cudaMemcpyKind, which the caller states, is true of the addresses.
bool is_true(cudaMemcpyKind stated, Kind to, Kind from) {
  if (to == MANAGED || from == MANAGED || stated == cudaMemcpyDefault) return true;
  bool to_device = stated == cudaMemcpyHostToDevice || stated == cudaMemcpyDeviceToDevice;
  bool from_device = stated == cudaMemcpyDeviceToHost || stated == cudaMemcpyDeviceToDevice;
  return to_device == on_device(to) && from_device == on_device(from);
}

void count_copy(Kind to, Kind from, size_t bytes) {
  if (on_device(to) && on_device(from)) {
    count(copies_within_device);
    count(bytes_within_device, bytes);
  } else if (on_device(to)) {
    count(copies_to_device);
    count(bytes_to_device, bytes);
  } else if (on_device(from)) {
    count(copies_to_host);
    count(bytes_to_host, bytes);
  }
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind stated, cudaStream_t handle,
                 bool async) {
  BEGIN;
  if (!bytes) return cudaSuccess;
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  Kind to_kind = kind_of(to), from_kind = kind_of(from);
  if (!is_true(stated, to_kind, from_kind)) {
    fprintf(stderr, "vgpu: cudaMemcpy to %p from %p, which are not of cudaMemcpyKind %d\n", to, from, stated);
    return fail(cudaErrorInvalidValue);
  }
  count_copy(to_kind, from_kind, bytes);
  if (from_kind == HOST && to_kind != HOST) {
    // CUDA reads pageable memory before it returns, and writes the device's memory later.
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    auto work = [=] {
      memcpy(to, staged->data(), bytes);
      return true;
    };
    auto position = enqueue(stream, "copy to the device", work, {}, lock);
    if (async) return cudaSuccess;
    count(synchronizations);
    wait(position, lock);
    return cudaSuccess;
  }
  auto work = [=] {
    memmove(to, from, bytes);
    return true;
  };
  auto position = enqueue(stream, "copy", work, {}, lock);
  bool within_device = on_device(to_kind) && on_device(from_kind);
  if (async ? to_kind == HOST : !within_device) {
    count(synchronizations);
    wait(position, lock);
  }
  return cudaSuccess;
}

cudaError_t copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, cudaStream_t handle, bool async) {
  BEGIN;
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  count_copy(kind_of(to), kind_of(from), width * height);
  auto work = [=] {
    for (size_t i = 0; i < height; ++i)
      memmove((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
    return true;
  };
  auto position = enqueue(stream, "copy of rows", work, {}, lock);
  if (!async || kind_of(to) == HOST || kind_of(from) == HOST) {
    count(synchronizations);
    wait(position, lock);
  }
  return cudaSuccess;
}

cudaError_t fill(void* p, int value, size_t bytes, cudaStream_t handle) {
  BEGIN;
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  count(fills);
  auto work = [=] {
    memset(p, value, bytes);
    return true;
  };
  enqueue(stream, "fill", work, {}, lock);
  return cudaSuccess;
}
}  // namespace

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, 0, false);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, true);
}
API cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
  return copy(to, from, bytes, cudaMemcpyDefault, 0, false);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDefault, stream, true);
}
API cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                             size_t height, cudaMemcpyKind) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, 0, false);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, stream, true);
}
API cudaError_t cudaMemset(void* p, int value, size_t bytes) { return fill(p, value, bytes, 0); }
API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return fill(p, value, bytes, stream);
}
