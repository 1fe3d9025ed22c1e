// The tile of a selective_scan: kTileSteps steps of a warp's channels and of its block's B and C, and the two ends of
// the pipeline, from global memory to (delta, delta * u), B and C in shared memory, and from y in shared memory to
// where it goes.
// Its arrays move in runs (run_stream.cuh).
//
// kPlain is the usual case with its flags known to the compiler: items of u's type read and written as vectors, one
// slice, no limits on delta. A run then exists as a whole or not at all. It does what the general code does.
#pragma once
#include "activations.cuh"
#include "run_stream.cuh"
#include "selective_args.cuh"
#include "selective_types.cuh"
#include "warp_scan.cuh"

// How many blocks of `bytes` of shared memory a multiprocessor can hold, of `most`: registers for more would be for
// nothing.
constexpr int resident_blocks(int most, int bytes) {
#ifdef __CUDA_ARCH__
  constexpr int kArch = __CUDA_ARCH__;
  constexpr int kKilobytes = kArch >= 1200  ? 100
                             : kArch >= 900 ? 228
                             : kArch == 800 ? 164
                             : kArch == 870 ? 164
                             : kArch >= 800 ? 100
                                            : 64;
  const int fit = kKilobytes * 1024 / (bytes + 1024);
  return fit < 1 ? 1 : fit < most ? fit : most;
#else
  return most;
#endif
}

// The shape of one instantiation. Item: u and z. S: the state, and A, B, C as computed.
template <class Item_, class S_, int kStates_, int kGroups_, int kWarps_, bool kTimeFast_, bool kTimeB_, bool kTimeC_,
          bool kSegmented_>
struct SelectiveTile {
  using Item = Item_;
  using S = S_;
  using R = typename Accumulated<Item>::type;
  using CoupleItem = typename ItemOfCouple<Item, S>::type;
  static constexpr int kStates = kStates_, kGroups = kGroups_, kWarps = kWarps_;
  static constexpr bool kTimeFast = kTimeFast_, kTimeB = kTimeB_, kTimeC = kTimeC_, kSegmented = kSegmented_;
  static constexpr int kAbreast = 32 / kGroups;  // channels of a warp
  static constexpr int kChannels = kWarps * kAbreast, kThreads = 32 * kWarps, kSlice = kStates * kGroups;
  static constexpr int kVector = kStates < 4 ? kStates : 4;  // states that are neighbours; see state_of
  using Grid = RunGrid<kChannels, kThreads, kTimeFast>;
  using CoupleGrid = RunGrid<kSlice, kThreads, kTimeFast>;
  using Stream = RunStream<Grid, Item, kThreads>;
  using CoupleStream = RunStream<CoupleGrid, CoupleItem, kThreads>;
  static constexpr int kRow = kChannels + 1;          // of drives; the last is that of lanes without states
  static constexpr int kSums = kChannels + kAbreast;  // of y: so are the steps that the groups write at once
  static constexpr int kMarks = 8;                    // words of marks that are kept; five are in use

  struct Shared {
    alignas(16) Drive<R> drive[2][kTileSteps][kRow];
    alignas(16) S B[2][kTimeB ? kTileSteps : 1][kSlice];
    alignas(16) S C[2][kTimeC ? kTileSteps : 1][kSlice];
    alignas(16) R y[2][kTileSteps][kSums];
    alignas(16) R bias[kChannels];
    alignas(16) R D[kChannels];
    alignas(16) StepMarks marks[kSegmented ? kMarks : 1];
    // Slots of the streams; of u by tile, as it is needed from its commit to its finish.
    typename Stream::Slots u[4];
    typename Stream::Slots delta;
    typename Stream::Slots z;
    typename CoupleStream::Slots raw_B;
    typename CoupleStream::Slots raw_C;
  };

  // The state of the slice that local n of a group is: neighbours in fours, so that the groups read one row of memory.
  static __device__ __forceinline__ int state_of(int group, int n) {
    return n / kVector * (kVector * kGroups) + group * kVector + n % kVector;
  }
};

// One block's share of the problem.
struct SelectiveItem {
  int batch, group, first_channel, first_state, chunk;
  long long begin, end;  // positions, of which the first may be in the middle of a tile
  int channels;          // how many of the tile's channels exist
  int states;            // how many of the slice's states exist
  bool summarised;       // is the map of the chunk asked for?
};

// Of the steps of a chunk that forget what is before them the first and the last, and the first of the next chunk; -1
// where there is none.
struct Cuts {
  long long first, last, next;
};

