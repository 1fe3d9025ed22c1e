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
//   warp    8 channels x 4 groups of kStates states, a slice, a group in 8 neighbouring lanes. So the sums over the
//           states are sums over lanes, and so are those over channels up to the last, over the block's warps.
//   block   kChannels channels
//   grid    (part of the batch, group of B and C, tile of channels, chunk of time), chunks fastest. A block does the
//           rows of its part of the batch one after the other and leaves one partial sum of dA, dD and d delta_bias. A
//           tile never straddles two groups of B and C.
//
// Where there are more states than a slice holds, a block does the slices of an interval one after the other, and keeps
// what its threads have of each in memory meanwhile.
//
// The work on an interval has three stages, with a barrier before and after the second:
//
//   commit   the raw items are converted into shared memory: (delta, delta * u) and dy by step and channel, B and C by
//            step and state, all in the accumulation type; and delta's slope, for the finish
//   compute  the states that enter each part of the interval, then from its last part to the first: the states before
//            each step again, and backwards p and all sums
//   finish   the sums in shared memory become du, d delta and dz, and over the warps dB and dC
//
// The raw items stay in the slots of their thread from commit to finish. Where there is room for two sets of them
// (kSets), those of the next interval arrive meanwhile. A warp waits longer for memory than for arithmetic, and the
// compiler moves no read of shared memory before a write to it or across a branch: so what a stage takes is read at its
// beginning, and a part's first steps before the last sums of the part before are stored.
//
// A sum over lanes that every lane holds several values of (steps, states) sends half of them away and keeps the other
// half at each step of a butterfly, so that n values cost n shuffles and not 5n. Which state a register holds differs
// from lane to lane (local n is state n ^ order of the group): then every lane keeps the same register, and the first
// steps of the butterfly need no selection. B and C lie in shared memory in all kStates orders.
//
// Where time is cut into chunks, the kernel run with kSummarise leaves each chunk's map from the p that comes from its
// right to the p that leaves on its left, and a linear_scan over them, last chunk first, makes seed[c] of what leaves.
// Its chunks are finer, a whole number of them in a chunk of the gradients: it needs little memory, so more blocks of
// it are resident.
//
// A step past the end, masked or outside of all sequences has gate 1 and input 0, and dy, B and C are 0; its gradients
// are set to 0 where they are stored, and it adds none to a sum. Where a sequence starts or the state is reset, p is
// cut.
#include "activations.cuh"
#include "operators.cuh"
#include "run_stream.cuh"
#include "selective_backward_args.cuh"
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

// One row's share of a block. It is in shared memory, as there are no registers to spare.
struct BackwardItem {
  long long number;
  int exists;  // or else the block has no more
  int part, group, tile, chunk;
  int slice;     // of the states, where one is summarised
  int channels;  // how many of the tile's channels exist
  long long first_channel;
  long long begin, end;  // positions
  long long rows_end;    // the part's
};

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
  static constexpr int kSets = sizeof(Item) <= 2 ? 2 : 1;  // of slots
  static constexpr int kTogether = kAbreast / kStates;     // steps whose sums over channels are one butterfly
  static constexpr int kParts = (sizeof(S) == 4 ? kStateInterval / 2 : kStateInterval) / kSteps;  // entered at once
  using Grid = RunGrid<kChannels, kThreads, kTimeFast>;
  using CoupleGrid = RunGrid<kSlice, kThreads, kTimeFast>;
  using Stream = RunStream<Grid, Item, kThreads>;
  using CoupleStream = RunStream<CoupleGrid, CoupleItem, kThreads>;
  static constexpr int kItems = Grid::kItems;
  static constexpr int kKept = 3 + 2 * !kTimeB + 2 * !kTimeC;  // rows of states that are kept of a slice
  static constexpr int kOwned = kTimeFast ? 1 : kItems;        // channels of a thread's items
  // Rows of shared memory, padded so that neither accesses along channels nor those along time share a bank. Items of a
  // row lie in columns: those that a thread writes in one access, and beside them those of its neighbour.
  static constexpr int kDriveRow = kChannels + (kTimeFast ? 1 : 8), kRow = kChannels + (kTimeFast ? 9 : 8);
  static constexpr int kSums = kStateInterval * kRow + (kTimeFast ? 18 : 16);
  static constexpr int kOrder = kStateInterval * kSlice + 32 / (int)sizeof(S);  // from one order of B or C to the next
  static constexpr int kBeside = sizeof(R) == 4 ? 2 : 1;                        // channels in one access
  static_assert(kChannels % kAbreast == 0 && kThreads % 32 == 0, "whole warps");
  static_assert(kItems % kBeside == 0 && (kTimeFast || kChannels % kItems == 0), "whole accesses");
  static_assert(CoupleGrid::kItems % kStates == 0, "a run of B or C is whole groups");
  static_assert(kSteps % 4 == 0 && kSteps % kTogether == 0 && kStateInterval % kSteps == 0,
                "sums over lanes take several steps together");

  // The column of a channel, and the channel of a column.
  static __device__ __forceinline__ int column_of(int channel) {
    if (kTimeFast) return channel;
    return (channel % kItems / kBeside * Grid::kRuns + channel / kItems) * kBeside + channel % kBeside;
  }
  static __device__ __forceinline__ int channel_of(int column) {
    constexpr int kRuns = kChannels / kItems;
    return column / kBeside % kRuns * kItems + column / kBeside / kRuns * kBeside + column % kBeside;
  }

  // kCount values of each thread, in pieces of 16 bytes: those of neighbours lie beside each other.
  template <class T, int kCount>
  struct Own {
    static constexpr int kPiece = kCount * sizeof(T) < 16 ? kCount : 16 / (int)sizeof(T);
    T piece[kCount / kPiece][kThreads][kPiece];

    __device__ __forceinline__ T& of(int thread, int i) { return piece[i / kPiece][thread][i % kPiece]; }
    __device__ __forceinline__ void read(int thread, T (&to)[kCount]) const {
#pragma unroll
      for (int i = 0; i < kCount; i += kPiece) {
        T values[kPiece];
        read_row(values, piece[i / kPiece][thread]);
#pragma unroll
        for (int k = 0; k < kPiece; ++k) to[i + k] = values[k];
      }
    }
    __device__ __forceinline__ void write(int thread, const T (&from)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; i += kPiece) {
        T values[kPiece];
#pragma unroll
        for (int k = 0; k < kPiece; ++k) values[k] = from[i + k];
        write_row(piece[i / kPiece][thread], values);
      }
    }
  };

  // What summaries need.
  struct Summary {
    alignas(16) BackwardItem at;
    alignas(16) Drive<R> drive[kStateInterval][kDriveRow];
    alignas(16) R dy[kStateInterval][kRow];
    alignas(16) S C[kTimeC ? kStates : 1][kTimeC ? kOrder : 1];  // by order, and step, group of states and place in it
    alignas(16) R bias[kChannels];
    alignas(16) char* inputs[6][kThreads];
    alignas(16) unsigned channel[kThreads];
    // Slots of the streams.
    alignas(16) typename Stream::Slots delta;  // not needed any more after its commit
    alignas(16) typename Stream::Slots grad_output[kSets];
    alignas(16) typename Stream::Slots z[kSets];
    alignas(16) typename CoupleStream::Slots raw_C;
  };
  struct Shared : Summary {
    alignas(16) S B[kTimeB ? kStates : 1][kTimeB ? kOrder : 1];
    alignas(16) S entering[kParts][kThreads][kStates];
    alignas(16) S saved[kThreads][kStates];  // what enters the interval, in the order of memory
    alignas(16) R sums[2][kSums];            // over the states: of B g, of A q; those of C h take dy's place
    alignas(16) S dB[kWarps][kTimeB ? kStateInterval : 1][kSlice];  // over a warp's channels
    alignas(16) S dC[kWarps][kTimeC ? kStateInterval : 1][kSlice];
    alignas(16) char* gradients[5][kThreads];
    alignas(16) S dA[sizeof(R) > 4 ? kThreads : 1][kStates];
    alignas(16) const S* next_saved[sizeof(R) > 4 ? kThreads : 1];
    alignas(16) S constant_C[sizeof(R) > 4 && !kTimeC ? kThreads : 1][kStates];
    alignas(16) Own<R, kItems> slope;      // of delta in what it is made of
    alignas(16) Own<R, kOwned> totals[2];  // of a thread's items, for dD and d delta_bias
    alignas(16) R D[kChannels];
    alignas(16) typename Stream::Slots u[kSets];
    alignas(16) typename CoupleStream::Slots raw_B;
  };
};

