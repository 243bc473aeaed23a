// libcufft.so.11: Fourier transforms, one dimension after the other.
//
// Each is computed by its definition in double precision: n^2 operations, which is enough for tests.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>
#include "../cuda/virtual_gpu.h"

enum Status { SUCCESS = 0, INVALID_PLAN = 1, NOT_SUPPORTED = 16 };
enum Direction { FORWARD = -1, INVERSE = 1 };
enum Type { R2C = 0x2a, C2R = 0x2c, C2C = 0x29, D2Z = 0x6a, Z2D = 0x6c, Z2Z = 0x69 };
using Complex = std::complex<double>;

// How the arrays of a batch lie in memory.
struct Layout {
  std::vector<long long> shape;  // of the memory; the first is not used
  long long step = 1;            // between elements
  long long distance = 0;        // between arrays

  long long offset(const std::vector<int>& index) const {
    long long at = 0;
    for (size_t d = 0; d < index.size(); ++d) at = at * (d ? shape[d] : 1) + index[d];
    return at * step;
  }
};
struct Plan {
  void* stream = nullptr;
  std::vector<int> shape;  // of the transform
  Layout in, out;
  int type = 0, batch = 1;
};

static std::map<int, Plan>& plans() {
  static auto* all = new std::map<int, Plan>;
  return *all;
}
static std::mutex& mutex() {
  static auto* m = new std::mutex;
  return *m;
}
static bool find(int handle, Plan* out) {
  std::lock_guard<std::mutex> lock(mutex());
  auto found = plans().find(handle);
  if (found == plans().end()) return false;
  *out = found->second;
  return true;
}
template <class F>
static int change(int handle, F change) {
  std::lock_guard<std::mutex> lock(mutex());
  auto found = plans().find(handle);
  if (found == plans().end()) return INVALID_PLAN;
  change(found->second);
  return SUCCESS;
}

// Calls f with each index of an array.
template <class F>
static void for_each(const std::vector<int>& shape, F f) {
  std::vector<int> index(shape.size());
  for (;;) {
    f(index);
    int d = shape.size() - 1;
    while (d >= 0 && ++index[d] == shape[d]) index[d--] = 0;
    if (d < 0) return;
  }
}

// Transforms an array along one axis.
static void transform_axis(std::vector<Complex>& x, const std::vector<int>& shape, size_t axis,
                           int direction) {
  int n = shape[axis];
  size_t inner = 1;
  for (size_t d = axis + 1; d < shape.size(); ++d) inner *= shape[d];
  std::vector<Complex> roots(n), y(n);
  for (int k = 0; k < n; ++k) roots[k] = std::polar(1., direction * 2 * M_PI * k / n);
  for (size_t start = 0; start < x.size(); start += inner * n)
    for (size_t i = start; i < start + inner; ++i) {
      for (int k = 0; k < n; ++k) {
        Complex sum = 0;
        for (int j = 0; j < n; ++j) sum += x[i + j * inner] * roots[(long long)j * k % n];
        y[k] = sum;
      }
      for (int k = 0; k < n; ++k) x[i + k * inner] = y[k];
    }
}

// One array. IN and OUT are real or complex types.
template <class In, class Out>
static void transform(const Plan& plan, const In* in, Out* out, int direction) {
  const auto& shape = plan.shape;
  bool from_half = plan.type == C2R || plan.type == Z2D, to_half = plan.type == R2C || plan.type == D2Z;
  auto half = shape;
  half.back() = half.back() / 2 + 1;
  std::vector<Complex> x;
  for_each(shape, [&](std::vector<int> index) {
    // The other half has the conjugate numbers, at the negative index.
    bool mirrored = from_half && index.back() >= half.back();
    for (size_t d = 0; mirrored && d < shape.size(); ++d) index[d] = (shape[d] - index[d]) % shape[d];
    Complex value(in[plan.in.offset(index)]);
    x.push_back(mirrored ? std::conj(value) : value);
  });
  for (size_t axis = 0; axis < shape.size(); ++axis) transform_axis(x, shape, axis, direction);
  size_t i = 0;
  for_each(shape, [&](const std::vector<int>& index) {
    Complex value = x[i++];
    if (to_half && index.back() >= half.back()) return;
    Out& target = out[plan.out.offset(index)];
    if constexpr (std::is_floating_point<Out>::value)
      target = value.real();
    else
      target = Out(value);
  });
}

template <class In, class Out>
static int execute(int handle, const In* in, Out* out, int direction) {
  Plan plan;
  if (!find(handle, &plan)) return INVALID_PLAN;
  virtual_gpu::compute(plan.stream, "cufft", [=] {
    for (int i = 0; i < plan.batch; ++i)
      transform(plan, in + i * plan.in.distance, out + i * plan.out.distance, direction);
  });
  return SUCCESS;
}
API int cufftExecC2C(int plan, std::complex<float>* in, std::complex<float>* out, int direction) {
  return execute(plan, in, out, direction);
}
API int cufftExecR2C(int plan, float* in, std::complex<float>* out) {
  return execute(plan, in, out, FORWARD);
}
API int cufftExecC2R(int plan, std::complex<float>* in, float* out) {
  return execute(plan, in, out, INVERSE);
}
API int cufftExecZ2Z(int plan, Complex* in, Complex* out, int direction) {
  return execute(plan, in, out, direction);
}
API int cufftExecD2Z(int plan, double* in, Complex* out) { return execute(plan, in, out, FORWARD); }
API int cufftExecZ2D(int plan, Complex* in, double* out) { return execute(plan, in, out, INVERSE); }

API int cufftCreate(int* handle) {
  static int last = 0;
  std::lock_guard<std::mutex> lock(mutex());
  *handle = ++last;
  plans()[last] = {};
  return SUCCESS;
}
API int cufftDestroy(int handle) {
  std::lock_guard<std::mutex> lock(mutex());
  return plans().erase(handle) ? SUCCESS : INVALID_PLAN;
}
API int cufftSetStream(int handle, void* stream) {
  return change(handle, [=](Plan& plan) { plan.stream = stream; });
}
API int cufftSetAutoAllocation(int, int) { return SUCCESS; }
API int cufftSetWorkArea(int, void*) { return SUCCESS; }
API int cufftGetVersion(int* version) {
  *version = 11400;
  return SUCCESS;
}

// The memory of a transform without gaps. Of real input or output, the complex side has only half of the last
// axis.
static Layout dense(const std::vector<int>& shape, bool is_half) {
  Layout layout;
  layout.shape.assign(shape.begin(), shape.end());
  if (is_half) layout.shape.back() = shape.back() / 2 + 1;
  layout.distance = 1;
  for (long long n : layout.shape) layout.distance *= n;
  return layout;
}
API int cufftMakePlanMany(int handle, int rank, int* shape, int* in_shape, int in_step, int in_distance,
                          int* out_shape, int out_step, int out_distance, int type, int batch, size_t* work) {
  *work = 0;
  return change(handle, [=](Plan& plan) {
    plan.shape.assign(shape, shape + rank);
    plan.type = type;
    plan.batch = batch;
    plan.in = dense(plan.shape, type == C2R || type == Z2D);
    plan.out = dense(plan.shape, type == R2C || type == D2Z);
    if (in_shape) plan.in = {{in_shape, in_shape + rank}, in_step, in_distance};
    if (out_shape) plan.out = {{out_shape, out_shape + rank}, out_step, out_distance};
  });
}
API int cufftMakePlan1d(int handle, int n, int type, int batch, size_t* work) {
  return cufftMakePlanMany(handle, 1, &n, nullptr, 1, 0, nullptr, 1, 0, type, batch, work);
}
