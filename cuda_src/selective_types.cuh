// What selective_scan and its single step, selective_state_update, share beside the algebra and the activations.
#pragma once
#include "item_types.cuh"

// What B and C are in memory: of u's type (or float32), or complex.
template <class Item, class S>
struct ItemOfCouple {
  using type = Item;
};
template <class Item>
struct ItemOfCouple<Item, complex<float>> {
  using type = complex<float>;
};

// sum + C h. A complex state stands for a conjugate pair: y = 2 Re(sum).
template <class R>
__device__ __forceinline__ R contract(R C, R h, R sum) {
  return multiply_add(C, h, sum);
}
template <class R>
__device__ __forceinline__ R contract(complex<R> C, complex<R> h, R sum) {
  return multiply_add(R(2) * C.re, h.re, multiply_add(R(-2) * C.im, h.im, sum));
}

// What a step does to the states of its channel: the gates are exp(delta * A), the inputs delta * u * B.
template <class R>
struct alignas(2 * sizeof(R)) Drive {
  R delta, delta_u;
};

// delta_limit in the accumulation type.
template <class Args>
__device__ __forceinline__ float limit(const Args& args, int i, float) {
  return args.limits32[i];
}
template <class Args>
__device__ __forceinline__ double limit(const Args& args, int i, double) {
  return args.limits64[i];
}
