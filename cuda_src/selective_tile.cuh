// The tile of a selective_scan: its shape, its place in shared memory, and the two ends of the pipeline, from global
// memory to (delta, delta * u), B and C in shared memory, and from partial sums in shared memory to y.
//
// Every array of a tile is a grid of steps by channels (u, delta, z, y) or of steps by states (B, C), and moves in
// pairs of neighbours: along channels or states, or along time where that is the fast axis (kTimeFast). Each thread has
// the same pairs in every tile, so it walks an array with one address, and what exists of a whole tile and of the last
// one are two bit masks made once.
//
// kPlain is the usual case with its flags known to the compiler: a whole tile of which every item exists, items of u's
// type read and written as vectors, one slice, no limits on delta. It is chosen for each tile at run time, and does
// what the general code does.
#pragma once
#include "activations.cuh"
#include "selective_args.cuh"
#include "selective_types.cuh"
#include "tile_io.cuh"

constexpr int kRowPadding = 2;  // channels added to a row of shared memory, against bank conflicts along time

template <class R>
struct alignas(2 * sizeof(R)) Drive {
  R delta, delta_u;
};

// A grid of kSteps steps by kWidth channels or states, and which pairs of it are this thread's. Item 2i is the first of
// pair i, item 2i + 1 its second.
template <int kSteps_, int kWidth, int kThreads, bool kTimeFast>
struct PairGrid {
  static constexpr int kSteps = kSteps_;
  static constexpr bool kAlongTime = kTimeFast;
  static constexpr int kPerRow = (kTimeFast ? kSteps : kWidth) / 2;  // pairs in a row along the fast axis
  static constexpr int kRows = kTimeFast ? kWidth : kSteps;
  static constexpr int kHop = kThreads / kPerRow;  // rows from a thread's pair to its next
  static constexpr int kPairs = (kRows + kHop - 1) / kHop;
  static constexpr int kItems = 2 * kPairs;
  static constexpr bool kEven = kRows % kHop == 0;  // every thread has kPairs pairs
  static_assert(kThreads % kPerRow == 0, "a thread's pairs are whole rows apart");
  static_assert(kItems <= 16, "two masks in a word");

  static __device__ __forceinline__ int row(int item) { return threadIdx.x / kPerRow + item / 2 * kHop; }
  static __device__ __forceinline__ int along(int item) { return 2 * (threadIdx.x % kPerRow) + item % 2; }
  static __device__ __forceinline__ int time(int item) { return kTimeFast ? along(item) : row(item); }
  static __device__ __forceinline__ int place(int item) { return kTimeFast ? row(item) : along(item); }
  static __device__ __forceinline__ bool held(int item) { return kEven || row(item) < kRows; }

  // Bit i: does item i exist in a whole tile, of which `width` channels or states exist; bit 16 + i: in the last one?
  static __device__ __forceinline__ unsigned masks(int last_steps, int width) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!held(i) || place(i) >= width) continue;
      bits |= 1u << i;
      if (time(i) < last_steps) bits |= 1u << (16 + i);
    }
    return bits;
  }
};

// Walks one array, tile by tile: starts the loads of a tile's pairs and, before it starts the next, gives their values.
// The slots in shared memory belong to the thread, so no barrier is needed between the two.
template <class Grid, class Item, int kThreads>
struct PairStream {
  using Slots = Vector<Item>[kThreads];
  char* at;  // this thread's first item in the tile that is next; the lower of its first two where pairs are vectors
  long long hop, next, tile_step;

  // `corner`: the block's item at the first step of its first tile, and place 0.
  __device__ __forceinline__ PairStream(char* corner, long long time_step, long long place_step, bool vector)
      : PairStream(first(corner, time_step, place_step, vector), time_step, place_step) {}
  // `at`: this thread's first item.
  __device__ __forceinline__ PairStream(char* at, long long time_step, long long place_step)
      : at(at),
        hop(Grid::kHop * (Grid::kAlongTime ? place_step : time_step)),
        next(Grid::kAlongTime ? time_step : place_step),
        tile_step(Grid::kSteps * time_step) {}

  static __device__ __forceinline__ char* first(char* corner, long long time_step, long long place_step, bool vector) {
    char* at = corner + Grid::time(0) * time_step + Grid::place(0) * place_step;
    const long long next = Grid::kAlongTime ? time_step : place_step;
    return vector && next < 0 ? at + next : at;
  }

  template <bool kPlain>
  __device__ __forceinline__ void start(Slots* slots, bool vector, unsigned exists) {
    if (kPlain || vector) {
#pragma unroll
      for (int i = 0; i < Grid::kPairs; ++i)
        if (kPlain ? Grid::held(2 * i) : exists >> 2 * i & 1) start_copy(&slots[i][threadIdx.x], at + i * hop);
    }
    at += tile_step;
  }