template <class Tile, bool kSummarise>
__device__ __forceinline__ BackwardItem locate_backward(const SelectiveBackwardArgs& args, long long item) {
  const long long in_group = args.channels / args.groups;
  const long long tiles = (in_group + Tile::kChannels - 1) / Tile::kChannels;
  BackwardItem at;
  at.number = item;
  at.chunk = (int)(item % args.chunks + (kSummarise ? args.left_out : 0));
  item /= args.chunks;
  at.tile = (int)(item % tiles);
  item /= tiles;
  at.group = (int)(item % args.groups);
  item /= args.groups;
  at.part = (int)(item % args.parts);
  at.slice = (int)(item / args.parts);
  at.exists = at.slice < (kSummarise ? args.slices : 1);
  const long long rows_end = (at.part + 1) * args.part;
  at.rows_end = rows_end < args.batch ? rows_end : args.batch;
  at.first_channel = at.group * in_group + (long long)at.tile * Tile::kChannels;
  const long long left = in_group - (long long)at.tile * Tile::kChannels;
  at.channels = (int)(left < Tile::kChannels ? left : Tile::kChannels);
  at.begin = at.chunk * args.chunk;
  at.end = at.begin + args.chunk < args.length ? at.begin + args.chunk : args.length;
  return at;
}

// What there is of an interval, and what is special about it.
struct Interval {
  int number, steps;
  StepMarks marks;  // masked beyond the last step, and a reset where nothing enters the row
  bool plain;       // all is there, as vectors
  __device__ __forceinline__ bool marked() const { return marks.masked | marks.resets | marks.starts | marks.ends; }
};

template <class Tile, bool kSummarise>
struct MemoryOf {
  using type = typename Tile::Shared;
};
template <class Tile>
struct MemoryOf<Tile, true> {
  using type = typename Tile::Summary;
};
template <class Tile, bool kSummarise>
using Memory = typename MemoryOf<Tile, kSummarise>::type;

template <class Tile, bool kSummarise>
struct Backward {
  using R = typename Tile::R;
  using S = typename Tile::S;
  using Item = typename Tile::Item;
  using Grid = typename Tile::Grid;
  using CoupleGrid = typename Tile::CoupleGrid;
  using Shared = Memory<Tile, kSummarise>;
  static constexpr int kStates = Tile::kStates, kSteps = Tile::kSteps, kItems = Tile::kItems;

  // All channels and slices are whole, and as vectors; no state enters the first step; there are several slices.
  enum { kWhole = 1, kFromZero = 2, kSeveral = 4 };

  const SelectiveBackwardArgs& args;
  Shared& shared;
  const BackwardItem& at;
  const unsigned thread;
  const int lane, own, column, group, order;  // own: number of the channel in the order of threads
  int slice, my_states;                       // the slice, and how many of kStates exist, if > 0
  const int length;                           // of the chunk
  const int special;                          // of kWhole, kFromZero, kSeveral: at hand, not in memory
  long long batch;
  S rate[kStates], p[kStates];
  // Doubles leave too few registers for these: the saved state that is next, of the first state of its group; the sums
  // of dA; C where it is constant.
  static constexpr bool kInMemory = sizeof(R) > 4 && !kSummarise;
  const S* saved_here;
  S dA_here[kInMemory ? 1 : kStates];
  S constant_B[Tile::kTimeB ? 1 : kStates], constant_C[Tile::kTimeC ? 1 : kStates];
  S constant_dB[Tile::kTimeB ? 1 : kStates], constant_dC[Tile::kTimeC ? 1 : kStates];
  DeltaSum<R> delta_sum;
  bool resets;

  __device__ __forceinline__ Backward(const SelectiveBackwardArgs& args, Shared& shared, const BackwardItem& at)
      : args(args),
        shared(shared),
        at(at),
        thread(threadIdx.x),
        lane(thread % 32),
        own(thread / 32 * Tile::kAbreast + lane % Tile::kTogether * kStates + lane % Tile::kAbreast / Tile::kTogether),
        column(Tile::column_of(Tile::channel_of(own))),
        group(lane / Tile::kAbreast),
        order(own % kStates),
        length((int)(at.end - at.begin)),
        special((args.plain && at.channels == Tile::kChannels ? kWhole : 0) |
                (args.starts_from_zero && at.chunk == 0 ? kFromZero : 0) | (args.slices > 1 ? kSeveral : 0)) {
    shared.channel[thread] = Tile::channel_of(own);
  }

  // This thread's first item of the row's chunk in each array and its channel, in shared memory, as there are no
  // registers to spare.
  enum { kU, kDelta, kZ, kGradOutput, kB, kC };
  enum { kGradU, kGradDelta, kGradZ, kGradB, kGradC };
  __device__ __forceinline__ char*& input(int of) const { return shared.inputs[of][thread]; }
  __device__ __forceinline__ char*& gradient(int of) const { return shared.gradients[of][thread]; }
  __device__ __forceinline__ const S*& saved() {
    if constexpr (kInMemory)
      return shared.next_saved[thread];
    else
      return saved_here;
  }
  __device__ __forceinline__ auto& dA() {
    if constexpr (kInMemory)
      return shared.dA[thread];
    else
      return dA_here;
  }
  __device__ __forceinline__ auto& held_C() {
    if constexpr (kInMemory && !Tile::kTimeC)
      return shared.constant_C[thread];
    else
      return constant_C;
  }
  __device__ __forceinline__ unsigned channel() const {
    return kInMemory ? Tile::channel_of(own) : shared.channel[thread];
  }
  __device__ __forceinline__ long long my_channel() const { return at.first_channel + channel(); }
  // The state that local n is.
  __device__ __forceinline__ int local_state(int n) const { return n ^ order; }
  __device__ __forceinline__ long long my_state(int n) const {
    return slice * Tile::kSlice + group * kStates + local_state(n);
  }
  __device__ __forceinline__ bool have(int n) const { return local_state(n) < my_states; }
  __device__ __forceinline__ int states_of(int slice) const { return (int)args.state - slice * Tile::kSlice; }
  __device__ __forceinline__ void turn_to(int which) {
    slice = kSummarise ? at.slice : which;
    my_states = states_of(slice) - group * kStates - ((int)channel() < at.channels ? 0 : 1 << 30);
  }

