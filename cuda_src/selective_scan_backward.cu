// The gradients of selective_scan, fused like the scan itself. With dy = grad_output silu(z), and conjugates where the
// state is complex (see below for what a product with dy is then):
//
//     g[t] = p[t+1] + C[t] dy[t]        p[t] = exp(delta[t] A) g[t], what reaches h[t-1]        q[t] = p[t] h[t-1]
//     dC = dy h      dB = g delta u      du = delta sum_n(B g) + D dy      dA = sum_t(delta q)
//     d delta = sum_n(A q) + u sum_n(B g)      dD = sum_t(dy u)      dz = grad_output (sum_n(C h) + D u) silu'(z)
//
// dB and dC are summed over the channels of a group, dA, dD and d delta_bias over batch and time.
//
// A block walks its chunk of time backwards, interval by interval. The state that enters an interval was saved by the
// forward scan; the states in between are computed again. Nothing of size (batch, length, channels, state) exists.
//
//   thread  one channel and kStates of its states: in registers p, and for kSteps steps (2 kSteps without marks) the
//           gates and the states before each step
//   warp    8 neighbouring channels x 4 groups of kStates states, a slice, a group in 8 neighbouring lanes. So the sums
//           over the states are sums over lanes, and so are those over channels up to the last, over the block's warps.
//   block   kChannels channels
//   grid    (part of the batch, group of B and C, tile of channels, chunk of time), chunks fastest. A block does the
//           rows of its part of the batch one after the other and leaves one partial sum of dA, dD and d delta_bias. A
//           tile never straddles two groups of B and C. More states than a slice holds take one launch a slice, which
//           hands the sums over the states so far to the next in partial_sum (3, batch, length, channels).
//
// The work on an interval has three stages, with a barrier before and after the second:
//
//   commit   the raw items are converted into shared memory: (delta, delta * u) and dy by step and channel, B and C by
//            step and state, all in the accumulation type
//   compute  the states that enter each kSteps steps, then from the last of these to the first: the states before each
//            step again, and backwards p and all sums
//   finish   the sums in shared memory become du, d delta and dz, and over the warps dB and dC
//
// The raw items stay in the slots of their thread from commit to finish. Where there is room for two sets of them
// (kSets), those of the next interval arrive meanwhile.
//
// A sum over lanes that every lane holds several values of (steps, states) sends half of them away and keeps the other
// half at each step of a butterfly, so that n values cost n shuffles and not 5n. Which state a register holds differs
// from lane to lane (local n is state n ^ (channel % kStates) of the group): then every lane keeps the same register,
// and the first steps of the butterfly need no selection. B and C lie in shared memory in all kStates orders, and the
// lanes of one order are neighbours, which the chip serves together.
//
// Where time is cut into chunks, the kernel run with kSummarise leaves each chunk's map from the p that comes from its
// right to the p that leaves on its left, and a linear_scan over them, last chunk first, makes seed[c] of what leaves.
//
// A step past the end, masked or outside of all sequences has gate 1 and input 0, and dy, B and C are 0; its gradients
// are set to 0 where they are stored, and it adds none to a sum. Where a sequence starts or the state is reset, p is
// cut.
#include "activations.cuh"
#include "operators.cuh"
#include "pair_stream.cuh"
#include "selective_backward_args.cuh"
#include "selective_types.cuh"
#include "warp_fold.cuh"

// --- sums over lanes --------------------------------------------------------------------------------------------

// The same of values in the lanes' own order, where local n is number n ^ (lane / unit % kCount): of that number.
template <int kCount, class V>
__device__ __forceinline__ V fold_in_own_order(V (&values)[kCount], int unit) {
#pragma unroll
  for (int bit = 1; bit < kCount; bit *= 2) {
#pragma unroll
    for (int n = 0; n < kCount; n += 2 * bit) values[n] = add(values[n], from_lane_across(values[n + bit], bit * unit));
  }
  return values[0];
}

// --- products; a complex state stands for a conjugate pair: y = 2 Re(sum C h) -----------------------------------

// sum + the gradient of one factor of C h, from dy and the other.
template <class R>
__device__ __forceinline__ R contract_gradient(R factor, R dy, R sum) {
  return multiply_add(factor, dy, sum);
}
__device__ __forceinline__ complex<float> contract_gradient(complex<float> factor, float dy, complex<float> sum) {
  return {fmaf(2.0f * dy, factor.re, sum.re), fmaf(-2.0f * dy, factor.im, sum.im)};
}

// sum + Re(conj(x) y)
template <class R>
__device__ __forceinline__ R inner(R x, R y, R sum) {
  return multiply_add(x, y, sum);
}
__device__ __forceinline__ float inner(complex<float> x, complex<float> y, float sum) {
  return fmaf(x.re, y.re, fmaf(x.im, y.im, sum));
}

__device__ __forceinline__ float scaled_sum(float x, float y, float sum) { return fmaf(x, y, sum); }
__device__ __forceinline__ double scaled_sum(double x, double y, double sum) { return fma(x, y, sum); }
__device__ __forceinline__ complex<float> scaled_sum(float x, complex<float> y, complex<float> sum) {
  return {fmaf(x, y.re, sum.re), fmaf(x, y.im, sum.im)};
}

// --- the tile -----------------------------------------------------------------------------------------------------

template <class Item_, class S_, int kStates_, int kChannels_, int kSteps_, bool kTimeFast_, bool kTimeB_, bool kTimeC_,
          bool kSegmented_>
