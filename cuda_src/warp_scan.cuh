// Hillis-Steele inclusive scan of one value a lane over the 32 lanes of a warp, in five rounds of shuffles.
//
// Every lane takes part in every shuffle (full mask): the callers pad, they do not leave early. In round r a
// lane combines the fold of the 2^r lanes that end 2^r below it with its own; a lane with no such neighbour
// keeps its own value, so the identity never stands as the earlier operand.
#pragma once
#include "operators.cuh"

constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ unsigned from_lane_below(unsigned x, int distance) {
  return __shfl_up_sync(kFullMask, x, distance);
}
__device__ __forceinline__ float from_lane_below(float x, int distance) {
  return __shfl_up_sync(kFullMask, x, distance);
}
__device__ __forceinline__ double from_lane_below(double x, int distance) {
  return __shfl_up_sync(kFullMask, x, distance);
}
template <class R>
__device__ __forceinline__ complex<R> from_lane_below(complex<R> x, int distance) {
  return {from_lane_below(x.re, distance), from_lane_below(x.im, distance)};
}
template <class S>
__device__ __forceinline__ Affine<S> from_lane_below(Affine<S> x, int distance) {
  return {from_lane_below(x.gate, distance), from_lane_below(x.input, distance)};
}
template <class S>
__device__ __forceinline__ Segmented<S> from_lane_below(Segmented<S> x, int distance) {
  return {from_lane_below(x.gate, distance), from_lane_below(x.input, distance), from_lane_below(x.resets, distance)};
}

__device__ __forceinline__ unsigned from_lane(unsigned x, int lane) { return __shfl_sync(kFullMask, x, lane); }
__device__ __forceinline__ float from_lane(float x, int lane) { return __shfl_sync(kFullMask, x, lane); }
__device__ __forceinline__ double from_lane(double x, int lane) { return __shfl_sync(kFullMask, x, lane); }
template <class R>
__device__ __forceinline__ complex<R> from_lane(complex<R> x, int lane) {
  return {from_lane(x.re, lane), from_lane(x.im, lane)};
}
template <class S>
__device__ __forceinline__ Affine<S> from_lane(Affine<S> x, int lane) {
  return {from_lane(x.gate, lane), from_lane(x.input, lane)};
}
template <class S>
__device__ __forceinline__ Segmented<S> from_lane(Segmented<S> x, int lane) {
  return {from_lane(x.gate, lane), from_lane(x.input, lane), from_lane(x.resets, lane)};
}

// The sum over the lanes, in all of them and with the same bits.
template <class S>
__device__ __forceinline__ S warp_sum(S x, int lane) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = add(x, from_lane(x, lane ^ distance));
  return x;
}

// Lane i gets the fold of lanes 0 to i, in their order.
template <class Map>
__device__ __forceinline__ Map warp_inclusive_scan(Map own, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    Map earlier = from_lane_below(own, distance);
    if (lane >= distance) own = combine(earlier, own);
  }
  return own;
}

// The same of maps that may forget: nothing before the last lane up to its own that resets (its head) enters a lane, so
// it combines back to that one alone, and flags need no shuffles.
template <class S>
__device__ __forceinline__ Segmented<S> warp_inclusive_scan(Segmented<S> own, int lane) {
  const unsigned resets = __ballot_sync(kFullMask, own.resets) & ((2u << lane) - 1);
  const int head = resets ? 31 - __clz(resets) : 0;
  Affine<S> map = {own.gate, own.input};
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Affine<S> earlier = from_lane_below(map, distance);
    if (lane - distance >= head) map = combine(earlier, map);
  }
  return {map.gate, map.input, resets ? 1u : 0u};
}
