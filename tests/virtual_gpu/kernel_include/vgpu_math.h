// Mathematical functions that CUDA has and the host's library lacks.
#pragma once
#include "vgpu_language.h"

static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline float rsqrt(float x) { return 1 / sqrtf(x); }
static inline double rcbrt(double x) { return 1 / cbrt(x); }
static inline double sinpi(double x) { return sin(M_PI * x); }
static inline double cospi(double x) { return cos(M_PI * x); }
static inline float sinpif(float x) { return sin(M_PI * x); }
static inline float cospif(float x) { return cos(M_PI * x); }
static inline float exp10f(float x, int) { return pow(10., x); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static inline float normcdff(float x) { return 0.5 * erfc(-double(x) * M_SQRT1_2); }
static inline float normcdf(float x) { return normcdff(x); }
static inline double vgpu_normcdfinv(double p) {
  if (p <= 0) return p == 0 ? -INFINITY : NAN;
  if (p >= 1) return p == 1 ? INFINITY : NAN;
  static const double a[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                             1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
  static const double b[] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02,
                             6.680131188771972e+01, -1.328068155288572e+01};
  static const double c[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                             -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
  static const double d[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00,
                             3.754408661907416e+00};
  double x, q, r;
  if (p < 0.02425) {
    q = sqrt(-2 * log(p));
    x = (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
        ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
  } else if (p <= 1 - 0.02425) {
    q = p - 0.5;
    r = q * q;
    x = (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q /
        (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
  } else {
    q = sqrt(-2 * log1p(-p));
    x = -(((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
        ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
  }
  for (int i = 0; i < 3; ++i) {
    double e = normcdf(x) - p, u = e * sqrt(2 * M_PI) * exp(x * x / 2);
    x -= u / (1 + x * u / 2);
  }
  return x;
}
static inline double normcdfinv(double p) { return vgpu_normcdfinv(p); }
static inline float normcdfinv(float p) { return vgpu_normcdfinv(p); }
static inline float normcdfinvf(float p) { return vgpu_normcdfinv(p); }
static inline double erfcinv(double x) { return -vgpu_normcdfinv(x / 2) * M_SQRT1_2; }
static inline double erfinv(double x) {
  if (fabs(x) < 0.5) {
    double y = x * 0.886226925452758;
    for (int i = 0; i < 4; ++i) y -= (erf(y) - x) / (1.1283791670955126 * exp(-y * y));
    return y;
  }
  return x < 0 ? -erfinv(-x) : erfcinv(1 - x);
}
static inline float erfinv(float x) { return erfinv(double(x)); }
static inline float erfcinv(float x) { return erfcinv(double(x)); }
static inline float erfinvf(float x) { return erfinv(double(x)); }
static inline float erfcinvf(float x) { return erfcinv(double(x)); }
static inline double erfcx(double x) { return exp(x * x) * erfc(x); }
static inline float erfcx(float x) { return exp(double(x) * x) * erfc(double(x)); }
static inline double cyl_bessel_i0(double x) { return std::cyl_bessel_i(0., fabs(x)); }
static inline double cyl_bessel_i1(double x) {
  return x < 0 ? -std::cyl_bessel_i(1., -x) : std::cyl_bessel_i(1., x);
}

#define VGPU_MIN_MAX(A, B, R)                                         \
  static inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
  static inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
VGPU_MIN_MAX(int, int, int);
VGPU_MIN_MAX(unsigned, unsigned, unsigned);
VGPU_MIN_MAX(int, unsigned, unsigned);
VGPU_MIN_MAX(unsigned, int, unsigned);
VGPU_MIN_MAX(long, long, long);
VGPU_MIN_MAX(unsigned long, unsigned long, unsigned long);
VGPU_MIN_MAX(long long, long long, long long);
VGPU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long);
VGPU_MIN_MAX(long long, long, long long);
VGPU_MIN_MAX(long, long long, long long);
VGPU_MIN_MAX(long, int, long);
VGPU_MIN_MAX(int, long, long);
VGPU_MIN_MAX(long long, int, long long);
VGPU_MIN_MAX(int, long long, long long);
VGPU_MIN_MAX(long long, unsigned long long, unsigned long long);
VGPU_MIN_MAX(unsigned long long, long long, unsigned long long);
#define VGPU_FLOAT_MIN_MAX(A, B, R, F)                    \
  static inline R min(A a, B b) { return fmin##F(a, b); } \
  static inline R max(A a, B b) { return fmax##F(a, b); }
VGPU_FLOAT_MIN_MAX(float, float, float, f);
VGPU_FLOAT_MIN_MAX(double, double, double, );
VGPU_FLOAT_MIN_MAX(float, double, double, );
VGPU_FLOAT_MIN_MAX(double, float, double, );
static inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