  // What a thread has of a slice is kept in memory while another has its turn, where there are several.
  __device__ __forceinline__ bool several() const { return !kSummarise && (special & kSeveral); }
  __device__ __forceinline__ bool is_last() const { return !several() || slice == args.slices - 1; }
  template <class Function>
  __device__ __forceinline__ void each_slice(Function function) {
    int which = 0;
    do {
      function(which);
    } while (several() && ++which < args.slices);
  }
  template <class Function>
  __device__ __forceinline__ void each_kept(Function function) {
    typename Tile::template Own<S, kStates>* kept =
        reinterpret_cast<typename Tile::template Own<S, kStates>*>(args.kept);
    kept += (at.number * args.slices + slice) * Tile::kKept;
    function(*kept++, rate);
    function(*kept++, p);
    function(*kept++, dA());
    if constexpr (!Tile::kTimeB) function(*kept++, constant_B), function(*kept++, constant_dB);
    if constexpr (!Tile::kTimeC) function(*kept++, held_C()), function(*kept++, constant_dC);
  }
  __device__ __forceinline__ void keep_slice() {
    if (several()) each_kept([&](auto& kept, const S(&values)[kStates]) { kept.write(thread, values); });
  }
  __device__ __forceinline__ void take_slice(int which) {
    turn_to(which);
    if (several()) each_kept([&](auto& kept, S(&values)[kStates]) { kept.read(thread, values); });
  }

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
    if ((special & kFromZero) && number == 0) is.marks.resets |= 1;
    is.plain = (special & kWhole) && is.steps == kStateInterval && (Tile::kSegmented || !is.marked());
    return is;
  }
  // Which of this thread's items there are.
  template <bool kPlain>
  __device__ __forceinline__ unsigned exist(const Interval& is) const {
    return kPlain ? Grid::kWhole : Grid::template exist<false>(thread, 0, is.steps, at.channels);
  }
  template <bool kPlain>
  __device__ __forceinline__ unsigned couples_exist(const Interval& is, int slice) const {
    return kPlain ? CoupleGrid::kWhole : CoupleGrid::template exist<false>(thread, 0, is.steps, states_of(slice));
  }

  __device__ __forceinline__ char* first(const SequenceArray& array) const {
    if (!array.start) return nullptr;
    const typename Tile::Stream stream(
        array.start + batch * array.batch + at.first_channel * array.channel + at.begin * array.time, array.time,
        array.channel, thread);
    return stream.at;
  }
  __device__ __forceinline__ char* first(const CoupleArray& array) const {
    const typename Tile::CoupleStream stream(
        array.start + batch * array.batch + at.group * array.group + at.begin * array.time, array.time, array.state,
        thread);
    return stream.at;
  }
  // `step` steps after `first`; two multiplications, as neither is 64 by 64 bits.
  static __device__ __forceinline__ char* after(char* first, int step, long long time) {
    return first + (unsigned)step * (unsigned long long)time;
  }
  // That before the items of interval `number`, as what is next in a stream.
  static __device__ __forceinline__ typename Tile::Stream stream(char* first, const SequenceArray& array, int number) {
    return {after(first, number * kStateInterval, array.time), array.time, array.channel};
  }
  static __device__ __forceinline__ typename Tile::CoupleStream stream(char* first, const CoupleArray& array,
                                                                       int number, int slice) {
    return {after(after(first, number * kStateInterval, array.time), slice * Tile::kSlice, array.state), array.time,
            array.state};
  }

  // This thread's items of an interval in rows of shared memory that begin at `rows`.
  template <class T>
  __device__ __forceinline__ void write_items(T* rows, int row, const T (&from)[kItems]) const {
    constexpr int kBeside = Tile::kTimeFast ? 1 : Tile::kBeside;
#pragma unroll
    for (int i = 0; i < kItems; i += kBeside) {
      T beside[kBeside];
#pragma unroll
      for (int k = 0; k < kBeside; ++k) beside[k] = from[i + k];
      write_row(rows + my_time(i) * row + my_column(i), beside);
    }
  }
  // The same back; steps from `steps` on are zero.
  template <bool kPlain, class T>
  __device__ __forceinline__ void read_items(T (&to)[kItems], const T* rows, int row, int steps) const {
    constexpr int kBeside = Tile::kTimeFast ? 1 : Tile::kBeside;
#pragma unroll
    for (int i = 0; i < kItems; i += kBeside) {
      T beside[kBeside] = {};
      if (kPlain || my_time(i) < steps) read_row(beside, rows + my_time(i) * row + my_column(i));
#pragma unroll
      for (int k = 0; k < kBeside; ++k) to[i + k] = beside[k];
    }
  }
  // Where this thread's items are in a grid, without a sign that the compiler would divide for.
  template <class Grid>
  __device__ __forceinline__ int time_of(int item) const {
    return Grid::kAlongTime ? thread % Grid::kRuns * Grid::kItems + item : thread / Grid::kRuns;
  }
  template <class Grid>
  __device__ __forceinline__ int place_of(int item) const {
    return Grid::kAlongTime ? thread / Grid::kRuns : thread % Grid::kRuns * Grid::kItems + item;
  }
  __device__ __forceinline__ int my_time(int item) const { return time_of<Grid>(item); }
  __device__ __forceinline__ int my_place(int item) const { return place_of<Grid>(item); }
  __device__ __forceinline__ int my_column(int item) const {
    if (Tile::kTimeFast) return my_place(item);
    return (item / Tile::kBeside * Grid::kRuns + thread % Grid::kRuns) * Tile::kBeside + item % Tile::kBeside;
  }
  // What there is of each channel, of this thread's items.
  __device__ __forceinline__ void of_items(R (&to)[kItems], const R* channels) const {
    if constexpr (Tile::kTimeFast) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) to[i] = channels[my_place(0)];
    } else {
      read_row(to, channels + my_place(0));
    }
  }

  // --- load and commit ------------------------------------------------------------------------------------------

  static __device__ __forceinline__ int set_of(const Interval& is) { return is.number & (Tile::kSets - 1); }

  // The sequences come with the first slice.
  template <bool kPlain>
  __device__ __forceinline__ void start_loads(const Interval& is, int slice) {
    const int set = set_of(is);
    const unsigned there = exist<kPlain>(is), couples_there = couples_exist<kPlain>(is, slice);
    char* from[6];  // read before the first copy: no read would be moved before one
#pragma unroll
    for (int of = 0; of < 6; ++of)
      if (!kSummarise || (of != kU && of != kB)) from[of] = input(of);
    auto start = [&](int of, const SequenceArray& array, auto& slots) {
      if ((kPlain && of != kZ) || array.start)
        stream(from[of], array, is.number).template start<kPlain>(slots, thread, array.vector, there);
    };
    if (kSummarise || slice == 0) {
      start(kDelta, args.delta, shared.delta);
      start(kGradOutput, args.grad_output, shared.grad_output[set]);
      start(kZ, args.z, shared.z[set]);
      if constexpr (!kSummarise) start(kU, args.u, shared.u[set]);
    }
    auto start_couple = [&](int of, const CoupleArray& array, auto& slots) {
      stream(from[of], array, is.number, slice).template start<kPlain>(slots, thread, array.vector, couples_there);
    };
    if constexpr (Tile::kTimeB && !kSummarise) start_couple(kB, args.B, shared.raw_B);
    if constexpr (Tile::kTimeC) start_couple(kC, args.C, shared.raw_C);
  }

  // The raw items of an interval; what does not exist is 0, and all if there is no such array. In a plain interval
  // there is.
  template <bool kPlain>
  __device__ __forceinline__ void raw(char* from, const SequenceArray& array, const typename Tile::Stream::Slots& slots,
                                      const Interval& is, R (&to)[kItems]) const {
    if (kPlain || array.start) {
      stream(from, array, is.number + 1)
          .template values<kPlain>(slots, thread, array.vector, array.wide, exist<kPlain>(is), 0, to);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) to[i] = R(0);
    }
  }

  // This thread's run of B or C, in all orders.
  __device__ __forceinline__ void leave_in_all_orders(S (*to)[Tile::kOrder],
                                                      const S (&value)[CoupleGrid::kItems]) const {
    const int time = time_of<CoupleGrid>(0), place = place_of<CoupleGrid>(0);
    const int at = time * Tile::kSlice + place / kStates * kStates;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if constexpr (Tile::kTimeFast) {
        // At each moment lanes are at different orders, or else they would share a bank.
        const int order = (i + thread) % kStates;
#pragma unroll
        for (int k = 0; k < CoupleGrid::kItems; ++k)
          to[order][at + k * Tile::kSlice + (place % kStates ^ order)] = value[k];
      } else {
#pragma unroll
        for (int k = 0; k < CoupleGrid::kItems; k += kStates) {
          S row[kStates];
#pragma unroll
          for (int n = 0; n < kStates; ++n) row[n] = value[k + (n ^ i)];
          write_row(&to[i][at + k], row);
        }
      }
    }
  }

  // From delta + bias to delta and its slope in that, which is -1 beyond the limits: there NaN has no gradient either.
  template <bool kPlain>
  __device__ __forceinline__ void activate(R (&x)[kItems], R (&slope)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) slope[i] = R(1);
    if (args.softplus) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        slope[i] = sigmoid(x[i]);
        x[i] = softplus(x[i]);
      }
    }
    if (!kPlain && args.limited) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!(x[i] >= limit(args, 0, R()) && x[i] <= limit(args, 1, R()))) slope[i] = R(-1);
        x[i] = clip(x[i], limit(args, 0, R()), limit(args, 1, R()));
      }
    }
  }

  // Brings an interval into shared memory: the one place where a step is formed. What was loaded is read first, so that
  // a warp waits for it once.
  template <bool kPlain>
  __device__ __forceinline__ void commit(const Interval& is) {
    R d[kItems], u[kItems], dy[kItems];
    S B[CoupleGrid::kItems], C[CoupleGrid::kItems];
    raw<kPlain>(input(kDelta), args.delta, shared.delta, is, d);
    if constexpr (!kSummarise) raw<kPlain>(input(kU), args.u, shared.u[set_of(is)], is, u);
    raw<kPlain>(input(kGradOutput), args.grad_output, shared.grad_output[set_of(is)], is, dy);
    auto raw_couple = [&](char* from, const CoupleArray& array, const auto& slots, S(&value)[CoupleGrid::kItems]) {
      stream(from, array, is.number + 1, slice)
          .template values<kPlain>(slots, thread, array.vector, array.wide, couples_exist<kPlain>(is, slice), 0, value);
      if ((Tile::kSegmented || !kPlain) && is.marks.masked) {
#pragma unroll
        for (int i = 0; i < CoupleGrid::kItems; ++i)
          if (is.marks.masked >> time_of<CoupleGrid>(i) & 1) value[i] = Scalar<S>::zero();
      }
    };
    if constexpr (Tile::kTimeB && !kSummarise) raw_couple(input(kB), args.B, shared.raw_B, B);
    if constexpr (Tile::kTimeC) raw_couple(input(kC), args.C, shared.raw_C, C);
    // The sums of C h of the slice before have taken the place of dy.
    if (kSummarise || slice == 0 || args.z.start) commit_sequences<kPlain>(is, d, u, dy);
    if constexpr (Tile::kTimeB && !kSummarise) leave_in_all_orders(shared.B, B);
    if constexpr (Tile::kTimeC) leave_in_all_orders(shared.C, C);
  }
  template <bool kPlain>
  __device__ __forceinline__ void commit_sequences(const Interval& is, R (&d)[kItems], const R (&u)[kItems],
                                                   R (&dy)[kItems]) {
    R d_u[kItems], other[kItems], slope[kItems];
    of_items(other, shared.bias);
#pragma unroll
    for (int i = 0; i < kItems; ++i) d[i] += other[i];
    activate<kPlain>(d, slope);
    if constexpr (!kSummarise) shared.slope.write(thread, slope);
    if (args.z.start) {
      raw<kPlain>(input(kZ), args.z, shared.z[set_of(is)], is, other);
#pragma unroll
      for (int i = 0; i < kItems; ++i) dy[i] *= silu(other[i]);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) d_u[i] = kSummarise ? R(0) : u[i] * d[i];
    if (Tile::kSegmented || !kPlain) {
      const unsigned still = is.marks.masked | (kSummarise ? is.marks.resets : 0);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (still >> my_time(i) & 1) d[i] = R(0);
        if (is.marks.masked >> my_time(i) & 1) d_u[i] = dy[i] = R(0);
      }
    }
    Drive<R> drive[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) drive[i] = {d[i], d_u[i]};
    write_items(shared.drive[0], Tile::kDriveRow, drive);
    write_items(shared.dy[0], Tile::kRow, dy);
  }

  // --- compute ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void read_B(S (&B)[kStates], int step) const {
    if constexpr (Tile::kTimeB) read_row(B, &shared.B[order][step * Tile::kSlice + group * kStates]);
