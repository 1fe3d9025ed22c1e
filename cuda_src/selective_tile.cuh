// The tile of a selective_scan: its shape, its place in shared memory, and the two ends of the pipeline, from global
// memory to (delta, delta * u), B and C in shared memory, and from partial sums in shared memory to y.
//
// (time, channel) arrays move in pairs of neighbours: along channels, or along time where that is the fast axis
// (kTimeFast). Each thread has kPairs pairs, fixed for the whole scan, so it walks each array with one address that
// advances by a tile; what exists of a whole tile is a bit mask made once.
//
// kPlain is the usual case with its flags known to the compiler: a whole tile of which every item exists, items of u's
// type read and written as vectors, one slice, no limits on delta. It is chosen for each tile at run time, and does
// what the general code does.
#pragma once
#include "activations.cuh"
#include "selective_args.cuh"
#include "tile_io.cuh"

constexpr int kRowPadding = 2;  // channels added to a row of shared memory, against bank conflicts along time

template <class R>
struct alignas(2 * sizeof(R)) Drive {
  R delta, delta_u;
};

// The shape of one instantiation. Item: u and z. S: the state, and A, B, C as computed.
template <class Item_, class S_, int kStates_, int kGroups_, int kChannels_, int kSteps_, bool kTimeFast_, bool kTimeB_,
          bool kTimeC_>
struct SelectiveTile {
  using Item = Item_;
  using S = S_;
  using R = typename Accumulated<Item>::type;
  static constexpr int kStates = kStates_, kGroups = kGroups_, kChannels = kChannels_, kSteps = kSteps_;
  static constexpr bool kTimeFast = kTimeFast_, kTimeB = kTimeB_, kTimeC = kTimeC_;
  static constexpr int kSlice = kStates * kGroups;
  static constexpr int kThreads = kChannels * kGroups;
  static constexpr int kRow = kChannels + kRowPadding;
  static constexpr int kPairs = kSteps * kChannels / 2 / kThreads;
  static constexpr int kCouples = (kSteps * kSlice + kThreads - 1) / kThreads;  // items of B, and of C, a thread
  static_assert(kChannels % 32 == 0, "a warp covers 32 channels of one state group");
  static_assert(kSteps * kChannels / 2 % kThreads == 0, "each thread moves the same number of pairs");
  static_assert(kChannels % kStates == 0, "a thread's items of B are whole steps apart");

  struct Shared {
    alignas(16) Drive<R> drive[2][kSteps][kRow];
    alignas(16) S B[2][kTimeB ? kSteps : 1][kSlice];
    alignas(16) S C[2][kTimeC ? kSteps : 1][kSlice];
    alignas(16) R partial[2][kGroups][kSteps][kRow];
    R bias[kChannels], D[kChannels];
  };
};

// One block's share of the problem.
struct SelectiveItem {
  long long batch, group, first_channel, first_state, chunk;
  long long begin, end;  // positions
  int channels;          // how many of the tile's channels exist
  int states;            // how many of the slice's states exist
};

template <class Tile>
__device__ __forceinline__ SelectiveItem locate_item(const SelectiveArgs& args, long long item) {
  const long long in_group = args.channels / args.groups;
  const long long tiles = (in_group + Tile::kChannels - 1) / Tile::kChannels;
  SelectiveItem at;
  at.chunk = item % args.chunks;
  item /= args.chunks;
  const long long tile = item % tiles;
  item /= tiles;
  at.group = item % args.groups;
  item /= args.groups;
  at.batch = item % args.batch;
  at.first_state = args.first_state + item / args.batch * Tile::kSlice;
  at.first_channel = at.group * in_group + tile * Tile::kChannels;
  const long long left_states = args.state - at.first_state, left = in_group - tile * Tile::kChannels;
  at.states = (int)(left_states < Tile::kSlice ? left_states : Tile::kSlice);
  at.channels = (int)(left < Tile::kChannels ? left : Tile::kChannels);
  at.begin = at.chunk * args.chunk;
  at.end = at.begin + args.chunk < args.length ? at.begin + args.chunk : args.length;
  return at;
}

