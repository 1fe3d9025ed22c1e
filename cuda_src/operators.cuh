// The algebra of the recurrence, and the only place where it stands.
//
// One step h -> gate * h + input is an affine map. Maps compose associatively and not commutatively, and the
// identity is (1, 0): a chain of steps may be cut anywhere, each piece folded to one map, and the maps
// composed, as long as their order is kept.
#pragma once
#include "item_types.cuh"

template <class S>
struct Affine {
  using State = S;
  S gate, input;

  static __device__ __forceinline__ Affine identity() { return {Scalar<S>::one(), Scalar<S>::zero()}; }
};

// The map that does `earlier` first and `later` second.
// The identity is harmless as the later operand (padding at a tail). As the earlier one it is not: gate * 0 is
// NaN where the gate is infinite. Whoever has no predecessor skips the combine instead.
template <class S>
__device__ __forceinline__ Affine<S> combine(Affine<S> earlier, Affine<S> later) {
  return {multiply(later.gate, earlier.gate), multiply_add(later.gate, earlier.input, later.input)};
}

template <class S>
__device__ __forceinline__ S apply(Affine<S> map, S state) {
  return multiply_add(map.gate, state, map.input);
}

// A map that may forget: with `resets`, what enters is zero, whatever it is. It is hidden by selection, because
// gate * state would let NaN through. The gate is then never used.
template <class S>
struct Segmented {
  using State = S;
  S gate, input;
  unsigned resets;  // 0 or 1

  static __device__ __forceinline__ Segmented identity() { return {Scalar<S>::one(), Scalar<S>::zero(), 0u}; }
};

template <class S>
__device__ __forceinline__ Segmented<S> combine(Segmented<S> earlier, Segmented<S> later) {
  const Affine<S> both = combine(Affine<S>{earlier.gate, earlier.input}, Affine<S>{later.gate, later.input});
  return later.resets ? later : Segmented<S>{both.gate, both.input, earlier.resets};
}

template <class S>
__device__ __forceinline__ S apply(Segmented<S> map, S state) {
  return map.resets ? map.input : apply(Affine<S>{map.gate, map.input}, state);
}
