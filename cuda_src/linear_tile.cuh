// What both ways of a linear_scan share: rows and what enters them, maps, what goes from tile to tile, packs along
// time.
#pragma once
#include "item_vector.cuh"
#include "linear_args.cuh"
#include "operators.cuh"
#include "step_marks.cuh"
#include "tile_io.cuh"
#include "warp_scan.cuh"

constexpr int kMostWarps = 8;  // warps a block, but in one pass

// Quotient, and the remainder in `rest`. 64-bit division is a subroutine of a hundred instructions.
__device__ __forceinline__ long long divide(long long x, long long y, long long& rest) {
  if ((x | y) >> 32) {
    const long long quotient = x / y;
    rest = x - quotient * y;
    return quotient;
  }
  const unsigned quotient = (unsigned)x / (unsigned)y;
  rest = (unsigned)x - quotient * (unsigned)y;
  return quotient;
}

// Two neighbouring rows that a thread takes as one: each has the steps it has alone.
template <class R>
struct alignas(2 * sizeof(R)) Two {
  R first, second;
};
template <class R>
struct Scalar<Two<R>> {
  static __device__ __forceinline__ Two<R> zero() { return {R(0), R(0)}; }
  static __device__ __forceinline__ Two<R> one() { return {R(1), R(1)}; }
  static __device__ __forceinline__ Two<R> negative_zero() { return {R(-0.0), R(-0.0)}; }
};
template <class R>
__device__ __forceinline__ Two<R> multiply(Two<R> x, Two<R> y) {
  return {multiply(x.first, y.first), multiply(x.second, y.second)};
}
template <class R>
__device__ __forceinline__ Two<R> add(Two<R> x, Two<R> y) {
  return {add(x.first, y.first), add(x.second, y.second)};
}
template <class R>
__device__ __forceinline__ Two<R> multiply_add(Two<R> x, Two<R> y, Two<R> z) {
  return {multiply_add(x.first, y.first, z.first), multiply_add(x.second, y.second, z.second)};
}

template <class Item>
using Pair = Items<Item, 2>;
template <class Item>
struct Accumulated<Pair<Item>> {
  using type = Two<float>;
};
template <class Item>
constexpr ItemCode kItemCode<Pair<Item>> = kItemCode<Item>;
template <class Item>
__device__ __forceinline__ Two<float> widen(Pair<Item> pair) {
  return {pair.get(0), pair.get(1)};
}
template <class Item>
__device__ __forceinline__ void narrow(Two<float> values, Pair<Item>& pair) {
  pair.set({values.first, values.second});
}

template <class R>
__device__ __forceinline__ Two<R> from_lane_below(Two<R> x, int distance) {
  return {from_lane_below(x.first, distance), from_lane_below(x.second, distance)};
}
template <class R>
__device__ __forceinline__ Two<R> from_lane(Two<R> x, int lane) {
  return {from_lane(x.first, lane), from_lane(x.second, lane)};
}

template <class S>
struct RowsOf {
  static constexpr int kRows = 1;
};
template <class R>
struct RowsOf<Two<R>> {
  static constexpr int kRows = 2;
};

template <class R>
__device__ __forceinline__ void store_as(char* address, int code, Two<R> value) {
  store_as(address, code, value.first);
  store_as(address + (code == kFloat64 ? 8 : code == kFloat32 ? 4 : 2), code, value.second);
}

// State of one row; that of two rows is in two places, `beside` bytes apart.
template <class S>
__device__ __forceinline__ S load_state(const char* address, long long) {
  return load_item<S>(address);
}
template <>
__device__ __forceinline__ Two<float> load_state(const char* address, long long beside) {
  return {load_item<float>(address), load_item<float>(address + beside)};
}
template <class S>
__device__ __forceinline__ void store_state(char* address, long long, int code, S state) {
  store_as(address, code, state);
}
template <class R>
__device__ __forceinline__ void store_state(char* address, long long beside, int code, Two<R> state) {
  store_as(address, code, state.first);
  store_as(address + beside, code, state.second);
}

// The same as it is.
template <class S>
__device__ __forceinline__ void store_state(char* address, long long, S state) {
  *reinterpret_cast<S*>(address) = state;
}
template <class R>
__device__ __forceinline__ void store_state(char* address, long long beside, Two<R> state) {
  *reinterpret_cast<R*>(address) = state.first;
  *reinterpret_cast<R*>(address + beside) = state.second;
}

template <class S, bool kSegmented>
struct MapOf {
  using type = Affine<S>;
};
template <class S>
struct MapOf<S, true> {
  using type = Segmented<S>;
};

// Is all of a warp's tile there, with nothing special about its steps? Then nothing is asked of any step.
// And if it is known besides that it has gates of its own, not of their one number.
struct Whole {
  static constexpr bool value = true, gates = false;
};
struct Gated {
  static constexpr bool value = true, gates = true;
};
struct Partial {
  static constexpr bool value = false, gates = false;
};

