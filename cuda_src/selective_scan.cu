// selective_scan, fused: discretisation, input, scan, contraction with C, skip connection and gate.
//
//     h[t] = exp(delta[t] A) h[t-1] + delta[t] u[t] B[t]        y[t] = (sum_n C[t] h[t] + D u[t]) silu(z[t])
//
// Time runs serially in a thread; nothing of size (batch, length, channels, state) exists.
//
//   thread  one channel and kStates of its states, in registers for the whole chunk
//   warp    kAbreast neighbouring channels x kGroups groups of states, together a slice of kSlice states:
//           lane = kAbreast * group + channel. So y, the sum over the states, is a sum over lanes
//   block   kWarps warps of neighbouring channels, which share B and C
//   grid    (slice, batch, group of B and C, tile of channels, chunk of time), chunks fastest. A tile never straddles
//           two groups of B and C. More states than a slice holds take one launch a slice, which hands the sums so far
//           to the next in partial_sum (batch, length, channels).
//
// A tile is kTileSteps steps; the work on it has three stages:
//
//   commit   the raw items that were loaded one tile earlier are converted (bias, softplus, limits) into shared memory:
//            (delta, delta * u) by step and channel, B and C by step and state, all in the accumulation type
//   compute  the recurrence over the tile; y is summed over the lanes, kGroups steps at once, into shared memory
//   finish   D, z; y is stored
//
// In one interval between two barriers a block commits tile i + 1, finishes tile i - 1, starts the loads of tile i + 2
// and computes tile i. What one stage hands to the next in shared memory is there twice, for even and for odd tiles.
//
// At the start of every tile the state that enters is saved where it is wanted.
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
// are the same for all threads of a block, so these are branches that no warp takes apart. A tile of nothing but masked
// steps is not computed, and chunks of a split begin where something is forgotten if they can (move_cuts).
#include "operators.cuh"
#include "selective_tile.cuh"
#include "warp_fold.cuh"

// --- compute --------------------------------------------------------------------------------------------------

// What one thread owns: the states of one channel and state group, with their rates.
template <class Tile, bool kSummarise>
struct Recurrence {
  using R = typename Tile::R;
  using S = typename Tile::S;
  static constexpr int kStates = Tile::kStates, kGroups = Tile::kGroups, kVector = Tile::kVector;
  S rate[kStates], h[kStates];
  S constant_B[Tile::kTimeB ? 1 : kStates], constant_C[Tile::kTimeC ? 1 : kStates];
  DeltaSum<R> delta_sum;

  // What the steps need that are computed next.
  template <int kCount>
  struct Loaded {
    Drive<R> drive[kCount];
    S B[Tile::kTimeB ? kCount : 1][kStates], C[Tile::kTimeC && !kSummarise ? kCount : 1][kStates];
  };

  static __device__ __forceinline__ void read_states(S (&to)[kStates], const S* row) {
#pragma unroll
    for (int n = 0; n < kStates; n += kVector) {
      S piece[kVector];
      read_row(piece, row + n * kGroups);
#pragma unroll
      for (int k = 0; k < kVector; ++k) to[n + k] = piece[k];
    }
  }