struct BackwardTile {
  using Item = Item_;
  using S = S_;
  using R = typename Accumulated<Item>::type;
  using CoupleItem = typename ItemOfCouple<Item, S>::type;
  static constexpr int kStates = kStates_, kChannels = kChannels_, kSteps = kSteps_;
  static constexpr bool kTimeFast = kTimeFast_, kTimeB = kTimeB_, kTimeC = kTimeC_, kSegmented = kSegmented_;
  static constexpr int kGroups = 4, kAbreast = 8;  // groups of states and channels in a warp
  static constexpr int kSlice = kStates * kGroups;
  static constexpr int kThreads = kChannels * kGroups, kWarps = kThreads / 32;
  // Rows of shared memory, padded so that neither accesses along channels nor those along time share a bank.
  static constexpr int kDriveRow = kChannels + (kTimeFast ? 1 : 0), kDyRow = kChannels + (kTimeFast ? 6 : 8);
  static constexpr int kSumRow = kChannels + (kTimeFast ? 7 : 8);
  static constexpr int kSets = sizeof(Item) <= 2 ? 2 : 1;  // of slots
  static constexpr int kTogether = kAbreast / kStates;     // steps whose sums over channels are one butterfly
  static constexpr int kPieces = 2, kPiece = kStateInterval / kPieces;  // of an interval, and the steps in each
  using Grid = PairGrid<kPiece, kChannels, kThreads, kTimeFast>;
  using CoupleGrid = PairGrid<kPiece, kSlice, kThreads, kTimeFast>;
  using Stream = PairStream<Grid, Item, kThreads>;
  using CoupleStream = PairStream<CoupleGrid, CoupleItem, kThreads>;
  static constexpr int kColumns = kTimeFast ? Grid::kPairs : 2;  // channels of a thread's items
  // A thread's sums for dD and d delta_bias are in registers, or in shared memory where registers are short.
  static constexpr bool kSharesTotals = sizeof(R) == 8;
  static constexpr int kTotals = kSharesTotals ? 2 * kColumns * kThreads : 4;
  static_assert(kChannels % kAbreast == 0 && kThreads % 32 == 0, "whole warps");
  static_assert(Grid::kEven, "each thread moves the same number of pairs");
  static_assert(kStateInterval == kMarkSteps, "an interval's marks are one word");
  static_assert(kSteps % 4 == 0 && kSteps % kTogether == 0 && kStateInterval % kSteps == 0,
                "sums over lanes take several steps together");

  struct Shared {
    alignas(16) Drive<R> drive[kStateInterval][kDriveRow];
    alignas(16) R dy[kStateInterval][kDyRow];
    // By step, group of states, order and place in it.
    alignas(16) S B[kTimeB ? kStateInterval : 1][kGroups][kStates][kStates];
    alignas(16) S C[kTimeC ? kStateInterval : 1][kGroups][kStates][kStates];
    alignas(16) S entering[kStateInterval / kSteps][kThreads][kStates];
    alignas(16) S saved[kStates][kThreads];           // what enters the next interval
    alignas(16) R sums[kStateInterval][2 * kSumRow];  // over the states: of B g, of A q; those of C h take dy's place
    alignas(16) S dB[kWarps][kTimeB ? kStateInterval : 1][kSlice];  // over a warp's channels
    alignas(16) S dC[kWarps][kTimeC ? kStateInterval : 1][kSlice];
    alignas(16) long long offset[5][kThreads];
    alignas(16) R totals[kTotals];
    alignas(16) R bias[kChannels];
    alignas(16) R D[kChannels];
    // Slots of the streams.
    alignas(16) Vector<Item> u[kSets][kPieces][Grid::kPairs][kThreads];
    alignas(16) Vector<Item> delta[kSets][kPieces][Grid::kPairs][kThreads];
    alignas(16) Vector<Item> grad_output[kSets][kPieces][Grid::kPairs][kThreads];
    alignas(16) Vector<Item> z[kSets][kPieces][Grid::kPairs][kThreads];
    alignas(16) Vector<CoupleItem> raw_B[kPieces][CoupleGrid::kPairs][kThreads];
    alignas(16) Vector<CoupleItem> raw_C[kPieces][CoupleGrid::kPairs][kThreads];
  };
};

// One row's share of a block.
struct BackwardItem {
  int part, group, tile, chunk;
  long long first_channel;
  long long begin, end;  // positions
  int channels, states;  // how many of the tile's channels and the slice's states exist
};

template <class Tile>
__device__ __forceinline__ BackwardItem locate_backward(const SelectiveBackwardArgs& args, long long item) {
  const long long in_group = args.channels / args.groups;
  const long long tiles = (in_group + Tile::kChannels - 1) / Tile::kChannels;
  BackwardItem at;
  at.chunk = (int)(item % args.chunks);
  item /= args.chunks;
  at.tile = (int)(item % tiles);
  item /= tiles;
  at.group = (int)(item % args.groups);
  at.part = (int)(item / args.groups);
  at.first_channel = at.group * in_group + (long long)at.tile * Tile::kChannels;
  const long long left = in_group - (long long)at.tile * Tile::kChannels, left_states = args.state - args.first_state;
  at.channels = (int)(left < Tile::kChannels ? left : Tile::kChannels);
  at.states = (int)(left_states < Tile::kSlice ? left_states : Tile::kSlice);
  at.begin = at.chunk * args.chunk;
  at.end = at.begin + args.chunk < args.length ? at.begin + args.chunk : args.length;
  return at;
}

// What there is of an interval, and what is special about it.
struct Interval {
  int number, steps;
  StepMarks marks;  // masked beyond the last step, and a reset where nothing enters the row
  bool plain;
  __device__ __forceinline__ bool marked() const { return marks.masked | marks.resets | marks.starts | marks.ends; }
};

// A piece of it, and which of this thread's items there are: those of sequences and those of couples.
struct Piece {
  int number, tile, first;  // in the interval, in the chunk; its first step in the interval
  unsigned exists, couples;
};

template <class R>
__device__ __forceinline__ R activated(const SelectiveBackwardArgs& args, R x) {
  if (args.softplus) x = softplus(x);
  return args.limited ? clip(x, limit(args, 0, R()), limit(args, 1, R())) : x;
}

template <class Tile, bool kSummarise>
struct Backward {
  using R = typename Tile::R;
  using S = typename Tile::S;
  using Item = typename Tile::Item;
  using Grid = typename Tile::Grid;
  using CoupleGrid = typename Tile::CoupleGrid;
  using Shared = typename Tile::Shared;
  static constexpr int kStates = Tile::kStates, kSteps = Tile::kSteps;

  const SelectiveBackwardArgs& args;
  Shared& shared;
  const BackwardItem at;
  const int lane, channel, group, order;
  const int my_states;  // how many of kStates exist, if > 0
  const int length;     // of the chunk
  long long batch;
  unsigned exists, couples;  // masks of Grid and CoupleGrid
  int whole, ragged;         // whole pieces of the chunk, steps of the one after
  // This thread's first item of the row's chunk.
  char *u, *delta, *z, *grad_output, *B, *C;
  const S* saved;  // its channel's, first state of its group, of the interval that is next
  S rate[kStates], p[kStates], dA[kStates];
  S constant_B[Tile::kTimeB ? 1 : kStates], constant_C[Tile::kTimeC ? 1 : kStates];
  S constant_dB[Tile::kTimeB ? 1 : kStates], constant_dC[Tile::kTimeC ? 1 : kStates];
  R totals[2][Tile::kColumns];  // dD, d delta_bias
  DeltaSum<R> delta_sum;
  bool resets;