// A bit for each of the 32 steps from `step` on, the first of a word of `row`, and before `end` that forgets.
__device__ __forceinline__ unsigned forgets(const StepMarks* row, long long step, long long end) {
  if (step >= end) return 0;
  const StepMarks& word = row[step / kMarkSteps];
  const unsigned cuts = word.resets | word.starts;
  return end - step < kMarkSteps ? cuts & ((1u << (end - step)) - 1) : cuts;
}

// A lane looks at a word of each of the two chunks at a time, so that it waits for both at once. There is no early
// exit, or the compiler would take the lanes for apart from here on.
__device__ __forceinline__ Cuts find_cuts(const StepMarks* row, long long begin, long long chunk, long long length,
                                          int lane) {
  const long long middle = begin + chunk < length ? begin + chunk : length;
  const long long end = middle + chunk < length ? middle + chunk : length;
  Cuts cuts = {-1, -1, -1};
  for (long long first = 0; first < chunk; first += 32 * kMarkSteps) {
    const long long step = first + lane * kMarkSteps;
    const unsigned own = forgets(row, begin + step, middle), next = forgets(row, middle + step, end);
    const unsigned own_found = __ballot_sync(kFullMask, own), next_found = __ballot_sync(kFullMask, next);
    const int first_word = __ffs(own_found) - 1, last_word = 31 - __clz(own_found), next_word = __ffs(next_found) - 1;
    const int first_step = __ffs(from_lane(own, first_word & 31)) - 1;
    const int last_step = 31 - __clz(from_lane(own, last_word & 31));
    const int next_step = __ffs(from_lane(next, next_word & 31)) - 1;
    if (own_found && cuts.first < 0) cuts.first = begin + first + first_word * kMarkSteps + first_step;
    if (own_found) cuts.last = begin + first + last_word * kMarkSteps + last_step;
    if (next_found && cuts.next < 0) cuts.next = middle + first + next_word * kMarkSteps + next_step;
  }
  return cuts;
}

// Chunks are cut where something is forgotten, if they can be: chunk c begins at the first such step at or after its
// own first one, and only if there is none before the next chunk at its first. Then a chunk has to be summarised only
// where the next one begins with a state, and only from the last step that forgets.
template <bool kSummarise>
__device__ __forceinline__ void move_cuts(const SelectiveArgs& args, SelectiveItem& at, int lane) {
  const Cuts cuts = find_cuts(args.marks + at.batch * args.marks_batch, at.begin, args.chunk, args.length, lane);
  at.summarised = at.end < args.length && cuts.next < 0;
  if (at.chunk > 0 && cuts.first >= 0) at.begin = cuts.first;
  if (cuts.next >= 0) at.end = cuts.next;
  if (kSummarise && cuts.last > at.begin) at.begin = cuts.last;
}

template <class Tile, bool kSummarise>
__device__ __forceinline__ SelectiveItem locate_item(const SelectiveArgs& args, long long item, int lane) {
  const int in_group = (int)(args.channels / args.groups);
  const int tiles = (in_group + Tile::kChannels - 1) / Tile::kChannels;
  SelectiveItem at;
  at.chunk = (int)(item % args.chunks);
  item /= args.chunks;
  const int tile = (int)(item % tiles);
  item /= tiles;
  at.group = (int)(item % args.groups);
  item /= args.groups;
  at.batch = (int)(item % args.batch);
  at.first_state = (int)(args.first_state + item / args.batch * Tile::kSlice);
  at.first_channel = at.group * in_group + tile * Tile::kChannels;
  const int left_states = (int)args.state - at.first_state, left = in_group - tile * Tile::kChannels;
  at.states = left_states < Tile::kSlice ? left_states : Tile::kSlice;
  at.channels = left < Tile::kChannels ? left : Tile::kChannels;
  at.begin = at.chunk * args.chunk;
  at.end = at.begin + args.chunk < args.length ? at.begin + args.chunk : args.length;
  at.summarised = true;
  if (Tile::kSegmented && args.marks && args.chunks > 1) move_cuts<kSummarise>(args, at, lane);
  return at;
}

