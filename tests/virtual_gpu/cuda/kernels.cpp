// The driver's functions for modules and kernels: cuModule*, cuLaunchKernel, cuFunc*, cuOccupancy*.
// A module is a shared object, which the stand-in for NVRTC compiled.
#include <dlfcn.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include "memory.h"
#include "threads.h"
using namespace virtual_gpu;

// The name of the kernel that runs now. A report of the address sanitizer ends with it.
static const char* running = nullptr;
static void name_kernel_in_reports() {
  auto set_callback =
      (void (*)(void (*)(const char*)))dlsym(RTLD_DEFAULT, "__asan_set_error_report_callback");
  if (set_callback)
    set_callback([](const char*) { fprintf(stderr, "vgpu: in kernel %s\n", running ? running : "(none)"); });
}

static CUresult load(CUmodule* out, const std::string& path) {
  name_kernel_in_reports();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "vgpu: %s\n", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  auto init = (void (*)(const vgpu_api*))dlsym(library, "vgpu_init");
  if (init) init(&kernel_api);
  *out = (CUmodule)library;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* out, const char* path) { return load(out, path); }

// The size of a shared object in memory: the table of sections ends it.
static size_t size_of_object(const unsigned char* elf) {
  uint64_t table;
  uint16_t entry, entries;
  memcpy(&table, elf + 40, sizeof table);
  memcpy(&entry, elf + 58, sizeof entry);
  memcpy(&entries, elf + 60, sizeof entries);
  return table + size_t(entry) * entries;
}
API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  if (memcmp(image,
             "\x7f"
             "ELF",
             4))
    return CUDA_ERROR_INVALID_IMAGE;
  // dlopen would return a library that it loaded before by the same name.
  static std::atomic<int> number{0};
  std::string path = "/tmp/vgpu-kernel-" + std::to_string(getpid()) + "-" + std::to_string(number++) + ".so";
  {
    std::ofstream file(path, std::ios::binary);
    file.write((const char*)image, size_of_object((const unsigned char*)image));
  }
  CUresult result = load(out, path);
  unlink(path.c_str());
  return result;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }  // its kernels may be in queues

API CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  void* kernel = dlsym((void*)module, (std::string("vgpu_kernel_") + name).c_str());
  if (!kernel) return CUDA_ERROR_NOT_FOUND;
  *out = (CUfunction)kernel;
  return CUDA_SUCCESS;
}
#undef cuModuleGetGlobal
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* out, size_t* size, CUmodule module, const char* name) {
  void* variable = dlsym((void*)module, name);
  if (!variable) return CUDA_ERROR_NOT_FOUND;
  // The symbol's size is in the table of symbols.
  Dl_info info;
  const unsigned char* symbol = nullptr;
  if (!dladdr1(variable, &info, (void**)&symbol, RTLD_DL_SYMENT) || !symbol) return CUDA_ERROR_NOT_FOUND;
  uint64_t bytes;
  memcpy(&bytes, symbol + 16, sizeof bytes);
  Lock lock;
  add_block(variable, {bytes, device_now, MANAGED});
  if (out) *out = (CUdeviceptr)variable;
  if (size) *size = bytes;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CUstream handle,
                            void** arguments, void** extra) {
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  if (!grid_x || !grid_y || !grid_z || grid_x > 2147483647u || grid_y > 65535 || grid_z > 65535)
    return CUDA_ERROR_INVALID_VALUE;
  if (!block_x || !block_y || !block_z || size_t(block_x) * block_y * block_z > 1024)
    return CUDA_ERROR_INVALID_VALUE;
  auto* kernel = (const vgpu_kernel*)function;

  // A copy of the arguments, 16 bytes aligned.
  std::vector<size_t> offsets;
  size_t size = 0;
  for (unsigned i = 0; i < kernel->n_arguments; ++i) {
    offsets.push_back(size);
    size += (kernel->argument_sizes[i] + 15) / 16 * 16;
  }
  std::shared_ptr<char> values((char*)aligned_alloc(16, size + 16), free);
  for (unsigned i = 0; i < kernel->n_arguments; ++i)
    memcpy(values.get() + offsets[i], arguments[i], kernel->argument_sizes[i]);

  Lock lock;
  State& s = state();
  if (s.forked) return CUDA_ERROR_NOT_INITIALIZED;
  auto stream = find_stream(handle);
  if (!stream || stream->device != device_now) return CUDA_ERROR_INVALID_HANDLE;
  count(launches);
  unsigned shuffle = s.settings.mode == RANDOM ? s.random() | 1 : 0;
  auto work = [=] {
    std::lock_guard<std::recursive_mutex> alone(state().one_computation);
    std::vector<void*> pointers;
    for (size_t offset : offsets) pointers.push_back(values.get() + offset);
    vgpu_launch launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, pointers.data(), shuffle};
    running = kernel->name;
    kernel->launch(&launch);
    running = nullptr;
    return true;
  };
  enqueue(stream, kernel->name, work, {}, lock);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       CUstream stream, void** arguments) {
  return cuLaunchKernel(f, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments,
                        nullptr);
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = 49152; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int block, size_t) {
  *n = std::max(1, 2048 / std::max(block, 1));
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t,
                                              int limit) {
  *block = limit > 0 ? std::min(limit, 1024) : 1024;
  *grid = 8;
  return CUDA_SUCCESS;
}
