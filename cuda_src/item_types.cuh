// Item types: what an array in memory holds, and the type it is computed in.
//
// An item is read, converted once to its accumulation type, and rounded once when it is stored:
//
//     float, bf16_t, f16_t -> float      double -> double      complex<R> -> complex<R>
//
// The 16-bit types are bare bit patterns with conversions of our own, so that this text needs no header.
#pragma once

// Run-time names of item types; _arrays.py has the same numbers.
enum ItemCode { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3, kComplex64 = 4, kComplex128 = 5 };

struct bf16_t {
  unsigned short bits;
};
struct f16_t {
  unsigned short bits;
};
template <class R>
struct alignas(2 * sizeof(R)) complex {
  R re, im;
};

__device__ __forceinline__ float widen(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float widen(f16_t x) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  _Float16 half;
  __builtin_memcpy(&half, &x.bits, sizeof half);
  return (float)half;
#endif
}
template <class R>
__device__ __forceinline__ R widen(R x) {
  return x;
}

// Rounding to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ void narrow(float x, bf16_t& item) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(item.bits) : "f"(x));
#else
  unsigned bits = __float_as_uint(x);
  item.bits = x != x ? 0x7fff : (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}
__device__ __forceinline__ void narrow(float x, f16_t& item) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(item.bits) : "f"(x));
#else
  _Float16 half = (_Float16)x;
  __builtin_memcpy(&item.bits, &half, sizeof half);
#endif
}
template <class R>
__device__ __forceinline__ void narrow(R x, R& item) {
  item = x;
}

template <class T>
constexpr ItemCode kItemCode = kFloat32;
template <>
constexpr ItemCode kItemCode<bf16_t> = kBFloat16;
template <>
constexpr ItemCode kItemCode<f16_t> = kFloat16;
template <>
constexpr ItemCode kItemCode<double> = kFloat64;
template <>
constexpr ItemCode kItemCode<complex<float>> = kComplex64;
template <>
constexpr ItemCode kItemCode<complex<double>> = kComplex128;

template <class T>
struct Accumulated {
  using type = T;
};
template <>
struct Accumulated<bf16_t> {
  using type = float;
};
template <>
struct Accumulated<f16_t> {
  using type = float;
};

template <class T>
__device__ __forceinline__ T load_item(const char* address) {
  return *reinterpret_cast<const T*>(address);
}

// One real item of a type known at run time. For what is read once a thread, not once a step.
template <class R>
__device__ __forceinline__ R load_real(const char* address, int code) {
  switch (code) {
    case kBFloat16:
      return widen(load_item<bf16_t>(address));
    case kFloat16:
      return widen(load_item<f16_t>(address));
    case kFloat64:
      return (R)load_item<double>(address);
    default:
      return (R)load_item<float>(address);
  }
}

// The same for a parameter whose accumulation type may be complex; complex items are complex64.
__device__ __forceinline__ void load_as(float& value, const char* address, int code) {
  value = load_real<float>(address, code);
}
__device__ __forceinline__ void load_as(double& value, const char* address, int code) {
  value = load_real<double>(address, code);
}
__device__ __forceinline__ void load_as(complex<float>& value, const char* address, int) {
  value = load_item<complex<float>>(address);
}

// A double on its way to 16 bits, as a float that rounds like the double itself: rounded to odd, so that no tie is
// made.
__device__ __forceinline__ float narrow_to_odd(float x) { return x; }
__device__ __forceinline__ float narrow_to_odd(double x) {
  float nearest = (float)x;
  unsigned bits = __float_as_uint(nearest);
  if ((double)nearest != x && x == x && !(bits & 1)) bits += fabs((double)nearest) < fabs(x) ? 1 : -1;
  return __uint_as_float(bits);
}

// Stores a value in the item type that the caller asked for (out_dtype).
template <class R>
__device__ __forceinline__ void store_as(char* address, int code, R value) {
  switch (code) {
    case kBFloat16:
      narrow(narrow_to_odd(value), *reinterpret_cast<bf16_t*>(address));
      break;
    case kFloat16:
      narrow(narrow_to_odd(value), *reinterpret_cast<f16_t*>(address));
      break;
    case kFloat64:
      *reinterpret_cast<double*>(address) = (double)value;
      break;
    default:
      *reinterpret_cast<float*>(address) = (float)value;
  }
}
template <class R>
__device__ __forceinline__ void store_as(char* address, int code, complex<R> value) {
  if (code == kComplex128)
    *reinterpret_cast<complex<double>*>(address) = {(double)value.re, (double)value.im};
  else
    *reinterpret_cast<complex<float>*>(address) = {(float)value.re, (float)value.im};
}

// The arithmetic of the accumulation types. The text is compiled without contraction: each fused
// multiply-add is written, so that the bits do not depend on a compiler's choice.
__device__ __forceinline__ float multiply(float x, float y) { return x * y; }
__device__ __forceinline__ double multiply(double x, double y) { return x * y; }
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) { return fma(x, y, z); }
template <class R>
__device__ __forceinline__ complex<R> multiply(complex<R> x, complex<R> y) {
  return {multiply_add(x.re, y.re, -(x.im * y.im)), multiply_add(x.re, y.im, x.im * y.re)};
}
template <class R>
__device__ __forceinline__ complex<R> multiply_add(complex<R> x, complex<R> y, complex<R> z) {
  return {multiply_add(x.re, y.re, multiply_add(-x.im, y.im, z.re)),
          multiply_add(x.re, y.im, multiply_add(x.im, y.re, z.im))};
}
template <class R>
__device__ __forceinline__ complex<R> multiply(R x, complex<R> y) {
  return {x * y.re, x * y.im};
}

template <class R>
__device__ __forceinline__ R add(R x, R y) {
  return x + y;
}
template <class R>
__device__ __forceinline__ complex<R> add(complex<R> x, complex<R> y) {
  return {x.re + y.re, x.im + y.im};
}
template <class R>
__device__ __forceinline__ R conjugate(R x) {
  return x;
}
template <class R>
__device__ __forceinline__ complex<R> conjugate(complex<R> x) {
  return {x.re, -x.im};
}

template <class S>
struct Scalar {
  static __device__ __forceinline__ S zero() { return S(0); }
  static __device__ __forceinline__ S one() { return S(1); }
  static __device__ __forceinline__ S negative_zero() { return S(-0.0); }
};
template <class R>
struct Scalar<complex<R>> {
  static __device__ __forceinline__ complex<R> zero() { return {R(0), R(0)}; }
  static __device__ __forceinline__ complex<R> one() { return {R(1), R(0)}; }
  static __device__ __forceinline__ complex<R> negative_zero() { return {R(-0.0), R(-0.0)}; }
};