  // After wait_for_copies. What does not exist is 0.
  template <bool kPlain, class R>
  __device__ __forceinline__ void values(const Slots* slots, bool vector, bool wide, unsigned exists,
                                         R (&to)[Grid::kItems]) const {
    if (kPlain || vector) {
#pragma unroll
      for (int i = 0; i < Grid::kPairs; ++i) {
        to[2 * i] = to[2 * i + 1] = Scalar<R>::zero();
        if (kPlain ? Grid::held(2 * i) : exists >> 2 * i & 1)
          read_vector(&slots[i][threadIdx.x], to[2 * i], to[2 * i + 1]);
      }
      if (Grid::kAlongTime && next < 0) swap_pairs(to);
    } else {
      load_pairs<Item>(at - tile_step, hop, next, exists, wide, to);
    }
  }
};

// The shape of one instantiation. Item: u and z. S: the state, and A, B, C as computed.
template <class Item_, class S_, int kStates_, int kGroups_, int kChannels_, int kSteps_, bool kTimeFast_, bool kTimeB_,
          bool kTimeC_, bool kSegmented_>
struct SelectiveTile {
  using Item = Item_;
  using S = S_;
  using R = typename Accumulated<Item>::type;
  using CoupleItem = typename ItemOfCouple<Item, S>::type;
  static constexpr int kStates = kStates_, kGroups = kGroups_, kChannels = kChannels_, kSteps = kSteps_;
  static constexpr bool kTimeFast = kTimeFast_, kTimeB = kTimeB_, kTimeC = kTimeC_, kSegmented = kSegmented_;
  static constexpr int kSlice = kStates * kGroups;
  static constexpr int kThreads = kChannels * kGroups;
  static constexpr int kRow = kChannels + kRowPadding;
  using Grid = PairGrid<kSteps, kChannels, kThreads, kTimeFast>;
  using CoupleGrid = PairGrid<kSteps, kSlice, kThreads, kTimeFast>;
  using Stream = PairStream<Grid, Item, kThreads>;
  using CoupleStream = PairStream<CoupleGrid, CoupleItem, kThreads>;
  static_assert(kChannels % 32 == 0, "a warp covers 32 channels of one state group");
  static_assert(Grid::kEven, "each thread moves the same number of pairs");
  static_assert(kSteps <= kMarkSteps, "a tile's marks are one word");

  struct Shared {
    alignas(16) Drive<R> drive[2][kSteps][kRow];
    alignas(16) S B[2][kTimeB ? kSteps : 1][kSlice];
    alignas(16) S C[2][kTimeC ? kSteps : 1][kSlice];
    alignas(16) R partial[2][kGroups][kSteps][kRow];
    alignas(16) R bias[kChannels];
    alignas(16) R D[kChannels];
    // Slots of the streams; u passes twice, for the state and for D * u.
    alignas(16) Vector<Item> u[Grid::kPairs][kThreads];
    alignas(16) Vector<Item> delta[Grid::kPairs][kThreads];
    alignas(16) Vector<Item> u_again[Grid::kPairs][kThreads];
    alignas(16) Vector<Item> z[Grid::kPairs][kThreads];
    alignas(16) Vector<CoupleItem> raw_B[CoupleGrid::kPairs][kThreads];
    alignas(16) Vector<CoupleItem> raw_C[CoupleGrid::kPairs][kThreads];
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

template <class Tile>
__device__ __forceinline__ typename Tile::Stream stream_of(const SequenceArray& array, const SelectiveItem& item) {
  return {array.start + item.batch * array.batch + item.first_channel * array.channel + item.begin * array.time,
          array.time, array.channel, (bool)array.vector};
}
template <class Tile>
__device__ __forceinline__ typename Tile::CoupleStream stream_of(const CoupleArray& array, const SelectiveItem& item) {
  return {array.start + item.batch * array.batch + item.group * array.group + item.first_state * array.state +
              item.begin * array.time,
          array.time, array.state, (bool)array.vector};
}

template <class Args>
__device__ __forceinline__ float limit(const Args& args, int i, float) {
  return args.limits32[i];
}
template <class Args>
__device__ __forceinline__ double limit(const Args& args, int i, double) {
  return args.limits64[i];
}

// Brings a tile of u and delta into shared memory as (delta, delta * u). Steps from `steps` on do not exist. Those and
// masked ones have gate 1 and input 0; one that resets has gate 1, of a state that is made 0, and so has the first step
// where `nothing_enters`: an infinite gate would make NaN of it.
template <bool kPlain, class Tile>
__device__ __forceinline__ void commit_sequence(const SelectiveArgs& args, typename Tile::Shared& shared, int buffer,
                                                const typename Tile::Stream& u, const typename Tile::Stream& delta,
                                                unsigned exists, int steps, bool nothing_enters,
                                                const StepMarks& marks) {
  using Grid = typename Tile::Grid;
  using R = typename Tile::R;
  R d_u[Grid::kItems], d[Grid::kItems];
  u.template values<kPlain>(shared.u, args.u.vector, false, exists, d_u);
  delta.template values<kPlain>(shared.delta, args.delta.vector, args.delta.wide, exists, d);
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) d[i] += shared.bias[Grid::place(i)];
  if (args.softplus) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) d[i] = softplus(d[i]);
  }
  if (!kPlain && args.limited) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) d[i] = clip(d[i], limit(args, 0, R()), limit(args, 1, R()));
  }
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) d_u[i] = d[i] * d_u[i];
  if (!kPlain) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      if (Grid::time(i) >= steps) d[i] = d_u[i] = R(0);
      if (nothing_enters && Grid::time(i) == 0) d[i] = R(0);
    }
  }
  if (Tile::kSegmented && marks.masked | marks.resets) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      if ((marks.masked | marks.resets) >> Grid::time(i) & 1) d[i] = R(0);
      if (marks.masked >> Grid::time(i) & 1) d_u[i] = R(0);
    }
  }
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) shared.drive[buffer][Grid::time(i)][Grid::place(i)] = {d[i], d_u[i]};
}

