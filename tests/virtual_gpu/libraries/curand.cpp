// libcurand.so.10: random numbers, which are other ones than those of cuRAND.
#include <cmath>
#include <memory>
#include <random>
#include "../cuda/virtual_gpu.h"

enum Status { SUCCESS = 0, LENGTH_NOT_MULTIPLE = 105 };
using Engine = std::mt19937_64;
struct Generator {
  void* stream = nullptr;
  unsigned long long seed = 0;
  std::shared_ptr<Engine> engine = std::make_shared<Engine>(0);
};

API int curandCreateGenerator(Generator** out, int) {
  *out = new Generator;
  return SUCCESS;
}
API int curandDestroyGenerator(Generator* g) {
  delete g;
  return SUCCESS;
}
API int curandGetVersion(int* version) {
  *version = 10310;
  return SUCCESS;
}
API int curandSetStream(Generator* g, void* stream) {
  g->stream = stream;
  return SUCCESS;
}
API int curandSetPseudoRandomGeneratorSeed(Generator* g, unsigned long long seed) {
  g->seed = seed;
  g->engine = std::make_shared<Engine>(seed);  // operations in queues keep the old one
  return SUCCESS;
}
API int curandSetGeneratorOffset(Generator* g, unsigned long long offset) {
  g->engine = std::make_shared<Engine>(g->seed);
  g->engine->discard(offset);
  return SUCCESS;
}
API int curandSetGeneratorOrdering(Generator*, int) { return SUCCESS; }

// Fills an array with f(engine).
template <class T, class F>
static int fill(Generator* g, T* p, size_t n, F f) {
  auto engine = g->engine;
  virtual_gpu::compute(g->stream, "curand", [=] {
    for (size_t i = 0; i < n; ++i) p[i] = f(*engine);
  });
  return SUCCESS;
}
static double uniform(Engine& e) { return ((e() >> 11) + 1) * 0x1p-53; }  // above 0, up to 1
static double normal(Engine& e) { return sqrt(-2 * log(uniform(e))) * cos(2 * M_PI * uniform(e)); }

API int curandGenerate(Generator* g, unsigned* p, size_t n) {
  return fill(g, p, n, [](Engine& e) { return unsigned(e() >> 32); });
}
API int curandGenerateLongLong(Generator* g, unsigned long long* p, size_t n) {
  return fill(g, p, n, [](Engine& e) { return e(); });
}
API int curandGenerateUniform(Generator* g, float* p, size_t n) {
  return fill(g, p, n, [](Engine& e) { return ((e() >> 40) + 1) * 0x1p-24f; });
}
API int curandGenerateUniformDouble(Generator* g, double* p, size_t n) { return fill(g, p, n, uniform); }

// cuRAND makes normal numbers in pairs.
template <class T, class F>
static int fill_pairs(Generator* g, T* p, size_t n, F f) {
  return n % 2 ? LENGTH_NOT_MULTIPLE : fill(g, p, n, f);
}
API int curandGenerateNormal(Generator* g, float* p, size_t n, float mean, float deviation) {
  return fill_pairs(g, p, n, [=](Engine& e) { return mean + deviation * normal(e); });
}
API int curandGenerateNormalDouble(Generator* g, double* p, size_t n, double mean, double deviation) {
  return fill_pairs(g, p, n, [=](Engine& e) { return mean + deviation * normal(e); });
}
API int curandGenerateLogNormal(Generator* g, float* p, size_t n, float mean, float deviation) {
  return fill_pairs(g, p, n, [=](Engine& e) { return exp(mean + deviation * normal(e)); });
}
API int curandGenerateLogNormalDouble(Generator* g, double* p, size_t n, double mean, double deviation) {
  return fill_pairs(g, p, n, [=](Engine& e) { return exp(mean + deviation * normal(e)); });
}
API int curandGeneratePoisson(Generator* g, unsigned* p, size_t n, double lambda) {
  return fill(g, p, n, [=](Engine& e) { return std::poisson_distribution<unsigned>(lambda)(e); });
}
