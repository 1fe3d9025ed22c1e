// selective_scan, fused: discretisation, input, scan, contraction with C, skip connection and gate.
//
//     h[t] = exp(delta[t] A) h[t-1] + delta[t] u[t] B[t]        y[t] = (sum_n C[t] h[t] + D u[t]) silu(z[t])
//
// Time runs serially in a thread; nothing of size (batch, length, channels, state) exists.
//
//   thread  one channel and kStates of its states, in registers for the whole chunk
//   warp    32 neighbouring channels and one group of kStates states: B and C are read at one address by all lanes
//   block   kChannels channels x kGroups groups of states, together a slice of kSlice states
//   grid    (slice, batch, group of B and C, tile of channels, chunk of time), chunks fastest. A tile never straddles
//           two groups of B and C. More states than a slice holds take one launch a slice, which hands the sums so far
//           to the next in partial_sum (batch, length, channels).
//
// A tile is kSteps steps; the work on it has three stages:
//
//   commit   the raw items that were loaded one tile earlier are converted (bias, softplus, limits) into shared memory:
//            (delta, delta * u) by step and channel, B and C by step and state, all in the accumulation type
//   compute  the recurrence over the tile; each state group leaves its partial sum of y in shared memory
//   finish   the partial sums are added in the order of the states; D, z; y is stored
//
// In one interval between two barriers a block commits tile i + 1, computes tile i and finishes tile i - 1. Everything
// in shared memory is there twice, for even and for odd tiles, so one barrier an interval is enough: commit writes the
// buffer that compute does not read, compute writes the sums that finish does not read. Half of the warps compute
// first and the other half last, so that the exponentials of one half overlap with the loads and stores of the other.
//
// Every kStateInterval positions the state that enters is saved where it is wanted; chunks are whole intervals then.
//
// Where a row is cut into chunks (split), the kernel run with kSummarise leaves each chunk's map: the gates' product,
// from one exponential of A times the sum of delta, and the state that the chunk reaches from zero. A linear_scan over
// them makes seed[c] the state that leaves chunk c.
//
// Position counts steps in the direction of the scan: in reverse the arrays come with their last step first and a
// negative stride. A step past the chunk's end has delta = 0, delta * u = 0 and B = 0: gate 1, input 0
// (commit_sequence and commit_couple, the one place where a step is formed).
//
// With segments (mask, reset, packed sequences) a masked step is formed like one past the end. Where a sequence starts
// or the state is reset, the thread sets its state before the step; no other code of the recurrence knows of it. Marks
// are the same for all threads of a block, so these are branches that no warp takes apart.
#include "operators.cuh"
#include "selective_tile.cuh"

constexpr int kUnroll = 2;     // steps whose shared-memory loads are issued together
constexpr int kSumSteps = 16;  // steps of delta that are added before their sum is added to the chunk's

// --- compute --------------------------------------------------------------------------------------------------

// What one thread owns: the states of one channel and state group, with their rates.
template <class Tile, bool kSummarise>
struct Recurrence {
  using R = typename Tile::R;
  using S = typename Tile::S;
  static constexpr int kStates = Tile::kStates;
  S rate[kStates], h[kStates];
  S constant_B[Tile::kTimeB ? 1 : kStates], constant_C[Tile::kTimeC ? 1 : kStates];
  R delta_sum;

  template <int kCount>
  struct Loaded {
    Drive<R> drive[kCount];
    S B[Tile::kTimeB ? kCount : 1][kStates], C[Tile::kTimeC && !kSummarise ? kCount : 1][kStates];
  };

