// What rms_norm and its backward share: pieces of a row, and sums over a block.
#pragma once
#include "item_vector.cuh"
#include "rms_norm_args.cuh"
#include "warp_fold.cuh"

constexpr int kNormItems = 4;
constexpr int kNormWarps = 32;  // a block at most

// A piece of a row: `count` items, kNormItems of them side by side if `vector`; the others are 0.
template <class Item>
__device__ __forceinline__ void load_piece(float (&values)[kNormItems], const char* at, long long step, int count,
                                           bool vector) {
  if (vector) {
    const auto items = load_item<Items<Item, kNormItems> >(at);
#pragma unroll
    for (int n = 0; n < kNormItems; ++n) values[n] = items.get(n);
  } else {
#pragma unroll
    for (int n = 0; n < kNormItems; ++n) values[n] = n < count ? widen(load_item<Item>(at + n * step)) : 0.0f;
  }
}
template <class Item>
__device__ __forceinline__ void store_piece(const float (&values)[kNormItems], char* to, int count, bool vector) {
  if (vector) {
    reinterpret_cast<Items<Item, kNormItems>*>(to)->set(values);
  } else {
#pragma unroll
    for (int n = 0; n < kNormItems; ++n)
      if (n < count) narrow(values[n], reinterpret_cast<Item*>(to)[n]);
  }
}

// The same of parameters and gradients, of whatever type.
__device__ __forceinline__ void load_real_piece(float (&values)[kNormItems], const char* at, long long step, int count,
                                                int code) {
  if (code == kFloat32) return load_piece<float>(values, at, step, count, false);
  if (code == kBFloat16) return load_piece<bf16_t>(values, at, step, count, false);
#pragma unroll
  for (int n = 0; n < kNormItems; ++n) values[n] = n < count ? load_real<float>(at + n * step, code) : 0.0f;
}

template <class Item>
__device__ __forceinline__ float rounded(float x) {
  Item item;
  narrow(x, item);
  return widen(item);
}

// Sums over a block, in a fixed order: over the lanes of each warp, then over the warps. Every thread gets them.
template <int kCount>
__device__ __forceinline__ void sum_over_block(float (&sums)[kCount]) {
  __shared__ float of_warps[kCount][kNormWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sums[i] += from_lane_across(sums[i], bit);
    if (lane == 0) of_warps[i][warp] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = lane < warps ? of_warps[i][lane] : 0;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sums[i] += from_lane_across(sums[i], bit);
  }
  __syncthreads();
}

// 1 / root mean square.
__device__ __forceinline__ float norm_share(float squares, const NormArgs& args) {
  return 1.0f / sqrtf(squares / (float)args.width + args.eps);
}