  __device__ __forceinline__ Backward(const SelectiveBackwardArgs& args, Shared& shared, const BackwardItem& at)
      : args(args),
        shared(shared),
        at(at),
        lane(threadIdx.x % 32),
        channel(threadIdx.x / 32 * Tile::kAbreast + lane % Tile::kTogether * kStates +
                lane % Tile::kAbreast / Tile::kTogether),
        group(lane / Tile::kAbreast),
        order(channel % kStates),
        my_states(channel < at.channels ? at.states - group * kStates : 0),
        length((int)(at.end - at.begin)) {
    whole = length / Tile::kPiece;
    ragged = length % Tile::kPiece;
    exists = Grid::masks(ragged, at.channels);
    couples = CoupleGrid::masks(ragged, at.states);
  }

  // From the start of an array that it leaves something in to this thread's first item of the row's chunk: in shared
  // memory, as there are no registers to spare.
  enum { kGradU, kGradDelta, kGradZ, kGradB, kGradC };
  __device__ __forceinline__ long long& offset(int of) const { return shared.offset[of][threadIdx.x]; }
  __device__ __forceinline__ R& total(int what, int column) {
    if constexpr (Tile::kSharesTotals)
      return shared.totals[(what * Tile::kColumns + column) * Tile::kThreads + threadIdx.x];
    else
      return totals[what][column];
  }
  __device__ __forceinline__ long long my_channel() const { return at.first_channel + channel; }
  // The state that local n is.
  __device__ __forceinline__ int local_state(int n) const { return n ^ order; }
  __device__ __forceinline__ long long my_state(int n) const {
    return args.first_state + group * kStates + local_state(n);
  }
  __device__ __forceinline__ bool have(int n) const { return local_state(n) < my_states; }

  template <class Function>
  __device__ __forceinline__ void each_state(Function function) {
#pragma unroll
    for (int n = 0; n < kStates; ++n)
      if (have(n)) function(n);
  }

  __device__ __forceinline__ long long position(int interval) const {
    return at.begin + (long long)interval * kStateInterval;
  }

  __device__ __forceinline__ Interval describe(int number) const {
    const int left = length - number * kStateInterval;
    Interval is;
    is.number = number;
    is.steps = left < kStateInterval ? left : kStateInterval;
    is.marks = {0, 0, 0, 0};
    if constexpr (Tile::kSegmented) {
      if (args.marks) is.marks = marks_of(args.marks + batch * args.marks_batch, position(number), is.steps);
    }
    if (is.steps < kStateInterval) is.marks.masked |= ~0u << is.steps;
    if (args.starts_from_zero && at.chunk == 0 && number == 0) is.marks.resets |= 1;
    is.plain = args.plain && is.steps == kStateInterval && (Tile::kSegmented || !is.marked()) &&
               at.channels == Tile::kChannels && at.states == Tile::kSlice;
    return is;
  }

  template <class Function>
  __device__ __forceinline__ void each_piece(const Interval& is, Function function) const {
#pragma unroll 1
    for (int i = 0; i < Tile::kPieces; ++i) {
      const int tile = is.number * Tile::kPieces + i;
      const bool none = tile > whole;
      const int last = tile == whole ? 16 : 0;
      function(
          Piece{i, tile, i * Tile::kPiece, none ? 0 : exists >> last & 0xffff, none ? 0 : couples >> last & 0xffff});
    }
  }

  __device__ __forceinline__ char* first(const SequenceArray& array) const {
    if (!array.start) return nullptr;
    return Tile::Stream::first(
        array.start + batch * array.batch + at.first_channel * array.channel + at.begin * array.time, array.time,
        array.channel, array.vector);
  }
  __device__ __forceinline__ char* first(const CoupleArray& array) const {
    return Tile::CoupleStream::first(array.start + batch * array.batch + at.group * array.group +
                                         args.first_state * array.state + at.begin * array.time,
                                     array.time, array.state, array.vector);
  }
  // `step` steps after `first`; two multiplications, as neither is 64 by 64 bits.
  static __device__ __forceinline__ char* after(char* first, int step, long long time) {
    return first + (unsigned)step * (unsigned long long)time;
  }
  static __device__ __forceinline__ typename Tile::Stream stream(char* first, const SequenceArray& array, int tile) {
    return {after(first, tile * Tile::kPiece, array.time), array.time, array.channel};
  }
  static __device__ __forceinline__ typename Tile::CoupleStream stream(char* first, const CoupleArray& array,
                                                                       int tile) {
    return {after(first, tile * Tile::kPiece, array.time), array.time, array.state};
  }