#pragma unroll
    for (int n = 0; n < kStates && !Tile::kTimeB; ++n) B[n] = constant_B[Tile::kTimeB ? 0 : n];
  }
  __device__ __forceinline__ void read_C(S (&C)[kStates], int step) const {
    if constexpr (Tile::kTimeC) read_row(C, &shared.C[order][step * Tile::kSlice + group * kStates]);
    if constexpr (!Tile::kTimeC && kInMemory) read_row(C, shared.constant_C[thread]);
#pragma unroll
    for (int n = 0; n < kStates && !Tile::kTimeC && !kInMemory; ++n) C[n] = constant_C[Tile::kTimeC ? 0 : n];
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
  static constexpr int kAtOnce =
      kMarked || (Tile::kSegmented && Tile::kTimeFast) || sizeof(S) > 4 ? kSteps : 2 * kSteps;

  // Steps that are loaded together and whose sums over lanes are added together, so that a warp waits less.
  static constexpr int kBatch = 4;
  static_assert(kBatch == Tile::kGroups, "the sums of C h of a batch are one butterfly");
  static_assert(kBatch % Tile::kTogether == 0 && kBatch % 2 == 0 && kSteps % kBatch == 0, "whole butterflies");

  // What kBatch steps take on the way forwards.
  struct Batch {
    Drive<R> drive[kBatch];
    R dy[kBatch];
    S B[kBatch][kStates];
  };
  __device__ __forceinline__ void load(Batch& batch, int first) const {
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      batch.drive[s] = shared.drive[first + s][column];
      batch.dy[s] = shared.dy[first + s][column];
      read_B(batch.B[s], first + s);
    }
  }

  // A step that resets has gate 1, of a state that is made 0: an infinite gate would make NaN of it.
  template <bool kMarked>
  static __device__ __forceinline__ R gate_delta(const Drive<R>& drive, const StepMarks& marks, int step) {
    return kMarked && marks.resets >> step & 1 ? R(0) : drive.delta;
  }

  // From the state that enters step `first` to that which enters kCount steps later.
  template <bool kMarked, int kCount>
  __device__ __forceinline__ void advance(const Interval& is, int first, S (&h)[kStates]) {
    const unsigned cuts = is.marks.resets | is.marks.starts;
#pragma unroll
    for (int i = 0; i < kCount; i += kBatch) {
      Drive<R> drives[kBatch];
      S B[kBatch][kStates];
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        drives[s] = shared.drive[first + i + s][column];
        read_B(B[s], first + i + s);
      }
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        const int step = first + i + s;
        if (kMarked && cuts >> step & 1) enter(h, is.marks.resets >> step & 1, position(is.number) + step);
        const R delta = gate_delta<kMarked>(drives[s], is.marks, step);
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          h[n] = apply(Affine<S>{gate_of(delta, rate[n]), multiply(drives[s].delta_u, B[s][n])}, h[n]);
      }
    }
  }

  // The steps of an interval in parts of kSteps, the last first; a part begins with the state that enters it. Of as
  // many parts as there is memory for, these states are computed at once, those of earlier parts again later.
  template <bool kMarked, bool kGated>
  __device__ __forceinline__ void compute_all(const Interval& is) {
    constexpr int kSteps = kAtOnce<kMarked>, kParts = Tile::kParts, kReach = kParts * kSteps;
#pragma unroll 1
    for (int first = kMarked ? (is.steps - 1) / kReach * kReach : kStateInterval - kReach; first >= 0;
         first -= kReach) {
      S h[kStates];
#pragma unroll
      for (int n = 0; n < kStates; ++n) h[n] = shared.saved[thread][local_state(n)];
      for (int step = 0; step < first; step += kSteps) advance<kMarked, kSteps>(is, step, h);
      if (first == 0) start_next_saved(is.number);
      int parts = kParts;
      Batch batch;
      if constexpr (kMarked) {
        parts = ((is.steps - first < kReach ? is.steps - first : kReach) + kSteps - 1) / kSteps;
        for (int part = 0; part < parts; ++part) {
          write_row(shared.entering[part][thread], h);
          if (part < parts - 1) advance<kMarked, kSteps>(is, first + part * kSteps, h);
        }
        load(batch, first + (parts - 1) * kSteps);
      } else {  // all of it as one piece of code, stores last: no load would be moved before one
        S entering[kParts][kStates];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int n = 0; n < kStates; ++n) entering[part][n] = h[n];
          if (part < kParts - 1) advance<kMarked, kSteps>(is, first + part * kSteps, h);
        }
        load(batch, first + (kParts - 1) * kSteps);
#pragma unroll
        for (int part = 0; part < kParts - 1; ++part) write_row(shared.entering[part][thread], entering[part]);
      }
