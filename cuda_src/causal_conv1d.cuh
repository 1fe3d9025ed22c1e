// What causal_conv1d and its backward share: the sum that the activation is of, in two forms.
//
//   windows  of the usual width, in vectors of channels, parameters of the item type or float: all in registers
//   items    of any width, any strides, one channel: everything from memory, step by step
//
// Both add in the order of the taps from the bias on: the bits are the same.
#pragma once
#include "activations.cuh"
#include "causal_conv1d_args.cuh"
#include "item_vector.cuh"
#include "linear_tile.cuh"

constexpr int kConvWidth = 4;  // the usual one
constexpr int kBefore = kConvWidth - 1;

// x of one row and channel at step t, which may lie before the first one.
template <class Item>
__device__ __forceinline__ float input_at(const ConvArgs& args, long long row, long long channel, long long t) {
  if (t >= 0) return widen(load_item<Item>(args.x + row * args.x_batch + t * args.x_time + channel * args.x_channel));
  if (!args.initial) return 0;
  const long long tap = t + args.width - 1;
  return widen(load_item<Item>(args.initial + row * args.initial_batch + channel * args.initial_channel +
                               tap * args.initial_tap));
}
__device__ __forceinline__ float tap_of(const ConvArgs& args, long long channel, int k) {
  return load_real<float>(args.weight + channel * args.weight_channel + k * args.weight_tap, args.weight_code);
}
template <class Item>
__device__ __forceinline__ float sum_at(const ConvArgs& args, long long row, long long channel, long long t) {
  float y = args.bias ? load_real<float>(args.bias + channel * args.bias_channel, args.bias_code) : 0;
#pragma unroll 1
  for (int k = 0; k < args.width; ++k)
    y = fmaf(tap_of(args, channel, k), input_at<Item>(args, row, channel, t - (args.width - 1) + k), y);
  return y;
}

// kItems neighbouring channels.
template <class Item, int kItems>
struct Windows {
  using Some = Items<Item, kItems>;
  using Window = float[kBefore][kItems];
  float taps[kConvWidth][kItems], bias[kItems];

  __device__ __forceinline__ Windows(const ConvArgs& args, long long channel) {
    const char* weight = args.weight + channel * args.weight_channel;
    const char* bias_at = args.bias ? args.bias + channel * args.bias_channel : weight;
    const bool wide = args.weight_code == kFloat32, bias_wide = args.bias ? args.bias_code == kFloat32 : wide;
    Parameter<Item> tap_items[kConvWidth][kItems], bias_items[kItems];
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
      bias_items[c].load(bias_at + c * args.bias_channel, bias_wide);
#pragma unroll
      for (int k = 0; k < kConvWidth; ++k)
        tap_items[k][c].load(weight + c * args.weight_channel + k * args.weight_tap, wide);
    }
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
      bias[c] = args.bias ? bias_items[c].get(bias_wide) : 0;
#pragma unroll
      for (int k = 0; k < kConvWidth; ++k) taps[k][c] = tap_items[k][c].get(wide);
    }
  }

  // x before step `begin` of a row, the latest last.
  static __device__ __forceinline__ void load(Window& window, const ConvArgs& args, long long row, long long channel,
                                              long long begin) {
    if (begin > 0) {  // a chunk has at least kBefore steps
      const char* x = args.x + row * args.x_batch + (begin - kBefore) * args.x_time + channel * args.x_channel;
      Some items[kBefore];
#pragma unroll
      for (int k = 0; k < kBefore; ++k) items[k] = load_item<Some>(x + k * args.x_time);
#pragma unroll
      for (int k = 0; k < kBefore; ++k)
#pragma unroll
        for (int c = 0; c < kItems; ++c) window[k][c] = items[k].get(c);
    } else {
      const char* initial = args.initial + row * args.initial_batch + channel * args.initial_channel;
      Item items[kBefore][kItems] = {};
      if (args.initial) {
#pragma unroll
        for (int k = 0; k < kBefore; ++k)
#pragma unroll
          for (int c = 0; c < kItems; ++c)
            items[k][c] = load_item<Item>(initial + k * args.initial_tap + c * args.initial_channel);
      }
#pragma unroll
      for (int k = 0; k < kBefore; ++k)
#pragma unroll
        for (int c = 0; c < kItems; ++c) window[k][c] = widen(items[k][c]);
    }
  }

  __device__ __forceinline__ float sum(const Window& window, float now, int c) const {
    float y = bias[c];
#pragma unroll
    for (int k = 0; k < kBefore; ++k) y = fmaf(taps[k][c], window[k][c], y);
    return fmaf(taps[kBefore][c], now, y);
  }

  // A step on: what is oldest goes.
  static __device__ __forceinline__ void shift(Window& window, const float (&now)[kItems]) {
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
#pragma unroll
      for (int k = 0; k + 1 < kBefore; ++k) window[k][c] = window[k + 1][c];
      window[kBefore - 1][c] = now[c];
    }
  }
};
