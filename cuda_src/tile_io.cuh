// Moving tiles between global memory and where they are worked on.
//
// Two forms, both split into a start (the copies are issued, nothing waits) and an end (the values are used):
//   packs   16 bytes of consecutive steps (linear_scan by asynchronous copies, its gradients straight into registers)
//   runs    some neighbours of a tile (selective_scan and its gradients), by asynchronous copies into slots of shared
//           memory that belong to the thread. Registers would not do: the copies are under way across branches, and at
//           a branch the chip waits for loads into registers. What is not aligned is loaded item by item where it is
//           used.
#pragma once
#include "item_types.cuh"

// --- packs ---------------------------------------------------------------------------------------------------

template <class T>
struct alignas(16) Pack {
  static constexpr int kItems = 16 / sizeof(T);
  T item[kItems];
};

// --- runs ----------------------------------------------------------------------------------------------------

// Copies 4, 8 or 16 bytes into shared memory without waiting; wait_for_copies waits for all that this thread has
// started. Older chips and the CPU copy at once.
template <class V>
__device__ __forceinline__ void start_copy(V* to, const char* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int kBytes = sizeof(V);
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes that the chip copies asynchronously");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
               "n"(kBytes)
               : "memory");
#else
  *to = load_item<V>(from);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <class R, int N>
__device__ __forceinline__ void reverse(R (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const R first = values[i];
    values[i] = values[N - 1 - i];
    values[N - 1 - i] = first;
  }
}

// Loads and waits for N items `next` bytes apart. Bit i of `exist`: does item i? The others become 0. `wide`: float32
// items where Item has 16 bits.
template <class Item, class R, int N>
__device__ __forceinline__ void load_run(const char* at, long long next, unsigned exist, bool wide, R (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i, at += next) {  // one address at a time: registers are scarce where this stands
    values[i] = Scalar<R>::zero();
    if (!(exist >> i & 1)) continue;
    if constexpr (sizeof(Item) == 2)
      values[i] = wide ? load_item<float>(at) : widen(load_item<Item>(at));
    else
      values[i] = load_item<Item>(at);
  }
}

// N items, N a power of two and their address a multiple of it, in the widest accesses there are.
template <class S, int N>
struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Row {
  S item[N];
};
template <class S, int N>
__device__ __forceinline__ void read_row(S (&to)[N], const S* from) {
  const Row<S, N> row = *reinterpret_cast<const Row<S, N>*>(from);
#pragma unroll
  for (int n = 0; n < N; ++n) to[n] = row.item[n];
}
template <class S, int N>
__device__ __forceinline__ void write_row(S* to, const S (&from)[N]) {
  Row<S, N> row;
#pragma unroll
  for (int n = 0; n < N; ++n) row.item[n] = from[n];
  *reinterpret_cast<Row<S, N>*>(to) = row;
}