  // This thread's items of a piece from `first` on, in `rows` of shared memory; neighbouring channels in one access.
  template <class T, int kRow>
  static __device__ __forceinline__ void write_items(T (*rows)[kRow], int first, const T (&from)[Grid::kItems]) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; i += 2) {
      T* const to = &rows[first + Grid::time(i)][Grid::place(i)];
      const T pair[2] = {from[i], from[i + 1]};
      if constexpr (Tile::kTimeFast)
        to[0] = pair[0], to[kRow] = pair[1];
      else
        write_row(to, pair);
    }
  }
  // The same back; steps from `steps` on are zero.
  template <bool kPlain, class T, int kRow>
  static __device__ __forceinline__ void read_items(T (&to)[Grid::kItems], const T (*rows)[kRow], int first, int column,
                                                    int steps) {
#pragma unroll
    for (int i = 0; i < Grid::kItems; i += 2) {
      const int step = first + Grid::time(i);
      const T* const from = &rows[step][column + Grid::place(i)];
      T pair[2] = {};
      if constexpr (Tile::kTimeFast) {
        if (kPlain || step < steps) pair[0] = from[0];
        if (kPlain || step + 1 < steps) pair[1] = from[kRow];
      } else {
        if (kPlain || step < steps) read_row(pair, from);
      }
      to[i] = pair[0];
      to[i + 1] = pair[1];
    }
  }

  // --- load and commit ------------------------------------------------------------------------------------------

  template <bool kPlain>
  __device__ __forceinline__ void start_loads(const Interval& is) {
    const int set = is.number % Tile::kSets;
    each_piece(is, [&](const Piece& piece) {
      auto start = [&](char* from, const SequenceArray& array, auto* slots) {
        if (array.start)
          stream(from, array, piece.tile).template start<kPlain>(slots[piece.number], array.vector, piece.exists);
      };
      start(delta, args.delta, shared.delta[set]);
      start(grad_output, args.grad_output, shared.grad_output[set]);
      start(z, args.z, shared.z[set]);
      if (!kSummarise) start(u, args.u, shared.u[set]);
      auto start_couple = [&](char* from, const CoupleArray& array, auto* slots) {
        stream(from, array, piece.tile).template start<kPlain>(slots[piece.number], array.vector, piece.couples);
      };
      if constexpr (Tile::kTimeB && !kSummarise) start_couple(B, args.B, shared.raw_B);
      if constexpr (Tile::kTimeC) start_couple(C, args.C, shared.raw_C);
    });
  }

  // The raw items of a piece; what does not exist is 0, and all if the array is not `there`.
  template <bool kPlain, class Slots>
  __device__ __forceinline__ void raw(char* from, const SequenceArray& array, Slots* slots, const Interval& is,
                                      const Piece& piece, R (&to)[Grid::kItems], bool there = true) const {
    if (there) {
      stream(from, array, piece.tile + 1)
          .template values<kPlain>(slots[is.number % Tile::kSets][piece.number], array.vector, array.wide, piece.exists,
                                   to);
    } else {
#pragma unroll
      for (int i = 0; i < Grid::kItems; ++i) to[i] = R(0);
    }
  }

  // A pair of B or C: at each moment lanes are at different orders, or else they would share a bank.
  static __device__ __forceinline__ void leave_in_all_orders(S (*to)[Tile::kGroups][kStates][kStates], int step,
                                                             int place, S first, S second) {
    constexpr int kMoved = Tile::kTimeFast ? ~0 : ~1;  // what an order does to the place of an item, or of a pair
    const int turn = (Tile::kTimeFast ? step / 2 : place / kStates / 2 + step * (kStates / 2)) % kStates;
    const int own = turn * kStates + (place % kStates ^ (turn & kMoved));
    S* const cell = to[step][place / kStates][0];
    if (!Tile::kTimeFast && turn & 1) {
      const S other = first;
      first = second;
      second = other;
    }
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      S* const at = cell + (own ^ (i * kStates + (i & kMoved)));
      const S pair[2] = {i & 1 ? second : first, i & 1 ? first : second};
      if constexpr (Tile::kTimeFast)
        at[0] = first, at[Tile::kSlice * kStates] = second;
      else
        write_row(at, pair);
    }
  }

  // Brings an interval into shared memory: the one place where a step is formed.
  template <bool kPlain>
  __device__ __forceinline__ void commit(const Interval& is) {
    each_piece(is, [&](const Piece& piece) {
      R d[Grid::kItems], d_u[Grid::kItems], dy[Grid::kItems], gate[Grid::kItems];
      raw<kPlain>(delta, args.delta, shared.delta, is, piece, d);
      if (!kSummarise) raw<kPlain>(u, args.u, shared.u, is, piece, d_u);
      raw<kPlain>(grad_output, args.grad_output, shared.grad_output, is, piece, dy, args.grad_output.start);
      if (args.z.start) raw<kPlain>(z, args.z, shared.z, is, piece, gate);
      Drive<R> drive[Grid::kItems];
#pragma unroll
      for (int i = 0; i < Grid::kItems; ++i) {
        const int step = piece.first + Grid::time(i);
        d[i] = activated(args, d[i] + shared.bias[Grid::place(i)]);
        d_u[i] = kSummarise ? R(0) : d[i] * d_u[i];
        if (args.z.start) dy[i] *= silu(gate[i]);
        if (Tile::kSegmented || !kPlain) {
          if ((is.marks.masked | is.marks.resets) >> step & 1) d[i] = R(0);
          if (is.marks.masked >> step & 1) d_u[i] = dy[i] = R(0);
        }
        drive[i] = {d[i], d_u[i]};
      }
      write_items(shared.drive, piece.first, drive);
      write_items(shared.dy, piece.first, dy);
      auto commit_couple = [&](char* from, const CoupleArray& array, auto* slots, auto* to) {
        S value[CoupleGrid::kItems];
        stream(from, array, piece.tile + 1)
            .template values<kPlain>(slots[piece.number], array.vector, array.wide, piece.couples, value);
#pragma unroll
        for (int i = 0; i < CoupleGrid::kItems; i += 2) {
          if (!CoupleGrid::held(i)) continue;
          if constexpr (Tile::kSegmented || !kPlain) {
            if (is.marks.masked >> (piece.first + CoupleGrid::time(i)) & 1) value[i] = Scalar<S>::zero();
            if (is.marks.masked >> (piece.first + CoupleGrid::time(i + 1)) & 1) value[i + 1] = Scalar<S>::zero();
          }
          leave_in_all_orders(to, piece.first + CoupleGrid::time(i), CoupleGrid::place(i), value[i], value[i + 1]);
        }
      };
      if constexpr (Tile::kTimeB && !kSummarise) commit_couple(B, args.B, shared.raw_B, shared.B);
      if constexpr (Tile::kTimeC) commit_couple(C, args.C, shared.raw_C, shared.C);
    });
  }

  // --- compute ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void read_B(S (&B)[kStates], int step) const {
    if constexpr (Tile::kTimeB) read_row(B, shared.B[step][group][order]);
