// exp2, softplus and silu: one definition for every kernel, so that a scan and a step agree to the bit.
//
// They are our own, from fused multiply-adds and (in float32) the chip's ex2 and rcp, because the bits must not
// change with the compiler's mathematics library. Largest relative errors, counted beside each.
#pragma once
#include "item_types.cuh"

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// 2^x; float32: 2^-22.5 (the chip's ex2), results below 2^-126 are 0.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#else
  return exp2f(x);
#endif
}

// 2^x in float64: 2^(n + f) with |f| <= 1/2, Taylor's polynomial of exp(f ln 2) to the 13th power (4e-18), and
// the power of two multiplied in two halves, so that subnormal results are right.
__device__ __forceinline__ double exp2_of(double x) {
  if (x != x) return x;
  x = fmin(fmax(x, -1100.0), 1100.0);
  double whole = rint(x);
  double r = (x - whole) * 0.6931471805599453;
  double p = 1.6059043836821613e-10;
  p = fma(p, r, 2.08767569878681e-09);
  p = fma(p, r, 2.505210838544172e-08);
  p = fma(p, r, 2.755731922398589e-07);
  p = fma(p, r, 2.7557319223985893e-06);
  p = fma(p, r, 2.48015873015873e-05);
  p = fma(p, r, 1.984126984126984e-04);
  p = fma(p, r, 1.388888888888889e-03);
  p = fma(p, r, 8.333333333333333e-03);
  p = fma(p, r, 4.1666666666666664e-02);
  p = fma(p, r, 1.6666666666666666e-01);
  p = fma(p, r, 0.5);
  p = fma(p, r, 1.0);
  p = fma(p, r, 1.0);
  int n = (int)whole, half = n / 2;
  double scale = __longlong_as_double((long long)(half + 1023) << 52);
  double other = __longlong_as_double((long long)(n - half + 1023) << 52);
  return p * scale * other;
}

__device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#else
  return 1.0f / x;
#endif
}
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

// log(1 + e) / e for 0 <= e <= 1, which is 1 at e = 0, where log(1 + e) itself would be 0.
__device__ __forceinline__ float log1p_share(float e) {
  float q = 5.3648293e-03f;  // least largest relative error: 3.3e-8
  q = fmaf(q, e, -3.0065812e-02f);
  q = fmaf(q, e, 7.9204567e-02f);
  q = fmaf(q, e, -1.3753805e-01f);
  q = fmaf(q, e, 1.9153656e-01f);
  q = fmaf(q, e, -2.4857164e-01f);
  q = fmaf(q, e, 3.3321323e-01f);
  q = fmaf(q, e, -4.9999648e-01f);
  return fmaf(q, e, 1.0f);
}
// By s = e / (2 + e) and log(1 + e) = 2 artanh(s) = 2 s (1 + p/3 + p^2/5 + ...), p = s^2 <= 1/9.
__device__ __forceinline__ double log1p_share(double e) {
  double twice = 2.0 / (2.0 + e), s = 0.5 * e * twice, p = s * s;
  double q = 1.0 / 35.0;  // the series itself; what is left out is below 1e-18
#pragma unroll
  for (int odd = 33; odd >= 3; odd -= 2) q = fma(q, p, 1.0 / odd);
  return fma(twice * p, q, twice);
}

__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }
__device__ __forceinline__ float positive_part(float x) { return fmaxf(x, 0.0f); }
__device__ __forceinline__ double positive_part(double x) { return fmax(x, 0.0); }

// What R leaves of log(2), and beyond what exp(-x) is 0.
__device__ __forceinline__ float ln2_rest(float) { return -1.904654e-09f; }
__device__ __forceinline__ double ln2_rest(double) { return 2.3190468138462996e-17; }
__device__ __forceinline__ float far(float) { return 200.0f; }
__device__ __forceinline__ double far(double) { return 1000.0; }

// The smaller of the two; NaN stays.
template <class R>
__device__ __forceinline__ R at_most(R x, R limit) {
  return x > limit ? limit : x;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ float at_most(float x, float limit) {
  float value;
  asm("min.NaN.ftz.f32 %0, %1, %2;" : "=f"(value) : "f"(x), "f"(limit));
  return value;
}
#endif

// exp(-|x|). The exponent of 2 is rounded, and what the rounding left off is put back: else the relative error would
// grow with |x|. NaN stays.
template <class R>
__device__ __forceinline__ R exp_of_minus(R x) {
  x = at_most(magnitude(x), far(x));
  const R exponent = x * R(-kLog2E);
  const R rest = multiply_add(exponent, ln2_rest(x), multiply_add(exponent, R(kLn2), x));
  const R power = exp2_of(exponent);
  return multiply_add(power, -rest, power);
}

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)). NaN comes through the second term.
template <class R>
__device__ __forceinline__ R softplus(R x) {
  const R e = exp_of_minus(x);
  return multiply_add(e, log1p_share(e), positive_part(x));
}