// One row of every array, at position 0.
struct LinearRow {
  const char *gate, *input, *initial;
  char *output, *last;
  const char* marks;
};

__device__ __forceinline__ LinearRow locate_row(const LinearArgs& args, long long row) {
  LinearRow at = {args.gate.start,   args.input.start, args.initial.start,
                  args.output.start, args.last.start,  args.marks.start};
#pragma unroll 1
  for (int d = args.row_dims - 1; d >= 0; --d) {
    long long i = row;
    row = d > 0 ? divide(row, args.row_size[d], i) : 0;
    at.gate += i * args.gate.row[d];
    at.input += i * args.input.row[d];
    at.initial += i * args.initial.row[d];
    at.output += i * args.output.row[d];
    at.last += i * args.last.row[d];
    at.marks += i * args.marks.row[d];
  }
  return at;
}

// From a row of an array to the one beside it, where the last axis counts pairs of rows.
__device__ __forceinline__ long long beside(const LinearArgs& args, const LinearArray& array) {
  return array.row[args.row_dims > 0 ? args.row_dims - 1 : 0] / 2;
}

__device__ __forceinline__ float constant_gate(const LinearArgs& args, float) { return args.gate32[0]; }
__device__ __forceinline__ double constant_gate(const LinearArgs& args, double) { return args.gate64[0]; }
__device__ __forceinline__ Two<float> constant_gate(const LinearArgs& args, Two<float>) {
  return {args.gate32[0], args.gate32[0]};
}
__device__ __forceinline__ complex<float> constant_gate(const LinearArgs& args, complex<float>) {
  return {args.gate32[0], args.gate32[1]};
}
__device__ __forceinline__ complex<double> constant_gate(const LinearArgs& args, complex<double>) {
  return {args.gate64[0], args.gate64[1]};
}

// What enters the packed sequence that starts at a position, and where what leaves one goes.
template <class S>
__device__ __forceinline__ S sequence_initial(const LinearArgs& args, const LinearRow& at, long long position) {
  return load_item<S>(at.initial + args.ids[position] * args.initial.time);
}
template <class S>
__device__ __forceinline__ void store_sequence_last(const LinearArgs& args, const LinearRow& at, long long position,
                                                    S state) {
  *reinterpret_cast<S*>(at.last + args.ids[position] * args.last.time) = state;
}

// The state that enters a chunk: h0 before the first one, what its predecessor leaves before another. Without h0 the
// first state is the first input as it is: its gate counts as 0, whatever it holds, and -0 changes no input's bits.
template <class S, bool kSegmented>
__device__ __forceinline__ S entering_state(const LinearArgs& args, const LinearRow& at, long long row,
                                            long long chunk) {
  if (chunk > 0)
    return reinterpret_cast<const S*>(args.summary_input)[row * args.summary_row + (chunk - 1) * args.summary_chunk];
  // The states that enter packed sequences do so where they start.
  return args.initial.start && !(kSegmented && args.ids) ? load_state<S>(at.initial, beside(args, args.initial))
                                                         : Scalar<S>::negative_zero();
}

template <class S>
__device__ __forceinline__ void store_summary(const LinearArgs& args, long long row, long long chunk, Affine<S> map) {
  long long i = row * args.summary_row + chunk * args.summary_chunk;
  reinterpret_cast<S*>(args.summary_gate)[i] = map.gate;
  reinterpret_cast<S*>(args.summary_input)[i] = map.input;
}
template <class S>
__device__ __forceinline__ void store_summary(const LinearArgs& args, long long row, long long chunk,
                                              Segmented<S> map) {
  store_summary(args, row, chunk, Affine<S>{map.gate, map.input});
  args.summary_resets[row * args.summary_row + chunk * args.summary_chunk] = map.resets;
}

// What goes from tile to tile: the state that enters the next one or, with kSummarise, the map of those so far.
template <class Map, bool kSummarise>
struct Carry {
  using S = typename Map::State;
  S state = Scalar<S>::zero();
  Map map = Map::identity();
  bool empty = true;  // no part yet, and no map

  // Takes in the next part of the row.
  __device__ __forceinline__ void add(Map part) {
    if (kSummarise) {
      map = empty ? part : combine(map, part);
      empty = false;
    } else {
      state = apply(part, state);
    }
  }
  // Takes in the parts of a tile, `stride` maps apart, and returns the state that enters the one of `warp_in_row`.
  __device__ __forceinline__ S add_all(const Map* parts, int stride, int row_warps, int warp_in_row) {
    S entering = state;
#pragma unroll 4
    for (int w = 0; w < row_warps; ++w) {
      if (w == warp_in_row) entering = state;
      add(parts[w * stride]);
    }
    return entering;
  }
};

// --- packs along time ------------------------------------------------------------------------------------------