#pragma unroll 1
      for (int part = parts - 1; part >= 0; --part) compute<kMarked, kGated>(is, first, part, h, batch);
    }
  }

  // The steps of this part, of those from `begin` on: h enters it, and `batch` is loaded with its first ones. They are
  // left so for the part before it. kGated: the sums of C h are wanted, for dz.
  template <bool kMarked, bool kGated>
  __device__ __forceinline__ void compute(const Interval& is, int begin, int part, S (&h)[kStates], Batch& batch) {
    constexpr int kSteps = kAtOnce<kMarked>;
    const StepMarks marks = is.marks;
    const unsigned cuts = marks.resets | marks.starts;
    const int first = begin + part * kSteps;
    S gate[kSteps][kStates], before[kSteps][kStates], C[kBatch][kStates];
    // With registers to spare what a step takes is kept, else read again on the way back.
    constexpr bool kKeeps = kSteps > Tile::kSteps && !kGated;
    Drive<R> drives[kSteps];
    R dys[kSteps], outputs[kSteps / kBatch];
    auto load_C = [&](int i) {
#pragma unroll
      for (int s = 0; s < kBatch; ++s) read_C(C[s], first + i + s);
    };
    if (kGated) load_C(0);
#pragma unroll
    for (int i = 0; i < kSteps; i += kBatch) {
      S dC[kBatch][kStates];
      R y[kBatch];
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        const int step = first + i + s;
        if (kMarked && cuts >> step & 1) enter(h, marks.resets >> step & 1, position(is.number) + step);
        const Drive<R> drive = drives[i + s] = batch.drive[s];
        const R dy = dys[i + s] = batch.dy[s], delta = gate_delta<kMarked>(drive, marks, step);
        const bool masked = kMarked && marks.masked >> step & 1;
        y[s] = R(0);
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          gate[i + s][n] = gate_of(delta, rate[n]);
          before[i + s][n] = h[n];
          h[n] = apply(Affine<S>{gate[i + s][n], multiply(drive.delta_u, batch.B[s][n])}, h[n]);
          const S seen = masked ? Scalar<S>::zero() : h[n];
          if constexpr (Tile::kTimeC)
            dC[s][n] = contract_gradient(seen, dy, Scalar<S>::zero());
          else
            constant_dC[n] = contract_gradient(seen, dy, constant_dC[n]);
          if constexpr (kGated) y[s] = contract(C[s][n], seen, y[s]);
        }
      }
      // The next batch is loaded before the sums of this one are stored: no load would be moved before them.
      if (i + kBatch < kSteps) load(batch, first + i + kBatch);
      if (kGated || i + kBatch == kSteps) load_C(i + kBatch < kSteps ? i + kBatch : i);
      if constexpr (Tile::kTimeC) leave(dC, shared.dC, first + i);
      if constexpr (kGated) outputs[i / kBatch] = fold(y, threadIdx.x, Tile::kAbreast);
    }
    S B[kBatch][kStates];
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
#pragma unroll
      for (int n = 0; n < kStates; ++n) B[s][n] = batch.B[s][n];

    S dA_now[kStates];
#pragma unroll
    for (int i = kSteps - kBatch; i >= 0; i -= kBatch) {
      S dB[kBatch][kStates];
      R through_B[kBatch], through_A[kBatch];
      if ((i + kBatch) % Tile::kSteps == 0) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) dA_now[n] = Scalar<S>::zero();
      }
