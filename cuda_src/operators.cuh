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