  template <int kCount>
  static __device__ __forceinline__ void load(Loaded<kCount>& to, const typename Tile::Shared& shared, int time,
                                              int channel, int state, int buffer) {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      to.drive[s] = shared.drive[buffer][time + s][channel];
      if constexpr (Tile::kTimeB) read_row(to.B[s], &shared.B[buffer][time + s][state]);
      if constexpr (Tile::kTimeC && !kSummarise) read_row(to.C[s], &shared.C[buffer][time + s][state]);
    }
  }

  // The steps of `now`. With kMarked, enter(time) and leave(time) are called around those that have a bit in `marks`.
  template <bool kMarked, int kCount, class Enter, class Leave>
  __device__ __forceinline__ void advance(const Loaded<kCount>& now, typename Tile::Shared& shared, int time,
                                          int channel, int group, int buffer, const StepMarks& marks, R& sum,
                                          Enter enter, Leave leave) {
    R y[kCount];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      y[s] = 0;
      if (kMarked && (marks.resets | marks.starts) >> (time + s) & 1) enter(time + s);
      if (kSummarise) sum += now.drive[s].delta;
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        S B = Tile::kTimeB ? now.B[Tile::kTimeB ? s : 0][n] : constant_B[Tile::kTimeB ? 0 : n];
        h[n] = apply(Affine<S>{gate_of(now.drive[s].delta, rate[n]), multiply(now.drive[s].delta_u, B)}, h[n]);
        if constexpr (!kSummarise) {
          S C = Tile::kTimeC ? now.C[Tile::kTimeC ? s : 0][n] : constant_C[Tile::kTimeC ? 0 : n];
          y[s] = contract(C, h[n], y[s]);
        }
      }
      if (kMarked && marks.ends >> (time + s) & 1) leave(time + s);
    }
    if constexpr (!kSummarise) {
#pragma unroll
      for (int s = 0; s < kCount; ++s) shared.partial[buffer][group][time + s][channel] = y[s];
    }
  }

  // One tile. Unrolled as a whole or, with kMarked, a part of it, so that the code around marked steps is there once.
  template <bool kMarked, class Enter, class Leave>
  __device__ __forceinline__ void run(typename Tile::Shared& shared, int channel, int group, int buffer,
                                      const StepMarks& marks, Enter enter, Leave leave) {
    constexpr bool kAhead = !kMarked || kStates <= 4;  // else there are no registers left for it
    constexpr int kCount = kAhead ? kUnroll : 1;
    constexpr int kPart = !kMarked ? Tile::kSteps : kAhead ? 2 * kCount : kCount;
    constexpr unsigned kStepsNow = (1u << kCount) - 1;
    Loaded<kCount> loaded[2];
    if (kAhead) load(loaded[0], shared, 0, channel, group * kStates, buffer);
    R sum = 0;
#pragma unroll 1
    for (int part = 0; part < Tile::kSteps; part += kPart) {
#pragma unroll
      for (int i = 0; i < kPart; i += kCount) {
        const int time = part + i;
        Loaded<kCount>& now = loaded[i / kCount % 2];
        if (!kAhead)
          load(now, shared, time, channel, group * kStates, buffer);
        else if (time + kCount < Tile::kSteps)
          load(loaded[(i / kCount + 1) % 2], shared, time + kCount, channel, group * kStates, buffer);
        if (kMarked && (marks.resets | marks.starts | marks.ends) >> time & kStepsNow)
          advance<true>(now, shared, time, channel, group, buffer, marks, sum, enter, leave);
        else
          advance<false>(now, shared, time, channel, group, buffer, marks, sum, enter, leave);
        if (kSummarise && (time + kCount) % kSumSteps == 0) {
          delta_sum += sum;
          sum = 0;
        }
      }
    }
  }
};

struct Plain {
  static constexpr bool value = true;
};
struct General {
  static constexpr bool value = false;
};