#pragma unroll
    for (int n = 0; n < kStates && !Tile::kTimeB; ++n) B[n] = constant_B[Tile::kTimeB ? 0 : n];
  }
  __device__ __forceinline__ void read_C(S (&C)[kStates], int step) const {
    if constexpr (Tile::kTimeC) read_row(C, shared.C[step][group][order]);
#pragma unroll
    for (int n = 0; n < kStates && !Tile::kTimeC; ++n) C[n] = constant_C[Tile::kTimeC ? 0 : n];
  }

  // The state that enters a step which resets or starts a sequence.
  __device__ __forceinline__ void enter(S (&h)[kStates], bool empty, long long position) {
#pragma unroll
    for (int n = 0; n < kStates; ++n) h[n] = Scalar<S>::zero();
    if (!Tile::kSegmented || empty) return;
    const char* from = args.sequence_initial + (long long)args.ids[position] * args.initial_sequence +
                       my_channel() * args.initial_channel;
    each_state([&](int n) { h[n] = load_item<S>(from + my_state(n) * args.initial_state); });
  }
  // Adds the gradient of the last state of a sequence that ends.
  __device__ __forceinline__ void add_last(long long position) {
    if (!args.sequence_grad_last) return;
    const char* from =
        args.sequence_grad_last + (long long)args.ids[position] * args.last_batch + my_channel() * args.last_channel;
    each_state([&](int n) { p[n] = add(p[n], load_item<S>(from + my_state(n) * args.last_state)); });
  }
  // Cuts p where the state is reset or a sequence starts, whose h0 gets it if it is not hidden.
  __device__ __forceinline__ void cut(bool reset, bool start, long long position) {
    if (Tile::kSegmented && !kSummarise && start && args.sequence_grad_initial) {
      S* to = reinterpret_cast<S*>(args.sequence_grad_initial) +
              ((long long)args.ids[position] * args.channels + my_channel()) * args.state;
      each_state([&](int n) { to[my_state(n)] = reset ? Scalar<S>::zero() : p[n]; });
    }
#pragma unroll
    for (int n = 0; n < kStates; ++n) p[n] = Scalar<S>::zero();
  }

  // Steps that are worked on together: without marks there are registers for more.
  template <bool kMarked>
  static constexpr int kAtOnce = kMarked || Tile::kSegmented || sizeof(S) > 4 ? kSteps : 2 * kSteps;

  // The states that enter each of these but the first.
  template <bool kMarked>
  __device__ __forceinline__ void enter_all(const Interval& is, int parts, S (&h)[kStates]) {
    constexpr int kSteps = kAtOnce<kMarked>;
    const unsigned cuts = is.marks.resets | is.marks.starts;
    for (int part = 0; part < parts; ++part) {
      write_row(shared.entering[part][threadIdx.x], h);
      if (part == parts - 1) break;
#pragma unroll 4
      for (int step = part * kSteps; step < (part + 1) * kSteps; ++step) {
        if (kMarked && cuts >> step & 1) enter(h, is.marks.resets >> step & 1, position(is.number) + step);
        const Drive<R> drive = shared.drive[step][channel];
        S B[kStates];
        read_B(B, step);
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          h[n] = apply(Affine<S>{gate_of(drive.delta, rate[n]), multiply(drive.delta_u, B[n])}, h[n]);
      }
    }
  }

  // These steps from `first` on. kGated: the sums of C h are wanted, for dz.
  template <bool kMarked, bool kGated>
  __device__ __forceinline__ void compute(const Interval& is, int first) {
    constexpr int kSteps = kAtOnce<kMarked>;
    const StepMarks marks = is.marks;
    const unsigned cuts = marks.resets | marks.starts;
    S h[kStates];
    read_row(h, shared.entering[first / kSteps][threadIdx.x]);
    S gate[kSteps][kStates], before[kSteps][kStates];
    // With registers to spare what a step takes is kept, else read again on the way back.
    constexpr bool kKeeps = kSteps > Tile::kSteps && !kGated;
    Drive<R> drives[kKeeps ? kSteps : 1];
    R dys[kKeeps ? kSteps : 1];
    S folded[Tile::kTogether];
    R y[4], outputs[kSteps / 4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = first + i;
      if (kMarked && cuts >> step & 1) enter(h, marks.resets >> step & 1, position(is.number) + step);
      const Drive<R> drive = drives[kKeeps ? i : 0] = shared.drive[step][channel];
      const R dy = dys[kKeeps ? i : 0] = shared.dy[step][channel];
      const bool masked = kMarked && marks.masked >> step & 1;
      S B[kStates], dC[kStates], seen[kStates];
      read_B(B, step);
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        gate[i][n] = gate_of(drive.delta, rate[n]);
        before[i][n] = h[n];
        h[n] = apply(Affine<S>{gate[i][n], multiply(drive.delta_u, B[n])}, h[n]);
        seen[n] = masked ? Scalar<S>::zero() : h[n];
        if constexpr (Tile::kTimeC)
          dC[n] = contract_gradient(seen[n], dy, Scalar<S>::zero());
        else
          constant_dC[n] = contract_gradient(seen[n], dy, constant_dC[n]);
      }
      if constexpr (Tile::kTimeC) {
        folded[i % Tile::kTogether] = fold_in_own_order(dC, Tile::kTogether);
        if ((i + 1) % Tile::kTogether == 0) leave(folded, shared.dC, step + 1 - Tile::kTogether);
      }
      if constexpr (kGated) {
        S C[kStates];
        read_C(C, step);
        y[i % 4] = R(0);
#pragma unroll
        for (int n = 0; n < kStates; ++n) y[i % 4] = contract(C[n], seen[n], y[i % 4]);
        if (i % 4 == 3) outputs[i / 4] = fold(y, threadIdx.x, Tile::kAbreast);
      }
    }

    S dA_here[kStates];
    R sums[2];
