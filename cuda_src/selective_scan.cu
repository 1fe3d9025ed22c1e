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
// Where a row is cut into chunks (split), the kernel run with kSummarise leaves each chunk's map: the gates' product,
// from one exponential of A times the sum of delta, and the state that the chunk reaches from zero. A linear_scan over
// them makes seed[c] the state that leaves chunk c.
//
// Position counts steps in the direction of the scan: in reverse the arrays come with their last step first and a
// negative stride. A step past the chunk's end has delta = 0, delta * u = 0 and B = 0: gate 1, input 0
// (commit_sequence and commit_couple, the one place where a step is formed).
#include "operators.cuh"
#include "selective_tile.cuh"

constexpr int kUnroll = 2;     // steps whose shared-memory loads are issued together
constexpr int kSumSteps = 16;  // steps of delta that are added before their sum is added to the chunk's

// A complex state stands for a conjugate pair: y = 2 Re(sum).
template <class R>
__device__ __forceinline__ R contract(R C, R h, R sum) {
  return multiply_add(C, h, sum);
}
template <class R>
__device__ __forceinline__ R contract(complex<R> C, complex<R> h, R sum) {
  return multiply_add(R(2) * C.re, h.re, multiply_add(R(-2) * C.im, h.im, sum));
}

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

  struct Loaded {
    Drive<R> drive[kUnroll];
    S B[Tile::kTimeB ? kUnroll : 1][kStates], C[Tile::kTimeC && !kSummarise ? kUnroll : 1][kStates];
  };

  static __device__ __forceinline__ void load(Loaded& to, const typename Tile::Shared& shared, int time, int channel,
                                              int state, int buffer) {
#pragma unroll
    for (int s = 0; s < kUnroll; ++s) {
      to.drive[s] = shared.drive[buffer][time + s][channel];
      if constexpr (Tile::kTimeB) read_row(to.B[s], &shared.B[buffer][time + s][state]);
      if constexpr (Tile::kTimeC && !kSummarise) read_row(to.C[s], &shared.C[buffer][time + s][state]);
    }
  }

  __device__ __forceinline__ void run(typename Tile::Shared& shared, int channel, int group, int buffer) {
    Loaded loaded[2];
    load(loaded[0], shared, 0, channel, group * kStates, buffer);
    R sum = 0;
#pragma unroll
    for (int time = 0; time < Tile::kSteps; time += kUnroll) {
      const Loaded& now = loaded[time / kUnroll % 2];
      if (time + kUnroll < Tile::kSteps)
        load(loaded[(time / kUnroll + 1) % 2], shared, time + kUnroll, channel, group * kStates, buffer);
      R y[kUnroll];
#pragma unroll
      for (int s = 0; s < kUnroll; ++s) {
        y[s] = 0;
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
      }
      if constexpr (!kSummarise) {
#pragma unroll
        for (int s = 0; s < kUnroll; ++s) shared.partial[buffer][group][time + s][channel] = y[s];
      } else if ((time + kUnroll) % kSumSteps == 0) {
        delta_sum += sum;
        sum = 0;
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
      commit_sequence<kPlain, Tile>(args, shared, tile % 2, u, delta, exist(masks, tile),
                                    tile == tiles - 1 ? ragged_steps : Tile::kSteps);
      if constexpr (Tile::kTimeB)
        commit_couple<kPlain, Tile>(args.B, B, shared.raw_B, exist(couple_masks, tile), shared.B[tile % 2]);
      if constexpr (Tile::kTimeC && !kSummarise)
        commit_couple<kPlain, Tile>(args.C, C, shared.raw_C, exist(couple_masks, tile), shared.C[tile % 2]);
    };
    // Everything of an interval but the recurrence. What is loaded here is used one interval later.
    auto stage = [&](auto is_plain, int tile) {
      constexpr bool kPlain = decltype(is_plain)::value;
      wait_for_copies();
      if (kPlain || tile + 1 < tiles) commit(is_plain, tile + 1);
      if (!kSummarise && (kPlain || tile > 0)) {
        finish<kPlain, Tile>(args, shared, (tile - 1) % 2, u_again, z, output, partial_sum, exist(masks, tile - 1),
                             groups);
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
          if (tile < tiles && group < groups) mine.run(shared, channel, group, tile % 2);
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
      } else if (args.last && at.end == args.length) {
        reinterpret_cast<S*>(args.last)[(at.batch * args.channels + my_channel) * args.state + my_state + n] =
            mine.h[n];
      }
    }
  }
}