#pragma unroll
      for (int s = kBatch - 1; s >= 0; --s) {
        const int step = first + i + s;
        if (kMarked && Tile::kSegmented && marks.ends >> step & 1) add_last(position(is.number) + step);
        const Drive<R> drive = drives[i + s];
        const R dy = dys[i + s], delta = gate_delta<kMarked>(drive, marks, step);
        const bool masked = kMarked && marks.masked >> step & 1;
        const bool blind = kMarked && (marks.masked | marks.resets) >> step & 1;  // to what was before
        through_B[s] = through_A[s] = R(0);
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          const S g = contract_gradient(C[s][n], dy, p[n]), felt = masked ? Scalar<S>::zero() : g;
          if constexpr (Tile::kTimeB)
            dB[s][n] = multiply(drive.delta_u, felt);
          else
            constant_dB[n] = scaled_sum(drive.delta_u, felt, constant_dB[n]);
          through_B[s] = inner(B[s][n], felt, through_B[s]);
          p[n] = masked ? g : multiply(conjugate(gate[i + s][n]), g);
          const S q = blind ? Scalar<S>::zero() : multiply(conjugate(before[i + s][n]), p[n]);
          through_A[s] = multiply_rate(rate[n], q, through_A[s]);
          dA_now[n] = scaled_sum(delta, q, dA_now[n]);
        }
        if (kMarked && cuts >> step & 1)
          cut(marks.resets >> step & 1, marks.starts >> step & 1, position(is.number) + step);
      }
      if (i > 0) {
#pragma unroll
        for (int s = 0; s < kBatch; ++s) {
          if (!kKeeps) {
            drives[i - kBatch + s] = shared.drive[first + i - kBatch + s][column];
            dys[i - kBatch + s] = shared.dy[first + i - kBatch + s][column];
          }
          read_B(B[s], first + i - kBatch + s);
        }
        load_C(i - kBatch);
      } else {  // of the first part itself, and for nothing: a branch would be in the way
        const int next = part > 0 ? part - 1 : 0;
        read_row(h, shared.entering[next][thread]);
        load(batch, begin + next * kSteps);
      }
      if constexpr (Tile::kTimeB) leave(dB, shared.dB, first + i);
#pragma unroll
      for (int s = 0; s < kBatch; s += 2) {
        const R sums[2] = {halve(through_B[s], through_A[s], threadIdx.x, Tile::kAbreast),
                           halve(through_B[s + 1], through_A[s + 1], threadIdx.x, Tile::kAbreast)};
        shared.sums[lane / Tile::kAbreast % 2][(first + i + s + lane / (2 * Tile::kAbreast)) * Tile::kRow + column] =
            fold(sums, threadIdx.x, 2 * Tile::kAbreast);
      }
      if (i % Tile::kSteps == 0) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) dA()[n] = add(dA()[n], dA_now[n]);
      }
    }
    if (kGated && args.z.start) {  // or else a slice to come needs dy
      __syncwarp();                // no lane of this warp, whose channels these are, needs it any more
#pragma unroll
      for (int i = 0; i < kSteps / kBatch; ++i)
        shared.dy[first + kBatch * i + lane / Tile::kAbreast][column] = outputs[i];
    }
  }

  // The sums over the warp's channels of kBatch steps from `first` on. The number of the thread is the chip's own here:
  // of a copy this compiler does not see that a lane's selections are no branches.
  __device__ __forceinline__ void leave(S (&values)[kBatch][kStates], S (*to)[kStateInterval][Tile::kSlice],
                                        int first) {
#pragma unroll
    for (int s = 0; s < kBatch; s += Tile::kTogether) {
      S folded[Tile::kTogether];
#pragma unroll
      for (int k = 0; k < Tile::kTogether; ++k) folded[k] = fold_in_own_order(values[s + k], Tile::kTogether);
      const S sum = fold(folded, threadIdx.x, 1);
      to[thread / 32][first + s + lane % Tile::kTogether][turned(group, first + s) * kStates + order] = sum;
    }
  }
  // Where a group's sums are in a row of dB or dC: lanes along time would share a bank.
  static __device__ __forceinline__ int turned(int group, int step) {
    return Tile::kTimeFast ? group ^ step / 2 % Tile::kGroups : group;
  }

  // kCount steps from `first` on with nothing left but p, and the gates' product as the sum of delta.
  template <int kCount>
  __device__ __forceinline__ void summarise_steps(const Interval& is, int first) {
    const StepMarks marks = is.marks;
    R delta[kCount], dy[kCount];
    S C[kCount][kStates];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      delta[s] = shared.drive[first + s][column].delta;
      dy[s] = shared.dy[first + s][column];
      read_C(C[s], first + s);
    }