// This thread's pairs of a tile. The i-th is at (time(i), channel(i)); its second item is kNextTime steps and
// kNextChannel channels on.
template <class Tile>
struct Pairs {
  static constexpr int kPerRow = (Tile::kTimeFast ? Tile::kSteps : Tile::kChannels) / 2;
  static constexpr int kHop = Tile::kThreads / kPerRow;  // rows (of time or channels) from pair to pair
  static constexpr int kTimeHop = Tile::kTimeFast ? 0 : kHop, kChannelHop = Tile::kTimeFast ? kHop : 0;
  static constexpr int kNextTime = Tile::kTimeFast, kNextChannel = !Tile::kTimeFast;
  static_assert(Tile::kThreads % kPerRow == 0, "pairs of one thread are whole rows apart");

  static __device__ __forceinline__ int time(int i) {
    return (Tile::kTimeFast ? 2 * (threadIdx.x % kPerRow) : threadIdx.x / kPerRow) + i * kTimeHop;
  }
  static __device__ __forceinline__ int channel(int i) {
    return (Tile::kTimeFast ? threadIdx.x / kPerRow : 2 * (threadIdx.x % kPerRow)) + i * kChannelHop;
  }
  // Item 2i is the first of pair i, item 2i + 1 its second.
  static __device__ __forceinline__ int time_of(int item) { return time(item / 2) + item % 2 * kNextTime; }
  static __device__ __forceinline__ int channel_of(int item) { return channel(item / 2) + item % 2 * kNextChannel; }
  // Bit i: does item i exist in a tile of `steps` steps and `channels` channels?
  static __device__ __forceinline__ unsigned exist(int steps, int channels) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kPairs; ++i)
      if (time_of(i) < steps && channel_of(i) < channels) bits |= 1u << i;
    return bits;
  }
};

// Walks one (batch, length, channels) array tile by tile.
template <class Tile>
struct SequenceCursor {
  char* at;  // the first pair of the tile
  long long hop, next, tile_step;
  bool swapped;

  __device__ __forceinline__ SequenceCursor(const SequenceArray& array, const SelectiveItem& item)
      : at(array.start + item.batch * array.batch + (item.first_channel + Pairs<Tile>::channel(0)) * array.channel +
           (item.begin + Pairs<Tile>::time(0)) * array.time),
        hop(Pairs<Tile>::kTimeHop * array.time + Pairs<Tile>::kChannelHop * array.channel),
        next(Tile::kTimeFast ? array.time : array.channel),
        tile_step(Tile::kSteps * array.time),
        swapped(array.vector && next < 0) {
    if (swapped) at += next;
  }
  __device__ __forceinline__ void advance() { at += tile_step; }
};

template <class Tile, bool kMayBeWide>
struct RawSequence {
  typename RawPairOf<typename Tile::Item, kMayBeWide>::type pair[Tile::kPairs];

  template <bool kPlain>
  __device__ __forceinline__ void start(const SequenceArray& array, const SequenceCursor<Tile>& cursor,
                                        unsigned exists) {
    start_pairs<typename Tile::Item>(pair, cursor.at, cursor.hop, cursor.next, kPlain ? ~0u : exists,
                                     !kPlain && array.wide, kPlain || array.vector);
  }
  template <bool kPlain>
  __device__ __forceinline__ void unpack(const SequenceArray& array, const SequenceCursor<Tile>& cursor,
                                         typename Tile::R (&values)[2 * Tile::kPairs]) const {
    unpack_pairs<typename Tile::Item>(pair, !kPlain && array.wide, Tile::kTimeFast && cursor.swapped, values);
  }
};

__device__ __forceinline__ float limit(const SelectiveArgs& args, int i, float) { return args.limits32[i]; }
__device__ __forceinline__ double limit(const SelectiveArgs& args, int i, double) { return args.limits64[i]; }

