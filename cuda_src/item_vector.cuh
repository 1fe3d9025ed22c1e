// Neighbouring items, aligned as one: what one access brings. Several items of 16 bits stay in words until they are
// used, for a compiler that takes words apart waits for them.
#pragma once
#include "item_types.cuh"

template <class Item, int N, bool kWords = sizeof(Item) == 2 && N % 2 == 0>
struct alignas(sizeof(Item) * N) Items {
  Item item[N];
  __device__ __forceinline__ auto get(int n) const { return widen(item[n]); }
  template <class R>
  __device__ __forceinline__ void set(const R (&values)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) narrow(values[n], item[n]);
  }
};
template <class Item, int N>
struct alignas(sizeof(Item) * N) Items<Item, N, true> {
  unsigned word[N / 2];
  __device__ __forceinline__ float get(int n) const { return widen(Item{(unsigned short)(word[n / 2] >> n % 2 * 16)}); }
  __device__ __forceinline__ void set(const float (&values)[N]) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      Item lower, upper;
      narrow(values[n], lower);
      narrow(values[n + 1], upper);
      word[n / 2] = lower.bits | (unsigned)upper.bits << 16;
    }
  }
};

// One parameter of type Item, or of type float (`wide`), converted where it is used: so no branch is between the loads
// of several.
template <class Item>
struct Parameter {
  unsigned bits;
  __device__ __forceinline__ void load(const char* at, bool wide) {
    bits = wide ? load_item<unsigned>(at) : load_item<unsigned short>(at);
  }
  __device__ __forceinline__ float get(bool wide) const {
    return wide ? __uint_as_float(bits) : widen(Item{(unsigned short)bits});
  }
};
template <>
struct Parameter<float> {
  float value;
  __device__ __forceinline__ void load(const char* at, bool) { value = load_item<float>(at); }
  __device__ __forceinline__ float get(bool) const { return value; }
};