#pragma unroll
    for (int s = kCount - 1; s >= 0; --s) {
      const int step = first + s;
      if (Tile::kSegmented && marks.ends >> step & 1) add_last(position(is.number) + step);
      delta_sum.add(delta[s]);
#pragma unroll
      for (int n = 0; n < kStates; ++n)
        p[n] = multiply(conjugate(gate_of(delta[s], rate[n])), contract_gradient(C[s][n], dy[s], p[n]));
      if (Tile::kSegmented && (marks.resets | marks.starts) >> step & 1) cut(true, false, 0);
    }
  }
  __device__ __forceinline__ void summarise(const Interval& is) {
    int left = is.steps;
    for (; left % kBatch; --left) summarise_steps<1>(is, left - 1);
#pragma unroll 2
    for (; left; left -= kBatch) summarise_steps<kBatch>(is, left - kBatch);
    resets |= (is.marks.resets | is.marks.starts) != 0;
  }

  // --- finish -----------------------------------------------------------------------------------------------------

  // From the sums in shared memory to the gradients of an interval. What it reads there comes before what it stores.
  template <bool kPlain>
  __device__ __forceinline__ void finish(const Interval& is) {
    S dB[kRows][kStates], dC[kRows][kStates];
    if constexpr (Tile::kTimeB) add_warps<kPlain>(is, shared.dB, dB);
    if constexpr (Tile::kTimeC) add_warps<kPlain>(is, shared.dC, dC);
    R sums[3][kItems], v[kItems], dy[kItems], slope[kItems];
    Drive<R> drive[kItems];
    read_items<kPlain>(sums[0], shared.sums[0], Tile::kRow, is.steps);
    read_items<kPlain>(sums[1], shared.sums[1], Tile::kRow, is.steps);
    read_items<true>(drive, shared.drive[0], Tile::kDriveRow, kStateInterval);
    shared.slope.read(thread, slope);
    raw<kPlain>(input(kU), args.u, shared.u[set_of(is)], is, v);
    raw<kPlain>(input(kGradOutput), args.grad_output, shared.grad_output[set_of(is)], is, dy);
    char* to[5];
#pragma unroll
    for (int of = 0; of < 5; ++of) to[of] = gradient(of);
    if (args.z.start) read_items<kPlain>(sums[2], shared.dy[0], Tile::kRow, is.steps);
    if (several()) pass_sums(sums);
    if (is_last()) finish_items<kPlain>(is, to, sums, drive, slope, v, dy);
    if constexpr (Tile::kTimeB) store_couple<kPlain>(is, dB, args.grad_B, to[kGradB]);
    if constexpr (Tile::kTimeC) store_couple<kPlain>(is, dC, args.grad_C, to[kGradC]);
  }

  // Adds the sums over the states of earlier slices, and keeps them for the next.
  __device__ __forceinline__ void pass_sums(R (&sums)[3][kItems]) const {
    auto* kept = reinterpret_cast<typename Tile::template Own<R, kItems>*>(args.kept_sums) + at.number * 3;
#pragma unroll
    for (int k = 0; k < 3; ++k, ++kept) {
      if (k == 2 && !args.z.start) break;
      if (slice > 0) {
        R earlier[kItems];
        kept->read(thread, earlier);
#pragma unroll
        for (int i = 0; i < kItems; ++i) sums[k][i] += earlier[i];
      }
      if (!is_last()) kept->write(thread, sums[k]);
    }
  }

  template <bool kPlain>
  __device__ __forceinline__ void finish_items(const Interval& is, char* const (&to)[5], const R (&sums)[3][kItems],
                                               const Drive<R> (&drive)[kItems], const R (&slope)[kItems],
                                               const R (&v)[kItems], R (&dy)[kItems]) {
    const unsigned unseen = Tile::kSegmented || !kPlain ? is.marks.masked : 0;
    const unsigned there = exist<kPlain>(is);
    auto counts = [&](int i) { return (kPlain || there >> i & 1) && !(unseen >> my_time(i) & 1); };
    auto store = [&](const SequenceArray& array, int of, R(&values)[kItems], int code) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (!counts(i)) values[i] = R(0);
      const auto out = stream(to[of], array, is.number);
      if (kPlain || (array.vector && there == Grid::kWhole)) {
        out.store(values);
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          if (there >> i & 1) store_as(out.at + i * out.next, code, values[i]);
      }
    };
    // Adds to this thread's sums of its channels over time what `plus` adds of item i.
    auto add_up = [&](auto& totals, auto plus) {
      R sum[Tile::kOwned];
      totals.read(thread, sum);
      if constexpr (Tile::kTimeFast) {
        R here = R(0);
#pragma unroll
        for (int i = 0; i < kItems; ++i) here = plus(i, here);
        sum[0] += here;
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) sum[i] = plus(i, sum[i]);
      }
      totals.write(thread, sum);
    };

    R D[kItems], du[kItems], dx[kItems], dz[kItems];
    of_items(D, shared.D);
    if (args.z.start) {
      R gate[kItems];
      raw<kPlain>(input(kZ), args.z, shared.z[set_of(is)], is, gate);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        dz[i] = dy[i] * silu_slope(gate[i]) * multiply_add(D[i], v[i], sums[2][i]);
        dy[i] *= silu(gate[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      du[i] = multiply_add(sums[0][i], drive[i].delta, dy[i] * D[i]);
      dx[i] = multiply_add(sums[0][i], v[i], sums[1][i] * rate_unit(S())) * slope[i];
    }
    if (!kPlain && args.limited) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (slope[i] < R(0)) dx[i] = R(0);
    }
    add_up(shared.totals[0], [&](int i, R sum) { return counts(i) ? multiply_add(dy[i], v[i], sum) : sum; });
    add_up(shared.totals[1], [&](int i, R sum) { return counts(i) ? sum + dx[i] : sum; });
    if (args.z.start) store(args.grad_z, kGradZ, dz, args.grad_z_code);
    store(args.grad_u, kGradU, du, args.grad_u_code);
    store(args.grad_delta, kGradDelta, dx, args.grad_delta_code);
  }

  // This thread's rows of kStates neighbours in an interval's dB and dC.
  static constexpr int kRows = kStateInterval * Tile::kGroups / Tile::kThreads, kRowHop = kStateInterval / kRows;
  static_assert(!Tile::kTimeFast || (kRows == 1 && Tile::kTogether == 2),
                "rows of a thread, and steps of a butterfly, are of one turn");
  __device__ __forceinline__ int row_time() const {
    return Tile::kTimeFast ? thread % kStateInterval : thread / Tile::kGroups;
  }
  __device__ __forceinline__ int row_group() const {
    return Tile::kTimeFast ? thread / kStateInterval : thread % Tile::kGroups;
  }
  // That of the part's first row of the batch.
  __device__ __forceinline__ char* first(const CoupleSums& to) const {
    return to.start + at.tile * to.tile + at.part * args.part * to.batch + at.group * to.group +
           (at.begin + row_time()) * to.time + row_group() * kStates * to.state;
  }

  // Adds the sums of the warps, in their order.
  template <bool kPlain>
  __device__ __forceinline__ void add_warps(const Interval& is, const S (*sums)[kStateInterval][Tile::kSlice],
                                            S (&to)[kRows][kStates]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int time = row_time() + i * kRowHop;
      if (!kPlain && time >= is.steps) continue;
      S next[kStates];
      const S* const from = &sums[0][time][turned(row_group(), time) * kStates];
      read_row(to[i], from);
#pragma unroll
      for (int warp = 1; warp < Tile::kWarps; ++warp) {
        read_row(next, from + warp * kStateInterval * Tile::kSlice);
#pragma unroll
        for (int n = 0; n < kStates; ++n) to[i][n] = add(to[i][n], next[n]);
      }
      if (Tile::kSegmented && is.marks.masked >> time & 1) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) to[i][n] = Scalar<S>::zero();
      }
    }
  }
  template <bool kPlain>
  __device__ __forceinline__ void store_couple(const Interval& is, const S (&sums)[kRows][kStates],
                                               const CoupleSums& to, char* first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int left = kPlain ? kStates : states_of(slice) - row_group() * kStates;
      if (!kPlain && row_time() + i * kRowHop >= is.steps) continue;
      char* const out =
          after(after(first, is.number * kStateInterval + i * kRowHop, to.time), slice * Tile::kSlice, to.state);
      if (to.state == sizeof(S) && left >= kStates && (unsigned long long)out % sizeof(Row<S, kStates>) == 0) {
        write_row(reinterpret_cast<S*>(out), sums[i]);
      } else {
#pragma unroll
        for (int n = 0; n < kStates; ++n)
          if (n < left) *reinterpret_cast<S*>(out + n * to.state) = sums[i][n];
      }
    }
  }

  // --- a chunk of a row --------------------------------------------------------------------------------------------

  // Starts the load of a slice of the states that enter the interval whose first states lie at `saved`, of which this
  // thread has so many. States that do not exist are 0.
  __device__ __forceinline__ void start_saved(int which, int states) {
    S* const to = shared.saved[thread];
    const char* const from = reinterpret_cast<const char*>(saved() + which * Tile::kSlice);
    if (states >= kStates && (unsigned long long)from % sizeof(Row<S, kStates>) == 0) {
      start_copy(reinterpret_cast<Row<S, kStates>*>(to), from);
    } else {
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        if (n < states)
          start_copy(&to[n], from + n * sizeof(S));
        else
          to[n] = Scalar<S>::zero();
      }
    }
  }
  // That of the next slice, or of the interval before.
  __device__ __forceinline__ void start_next_saved(int number) {
    if (!is_last()) {
      start_saved(slice + 1, my_states - Tile::kSlice);
    } else if (number > 0) {
      saved() -= args.channels * args.state;
      start_saved(0, my_states + slice * Tile::kSlice);
    }
  }

  // Of the summary that begins where the chunk does, its number from the right.
  __device__ __forceinline__ long long from_right(long long chunk) const {
    return args.left_out + args.summaries - 1 - chunk * args.in_chunk;
  }
  // Element (batch, summary from the right, my state, my channel) of seeds and summaries.
  __device__ __forceinline__ long long place(long long summary, int n) const {
    return ((batch * args.summaries + summary) * args.state + my_state(n)) * args.channels + my_channel();
  }

  __device__ __forceinline__ void walk() {
    const int intervals = (int)((at.end - at.begin + kStateInterval - 1) / kStateInterval);
    input(kU) = first(args.u);
    input(kDelta) = first(args.delta);
    input(kZ) = first(args.z);
    input(kGradOutput) = first(args.grad_output);
    input(kB) = Tile::kTimeB ? first(args.B) : nullptr;
    input(kC) = Tile::kTimeC ? first(args.C) : nullptr;
    if constexpr (!kSummarise) {
      gradient(kGradU) = first(args.grad_u);
      gradient(kGradDelta) = first(args.grad_delta);
      gradient(kGradZ) = first(args.grad_z);
    }
    const long long all = (args.length + kStateInterval - 1) / kStateInterval;  // intervals of the row
    saved() = reinterpret_cast<const S*>(args.states) +
              ((batch * all + at.begin / kStateInterval + intervals - 1) * args.channels + my_channel()) * args.state +
              group * kStates;
    each_slice([&](int s) {
      take_slice(s);
#pragma unroll
      for (int n = 0; n < kStates; ++n) p[n] = Scalar<S>::zero();
      each_state([&](int n) {
        if (kSummarise) return;
        if (at.end < args.length)
          p[n] = reinterpret_cast<const S*>(args.seed)[place(from_right(at.chunk + 1), n)];
        else if (args.grad_last)
          p[n] = load_item<S>(args.grad_last + batch * args.last_batch + my_channel() * args.last_channel +
                              my_state(n) * args.last_state);
      });
      keep_slice();
    });
    delta_sum = {R(0), R(0)};
    resets = false;

    auto start = [&](int number, int slice) {
      const Interval is = describe(number);
      if (is.plain)
        start_loads<true>(is, slice);
      else
        start_loads<false>(is, slice);
    };
    auto start_next = [&](int number) {
      if (!is_last())
        start(number, slice + 1);
      else if (number > 0)
        start(number - 1, kSummarise ? slice : 0);
    };
    constexpr bool kAhead = kSummarise || Tile::kSets == 2;
    if (several()) take_slice(0);
    start(intervals - 1, slice);
    if constexpr (!kSummarise) start_saved(0, my_states);
    for (int number = intervals - 1; number >= 0;) {  // one loop, so that nothing is moved out of an inner one
      const Interval is = describe(number);
      wait_for_copies();
      if (is.plain)
        commit<true>(is);
      else
        commit<false>(is);
      if (kAhead) start_next(number);
      __syncthreads();
      if constexpr (kSummarise) {
        summarise(is);
      } else {
        if (is.marked())
          compute_all<true, true>(is);
        else if (args.z.start)
          compute_all<false, true>(is);
        else
          compute_all<false, false>(is);
      }
      __syncthreads();
      if constexpr (!kSummarise) {
        if (is.plain)
          finish<true>(is);
        else
          finish<false>(is);
        if (!kAhead) start_next(number);
      }
      number -= is_last();
      if (several()) {
        keep_slice();
        take_slice(is_last() ? 0 : slice + 1);
      }
    }

    if constexpr (kSummarise) {
      each_state([&](int n) {
        const long long i = place(from_right(at.chunk), n);
        reinterpret_cast<S*>(args.summary_gate)[i] = conjugate(gate_of(delta_sum.value(), rate[n]));
        reinterpret_cast<S*>(args.summary_input)[i] = p[n];
        if (Tile::kSegmented && args.marks && my_channel() == 0 && my_state(n) == 0)
          args.summary_resets[batch * args.summaries + from_right(at.chunk)] = resets;
      });
    } else if (args.grad_initial && at.chunk == 0) {
      each_slice([&](int s) {
        take_slice(s);
        each_state([&](int n) {
          reinterpret_cast<S*>(args.grad_initial)[(batch * args.channels + my_channel()) * args.state + my_state(n)] =
              p[n];
        });
      });
    }
  }

  // A slice as it begins: the rates, B and C where they are constant, and sums of 0.
  __device__ __forceinline__ void begin_slice(int which) {
    turn_to(which);
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      rate[n] = p[n] = dA()[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeB) constant_B[n] = constant_dB[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeC) held_C()[n] = constant_dC[n] = Scalar<S>::zero();
    }
    each_state([&](int n) {
      S A;
      load_as(A, args.A + my_channel() * args.A_channel + my_state(n) * args.A_state, args.A_code);
      rate[n] = scale_rate(A);
      if constexpr (!Tile::kTimeB)
        load_as(constant_B[n], args.B.start + my_channel() * args.B.channel + my_state(n) * args.B.state, args.B.code);
      if constexpr (!Tile::kTimeC)
        load_as(held_C()[n], args.C.start + my_channel() * args.C.channel + my_state(n) * args.C.state, args.C.code);
    });
    keep_slice();
  }

  __device__ __forceinline__ void run() {
    each_slice([&](int s) { begin_slice(s); });
    if constexpr (!kSummarise) {
#pragma unroll
      for (int c = 0; c < Tile::kOwned; ++c) shared.totals[0].of(thread, c) = shared.totals[1].of(thread, c) = R(0);
    }
    for (int c = thread; c < Tile::kChannels; c += Tile::kThreads) {
      const long long d = at.first_channel + c;
      const bool there = c < at.channels;
      shared.bias[c] =
          there && args.delta_bias ? load_real<R>(args.delta_bias + d * args.bias_channel, args.bias_code) : R(0);
      if constexpr (!kSummarise)
        shared.D[c] = there && args.D ? load_real<R>(args.D + d * args.D_channel, args.D_code) : R(0);
    }
    __syncthreads();
    if constexpr (!kSummarise) {
      gradient(kGradB) = Tile::kTimeB ? first(args.grad_B) : nullptr;
      gradient(kGradC) = Tile::kTimeC ? first(args.grad_C) : nullptr;
    }
    for (batch = at.part * args.part; batch < at.rows_end; ++batch) {
      walk();
      if constexpr (!kSummarise && Tile::kTimeB) gradient(kGradB) += args.grad_B.batch;
      if constexpr (!kSummarise && Tile::kTimeC) gradient(kGradC) += args.grad_C.batch;
    }
    if constexpr (!kSummarise) leave_parts();
  }

  // This block's sums over batch and time.
  __device__ __forceinline__ void leave_parts() {
    const long long row = at.part * args.chunks + at.chunk;
    each_slice([&](int s) {
      take_slice(s);
      each_state([&](int n) {
        const long long i = (row * args.channels + my_channel()) * args.state + my_state(n);
        reinterpret_cast<S*>(args.part_A)[i] = dA()[n];
        if constexpr (!Tile::kTimeB) reinterpret_cast<S*>(args.grad_B.start)[i] = constant_dB[n];
        if constexpr (!Tile::kTimeC) reinterpret_cast<S*>(args.grad_C.start)[i] = constant_dC[n];
      });
    });
    __syncthreads();
    for (int c = thread; c < at.channels; c += Tile::kThreads) {
      R sum[2] = {R(0), R(0)};
      for (int k = 0; k < Tile::kThreads * Tile::kOwned / Tile::kChannels; ++k) {
        // The k-th thread with items of channel c.
        const int owner = Tile::kTimeFast ? c * Grid::kRuns + k : c / kItems + k * Grid::kRuns;
        const int place = Tile::kTimeFast ? 0 : c % kItems;
        sum[0] += shared.totals[0].of(owner, place);
        sum[1] += shared.totals[1].of(owner, place);
      }
      const long long i = row * args.channels + at.first_channel + c;
      if (args.part_D) reinterpret_cast<R*>(args.part_D)[i] = sum[0];
      if (args.part_bias) reinterpret_cast<R*>(args.part_bias)[i] = sum[1];
    }
  }
};

template <class Tile, bool kSummarise>
__device__ __forceinline__ void selective_scan_backward(const SelectiveBackwardArgs& args, unsigned char* memory) {
  auto& shared = *reinterpret_cast<Memory<Tile, kSummarise>*>(memory);
  long long item = blockIdx.x;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) shared.at = locate_backward<Tile, kSummarise>(args, item);
    __syncthreads();
    if (!shared.at.exists) return;
    Backward<Tile, kSummarise>(args, shared, shared.at).run();
    item = shared.at.number + gridDim.x;
  }
}