  // `drive`: this lane's at step 0, the next `next_drive` on; B, C: its first state at step 0.
  template <int kCount>
  static __device__ __forceinline__ void load(Loaded<kCount>& to, const Drive<R>* drive, int next_drive, const S* B,
                                              const S* C, int time) {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      to.drive[s] = drive[(time + s) * next_drive];
      if constexpr (Tile::kTimeB) read_states(to.B[s], B + (time + s) * Tile::kSlice);
      if constexpr (Tile::kTimeC && !kSummarise) read_states(to.C[s], C + (time + s) * Tile::kSlice);
    }
  }

  template <int kCount>
  __device__ __forceinline__ R step(const Loaded<kCount>& now, int s) {
    R y = 0;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      S B = Tile::kTimeB ? now.B[Tile::kTimeB ? s : 0][n] : constant_B[Tile::kTimeB ? 0 : n];
      h[n] = apply(Affine<S>{gate_of(now.drive[s].delta, rate[n]), multiply(now.drive[s].delta_u, B)}, h[n]);
      if constexpr (!kSummarise) {
        S C = Tile::kTimeC ? now.C[Tile::kTimeC ? s : 0][n] : constant_C[Tile::kTimeC ? 0 : n];
        y = contract(C, h[n], y);
      }
    }
    return y;
  }

  // Steps one at a time, those that have a bit in `marks` between enter(time) and leave(time).
  template <class Enter, class Leave>
  __device__ __forceinline__ void run_marked(const Drive<R>* drive, int next_drive, const S* B, const S* C, R* y,
                                             int lane, int first, int steps, const StepMarks& marks, Enter enter,
                                             Leave leave) {
#pragma unroll 1
    for (int time = first; time < first + steps; ++time) {
      if ((marks.resets | marks.starts) >> time & 1) enter(time);
      Loaded<1> now;
      load(now, drive, next_drive, B, C, time);
      R sum = step(now, 0);
      if (kSummarise) delta_sum.add(now.drive[0].delta);
      if (marks.ends >> time & 1) leave(time);
      if constexpr (!kSummarise) {  // the additions of fold
#pragma unroll
        for (int bit = Tile::kAbreast; bit < 32; bit *= 2) sum = add(sum, from_lane_across(sum, bit));
        if (lane / Tile::kAbreast == time % kGroups) y[time / kGroups * kGroups * Tile::kSums] = sum;
      }
    }
  }

  // One tile. `y`: where this lane puts the sum that it gets of steps 0 to kGroups - 1. With kMarked, steps may have
  // marks; those at which states are loaded or stored are run with their neighbours.
  template <bool kMarked, class Enter, class Leave>
  __device__ __forceinline__ void run(const Drive<R>* drive, int next_drive, const S* B, const S* C, R* y, int lane,
                                      const StepMarks& marks, Enter enter, Leave leave) {
    // Steps whose loads are issued together: as many as there are registers for.
    constexpr int kCount = kStates > 8 ? 1 : kMarked || sizeof(S) > 4 ? 2 : 4;
    constexpr int kFold = kSummarise ? 4 : kGroups;  // steps whose sums are one butterfly
    constexpr int kPart = kMarked || kStates > 8 ? kFold : kTileSteps;
    static_assert(kPart / kCount % 2 == 0, "a part ends with what the next one begins with in loaded[0]");
    Loaded<kCount> loaded[2];
    load(loaded[0], drive, next_drive, B, C, 0);
#pragma unroll 1
    for (int part = 0; part < kTileSteps; part += kPart) {
      if (kMarked && (marks.starts | marks.ends) >> part & ((1u << kFold) - 1)) {
        run_marked(drive, next_drive, B, C, y, lane, part, kPart, marks, enter, leave);
        if (part + kPart < kTileSteps) load(loaded[0], drive, next_drive, B, C, part + kPart);
        continue;
      }
      R sums[kPart];
#pragma unroll
      for (int i = 0; i < kPart; i += kCount) {
        const int next = part + i + kCount;
        if (i + kCount < kPart || next < kTileSteps) load(loaded[(i / kCount + 1) % 2], drive, next_drive, B, C, next);
#pragma unroll
        for (int s = 0; s < kCount; ++s) {
          const bool forget = kMarked && marks.resets >> (part + i + s) & 1;
#pragma unroll
          for (int n = 0; kMarked && n < kStates; ++n) h[n] = forget ? Scalar<S>::negative_zero() : h[n];
          sums[i + s] = step(loaded[i / kCount % 2], s);
          if (kSummarise) delta_sum.add(loaded[i / kCount % 2].drive[s].delta);
        }
      }
      if constexpr (!kSummarise) {
#pragma unroll
        for (int i = 0; i < kPart; i += kFold) {
          R together[kFold];
#pragma unroll
          for (int s = 0; s < kFold; ++s) together[s] = sums[i + s];
          y[(part + i) * Tile::kSums] = fold(together, lane, Tile::kAbreast);
        }
      }
    }
  }
};

