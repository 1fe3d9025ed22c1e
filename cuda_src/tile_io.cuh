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

// Two items as they came from memory: 16-bit items in one word, two words, or two doubles. `vector`: they are
// neighbours in memory and aligned as one, so one access brings both.
struct alignas(8) WordPair {
  unsigned first, second;
};
struct alignas(16) DoublePair {
  double first, second;
};

// What holds a pair of Items; kMayBeWide: or of float32, where Item has 16 bits.
template <class Item, bool kMayBeWide>
struct RawPairOf {
  using type = WordPair;
};
template <>
struct RawPairOf<bf16_t, false> {
  using type = unsigned;
};
template <>
struct RawPairOf<f16_t, false> {
  using type = unsigned;
};
template <bool kMayBeWide>
struct RawPairOf<double, kMayBeWide> {
  using type = DoublePair;
};

template <class Item>
__device__ __forceinline__ float widen_bits(unsigned bits) {
  if constexpr (sizeof(Item) == 4)
    return __uint_as_float(bits);
  else
    return widen(Item{(unsigned short)bits});
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

// Starts the loads of N pairs, `hop` bytes apart from `at`, the second item of each `next` bytes from the first; with
// `vector`, `at` is the lower of the two. Bits 2i and 2i + 1 of `exists` say which items of pair i to read; the others
// become 0. With vectors, nothing here depends on what was loaded, so nothing waits.
template <class Item, int N>
__device__ __forceinline__ void start_pairs(unsigned (&raw)[N], const char* at, long long hop, long long next,
                                            unsigned exists, bool, bool vector) {
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = 0;
  if (vector) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (exists >> 2 * i & 1) raw[i] = load_item<unsigned>(at + i * hop);
  } else {
    unsigned second[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      second[i] = 0;
      if (exists >> 2 * i & 1) raw[i] = load_item<unsigned short>(at + i * hop);
      if (exists >> 2 * i & 2) second[i] = load_item<unsigned short>(at + i * hop + next);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) raw[i] |= second[i] << 16;
  }
}
template <class Item, int N>
__device__ __forceinline__ void start_pairs(WordPair (&raw)[N], const char* at, long long hop, long long next,
                                            unsigned exists, bool wide, bool vector) {
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = {0, 0};
  if constexpr (sizeof(Item) == 2) {
    if (!wide) {
      unsigned both[N];
      start_pairs<Item>(both, at, hop, next, exists, wide, vector);
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i].first = both[i];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (vector) {
      if (exists >> 2 * i & 1) raw[i] = load_item<WordPair>(at + i * hop);
    } else {
      if (exists >> 2 * i & 1) raw[i].first = load_item<unsigned>(at + i * hop);
      if (exists >> 2 * i & 2) raw[i].second = load_item<unsigned>(at + i * hop + next);
    }
  }
}
template <class Item, int N>
__device__ __forceinline__ void start_pairs(DoublePair (&raw)[N], const char* at, long long hop, long long next,
                                            unsigned exists, bool, bool vector) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    raw[i] = {0, 0};
    if (vector) {
      if (exists >> 2 * i & 1) raw[i] = load_item<DoublePair>(at + i * hop);
    } else {
      if (exists >> 2 * i & 1) raw[i].first = load_item<double>(at + i * hop);
      if (exists >> 2 * i & 2) raw[i].second = load_item<double>(at + i * hop + next);
    }
  }
}

// The end of the loads: the items of pair i as values 2i and 2i + 1. `swapped`: a vector's lower item is the second.
template <class Item>
__device__ __forceinline__ void unpack_pair(unsigned raw, bool, float& first, float& second) {
  first = widen_bits<Item>(raw);
  second = widen_bits<Item>(raw >> 16);
}
template <class Item>
__device__ __forceinline__ void unpack_pair(WordPair raw, bool wide, float& first, float& second) {
  if (sizeof(Item) == 4 || wide) {
    first = __uint_as_float(raw.first);
    second = __uint_as_float(raw.second);
  } else {
    unpack_pair<Item>(raw.first, wide, first, second);
  }
}
template <class Item>
__device__ __forceinline__ void unpack_pair(DoublePair raw, bool, double& first, double& second) {
  first = raw.first;
  second = raw.second;
}
template <class Item, class Raw, class R, int N>
__device__ __forceinline__ void unpack_pairs(const Raw (&raw)[N], bool wide, bool swapped, R (&values)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) unpack_pair<Item>(raw[i], wide, values[2 * i], values[2 * i + 1]);
  if (swapped) swap_pairs(values);
}

// Rounds and stores N pairs; the arguments are those of start_pairs. With `vector` the items are of type Item.
template <class Item, class R, int N>
__device__ __forceinline__ void store_pairs(char* at, long long hop, long long next, R (&values)[N], unsigned exists,
                                            int code, bool vector, bool swapped) {
  if (vector) {
    struct alignas(2 * sizeof(Item)) Both {
      Item lower, upper;
    };
    if (swapped) swap_pairs(values);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      Both both;
      narrow(values[2 * i], both.lower);
      narrow(values[2 * i + 1], both.upper);
      if (exists >> 2 * i & 1) *reinterpret_cast<Both*>(at + i * hop) = both;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (exists >> 2 * i & 1) store_as(at + i * hop, code, values[2 * i]);
      if (exists >> 2 * i & 2) store_as(at + i * hop + next, code, values[2 * i + 1]);
    }
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

// Starts the loads of N items `hop` bytes apart; bit i of `exists` says whether to read item i.
template <class Item, class S, class Raw, int N>
__device__ __forceinline__ void start_items(Raw (&raw)[N], const char* at, long long hop, unsigned exists, bool wide) {
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = Raw{};
  if constexpr (sizeof(S) == 4 && sizeof(Item) == 2) {
    if (!wide) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (exists >> i & 1) raw[i] = load_item<unsigned short>(at + i * hop);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (exists >> i & 1) raw[i] = load_item<Raw>(at + i * hop);
}

template <class Item, class S, class Raw>
__device__ __forceinline__ S unpack_item(const Raw& raw, bool wide) {
  if constexpr (sizeof(Raw) == 4)
    return sizeof(Item) == 4 || wide ? __uint_as_float(raw) : widen_bits<Item>(raw);
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