// x * sigmoid(x), the sigmoid from exp(-|x|) so that it neither overflows nor cancels.
template <class R>
__device__ __forceinline__ R silu(R x) {
  R e = exp_of_minus(x);
  return x * (x < R(0) ? e : R(1)) * reciprocal(R(1) + e);
}

// The slopes of softplus and silu: sigmoid(x), and sigmoid(x) (1 + x sigmoid(-x)).
template <class R>
__device__ __forceinline__ R sigmoid(R x) {
  R e = exp_of_minus(x);
  return (x < R(0) ? e : R(1)) * reciprocal(R(1) + e);
}
template <class R>
__device__ __forceinline__ R silu_slope(R x) {
  R e = exp_of_minus(x);
  R share = reciprocal(R(1) + e);
  R rises = (x < R(0) ? e : R(1)) * share, falls = (x < R(0) ? R(1) : e) * share;
  return multiply_add(x * falls, rises, rises);
}

// NaN stays NaN: a comparison with NaN is false on both sides.
template <class R>
__device__ __forceinline__ R clip(R x, R lowest, R highest) {
  x = x < lowest ? lowest : x;
  return x > highest ? highest : x;
}

// cos(x) and sin(x) to 2^-23 of the unit circle: x is reduced to |r| <= pi/4 by three exact-product steps, beyond
// 8192 in float64; beyond 1e12 a float32's spacing is many turns, and the angle is taken as 0.
__device__ __forceinline__ complex<float> unit_at_angle(float x) {
  float r;
  int quarter;
  if (fabsf(x) <= 8192.0f) {
    float k = rintf(x * 0.6366197723675814f);
    r = fmaf(k, -1.570796251296997f, x);
    r = fmaf(k, -7.549790126404332e-08f, r);
    quarter = (int)k;
  } else if (fabsf(x) <= 1e12f) {
    double k = rint((double)x * 0.6366197723675814);
    double reduced = fma(k, -1.5707963267948966, (double)x);
    r = (float)fma(k, -6.123233995736766e-17, reduced);
    quarter = (int)((long long)k & 3);
  } else {
    r = x - x;  // 0, or NaN where x is not finite
    quarter = 0;
  }
  float p = r * r;
  float s = 2.7557319e-06f;
  s = fmaf(s, p, -1.9841270e-04f);
  s = fmaf(s, p, 8.3333333e-03f);
  s = fmaf(s, p, -1.6666667e-01f);
  s = fmaf(s * p, r, r);
  float c = -2.7557319e-07f;
  c = fmaf(c, p, 2.4801587e-05f);
  c = fmaf(c, p, -1.3888889e-03f);
  c = fmaf(c, p, 4.1666667e-02f);
  c = fmaf(c, p, -0.5f);
  c = fmaf(c, p, 1.0f);
  float real = quarter & 1 ? s : c, imaginary = quarter & 1 ? c : s;
  return {(quarter + 1) & 2 ? -real : real, quarter & 2 ? -imaginary : imaginary};
}

// The gate exp(delta * A), from A scaled beforehand: log2(e) A, and for complex A only its real part.
__device__ __forceinline__ float scale_rate(float A) { return A * (float)kLog2E; }
__device__ __forceinline__ double scale_rate(double A) { return A * kLog2E; }
__device__ __forceinline__ complex<float> scale_rate(complex<float> A) { return {A.re * (float)kLog2E, A.im}; }

// sum + the gradient of delta from that of the exponent delta * A, where a scaled real rate leaves out rate_unit.
template <class R>
__device__ __forceinline__ R multiply_rate(R scaled_rate, R gradient, R sum) {
  return multiply_add(scaled_rate, gradient, sum);
}
__device__ __forceinline__ float multiply_rate(complex<float> scaled_rate, complex<float> gradient, float sum) {
  return fmaf(scaled_rate.re * (float)kLn2, gradient.re, fmaf(scaled_rate.im, gradient.im, sum));
}
__device__ __forceinline__ float rate_unit(float) { return (float)kLn2; }
__device__ __forceinline__ double rate_unit(double) { return kLn2; }
__device__ __forceinline__ float rate_unit(complex<float>) { return 1.0f; }

template <class R>
__device__ __forceinline__ R gate_of(R delta, R scaled_rate) {
  return exp2_of(delta * scaled_rate);
}
__device__ __forceinline__ complex<float> gate_of(float delta, complex<float> scaled_rate) {
  float size = exp2_of(delta * scaled_rate.re);
  complex<float> unit = unit_at_angle(delta * scaled_rate.im);
  return {size * unit.re, size * unit.im};
}

// The delta of a gate that stands for many steps. What each addition rounds off is added up too: the error of a plain
// sum grows with the number of steps, and |A| times it is that of the gate.
template <class R>
struct DeltaSum {
  R sum, rest;

  __device__ __forceinline__ void add(R delta) {
    const R next = sum + delta;
    rest += delta - (next - sum);
    sum = next;
  }
  // After a delta that is not finite the rest is NaN.
  __device__ __forceinline__ R value() const { return rest == rest ? sum + rest : sum; }
};