// How a tile is staged; see selective_tile.cuh. Whole is plain, and all that the stage touches exists.
struct General {
  static constexpr bool kPlain = false, kWhole = false;
};
struct Plain {
  static constexpr bool kPlain = true, kWhole = false;
};
struct Whole {
  static constexpr bool kPlain = true, kWhole = true;
};

template <class Tile, bool kSummarise>
__device__ __forceinline__ void selective_scan(const SelectiveArgs& args, unsigned char* memory) {
  using R = typename Tile::R;
  using S = typename Tile::S;
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  // By shuffles, or the compiler would read the number of the thread again and again, which is slow.
  const int lane = from_lane(threadIdx.x % 32, threadIdx.x % 32), warp = from_lane(threadIdx.x / 32, 0);
  const int thread = 32 * warp + lane;
  const int channel = warp * Tile::kAbreast + lane % Tile::kAbreast, group = lane / Tile::kAbreast;
  const long long tiles_in_group = (args.channels / args.groups + Tile::kChannels - 1) / Tile::kChannels;
  const long long items = args.slices * args.batch * args.groups * tiles_in_group * args.chunks;

  // The drive of lanes whose states do not exist.
  for (int step = thread; step < 2 * kTileSteps; step += Tile::kThreads)
    shared.drive[step / kTileSteps][step % kTileSteps][Tile::kChannels] = {R(0), R(0)};

  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    const SelectiveItem at = locate_item<Tile, kSummarise>(args, item, lane);
    // Tiles are whole words of marks: the first may begin before the chunk does.
    const long long origin = at.begin / kTileSteps * kTileSteps;
    const int steps = (int)(at.end - origin), ragged_begin = (int)(at.begin - origin);
    const int tiles = (steps + kTileSteps - 1) / kTileSteps;
    const bool ends_row = at.end == args.length;
    const int my_channel = at.first_channel + channel;
    // A group's states exist all or not at all, as kStates divides their number.
    const bool mine_exist = channel < at.channels && Tile::state_of(group, 0) < at.states;
    auto my_state = [&](int n) { return at.first_state + Tile::state_of(group, n); };

    // Element (batch, chunk, state, my_channel) of the seeds and summaries.
    auto place = [&](int chunk, int n) {
      return ((at.batch * args.chunks + chunk) * args.state + my_state(n)) * args.channels + my_channel;
    };

    auto summarise = [&](int n, S gate, S input, bool resets) {
      const long long i = place(at.chunk, n);
      reinterpret_cast<S*>(args.summary_gate)[i] = gate;
      reinterpret_cast<S*>(args.summary_input)[i] = input;
      if (Tile::kSegmented && args.marks && my_channel == 0 && my_state(n) == 0)
        args.summary_resets[at.batch * args.chunks + at.chunk] = resets;
    };
    if (kSummarise && !at.summarised) {  // nobody asks for it
#pragma unroll
      for (int n = 0; n < Tile::kStates; ++n)
        if (mine_exist) summarise(n, Scalar<S>::one(), Scalar<S>::zero(), true);
      continue;
    }

    Recurrence<Tile, kSummarise> mine;
    mine.delta_sum = {R(0), R(0)};
#pragma unroll
    for (int n = 0; n < Tile::kStates; ++n) {
      mine.rate[n] = mine.h[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeB) mine.constant_B[n] = Scalar<S>::zero();
      if constexpr (!Tile::kTimeC) mine.constant_C[n] = Scalar<S>::zero();
      if (!mine_exist) continue;
      S A;
      load_as(A, args.A + my_channel * args.A_channel + my_state(n) * args.A_state, args.A_code);
      mine.rate[n] = scale_rate(A);
      if constexpr (!Tile::kTimeB)
        load_as(mine.constant_B[n], args.B.start + my_channel * args.B.channel + my_state(n) * args.B.state,
                args.B.code);
      if constexpr (!Tile::kTimeC)
        load_as(mine.constant_C[n], args.C.start + my_channel * args.C.channel + my_state(n) * args.C.state,
                args.C.code);
      if (!kSummarise && at.chunk > 0)
        mine.h[n] = reinterpret_cast<const S*>(args.seed)[place(at.chunk - 1, n)];
      else if (!kSummarise && args.initial)
        mine.h[n] = load_item<S>(args.initial + at.batch * args.initial_batch + my_channel * args.initial_channel +
                                 my_state(n) * args.initial_state);
    }

    // The first and the last tile may be ragged: the steps of a tile are those from first_step to before end_step.
    const int ragged_end = steps - (tiles - 1) * kTileSteps;
    auto first_step = [&](int tile) { return Tile::kSegmented && tile == 0 ? ragged_begin : 0; };
    auto end_step = [&](int tile) { return tile == tiles - 1 ? ragged_end : kTileSteps; };
    auto exist = [&](auto how, int tile) {
      if (how.kWhole) return Tile::Grid::kWhole;
      return Tile::Grid::template exist<how.kPlain>(thread, first_step(tile), end_step(tile), at.channels);
    };
    auto couples_exist = [&](auto how, int tile) {
      if (how.kWhole) return Tile::CoupleGrid::kWhole;
      return Tile::CoupleGrid::template exist<how.kPlain>(thread, first_step(tile), end_step(tile), at.states);
    };

    auto stream = [&](const SequenceArray& array) -> typename Tile::Stream {
      return {array.start + at.batch * array.batch + at.first_channel * array.channel + origin * array.time, array.time,
              array.channel, thread};
    };
    auto couple_stream = [&](const CoupleArray& array) -> typename Tile::CoupleStream {
      return {array.start + at.batch * array.batch + at.group * array.group + at.first_state * array.state +
                  origin * array.time,
              array.time, array.state, thread};
    };
    auto u = stream(args.u), delta = stream(args.delta), z = stream(args.z), output = stream(args.output);
    auto partial_sum = stream(args.partial_sum);
    auto B = couple_stream(args.B), C = couple_stream(args.C);

    // One thread copies the marks of a tile, three tiles ahead: the others see them after the barrier that follows its
    // wait.
    auto start_marks = [&](int tile) {
      if constexpr (Tile::kSegmented) {
        if (args.marks && thread == 0 && tile < tiles)
          start_copy(
              &shared.marks[tile % Tile::kMarks],
              reinterpret_cast<const char*>(args.marks + at.batch * args.marks_batch + origin / kMarkSteps + tile));
      }
    };
    auto marks_of = [&](int tile) -> StepMarks {
      if constexpr (Tile::kSegmented) {
        if (args.marks) {
          StepMarks marks = marks_from(shared.marks[tile % Tile::kMarks], nullptr, 0, end_step(tile));
          const unsigned keep = ~0u << first_step(tile);
          marks.resets &= keep, marks.starts &= keep, marks.ends &= !kSummarise && args.sequence_last ? keep : 0;
          return marks;
        }
      }
      return {0, 0, 0, 0};
    };

    auto start_loads = [&](auto how, int tile) {
      constexpr bool kPlain = decltype(how)::kPlain;
      const unsigned there = exist(how, tile), couples_there = couples_exist(how, tile);
      u.template start<kPlain>(shared.u[tile & 3], thread, args.u.vector, there);
      delta.template start<kPlain>(shared.delta, thread, args.delta.vector, there);
      if constexpr (Tile::kTimeB) B.template start<kPlain>(shared.raw_B, thread, args.B.vector, couples_there);
      if constexpr (Tile::kTimeC && !kSummarise)
        C.template start<kPlain>(shared.raw_C, thread, args.C.vector, couples_there);
    };
    auto commit = [&](auto how, int tile, const StepMarks& marks) {
      constexpr bool kPlain = decltype(how)::kPlain;
      const unsigned there = exist(how, tile), couples_there = couples_exist(how, tile);
      commit_sequence<kPlain, Tile>(
          args, shared, thread, tile, u, delta, there,
          !how.kWhole && tile == 0 && at.chunk == 0 && !args.initial && !args.sequence_initial, marks);
      if constexpr (Tile::kTimeB)
        commit_couple<kPlain, Tile>(args.B, thread, B, shared.raw_B, couples_there, marks.masked, shared.B[tile & 1]);
      if constexpr (Tile::kTimeC && !kSummarise)
        commit_couple<kPlain, Tile>(args.C, thread, C, shared.raw_C, couples_there, 0, shared.C[tile & 1]);
    };
    // Everything of an interval but the recurrence. What is loaded here is used one interval later.
    auto stage = [&](auto how, int tile, unsigned masked_before, const StepMarks& marks_after) {
      constexpr bool kPlain = decltype(how)::kPlain;
      wait_for_copies();
      if (how.kWhole || tile + 1 < tiles) commit(how, tile + 1, marks_after);
      if (!kSummarise && (how.kWhole || tile > 0)) {
        const int started = how.kWhole || tile + 1 < tiles ? tile + 1 : tiles - 1;  // the last whose u was started
        finish<kPlain, Tile>(args, shared, thread, tile - 1, u, z, output, partial_sum, exist(how, tile - 1),
                             masked_before, started - (tile - 1));
        output.at += output.tile_step;
        if (!kPlain) partial_sum.at += partial_sum.tile_step;
      }
      if (how.kWhole || tile + 2 < tiles) start_loads(how, tile + 2);
      if (!kSummarise && args.z.start && (how.kWhole || tile < tiles))
        z.template start<kPlain>(shared.z, thread, args.z.vector, exist(how, tile));
      start_marks(tile + 3);
    };

    // A constant, but not of doubles: the compiler would move their loads farther ahead than there are registers for.
    const int next_drive = sizeof(R) > 4 && !mine_exist ? 0 : Tile::kRow;
    bool resets = false;  // has any step so far?
    auto compute = [&](int tile) {
      const StepMarks marks = marks_of(tile);
      // The sequence at a time of this tile.
      auto sequence = [&](int time) { return (long long)args.ids[origin + (long long)tile * kTileSteps + time]; };
      auto enter = [&](int time) {
        const bool empty = marks.resets >> time & 1;
#pragma unroll
        for (int n = 0; n < Tile::kStates; ++n) {
          mine.h[n] = Scalar<S>::negative_zero();
          if (!empty && mine_exist)
            mine.h[n] = load_item<S>(args.sequence_initial + sequence(time) * args.initial_batch +
                                     my_channel * args.initial_channel + my_state(n) * args.initial_state);
        }
      };
      auto leave = [&](int time) {
        if (!mine_exist) return;
        const long long row = (sequence(time) * args.channels + my_channel) * args.state;
#pragma unroll
        for (int n = 0; n < Tile::kStates; ++n) reinterpret_cast<S*>(args.sequence_last)[row + my_state(n)] = mine.h[n];
      };
      if (!kSummarise && args.states && first_step(tile) == 0) {
        if (Tile::kSegmented && (marks.resets | marks.starts) & 1) enter(0);
        const long long intervals = (args.length + kStateInterval - 1) / kStateInterval;
        const long long row = at.batch * intervals + origin / kStateInterval + tile;
        S* const to = reinterpret_cast<S*>(args.states) + (row * args.channels + my_channel) * args.state;
#pragma unroll
        for (int n = 0; n < Tile::kStates; n += Tile::kVector) {
          S piece[Tile::kVector];
#pragma unroll
          for (int k = 0; k < Tile::kVector; ++k) piece[k] = mine.h[n + k];
          if (mine_exist) write_row(to + my_state(n), piece);
        }
      }
      const int buffer = tile & 1, first = Tile::state_of(group, 0);
      R* const y = &shared.y[buffer][group][channel];
      if (Tile::kSegmented && marks.masked == ~0u && !(marks.resets | marks.starts | marks.ends)) {
        // A tile of padding changes nothing.
        for (int step = 0; !kSummarise && step < kTileSteps; step += Tile::kGroups) y[step * Tile::kSums] = R(0);
        return;
      }
      const S* const now_B = &shared.B[buffer][0][first];
      const S* const now_C = &shared.C[buffer][0][first];
      const Drive<R>* const drive = &shared.drive[buffer][0][mine_exist ? channel : Tile::kChannels];
      if (Tile::kSegmented && marks.resets | marks.starts | marks.ends) {
        resets |= (marks.resets | marks.starts) != 0;
        mine.template run<true>(drive, next_drive, now_B, now_C, y, lane, marks, enter, leave);
      } else {
        mine.template run<false>(drive, next_drive, now_B, now_C, y, lane, marks, enter, leave);
      }
    };

    for (int c = thread; c < Tile::kChannels; c += Tile::kThreads) {
      const int d = at.first_channel + c;
      const bool exists = c < at.channels;
      shared.bias[c] =
          exists && args.delta_bias ? load_real<R>(args.delta_bias + d * args.bias_channel, args.bias_code) : R(0);
      shared.D[c] = exists && args.D ? load_real<R>(args.D + d * args.D_channel, args.D_code) : R(0);
    }
    for (int tile = 0; tile < 3; ++tile) start_marks(tile);
    const bool whole = at.channels == Tile::kChannels && at.states == Tile::kSlice;
    auto walk = [&](auto how) {
      start_loads(how, 0);
      wait_for_copies();
      __syncthreads();
      const StepMarks first = marks_of(0);
      unsigned masked_before = 0, masked_now = first.masked;
      commit(how, 0, first);
      if (tiles > 1) start_loads(how, 1);
      __syncthreads();
      // The interval after the last tile only finishes that.
      for (int tile = 0; tile <= tiles; ++tile) {
        const StepMarks after = tile + 1 < tiles ? marks_of(tile + 1) : StepMarks{0, 0, 0, 0};
        if (how.kPlain && whole && tile > (ragged_begin > 0) && tile + 3 < tiles)
          stage(Whole(), tile, masked_before, after);
        else
          stage(how, tile, masked_before, after);
        if (tile < tiles) compute(tile);
        masked_before = masked_now;
        masked_now = after.masked;
        __syncthreads();
      }
    };
    // Along time the runs of a chunk that was moved are cut.
    constexpr int kRun = Tile::Grid::kItems > Tile::CoupleGrid::kItems ? Tile::Grid::kItems : Tile::CoupleGrid::kItems;
    const bool cut_runs = Tile::kTimeFast && Tile::kSegmented && (ragged_begin | ragged_end) % kRun;
    if (args.plain && !cut_runs)
      walk(Plain());
    else
      walk(General());

    if (!mine_exist) continue;
#pragma unroll
    for (int n = 0; n < Tile::kStates; ++n) {
      if (kSummarise) {
        summarise(n, gate_of(mine.delta_sum.value(), mine.rate[n]), mine.h[n], resets);
      } else if (args.last && ends_row) {
        reinterpret_cast<S*>(args.last)[(at.batch * args.channels + my_channel) * args.state + my_state(n)] = mine.h[n];
      }
    }
  }
}