// A thread's packs in a tile. Warp w of a slot owns the packs [w * kRounds * 32, (w + 1) * kRounds * 32), round r of
// them the r-th 32, lane i the i-th. The order of association: a pack by its thread, packs by Hillis-Steele, rounds,
// warps, tiles.
template <class T, int kRounds_ = Pack<T>::kItems == 4 ? 4 : 2>
struct Packs {
  static constexpr int kItems = Pack<T>::kItems;
  static constexpr int kRounds = kRounds_;
  static constexpr int kApart = 32 * kItems;                      // steps from one of a thread's packs to its next
  static constexpr int kReach = (kRounds - 1) * kApart + kItems;  // steps from its first to behind its last
};

// A pack whose items are turned around if time goes `down`; selections would take several 16-bit items apart.
template <class T, int N>
__device__ __forceinline__ Items<T, N> in_order(const Items<T, N> pack, bool down) {
  Items<T, N> ordered = pack;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < N / 2; ++w) {
      const unsigned low = pack.word[w], high = pack.word[N / 2 - 1 - w];
#ifdef __CUDA_ARCH__
      ordered.word[w] = __byte_perm(low, high, down ? 0x5476 : 0x3210);
#else
      ordered.word[w] = down ? high >> 16 | high << 16 : low;
#endif
    }
  } else {
    if (down) reverse(ordered.item);
  }
  return ordered;
}

// Starts the copy of one item into shared memory; of a pair, of which each is aligned for itself, of two.
template <class T>
__device__ __forceinline__ void start_item(T* to, const char* from) {
  if constexpr (sizeof(T) < 4)  // too small for asynchronous copies
    *to = load_item<T>(from);
  else
    start_copy(to, from);
}
__device__ __forceinline__ void start_item(Pair<float>* to, const char* from) {
  start_copy(&to->item[0], from);
  start_copy(&to->item[1], from + sizeof(float));
}

// They come into the thread's own slots of shared memory: `which` 0 holds gates and 1 inputs. Where a block has
// more than one tile, one stage is filled while another is worked on.
template <class T, int kRounds = Packs<T>::kRounds>
struct PackSlots {
  using Own = Packs<T, kRounds>;
  static constexpr int kItems = Own::kItems, kApart = Own::kApart, kReach = Own::kReach;
  Pack<T>* slots;  // this thread's first, of its warp's

  __device__ __forceinline__ PackSlots(unsigned char* memory, int stage)
      : slots(reinterpret_cast<Pack<T>*>(memory) + (stage * blockDim.x + threadIdx.x / 32 * 32) * (2 * kRounds) +
              threadIdx.x % 32) {}
  __device__ __forceinline__ Pack<T>* slot(int array, int r) const { return slots + (array * kRounds + r) * 32; }
  // Starts copying the packs whose first step is at `at` and whose steps below `left` exist.
  __device__ __forceinline__ void start(int which, const LinearArray& array, const char* at, int left) const {
    if (array.packs && left >= kReach) {
      if (array.time < 0) at += (kItems - 1) * array.time;  // the lowest item of a pack
#pragma unroll
      for (int r = 0; r < kRounds; ++r, at += kApart * array.time) start_copy(slot(which, r), at);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRounds; ++r, at += (kApart - kItems) * array.time)
#pragma unroll 1
        for (int v = 0; v < kItems; ++v, at += array.time)
          if (r * kApart + v < left) {
            start_item(&slot(which, r)->item[v], at);
          }
    }
  }
  // After wait_for_copies: a pack, its items in the order of the scan.
  template <class Tag>
  __device__ __forceinline__ Items<T, kItems> read(Tag tag, int which, const LinearArray& array, int r,
                                                   int left) const {
    if (tag.value || (array.packs && left >= kReach))
      return in_order(*reinterpret_cast<const Items<T, kItems>*>(slot(which, r)), array.time < 0);
    Pack<T> pack;
#pragma unroll
    for (int v = 0; v < kItems; ++v) pack.item[v] = r * kApart + v < left ? slot(which, r)->item[v] : T();
    return *reinterpret_cast<const Items<T, kItems>*>(&pack);
  }
};

template <class T, class S>
__device__ __forceinline__ void store_pack(const LinearArray& array, char* to, const S (&state)[Pack<T>::kItems]) {
  constexpr int kItems = Pack<T>::kItems;
  const bool down = array.time < 0;
  Items<T, kItems> pack;
  pack.set(state);
  *reinterpret_cast<Items<T, kItems>*>(down ? to + (kItems - 1) * array.time : to) = in_order(pack, down);
}

template <class T, class S, int kRounds>
__device__ __forceinline__ void store_packs(const LinearArray& array, int code, char* to, int left,
                                            const S (&state)[kRounds][Pack<T>::kItems], long long beside = 0) {
  constexpr int kItems = Pack<T>::kItems, kApart = Packs<T>::kApart;
  if (array.packs && left >= (kRounds - 1) * kApart + kItems) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) store_pack<T>(array, to + r * kApart * array.time, state[r]);
  } else {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int v = 0; v < kItems; ++v)
        if (r * kApart + v < left) store_state(to + (r * kApart + v) * array.time, beside, code, state[r][v]);
  }
}
