// Moving tiles between global memory and where they are worked on.
//
// Three forms, all split into a start (the copies are issued, nothing waits) and an end (the values are used):
//   packs   16 bytes of consecutive steps, straight into registers (linear_scan)
//   pairs   two neighbours of a tile (the gradients of selective_scan), and
//   runs    some neighbours of a tile (selective_scan), by asynchronous copies into slots of shared memory that belong
//           to the thread. Registers would not do: the copies are under way across branches, and at a branch the chip
//           waits for loads into registers. What is not aligned is loaded item by item where it is used.
#pragma once
#include "item_types.cuh"

// --- packs ---------------------------------------------------------------------------------------------------

template <class T>
struct alignas(16) Pack {
  static constexpr int kItems = 16 / sizeof(T);
  T item[kItems];
};

// --- pairs ---------------------------------------------------------------------------------------------------

// Two neighbours in memory, aligned as one: what one access brings.
template <class Item>
struct alignas(2 * sizeof(Item)) Vector {
  Item lower, upper;
};

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
__device__ __forceinline__ void swap_pairs(R (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const R first = values[i];
    values[i] = values[i + 1];
    values[i + 1] = first;
  }
}

// Both items of a vector, widened; two 16-bit items as one word.
template <class Item, class R>
__device__ __forceinline__ void read_vector(const Vector<Item>* from, R& lower, R& upper) {
  if constexpr (sizeof(Item) == 2) {
    const unsigned word = *reinterpret_cast<const unsigned*>(from);
    lower = widen(Item{(unsigned short)word});
    upper = widen(Item{(unsigned short)(word >> 16)});
  } else {
    const Vector<Item> both = *from;
    lower = both.lower;
    upper = both.upper;
  }
}

// Loads and waits for N / 2 pairs that are not vectors, `hop` bytes apart, the second item of each `next` bytes from
// the first. Bit i of `exists`: does item i? The others become 0. `wide`: float32 items where Item has 16 bits.
template <class Item, class R, int N>
__device__ __forceinline__ void load_pairs(const char* at, long long hop, long long next, unsigned exists, bool wide,
                                           R (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const char* address = at + i / 2 * hop + i % 2 * next;
    values[i] = Scalar<R>::zero();
    if (!(exists >> i & 1)) continue;
    if constexpr (sizeof(Item) == 2)
      values[i] = wide ? load_item<float>(address) : widen(load_item<Item>(address));
    else
      values[i] = load_item<Item>(address);
  }
}

// Rounds and stores N / 2 pairs; with `vector`, of type Item and `at` the lower item of the first.
template <class Item, class R, int N>
__device__ __forceinline__ void store_pairs(char* at, long long hop, long long next, R (&values)[N], unsigned exists,
                                            int code, bool vector) {
  if (vector) {
    if (next < 0) swap_pairs(values);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      Vector<Item> both;
      narrow(values[2 * i], both.lower);
      narrow(values[2 * i + 1], both.upper);
      if (exists >> 2 * i & 1) *reinterpret_cast<Vector<Item>*>(at + i * hop) = both;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (exists >> i & 1) store_as(at + i / 2 * hop + i % 2 * next, code, values[i]);
  }
}

// --- runs ----------------------------------------------------------------------------------------------------

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