// Brings u and delta into shared memory as (delta, delta * u).
template <class Tile>
struct SequenceStage {
  using R = typename Tile::R;
  static constexpr int kItems = 2 * Tile::kPairs;
  SequenceCursor<Tile> u_at, delta_at;
  RawSequence<Tile, false> u;
  RawSequence<Tile, true> delta;

  __device__ __forceinline__ SequenceStage(const SelectiveArgs& args, const SelectiveItem& item)
      : u_at(args.u, item), delta_at(args.delta, item) {}

  template <bool kPlain>
  __device__ __forceinline__ void start(const SelectiveArgs& args, unsigned exists) {
    u.template start<kPlain>(args.u, u_at, exists);
    delta.template start<kPlain>(args.delta, delta_at, exists);
    u_at.advance();
    delta_at.advance();
  }

  template <bool kPlain>
  __device__ __forceinline__ void commit(const SelectiveArgs& args, typename Tile::Shared& shared, int buffer,
                                         int steps) const {
    R u_values[kItems], d[kItems];
    u.template unpack<kPlain>(args.u, u_at, u_values);
    delta.template unpack<kPlain>(args.delta, delta_at, d);
#pragma unroll
    for (int i = 0; i < kItems; ++i) d[i] += shared.bias[Pairs<Tile>::channel_of(i)];
    if (args.softplus) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) d[i] = softplus(d[i]);
    }
    if (!kPlain && args.limited) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) d[i] = clip(d[i], limit(args, 0, R()), limit(args, 1, R()));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) u_values[i] = d[i] * u_values[i];
    if (!kPlain && steps < Tile::kSteps) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (Pairs<Tile>::time_of(i) >= steps) d[i] = u_values[i] = R(0);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      shared.drive[buffer][Pairs<Tile>::time_of(i)][Pairs<Tile>::channel_of(i)] = {d[i], u_values[i]};
  }
};

// Brings B or C into shared memory. The i-th item of a thread is at (time + i * time_hop, state + i * state_hop).
template <class Tile>
struct CoupleStage {
  using S = typename Tile::S;
  const char* at;
  long long hop, tile_step;
  int place, place_hop;          // index of the first item in a [kSteps][kSlice] tile, and to the next
  unsigned whole, ragged, held;  // bit i: does item i exist in a whole tile, in the last one; is it in the tile at all
  typename RawItemOf<S>::type item[Tile::kCouples];

  __device__ __forceinline__ CoupleStage(const CoupleArray& array, const SelectiveItem& block, int ragged_steps) {
    static_assert(Tile::kThreads % Tile::kSteps == 0 && Tile::kThreads % Tile::kSlice == 0,
                  "a thread's items are whole steps or whole states apart");
    const int e = threadIdx.x;
    const int time = array.time_fast ? e % Tile::kSteps : e / Tile::kSlice;
    const int state = array.time_fast ? e / Tile::kSteps : e % Tile::kSlice;
    const int time_hop = array.time_fast ? 0 : Tile::kThreads / Tile::kSlice;
    const int state_hop = array.time_fast ? Tile::kThreads / Tile::kSteps : 0;
    at = array.start + block.batch * array.batch + block.group * array.group +
         (block.first_state + state) * array.state + (block.begin + time) * array.time;
    hop = time_hop * array.time + state_hop * array.state;
    tile_step = Tile::kSteps * array.time;
    place = time * Tile::kSlice + state;
    place_hop = time_hop * Tile::kSlice + state_hop;
    whole = ragged = held = 0;
#pragma unroll
    for (int i = 0; i < Tile::kCouples; ++i) {
      const int t = time + i * time_hop, n = state + i * state_hop;
      if (t < Tile::kSteps && n < Tile::kSlice) held |= 1u << i;
      if (t < Tile::kSteps && n < block.states) whole |= 1u << i;
      if (t < ragged_steps && n < block.states) ragged |= 1u << i;
    }
  }

