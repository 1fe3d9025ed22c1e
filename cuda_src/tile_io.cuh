// Moving tiles between global memory and where they are worked on.
//
// Two forms, both split into a start (the loads are issued, nothing waits) and an end (the values are used):
//   packs   16 bytes of consecutive steps, straight into registers (linear_scan)
//   pairs   two neighbours of a (time, channel) tile, into raw registers, then converted into shared memory
//           (selective_scan); one orientation flag serves both layouts
#pragma once
#include "item_types.cuh"

// --- packs ---------------------------------------------------------------------------------------------------

template <class T>
struct alignas(16) Pack {
  static constexpr int kItems = 16 / sizeof(T);
  T item[kItems];
};

// --- pairs ---------------------------------------------------------------------------------------------------

// Two items as they came from memory: a word each, or both 16-bit items in the first word.
struct alignas(8) RawPair {
  unsigned first, second;
};
struct alignas(16) RawPair64 {
  double first, second;
};
template <class R>
struct RawPairOf {
  using type = RawPair;
};
template <>
struct RawPairOf<double> {
  using type = RawPair64;
};

// Starts loading the pair at `address`, whose second item is `next` bytes on; where it does not exist the words become
// 0. `wide`: float32 items where Item has 16 bits. `vector`: the two are neighbours in memory (next > 0: the second is
// the upper one), aligned as one, and exist both or not at all.
// Nothing here depends on what was loaded, so nothing waits.
template <class Item>
__device__ __forceinline__ void start_pair(RawPair& raw, const char* address, long long next, bool has_first, bool has_second, bool wide, bool vector) {
  raw = {0, 0};
  if (sizeof(Item) == 4 || wide) {
    if (vector) {
      if (has_first) raw = load_item<RawPair>(next > 0 ? address : address + next);
    } else {
      if (has_first) raw.first = load_item<unsigned>(address);
      if (has_second) raw.second = load_item<unsigned>(address + next);
    }
  } else if (vector) {
    if (has_first) raw.first = load_item<unsigned>(next > 0 ? address : address + next);
  } else {
    if (has_first) raw.first = load_item<unsigned short>(address);
    if (has_second) raw.second = load_item<unsigned short>(address + next);
  }
}
template <class Item>
__device__ __forceinline__ void start_pair(RawPair64& raw, const char* address, long long next, bool has_first, bool has_second, bool, bool vector) {
  raw = {0, 0};
  if (vector) {
    if (has_first) raw = load_item<RawPair64>(next > 0 ? address : address + next);
  } else {
    if (has_first) raw.first = load_item<double>(address);
    if (has_second) raw.second = load_item<double>(address + next);
  }
}

template <class Item>
__device__ __forceinline__ float widen_bits(unsigned bits) {
  if constexpr (sizeof(Item) == 4)
    return __uint_as_float(bits);
  else
    return widen(Item{(unsigned short)bits});
}

template <class Item>
__device__ __forceinline__ void unpack_pair(const RawPair& raw, bool wide, bool vector, long long next, float& first,
                                            float& second) {
  float low, high;
  if (sizeof(Item) == 4 || wide) {
    low = __uint_as_float(raw.first);
    high = __uint_as_float(raw.second);
  } else {
    low = widen_bits<Item>(raw.first);
    high = widen_bits<Item>(vector ? raw.first >> 16 : raw.second);
  }
  first = vector && next < 0 ? high : low;
  second = vector && next < 0 ? low : high;
}
template <class Item>
__device__ __forceinline__ void unpack_pair(const RawPair64& raw, bool, bool vector, long long next, double& first,
                                            double& second) {
  first = vector && next < 0 ? raw.second : raw.first;
  second = vector && next < 0 ? raw.first : raw.second;
}

// Rounds and stores a pair; the arguments are those of start_pair.
template <class Item, class R>
__device__ __forceinline__ void store_pair(char* address, long long next, R first, R second,
                                           bool has_first, bool has_second, int code, bool vector) {
  if (vector) {
    struct alignas(2 * sizeof(Item)) Both {
      Item low, high;
    } both;
    narrow(next > 0 ? first : second, both.low);
    narrow(next > 0 ? second : first, both.high);
    if (has_first) *reinterpret_cast<Both*>(next > 0 ? address : address + next) = both;
  } else {
    if (has_first) store_as(address, code, first);
    if (has_second) store_as(address + next, code, second);
  }
}

// --- single items of B and C, whose accumulation type may be complex ---------------------------------------------

template <class S>
struct RawItemOf {
  using type = S;
};
template <>
struct RawItemOf<float> {
  using type = unsigned;
};

template <class Item, class S>
__device__ __forceinline__ void start_item(S& raw, const char* address, bool exists, bool wide) {
  if constexpr (sizeof(S) == 4 && sizeof(Item) == 2) {
    if (exists)
      raw = wide ? load_item<unsigned>(address) : load_item<unsigned short>(address);
    else
      raw = 0;
  } else {
    raw = exists ? load_item<S>(address) : S{};
  }
}

template <class Item, class S, class Raw>
__device__ __forceinline__ S unpack_item(const Raw& raw, bool wide) {
  if constexpr (sizeof(Raw) == 4)
    return wide ? __uint_as_float(raw) : widen_bits<Item>(raw);
  else
    return raw;
}

// N items of shared memory, N a power of two, in the widest reads there are.
template <class S, int N>
__device__ __forceinline__ void read_row(S (&to)[N], const S* from) {
  struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Row {
    S item[N];
  };
  Row row = *reinterpret_cast<const Row*>(from);
#pragma unroll
  for (int n = 0; n < N; ++n) to[n] = row.item[n];
}