// From the raw runs of u and delta to a tile's drives. What does not exist and masked steps have gate 1 and input 0;
// one that resets has gate 1, of a state that is made 0, and so has the first step where `nothing_enters`: an infinite
// gate would make NaN of it.
template <bool kPlain, class Tile>
__device__ __forceinline__ void commit_sequence(const SelectiveArgs& args, typename Tile::Shared& shared, int thread,
                                                int tile, const typename Tile::Stream& u,
                                                const typename Tile::Stream& delta, unsigned exist, bool nothing_enters,
                                                const StepMarks& marks) {
  using Grid = typename Tile::Grid;
  using R = typename Tile::R;
  R d_u[Grid::kItems], d[Grid::kItems];
  u.template values<kPlain>(shared.u[tile & 3], thread, args.u.vector, false, exist, 0, d_u);
  delta.template values<kPlain>(shared.delta, thread, args.delta.vector, args.delta.wide, exist, 0, d);
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) d[i] += shared.bias[Grid::place(thread, i)];
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) {
    const R soft = softplus(d[i]);  // selected, as a branch costs more than it saves
    d[i] = args.softplus ? soft : d[i];
  }
  if (!kPlain && args.limited) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) d[i] = clip(d[i], limit(args, 0, R()), limit(args, 1, R()));
  }
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i) d_u[i] = d[i] * d_u[i];
  if (!kPlain || !exist || nothing_enters) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      if (!(exist >> i & 1)) d[i] = d_u[i] = R(0);
      if (nothing_enters && Grid::time(thread, i) == 0) d[i] = R(0);
    }
  }
  if (Tile::kSegmented && marks.masked | marks.resets) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      if ((marks.masked | marks.resets) >> Grid::time(thread, i) & 1) d[i] = R(0);
      if (marks.masked >> Grid::time(thread, i) & 1) d_u[i] = R(0);
    }
  }
#pragma unroll
  for (int i = 0; i < Grid::kItems; ++i)
    shared.drive[tile & 1][Grid::time(thread, i)][Grid::place(thread, i)] = {d[i], d_u[i]};
}

// From the raw run of B or C to a tile in shared memory; what does not exist is 0, and so are masked steps.
template <bool kPlain, class Tile>
__device__ __forceinline__ void commit_couple(const CoupleArray& array, int thread,
                                              const typename Tile::CoupleStream& stream,
                                              const typename Tile::CoupleStream::Slots& slots, unsigned exist,
                                              unsigned masked, typename Tile::S (*tile)[Tile::kSlice]) {
  using Grid = typename Tile::CoupleGrid;
  using S = typename Tile::S;
  S value[Grid::kItems];
  stream.template values<kPlain>(slots, thread, array.vector, array.wide, exist, 0, value);
  if (Tile::kSegmented && masked) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (masked >> Grid::time(thread, i) & 1) value[i] = Scalar<S>::zero();
  }
  if constexpr (Tile::kTimeFast) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) tile[Grid::time(thread, i)][Grid::place(thread, i)] = value[i];
  } else {
    write_row(&tile[Grid::time(thread, 0)][Grid::place(thread, 0)], value);
  }
}

// Brings a tile's y to where it goes: to the output, or while there are slices to come to partial_sum. y is 0 where a
// step is masked.
template <bool kPlain, class Tile>
__device__ __forceinline__ void finish(const SelectiveArgs& args, const typename Tile::Shared& shared, int thread,
                                       int tile, const typename Tile::Stream& u, const typename Tile::Stream& z,
                                       const typename Tile::Stream& output, const typename Tile::Stream& partial_sum,
                                       unsigned exist, unsigned masked, int back) {
  using Grid = typename Tile::Grid;
  using R = typename Tile::R;
  R y[Grid::kItems], value[Grid::kItems];
  if constexpr (Tile::kTimeFast) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] = shared.y[tile & 1][Grid::time(thread, i)][Grid::place(thread, i)];
  } else {
    read_row(y, &shared.y[tile & 1][Grid::time(thread, 0)][Grid::place(thread, 0)]);
  }
  if (!kPlain && args.adds_to_partial_sum) {
    load_run<R>(partial_sum.at, partial_sum.next, exist, false, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] += value[i];
  }
  if (!kPlain && args.leaves_partial_sum) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (exist >> i & 1) *reinterpret_cast<R*>(partial_sum.at + i * partial_sum.next) = y[i];
    return;
  }
  if (args.D) {
    u.template values<kPlain>(shared.u[tile & 3], thread, args.u.vector, false, exist, back, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] = multiply_add(shared.D[Grid::place(thread, i)], value[i], y[i]);
  }
  if (args.z.start) {
    z.template values<kPlain>(shared.z, thread, args.z.vector, false, exist, 0, value);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) y[i] = y[i] * silu(value[i]);
  }
  if (Tile::kSegmented && masked) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (masked >> Grid::time(thread, i) & 1) y[i] = R(0);
  }
  if (kPlain || (args.output.vector && exist == Grid::kWhole)) {
    if (exist) output.store(y);
  } else {
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i)
      if (exist >> i & 1) store_as(output.at + i * output.next, args.output_code, y[i]);
  }
}