  // Whether every thread has kCouples items, and what is between them where kPlain knows the orientation.
  static constexpr bool kEven = Tile::kCouples * Tile::kThreads == Tile::kSteps * Tile::kSlice;
  static constexpr int kPlaceHop =
      Tile::kTimeFast ? Tile::kThreads / Tile::kSteps : Tile::kThreads / Tile::kSlice * Tile::kSlice;

  template <bool kPlain>
  __device__ __forceinline__ void start(const CoupleArray& array, bool is_last) {
    const unsigned exists = kPlain ? (kEven ? ~0u : held) : is_last ? ragged : whole;
    start_items<typename Tile::Item, S>(item, at, hop, exists, !kPlain && array.wide);
    at += tile_step;
  }

  template <bool kPlain>
  __device__ __forceinline__ void commit(const CoupleArray& array, S (*tile)[Tile::kSlice]) const {
#pragma unroll
    for (int i = 0; i < Tile::kCouples; ++i)
      if ((kPlain && kEven) || held >> i & 1)
        (*tile)[place + i * (kPlain ? kPlaceHop : place_hop)] =
            unpack_item<typename Tile::Item, S>(item[i], !kPlain && array.wide);
  }
};

// Adds a tile's partial sums in the order of the states and brings y to where it goes: to the output, or while there
// are slices to come to partial_sum.
template <class Tile>
struct Finish {
  using R = typename Tile::R;
  static constexpr int kItems = 2 * Tile::kPairs;
  SequenceCursor<Tile> u_at, z_at, output_at, partial_sum_at;
  RawSequence<Tile, false> u, z;

  __device__ __forceinline__ Finish(const SelectiveArgs& args, const SelectiveItem& item)
      : u_at(args.u, item), z_at(args.z, item), output_at(args.output, item), partial_sum_at(args.partial_sum, item) {}

  template <bool kPlain>
  __device__ __forceinline__ void start(const SelectiveArgs& args, unsigned exists) {
    if (args.D) u.template start<kPlain>(args.u, u_at, exists);
    if (args.z.start) z.template start<kPlain>(args.z, z_at, exists);
    u_at.advance();
    z_at.advance();
  }

  template <bool kPlain>
  __device__ __forceinline__ void run(const SelectiveArgs& args, const typename Tile::Shared& shared, int buffer,
                                      unsigned exists, int groups) {
    R y[kItems], values[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      y[i] = shared.partial[buffer][0][Pairs<Tile>::time_of(i)][Pairs<Tile>::channel_of(i)];
    if (!kPlain && args.adds_to_partial_sum) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (exists >> i & 1)
          y[i] += load_item<R>(partial_sum_at.at + i / 2 * partial_sum_at.hop + i % 2 * partial_sum_at.next);
    }
#pragma unroll
    for (int g = 1; g < Tile::kGroups; ++g) {
      if (kPlain || g < groups) {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          y[i] += shared.partial[buffer][g][Pairs<Tile>::time_of(i)][Pairs<Tile>::channel_of(i)];
      }
    }
    if (!kPlain && args.leaves_partial_sum) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (exists >> i & 1)
          *reinterpret_cast<R*>(partial_sum_at.at + i / 2 * partial_sum_at.hop + i % 2 * partial_sum_at.next) = y[i];
    } else {
      if (args.D) {
        u.template unpack<kPlain>(args.u, u_at, values);
#pragma unroll
        for (int i = 0; i < kItems; ++i) y[i] = multiply_add(shared.D[Pairs<Tile>::channel_of(i)], values[i], y[i]);
      }
      if (args.z.start) {
        z.template unpack<kPlain>(args.z, z_at, values);
#pragma unroll
        for (int i = 0; i < kItems; ++i) y[i] = y[i] * silu(values[i]);
      }
      store_pairs<typename Tile::Item>(output_at.at, output_at.hop, output_at.next, y, kPlain ? ~0u : exists,
                                       args.output_code, kPlain || args.output.vector,
                                       Tile::kTimeFast && output_at.swapped);
    }
    output_at.advance();
    partial_sum_at.advance();
  }
};
