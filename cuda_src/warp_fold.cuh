// Sums over the lanes of a warp of several values at once: each step of a butterfly sends half of the values away and
// keeps the other half, so that n values cost n shuffles and not 5n. The order of the additions is fixed, and that of
// their operands does not matter to the bits.
#pragma once
#include "warp_scan.cuh"

__device__ __forceinline__ float from_lane_across(float x, int bit) { return __shfl_xor_sync(kFullMask, x, bit); }
__device__ __forceinline__ double from_lane_across(double x, int bit) { return __shfl_xor_sync(kFullMask, x, bit); }
template <class R>
__device__ __forceinline__ complex<R> from_lane_across(complex<R> x, int bit) {
  return {from_lane_across(x.re, bit), from_lane_across(x.im, bit)};
}

// Two sums over the lanes that differ in `bit`: of `first` in the lane without it, of `second` in the lane with it.
template <class V>
__device__ __forceinline__ V halve(V first, V second, int lane, int bit) {
  const bool upper = lane & bit;
  const V keep = upper ? second : first, send = upper ? first : second;
  return add(keep, from_lane_across(send, bit));
}

// kCount sums, a power of two, over the lanes that differ in log2(kCount) bits from `bit` on: lane gets number
// (lane / bit) % kCount.
template <int kCount, class V>
__device__ __forceinline__ V fold(const V (&values)[kCount], int lane, int bit) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    V half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) half[i] = halve(values[2 * i], values[2 * i + 1], lane, bit);
    return fold(half, lane, 2 * bit);
  }
}