// Brings a tile of B or C into shared memory; steps and states that do not exist are 0, and so are masked steps.
template <bool kPlain, class Tile>
__device__ __forceinline__ void commit_couple(const CoupleArray& array, const typename Tile::CoupleStream& stream,
                                              const typename Tile::CoupleStream::Slots* slots, unsigned exists,
                                              unsigned masked, typename Tile::S (*tile)[Tile::kSlice]) {
  using Grid = typename Tile::CoupleGrid;
  typename Tile::S value[Grid::kItems];
  stream.template values<kPlain>(slots, array.vector, array.wide, exists, value);
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i)
    if (Grid::held(i))
      tile[Grid::time(i)][Grid::place(i)] =
          Tile::kSegmented && masked >> Grid::time(i) & 1 ? Scalar<typename Tile::S>::zero() : value[i];
}

// Adds a tile's partial sums in the order of the states and brings y to where it goes: to the output, or while there
// are slices to come to partial_sum. y is 0 where a step is masked.
template <bool kPlain, class Tile>
__device__ __forceinline__ void finish(const SelectiveArgs& args, const typename Tile::Shared& shared, int buffer,
                                       const typename Tile::Stream& u, const typename Tile::Stream& z,
                                       const typename Tile::Stream& output, const typename Tile::Stream& partial_sum,
                                       unsigned exists, int groups, unsigned masked) {
  using Grid = typename Tile::Grid;
  using R = typename Tile::R;
  R y[Grid::kItems], value[Grid::kItems];
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) y[i] = shared.partial[buffer][0][Grid::time(i)][Grid::place(i)];
  if (!kPlain && args.adds_to_partial_sum) {
    load_pairs<R>(partial_sum.at, partial_sum.hop, partial_sum.next, exists, false, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] += value[i];
  }
#pragma unroll
  for (int g = 1; g < Tile::kGroups; ++g) {
    if (kPlain || g < groups) {
#pragma unroll
      for (int i = 0; i < Grid::kItems; ++i) y[i] += shared.partial[buffer][g][Grid::time(i)][Grid::place(i)];
    }
  }
  if (!kPlain && args.leaves_partial_sum) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (exists >> i & 1)
        *reinterpret_cast<R*>(partial_sum.at + i / 2 * partial_sum.hop + i % 2 * partial_sum.next) = y[i];
    return;
  }
  if (args.D) {
    u.template values<kPlain>(shared.u_again, args.u.vector, false, exists, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] = multiply_add(shared.D[Grid::place(i)], value[i], y[i]);
  }
  if (args.z.start) {
    z.template values<kPlain>(shared.z, args.z.vector, false, exists, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] = y[i] * silu(value[i]);
  }
  if (Tile::kSegmented && masked) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (masked >> Grid::time(i) & 1) y[i] = R(0);
  }
  store_pairs<typename Tile::Item>(output.at, output.hop, output.next, y, kPlain ? ~0u : exists, args.output_code,
                                   kPlain || args.output.vector);
}