#pragma unroll
    for (int i = kSteps - 1; i >= 0; --i) {
      const int step = first + i;
      if (kMarked && Tile::kSegmented && marks.ends >> step & 1) add_last(position(is.number) + step);
      const Drive<R> drive = kKeeps ? drives[kKeeps ? i : 0] : shared.drive[step][channel];
      const R dy = kKeeps ? dys[kKeeps ? i : 0] : shared.dy[step][channel];
      const bool masked = kMarked && marks.masked >> step & 1;
      const bool blind = kMarked && (marks.masked | marks.resets) >> step & 1;  // to what was before
      S B[kStates], C[kStates], dB[kStates];
      read_B(B, step);
      read_C(C, step);
      R through_B = R(0), through_A = R(0);
      if ((i + 1) % Tile::kSteps == 0) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) dA_here[n] = Scalar<S>::zero();
      }
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        const S g = contract_gradient(C[n], dy, p[n]), felt = masked ? Scalar<S>::zero() : g;
        if constexpr (Tile::kTimeB)
          dB[n] = multiply(drive.delta_u, felt);
        else
          constant_dB[n] = scaled_sum(drive.delta_u, felt, constant_dB[n]);
        through_B = inner(B[n], felt, through_B);
        p[n] = masked ? g : multiply(conjugate(gate[i][n]), g);
        const S q = blind ? Scalar<S>::zero() : multiply(conjugate(before[i][n]), p[n]);
        through_A = multiply_rate(rate[n], q, through_A);
        dA_here[n] = scaled_sum(drive.delta, q, dA_here[n]);
      }
      if (kMarked && cuts >> step & 1)
        cut(marks.resets >> step & 1, marks.starts >> step & 1, position(is.number) + step);
      if constexpr (Tile::kTimeB) {
        folded[i % Tile::kTogether] = fold_in_own_order(dB, Tile::kTogether);
        if (i % Tile::kTogether == 0) leave(folded, shared.dB, step);
      }
      sums[i % 2] = halve(through_B, through_A, threadIdx.x, Tile::kAbreast);
      if (i % 2 == 0)
        shared.sums[step + lane / (2 * Tile::kAbreast)][lane / Tile::kAbreast % 2 * Tile::kSumRow + channel] =
            fold(sums, threadIdx.x, 2 * Tile::kAbreast);
      if (i % Tile::kSteps == 0) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) dA[n] = add(dA[n], dA_here[n]);
      }
    }
    if constexpr (kGated) {
      __syncwarp();  // no lane of this warp, whose channels these are, needs dy any more
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) shared.dy[first + 4 * i + lane / Tile::kAbreast][channel] = outputs[i];
    }
  }

  // The sums over the warp's channels of kTogether steps from `step` on.
  __device__ __forceinline__ void leave(S (&folded)[Tile::kTogether], S (*to)[kStateInterval][Tile::kSlice], int step) {
    const S sum = fold(folded, threadIdx.x, 1);
    to[threadIdx.x / 32][step + lane % Tile::kTogether][turned(group, step) * kStates + order] = sum;
  }
  // Where a group's sums are in a row of dB or dC: lanes along time would share a bank.
  static __device__ __forceinline__ int turned(int group, int step) {
    return Tile::kTimeFast ? group ^ step / 2 % Tile::kGroups : group;
  }

  // The same steps with nothing left but p, and the gates' product as the sum of delta.
  __device__ __forceinline__ void summarise(const Interval& is) {
    const StepMarks marks = is.marks;
    for (int last = is.steps - 1; last >= 0; last -= kSteps) {
#pragma unroll 4
      for (int step = last; step > last - kSteps && step >= 0; --step) {
        if (Tile::kSegmented && marks.ends >> step & 1) add_last(position(is.number) + step);
        const R delta = shared.drive[step][channel].delta, dy = shared.dy[step][channel];
        S C[kStates];
        read_C(C, step);
        delta_sum.add(delta);
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          p[n] = multiply(conjugate(gate_of(delta, rate[n])), contract_gradient(C[n], dy, p[n]));
        if (Tile::kSegmented && (marks.resets | marks.starts) >> step & 1) cut(true, false, 0);
      }
    }
    resets |= (marks.resets | marks.starts) != 0;
  }

  // --- finish -----------------------------------------------------------------------------------------------------

  // From the sums in shared memory to the gradients of an interval.
  template <bool kPlain>
  __device__ __forceinline__ void finish(const Interval& is) {
    if constexpr (Tile::kTimeB) finish_couple(is, shared.dB, args.grad_B, offset(kGradB));
    if constexpr (Tile::kTimeC) finish_couple(is, shared.dC, args.grad_C, offset(kGradC));
    each_piece(is, [&](const Piece& piece) {
      R sums[3][Grid::kItems];
      read_items<kPlain>(sums[0], shared.sums, piece.first, 0, is.steps);
      read_items<kPlain>(sums[1], shared.sums, piece.first, Tile::kSumRow, is.steps);
      if (args.z.start) read_items<kPlain>(sums[2], shared.dy, piece.first, 0, is.steps);
      if (!kPlain && (args.adds_to_partial_sum | args.leaves_partial_sum)) {
        pass_partial_sums(piece, sums);
        if (args.leaves_partial_sum) return;
      }
      finish_piece<kPlain>(is, piece, sums);
    });
  }

  // Adds the sums over the states of earlier slices, and leaves them for the next.
  __device__ __forceinline__ void pass_partial_sums(const Piece& piece, R (&sums)[3][Grid::kItems]) const {
    const auto partial = stream(first(args.partial_sum), args.partial_sum, piece.tile);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (k == 2 && !args.z.start) break;
      char* const plane = partial.at + k * args.partial_plane;
      if (args.adds_to_partial_sum) {
        R earlier[Grid::kItems];
        load_pairs<R>(plane, partial.hop, partial.next, piece.exists, false, earlier);
#pragma unroll
        for (int i = 0; i < Grid::kItems; ++i) sums[k][i] += earlier[i];
      }
      if (args.leaves_partial_sum) {
#pragma unroll
        for (int i = 0; i < Grid::kItems; ++i)
          if (piece.exists >> i & 1)
            *reinterpret_cast<R*>(plane + i / 2 * partial.hop + i % 2 * partial.next) = sums[k][i];
      }
    }
  }

  template <bool kPlain>
  __device__ __forceinline__ void finish_piece(const Interval& is, const Piece& piece, R (&sums)[3][Grid::kItems]) {
    R v[Grid::kItems], x[Grid::kItems], dy[Grid::kItems], gate[Grid::kItems];
    raw<kPlain>(u, args.u, shared.u, is, piece, v);
    raw<kPlain>(delta, args.delta, shared.delta, is, piece, x);
    raw<kPlain>(grad_output, args.grad_output, shared.grad_output, is, piece, dy, args.grad_output.start);
    if (args.z.start) raw<kPlain>(z, args.z, shared.z, is, piece, gate);
    // The deltas; where a step was changed, again.
    R formed[Grid::kItems];
    Drive<R> drive[Grid::kItems];
    read_items<true>(drive, shared.drive, piece.first, 0, kStateInterval);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      x[i] += shared.bias[Grid::place(i)];
      formed[i] = drive[i].delta;
    }
    if ((Tile::kSegmented || !kPlain) && (is.marks.masked | is.marks.resets)) {
#pragma unroll
      for (int i = 0; i < Grid::kItems; ++i) formed[i] = activated(args, x[i]);
    }
    R du[Grid::kItems], dx[Grid::kItems], dz[Grid::kItems];
    R dD_here[Tile::kColumns], dbias_here[Tile::kColumns];
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) dD_here[c] = dbias_here[c] = R(0);
#pragma unroll
    for (int i = 0; i < Grid::kItems; ++i) {
      const int step = piece.first + Grid::time(i), place = Grid::place(i);
      const bool counts =
          (kPlain || (piece.exists >> i & 1)) && !((Tile::kSegmented || !kPlain) && is.marks.masked >> step & 1);
      if (args.z.start) {
        dz[i] = dy[i] * silu_slope(gate[i]) * multiply_add(shared.D[place], v[i], sums[2][i]);
        dy[i] *= silu(gate[i]);
      }
      du[i] = multiply_add(sums[0][i], formed[i], dy[i] * shared.D[place]);
      dx[i] = multiply_add(sums[0][i], v[i], sums[1][i] * rate_unit(S()));
      if (args.softplus) dx[i] *= sigmoid(x[i]);
      if (args.limited) {
        const R unclipped = args.softplus ? softplus(x[i]) : x[i];
        if (!(unclipped >= limit(args, 0, R()) && unclipped <= limit(args, 1, R()))) dx[i] = R(0);
      }
      if (!counts) du[i] = dx[i] = dz[i] = R(0);
      const int column = Tile::kTimeFast ? i / 2 : i % 2;
      dD_here[column] = multiply_add(counts ? dy[i] : R(0), counts ? v[i] : R(0), dD_here[column]);
      dbias_here[column] += dx[i];
    }
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) {
      total(0, c) += dD_here[c];
      total(1, c) += dbias_here[c];
    }
    auto store = [&](int of, const SequenceArray& array, R(&values)[Grid::kItems], int code) {
      const auto out = stream(array.start + offset(of), array, piece.tile);
      store_pairs<Item>(out.at, out.hop, out.next, values, kPlain ? ~0u : piece.exists, code, kPlain || array.vector);
    };
    store(kGradU, args.grad_u, du, args.grad_u_code);
    store(kGradDelta, args.grad_delta, dx, args.grad_delta_code);
    if (args.z.start) store(kGradZ, args.grad_z, dz, args.grad_z_code);
  }

  // This thread's rows of kStates neighbours in an interval's dB and dC.
  static constexpr int kRows = kStateInterval * Tile::kGroups / Tile::kThreads, kRowHop = kStateInterval / kRows;
  static_assert(!Tile::kTimeFast || kRows == 1, "rows of a thread are of one group");
  static __device__ __forceinline__ int row_time() {
    return Tile::kTimeFast ? threadIdx.x % kStateInterval : threadIdx.x / Tile::kGroups;
  }
  static __device__ __forceinline__ int row_group() {
    return Tile::kTimeFast ? threadIdx.x / kStateInterval : threadIdx.x % Tile::kGroups;
  }
  __device__ __forceinline__ char* first(const CoupleSums& to) const {
    return to.start + at.tile * to.tile + batch * to.batch + at.group * to.group + (at.begin + row_time()) * to.time +
           (args.first_state + row_group() * kStates) * to.state;
  }

  // Adds the sums of the warps, in their order.
  __device__ __forceinline__ void finish_couple(const Interval& is, const S (*sums)[kStateInterval][Tile::kSlice],
                                                const CoupleSums& to, long long offset) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int time = row_time() + i * kRowHop, left = at.states - row_group() * kStates;
      if (time >= is.steps) continue;
      S sum[kStates], next[kStates];
      const S* const from = &sums[0][time][turned(row_group(), time) * kStates];
      read_row(sum, from);