template <class Tile, bool kSummarise>
__device__ __forceinline__ void selective_scan(const SelectiveArgs& args, unsigned char* memory) {
  using R = typename Tile::R;
  using S = typename Tile::S;
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = warp % (Tile::kChannels / 32) * 32 + lane, group = warp / (Tile::kChannels / 32);
  const bool computes_first = (warp / 4) % 2;
  const long long tiles_in_group = (args.channels / args.groups + Tile::kChannels - 1) / Tile::kChannels;
  const long long items = args.slices * args.batch * args.groups * tiles_in_group * args.chunks;

  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    const SelectiveItem at = locate_item<Tile>(args, item);
    const int tiles = (int)((at.end - at.begin + Tile::kSteps - 1) / Tile::kSteps);
    const long long my_channel = at.first_channel + channel;
    const long long my_state = at.first_state + group * Tile::kStates;
    const int my_states = channel < at.channels ? at.states - group * Tile::kStates : 0;  // how many exist, if > 0

    // Element (batch, chunk, my_state, my_channel) of the seeds and summaries; the next state is `channels` on.
    auto place = [&](long long chunk) {
      return ((at.batch * args.chunks + chunk) * args.state + my_state) * args.channels + my_channel;
    };

    for (int c = threadIdx.x; c < Tile::kChannels; c += Tile::kThreads) {
      const long long d = at.first_channel + c;
      const bool exists = c < at.channels;
      shared.bias[c] =
          exists && args.delta_bias ? load_real<R>(args.delta_bias + d * args.bias_channel, args.bias_code) : R(0);
      shared.D[c] = exists && args.D ? load_real<R>(args.D + d * args.D_channel, args.D_code) : R(0);
    }

    Recurrence<Tile, kSummarise> mine;
    mine.delta_sum = 0;
#pragma unroll
    for (int n = 0; n < Tile::kStates; ++n) {
      mine.rate[n] = mine.h[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeB) mine.constant_B[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeC) mine.constant_C[n] = Scalar<S>::zero();
      if (n >= my_states) continue;
      S A;
      load_as(A, args.A + my_channel * args.A_channel + (my_state + n) * args.A_state, args.A_code);
      mine.rate[n] = scale_rate(A);
      if constexpr (!Tile::kTimeB)
        load_as(mine.constant_B[n], args.B.start + my_channel * args.B.channel + (my_state + n) * args.B.state,
                args.B.code);
      if constexpr (!Tile::kTimeC)
        load_as(mine.constant_C[n], args.C.start + my_channel * args.C.channel + (my_state + n) * args.C.state,
                args.C.code);
      if (!kSummarise && at.chunk > 0)
        mine.h[n] = reinterpret_cast<const S*>(args.seed)[place(at.chunk - 1) + n * args.channels];
      else if (!kSummarise && args.initial)
        mine.h[n] = load_item<S>(args.initial + at.batch * args.initial_batch + my_channel * args.initial_channel +
                                 (my_state + n) * args.initial_state);
    }

    // The last tile may be ragged.
    const int ragged_steps = (int)(at.end - at.begin - (long long)(tiles - 1) * Tile::kSteps);
    const unsigned masks = Tile::Grid::masks(ragged_steps, at.channels);
    const unsigned couple_masks = Tile::CoupleGrid::masks(ragged_steps, at.states);
    auto exist = [&](unsigned both, int tile) { return tile == tiles - 1 ? both >> 16 : both & 0xffff; };
    const int groups = (at.states + Tile::kStates - 1) / Tile::kStates;
    // May tiles that are whole be done by the plain code?
    const bool plain = args.plain && at.channels == Tile::kChannels && at.states == Tile::kSlice;

    auto u = stream_of<Tile>(args.u, at), delta = stream_of<Tile>(args.delta, at);
    auto u_again = u, z = stream_of<Tile>(args.z, at);
    auto output = stream_of<Tile>(args.output, at), partial_sum = stream_of<Tile>(args.partial_sum, at);
    auto B = stream_of<Tile>(args.B, at), C = stream_of<Tile>(args.C, at);

    auto marks_of = [&](int tile) -> StepMarks {
      if constexpr (Tile::kSegmented) {
        if (args.marks) {
          return ::marks_of(args.marks + at.batch * args.marks_batch, at.begin + (long long)tile * Tile::kSteps,
                            tile == tiles - 1 ? ragged_steps : Tile::kSteps);
        }
      }
      return {0, 0, 0, 0};
    };
    bool resets = false;  // has any step so far?
    auto compute = [&](int tile) {
      const StepMarks marks = marks_of(tile);
      // Element (sequence, my_channel, my_state), of the sequence at a time of this tile.
      auto sequence = [&](int time) { return (long long)args.ids[at.begin + (long long)tile * Tile::kSteps + time]; };
      auto enter = [&](int time) {
        const bool empty = marks.resets >> time & 1;
#pragma unroll
        for (int n = 0; n < Tile::kStates; ++n) {
          mine.h[n] = Scalar<S>::negative_zero();
          if (!empty && n < my_states)
            mine.h[n] = load_item<S>(args.sequence_initial + sequence(time) * args.initial_batch +
                                     my_channel * args.initial_channel + (my_state + n) * args.initial_state);
        }
      };
      auto leave = [&](int time) {
        if (kSummarise || !args.sequence_last) return;
#pragma unroll
        for (int n = 0; n < Tile::kStates; ++n)
          if (n < my_states)
            reinterpret_cast<S*>(
                args.sequence_last)[(sequence(time) * args.channels + my_channel) * args.state + my_state + n] =
                mine.h[n];
      };
      if (!kSummarise && args.states && tile % (kStateInterval / Tile::kSteps) == 0) {
        if (Tile::kSegmented && (marks.resets | marks.starts) & 1) enter(0);
        const long long intervals = (args.length + kStateInterval - 1) / kStateInterval;
        const long long row = at.batch * intervals + at.begin / kStateInterval + tile / (kStateInterval / Tile::kSteps);
        S* to = reinterpret_cast<S*>(args.states) + (row * args.channels + my_channel) * args.state + my_state;
        if (my_states > 0) write_row(to, mine.h);
      }
      if (Tile::kSegmented && marks.resets | marks.starts | marks.ends) {
        resets |= (marks.resets | marks.starts) != 0;
        mine.template run<true>(shared, channel, group, tile % 2, marks, enter, leave);
      } else {
        mine.template run<false>(shared, channel, group, tile % 2, marks, enter, leave);
      }
    };

    auto start_loads = [&](auto is_plain, int tile) {
      constexpr bool kPlain = decltype(is_plain)::value;
      u.template start<kPlain>(shared.u, args.u.vector, exist(masks, tile));
      delta.template start<kPlain>(shared.delta, args.delta.vector, exist(masks, tile));
      if constexpr (Tile::kTimeB) B.template start<kPlain>(shared.raw_B, args.B.vector, exist(couple_masks, tile));
      if constexpr (Tile::kTimeC && !kSummarise)
        C.template start<kPlain>(shared.raw_C, args.C.vector, exist(couple_masks, tile));
    };
    auto commit = [&](auto is_plain, int tile) {
      constexpr bool kPlain = decltype(is_plain)::value;
      const StepMarks marks = marks_of(tile);
      commit_sequence<kPlain, Tile>(args, shared, tile % 2, u, delta, exist(masks, tile),
                                    tile == tiles - 1 ? ragged_steps : Tile::kSteps,
                                    tile == 0 && at.chunk == 0 && !args.initial && !args.sequence_initial, marks);
      if constexpr (Tile::kTimeB)
        commit_couple<kPlain, Tile>(args.B, B, shared.raw_B, exist(couple_masks, tile), marks.masked,
                                    shared.B[tile % 2]);
      if constexpr (Tile::kTimeC && !kSummarise)
        commit_couple<kPlain, Tile>(args.C, C, shared.raw_C, exist(couple_masks, tile), 0, shared.C[tile % 2]);
    };
    // Everything of an interval but the recurrence. What is loaded here is used one interval later.
    auto stage = [&](auto is_plain, int tile) {
      constexpr bool kPlain = decltype(is_plain)::value;
      wait_for_copies();
      if (kPlain || tile + 1 < tiles) commit(is_plain, tile + 1);
      if (!kSummarise && (kPlain || tile > 0)) {
        finish<kPlain, Tile>(args, shared, (tile - 1) % 2, u_again, z, output, partial_sum, exist(masks, tile - 1),
                             groups, marks_of(tile - 1).masked);
        output.at += output.tile_step;
        partial_sum.at += partial_sum.tile_step;
      }
      if (kPlain || tile + 2 < tiles) start_loads(is_plain, tile + 2);
      if (!kSummarise && (kPlain || tile < tiles)) {
        if (args.D) u_again.template start<kPlain>(shared.u_again, args.u.vector, exist(masks, tile));
        if (args.z.start) z.template start<kPlain>(shared.z, args.z.vector, exist(masks, tile));
      }
    };

    start_loads(General(), 0);
    __syncthreads();  // bias and D are in shared memory
    wait_for_copies();
    commit(General(), 0);
    if (tiles > 1) start_loads(General(), 1);
    __syncthreads();
    for (int tile = 0; tile <= tiles; ++tile) {
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) == computes_first) {
          if (tile < tiles && group < groups) compute(tile);
        } else if (plain && tile > 0 && tile + 3 < tiles) {
          stage(Plain(), tile);
        } else {
          stage(General(), tile);
        }
      }
      __syncthreads();
    }

#pragma unroll
    for (int n = 0; n < Tile::kStates; ++n) {
      if (n >= my_states) continue;
      if (kSummarise) {
        const long long i = place(at.chunk) + n * args.channels;
        reinterpret_cast<S*>(args.summary_gate)[i] = gate_of(mine.delta_sum, mine.rate[n]);
        reinterpret_cast<S*>(args.summary_input)[i] = mine.h[n];
        if (Tile::kSegmented && args.marks && my_channel == 0 && my_state + n == 0)
          args.summary_resets[at.batch * args.chunks + at.chunk] = resets;
      } else if (args.last && at.end == args.length) {
        reinterpret_cast<S*>(args.last)[(at.batch * args.channels + my_channel) * args.state + my_state + n] =
            mine.h[n];
      }
    }
  }
}