#pragma unroll
      for (int warp = 1; warp < Tile::kWarps; ++warp) {
        read_row(next, from + warp * kStateInterval * Tile::kSlice);
#pragma unroll
        for (int n = 0; n < kStates; ++n) sum[n] = add(sum[n], next[n]);
      }
      if (Tile::kSegmented && is.marks.masked >> time & 1) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) sum[n] = Scalar<S>::zero();
      }
      char* const out = after(to.start + offset, is.number * kStateInterval + i * kRowHop, to.time);
      if (to.state == sizeof(S) && left >= kStates && (unsigned long long)out % sizeof(Row<S, kStates>) == 0) {
        write_row(reinterpret_cast<S*>(out), sum);
      } else {
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          if (n < left) *reinterpret_cast<S*>(out + n * to.state) = sum[n];
      }
    }
  }

  // --- a chunk of a row --------------------------------------------------------------------------------------------

  // Starts the load of the states that enter the interval whose first states lie at `saved`, and goes to the one before
  // it. States that do not exist are 0 from the start.
  __device__ __forceinline__ void start_saved() {
    each_state([&](int n) {
      start_copy(&shared.saved[n][threadIdx.x], reinterpret_cast<const char*>(saved + local_state(n)));
    });
    saved -= args.channels * args.state;
  }

  // Element (batch, chunk, my state, my channel) of seeds and summaries.
  __device__ __forceinline__ long long place(long long chunk, int n) const {
    return ((batch * args.chunks + chunk) * args.state + my_state(n)) * args.channels + my_channel();
  }

  __device__ __forceinline__ void walk() {
    const int intervals = (int)((at.end - at.begin + kStateInterval - 1) / kStateInterval);
    const long long from_right = args.chunks - 1 - at.chunk;  // this chunk's number from the right
    u = first(args.u);
    delta = first(args.delta);
    z = first(args.z);
    grad_output = first(args.grad_output);
    offset(kGradU) = first(args.grad_u) - args.grad_u.start;
    offset(kGradDelta) = first(args.grad_delta) - args.grad_delta.start;
    offset(kGradZ) = first(args.grad_z) - args.grad_z.start;
    if constexpr (Tile::kTimeB) B = first(args.B);
    if constexpr (Tile::kTimeC) C = first(args.C);
    if constexpr (Tile::kTimeB) offset(kGradB) = first(args.grad_B) - args.grad_B.start;
    if constexpr (Tile::kTimeC) offset(kGradC) = first(args.grad_C) - args.grad_C.start;
    const long long all = (args.length + kStateInterval - 1) / kStateInterval;  // intervals of the row
    saved = reinterpret_cast<const S*>(args.states) +
            ((batch * all + at.begin / kStateInterval + intervals - 1) * args.channels + my_channel()) * args.state +
            args.first_state + group * kStates;
#pragma unroll
    for (int n = 0; n < kStates; ++n) p[n] = Scalar<S>::zero();
    each_state([&](int n) {
      if (kSummarise) return;
      if (from_right > 0)
        p[n] = reinterpret_cast<const S*>(args.seed)[place(from_right - 1, n)];
      else if (args.grad_last)
        p[n] = load_item<S>(args.grad_last + batch * args.last_batch + my_channel() * args.last_channel +
                            my_state(n) * args.last_state);
    });
    delta_sum = {R(0), R(0)};
    resets = false;

    auto start = [&](int number) {
      const Interval is = describe(number);
      if (is.plain)
        start_loads<true>(is);
      else
        start_loads<false>(is);
    };
    constexpr bool kAhead = kSummarise || Tile::kSets == 2;
    start(intervals - 1);
    if (!kSummarise) start_saved();
    for (int number = intervals - 1; number >= 0; --number) {
      const Interval is = describe(number);
      wait_for_copies();
      if (is.plain)
        commit<true>(is);
      else
        commit<false>(is);
      if (kAhead && number > 0) start(number - 1);
      __syncthreads();
      if constexpr (kSummarise) {
        summarise(is);
      } else {
        S h[kStates];
#pragma unroll
        for (int n = 0; n < kStates; ++n) h[n] = shared.saved[n][threadIdx.x];
        if (number > 0) start_saved();
        const bool marked = is.marked();
        const int step = marked ? kAtOnce<true> : kAtOnce<false>, parts = (is.steps + step - 1) / step;
        if (marked)
          enter_all<true>(is, parts, h);
        else
          enter_all<false>(is, parts, h);
#pragma unroll 1
        for (int part = parts - 1; part >= 0; --part) {
          if (marked)
            compute<true, true>(is, part * step);
          else if (args.z.start)
            compute<false, true>(is, part * step);
          else
            compute<false, false>(is, part * step);
        }
      }
      __syncthreads();
      if constexpr (!kSummarise) {
        if (is.plain)
          finish<true>(is);
        else
          finish<false>(is);
        if (!kAhead && number > 0) start(number - 1);
      }
    }

    each_state([&](int n) {
      if (kSummarise) {
        const long long i = place(from_right, n);
        reinterpret_cast<S*>(args.summary_gate)[i] = conjugate(gate_of(delta_sum.value(), rate[n]));
        reinterpret_cast<S*>(args.summary_input)[i] = p[n];
        if (Tile::kSegmented && args.marks && my_channel() == 0 && my_state(n) == 0)
          args.summary_resets[batch * args.chunks + from_right] = resets;
      } else if (args.grad_initial && at.chunk == 0) {
        reinterpret_cast<S*>(args.grad_initial)[(batch * args.channels + my_channel()) * args.state + my_state(n)] =
            p[n];
      }
    });
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      rate[n] = dA[n] = Scalar<S>::zero();
      if (!have(n)) shared.saved[n][threadIdx.x] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeB) constant_B[n] = constant_dB[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeC) constant_C[n] = constant_dC[n] = Scalar<S>::zero();
    }
    each_state([&](int n) {
      S A;
      load_as(A, args.A + my_channel() * args.A_channel + my_state(n) * args.A_state, args.A_code);
      rate[n] = scale_rate(A);
      if constexpr (!Tile::kTimeB)
        load_as(constant_B[n], args.B.start + my_channel() * args.B.channel + my_state(n) * args.B.state, args.B.code);
      if constexpr (!Tile::kTimeC)
        load_as(constant_C[n], args.C.start + my_channel() * args.C.channel + my_state(n) * args.C.state, args.C.code);
    });
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) total(0, c) = total(1, c) = R(0);
    for (int c = threadIdx.x; c < Tile::kChannels; c += Tile::kThreads) {
      const long long d = at.first_channel + c;
      const bool there = c < at.channels;
      shared.bias[c] =
          there && args.delta_bias ? load_real<R>(args.delta_bias + d * args.bias_channel, args.bias_code) : R(0);
      shared.D[c] = there && args.D ? load_real<R>(args.D + d * args.D_channel, args.D_code) : R(0);
    }
    __syncthreads();
    const long long last = (long long)at.part * args.part + args.part;
    for (batch = (long long)at.part * args.part; batch < (last < args.batch ? last : args.batch); ++batch) walk();
    if constexpr (!kSummarise) leave_parts();
  }

  // This block's sums over batch and time.
  __device__ __forceinline__ void leave_parts() {
    const long long row = at.part * args.chunks + at.chunk;
    each_state([&](int n) {
      const long long i = (row * args.channels + my_channel()) * args.state + my_state(n);
      reinterpret_cast<S*>(args.part_A)[i] = dA[n];
      if constexpr (!Tile::kTimeB) reinterpret_cast<S*>(args.grad_B.start)[i] = constant_dB[n];
      if constexpr (!Tile::kTimeC) reinterpret_cast<S*>(args.grad_C.start)[i] = constant_dC[n];
    });
    if (args.leaves_partial_sum) return;
    // Each thread has sums of kColumns channels: entry (thread, column) of a table where the sums over states were.
    R* const table = shared.sums[0];
    static_assert(sizeof(shared.sums) >= 2 * sizeof(R) * Tile::kThreads * Tile::kColumns, "the table fits");
    __syncthreads();
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) {
      table[threadIdx.x * Tile::kColumns + c] = total(0, c);
      table[(Tile::kThreads + threadIdx.x) * Tile::kColumns + c] = total(1, c);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < at.channels; c += Tile::kThreads) {
      constexpr int kShare = Grid::kPerRow;
      R sum[2] = {R(0), R(0)};
      for (int k = 0; k < Tile::kThreads * Tile::kColumns / Tile::kChannels; ++k) {
        // The k-th thread with items of channel c, and the column that they are in.
        const int thread = Tile::kTimeFast ? c % Grid::kHop * kShare + k : c / 2 + k * kShare;
        const int column = Tile::kTimeFast ? c / Grid::kHop : c % 2;
        sum[0] += table[thread * Tile::kColumns + column];
        sum[1] += table[(Tile::kThreads + thread) * Tile::kColumns + column];
      }
      const long long i = row * args.channels + at.first_channel + c;
      if (args.part_D) reinterpret_cast<R*>(args.part_D)[i] = sum[0];
      if (args.part_bias) reinterpret_cast<R*>(args.part_bias)[i] = sum[1];
    }
  }
};

template <class Tile, bool kSummarise>
__device__ __forceinline__ void selective_scan_backward(const SelectiveBackwardArgs& args, unsigned char* memory) {
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const long long tiles = (args.channels / args.groups + Tile::kChannels - 1) / Tile::kChannels;
  const long long items = args.parts * args.groups * tiles * args.chunks;
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    __syncthreads();
    Backward<Tile, kSummarise>(args, shared, locate_backward<Tile>(args, item)).run();
  }
}
