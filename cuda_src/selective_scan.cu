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
// A tile is kTile steps; the work on it has three stages:
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
// negative stride. The one place where a step is formed is commit_sequence: a step past the chunk's end has delta = 0 and
// delta * u = 0, and its B is 0 (commit_couple): gate 1, input 0.
#include "activations.cuh"
#include "operators.cuh"
#include "selective_args.cuh"
#include "tile_io.cuh"

constexpr int kTile = 16;       // steps a tile
constexpr int kUnroll = 2;      // steps whose shared-memory loads are issued together
constexpr int kRowPadding = 2;  // channels added to a row of shared memory, against bank conflicts along time

template <class R>
struct alignas(2 * sizeof(R)) Drive {
  R delta, delta_u;
};

// The shape of one instantiation. Item: u and z. S: the state, and A, B, C as computed.
template <class Item_, class S_, int kStates_, int kGroups_, int kChannels_, bool kTimeB_, bool kTimeC_>
struct SelectiveTile {
  using Item = Item_;
  using S = S_;
  using R = typename Accumulated<Item>::type;
  static constexpr int kStates = kStates_, kGroups = kGroups_, kChannels = kChannels_;
  static constexpr bool kTimeB = kTimeB_, kTimeC = kTimeC_;
  static constexpr int kSlice = kStates * kGroups;
  static constexpr int kThreads = kChannels * kGroups;
  static constexpr int kRow = kChannels + kRowPadding;
  static constexpr int kPairs = kTile * kChannels / 2 / kThreads;          // (time, channel) pairs a thread
  static constexpr int kCouples = (kTile * kSlice + kThreads - 1) / kThreads;  // items of B, and of C, a thread
  static_assert(kChannels % 32 == 0, "a warp covers 32 channels of one state group");
  static_assert(kTile * kChannels / 2 % kThreads == 0, "each thread commits and finishes the same number of pairs");
  static_assert(kTile % kUnroll == 0, "a tile is whole groups of steps");

  struct Shared {
    alignas(16) Drive<R> drive[2][kTile][kRow];
    alignas(16) S B[2][kTimeB ? kTile : 1][kSlice];
    alignas(16) S C[2][kTimeC ? kTile : 1][kSlice];
    R partial[2][kGroups][kTile][kRow];
    R bias[kChannels], D[kChannels];
  };
};

// A complex state stands for a conjugate pair: y = 2 Re(sum).
template <class R>
__device__ __forceinline__ R contract(R C, R h, R sum) {
  return multiply_add(C, h, sum);
}
template <class R>
__device__ __forceinline__ R contract(complex<R> C, complex<R> h, R sum) {
  return multiply_add(R(2) * C.re, h.re, multiply_add(R(-2) * C.im, h.im, sum));
}

// Which (time, channel) pairs of a tile are this thread's: the i-th is i times `time_hop` steps and `channel_hop`
// channels from the first. The two items of a pair are neighbours along the fast axis.
template <class Tile>
struct PairPlace {
  int time, channel;
  bool time_fast;

  __device__ __forceinline__ explicit PairPlace(bool time_fast) : time_fast(time_fast) {
    time = time_fast ? 2 * (threadIdx.x % (kTile / 2)) : threadIdx.x / (Tile::kChannels / 2);
    channel = time_fast ? threadIdx.x / (kTile / 2) : 2 * (threadIdx.x % (Tile::kChannels / 2));
  }
  __device__ __forceinline__ int time_hop() const { return time_fast ? 0 : 2 * Tile::kThreads / Tile::kChannels; }
  __device__ __forceinline__ int channel_hop() const { return time_fast ? 2 * Tile::kThreads / kTile : 0; }
  __device__ __forceinline__ int time_at(int i) const { return time + i * time_hop(); }
  __device__ __forceinline__ int channel_at(int i) const { return channel + i * channel_hop(); }
  // The second item's place, relative to the first.
  __device__ __forceinline__ int next_time() const { return time_fast; }
  __device__ __forceinline__ int next_channel() const { return !time_fast; }
};

// Where this thread's pairs of one array are: the first at position 0, and the bytes from there.
template <class Tile>
struct PairCursor {
  char* start;
  long long step, hop, next;

  __device__ __forceinline__ PairCursor(const SequenceArray& array, const PairPlace<Tile>& place, long long batch,
                                        long long first_channel)
      : start(array.start + batch * array.batch + (first_channel + place.channel) * array.channel +
              place.time * array.time),
        step(array.time),
        hop(place.time_hop() * array.time + place.channel_hop() * array.channel),
        next(place.time_fast ? array.time : array.channel) {}
  __device__ __forceinline__ char* at(long long base, int i) const { return start + base * step + i * hop; }
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
  long long tile = item % tiles;
  item /= tiles;
  at.group = item % args.groups;
  item /= args.groups;
  at.batch = item % args.batch;
  at.first_state = args.first_state + item / args.batch * Tile::kSlice;
  const long long left_states = args.state - at.first_state;
  at.states = (int)(left_states < Tile::kSlice ? left_states : Tile::kSlice);
  at.first_channel = at.group * in_group + tile * Tile::kChannels;
  const long long left = in_group - tile * Tile::kChannels;
  at.channels = (int)(left < Tile::kChannels ? left : Tile::kChannels);
  at.begin = at.chunk * args.chunk;
  at.end = at.begin + args.chunk < args.length ? at.begin + args.chunk : args.length;
  return at;
}

// --- loads: raw items into registers --------------------------------------------------------------------------

template <class Tile>
struct RawSequence {
  typename RawPairOf<typename Tile::R>::type pair[Tile::kPairs];

  __device__ __forceinline__ void start(const SequenceArray& array, const PairCursor<Tile>& cursor,
                                        const PairPlace<Tile>& place, long long base, int steps, int channels) {
#pragma unroll
    for (int i = 0; i < Tile::kPairs; ++i) {
      const int time = place.time_at(i), channel = place.channel_at(i);
      start_pair<typename Tile::Item>(
          pair[i], cursor.at(base, i), cursor.next, time < steps && channel < channels,
          time + place.next_time() < steps && channel + place.next_channel() < channels, array.wide, array.vector);
    }
  }
};

// B or C of one tile. The e-th item of the tile is this thread's where e = threadIdx.x + i * kThreads.
template <class Tile>
struct RawCouple {
  using S = typename Tile::S;
  typename RawItemOf<S>::type item[Tile::kCouples];

  static __device__ __forceinline__ int time_of(const CoupleArray& array, int e) {
    return array.time_fast ? e % kTile : e / Tile::kSlice;
  }
  static __device__ __forceinline__ int state_of(const CoupleArray& array, int e) {
    return array.time_fast ? e / kTile : e % Tile::kSlice;
  }

  // `corner`: the item at the tile's first step and the slice's first state.
  __device__ __forceinline__ void start(const CoupleArray& array, const char* corner, int steps, int states) {
#pragma unroll
    for (int i = 0; i < Tile::kCouples; ++i) {
      const int e = threadIdx.x + i * Tile::kThreads;
      const int time = time_of(array, e), state = state_of(array, e);
      start_item<typename Tile::Item>(item[i], corner + time * array.time + state * array.state,
                                      time < steps && state < states, array.wide);
    }
  }

  __device__ __forceinline__ void commit(const CoupleArray& array, S (*to)[Tile::kSlice]) const {
#pragma unroll
    for (int i = 0; i < Tile::kCouples; ++i) {
      const int e = threadIdx.x + i * Tile::kThreads;
      if (e < kTile * Tile::kSlice)
        to[time_of(array, e)][state_of(array, e)] = unpack_item<typename Tile::Item, S>(item[i], array.wide);
    }
  }
};

// --- commit ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float limit(const SelectiveArgs& args, int i, float) { return args.limits32[i]; }
__device__ __forceinline__ double limit(const SelectiveArgs& args, int i, double) { return args.limits64[i]; }

template <class R>
__device__ __forceinline__ R discretise(const SelectiveArgs& args, R delta, R bias) {
  delta = delta + bias;
  if (args.softplus) delta = softplus(delta);
  if (args.limited) delta = clip(delta, limit(args, 0, R()), limit(args, 1, R()));
  return delta;
}

template <class Tile>
__device__ __forceinline__ void commit_sequence(const SelectiveArgs& args, const PairPlace<Tile>& place,
                                                const RawSequence<Tile>& u, const PairCursor<Tile>& u_at,
                                                const RawSequence<Tile>& delta, const PairCursor<Tile>& delta_at, int steps,
                                                typename Tile::Shared& shared, int buffer) {
  using R = typename Tile::R;
#pragma unroll
  for (int i = 0; i < Tile::kPairs; ++i) {
    const int time = place.time_at(i), channel = place.channel_at(i);
    const int next_time = time + place.next_time(), next_channel = channel + place.next_channel();
    R u_first, u_second, d_first, d_second;
    unpack_pair<typename Tile::Item>(u.pair[i], args.u.wide, args.u.vector, u_at.next, u_first, u_second);
    unpack_pair<typename Tile::Item>(delta.pair[i], args.delta.wide, args.delta.vector, delta_at.next, d_first,
                                     d_second);
    d_first = discretise(args, d_first, shared.bias[channel]);
    d_second = discretise(args, d_second, shared.bias[next_channel]);
    const bool first = time < steps, second = next_time < steps;
    shared.drive[buffer][time][channel] = {first ? d_first : R(0), first ? d_first * u_first : R(0)};
    shared.drive[buffer][next_time][next_channel] = {second ? d_second : R(0), second ? d_second * u_second : R(0)};
  }
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
    R tile_sum = 0;
#pragma unroll
    for (int time = 0; time < kTile; time += kUnroll) {
      const Loaded& now = loaded[time / kUnroll % 2];
      if (time + kUnroll < kTile)
        load(loaded[(time / kUnroll + 1) % 2], shared, time + kUnroll, channel, group * kStates, buffer);
      R y[kUnroll];
#pragma unroll
      for (int s = 0; s < kUnroll; ++s) {
        y[s] = 0;
        if (kSummarise) tile_sum += now.drive[s].delta;
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
      }
    }
    if (kSummarise) delta_sum += tile_sum;
  }
};

// --- finish ---------------------------------------------------------------------------------------------------

// Adds a tile's partial sums in the order of the states and brings y to where it goes: to the output, or while there
// are slices to come to partial_sum.
template <class Tile>
__device__ __forceinline__ void finish(const SelectiveArgs& args, const typename Tile::Shared& shared, int buffer,
                                       const PairPlace<Tile>& place, const RawSequence<Tile>& u,
                                       const PairCursor<Tile>& u_at, const RawSequence<Tile>& z,
                                       const PairCursor<Tile>& z_at, const PairCursor<Tile>& output_at,
                                       const PairCursor<Tile>& partial_sum_at, long long base, int steps, int channels,
                                       int groups) {
  using R = typename Tile::R;
#pragma unroll
  for (int i = 0; i < Tile::kPairs; ++i) {
    const int time = place.time_at(i), channel = place.channel_at(i);
    const int next_time = time + place.next_time(), next_channel = channel + place.next_channel();
    const bool has_first = time < steps && channel < channels;
    const bool has_second = next_time < steps && next_channel < channels;
    R y_first = shared.partial[buffer][0][time][channel];
    R y_second = shared.partial[buffer][0][next_time][next_channel];
    if (args.adds_to_partial_sum) {
      y_first += has_first ? load_item<R>(partial_sum_at.at(base, i)) : R(0);
      y_second += has_second ? load_item<R>(partial_sum_at.at(base, i) + partial_sum_at.next) : R(0);
    }
#pragma unroll
    for (int g = 1; g < Tile::kGroups; ++g) {
      if (g < groups) {
        y_first += shared.partial[buffer][g][time][channel];
        y_second += shared.partial[buffer][g][next_time][next_channel];
      }
    }
    if (args.leaves_partial_sum) {
      char* address = partial_sum_at.at(base, i);
      if (has_first) *reinterpret_cast<R*>(address) = y_first;
      if (has_second) *reinterpret_cast<R*>(address + partial_sum_at.next) = y_second;
      continue;
    }
    R first, second;
    if (args.D) {
      unpack_pair<typename Tile::Item>(u.pair[i], args.u.wide, args.u.vector, u_at.next, first, second);
      y_first = multiply_add(shared.D[channel], first, y_first);
      y_second = multiply_add(shared.D[next_channel], second, y_second);
    }
    if (args.z.start) {
      unpack_pair<typename Tile::Item>(z.pair[i], args.z.wide, args.z.vector, z_at.next, first, second);
      y_first = y_first * silu(first);
      y_second = y_second * silu(second);
    }
    store_pair<typename Tile::Item>(output_at.at(base, i), output_at.next, y_first, y_second, has_first, has_second,
                                    args.output_code, args.output.vector);
  }
}

// --- the kernel -----------------------------------------------------------------------------------------------

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
    const int tiles = (int)((at.end - at.begin + kTile - 1) / kTile);
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
      shared.bias[c] = exists && args.delta_bias
                           ? load_real<R>(args.delta_bias + d * args.bias_channel, args.bias_code)
                           : R(0);
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

    const PairPlace<Tile> my_pairs(args.time_fast);
    const PairCursor<Tile> u_at(args.u, my_pairs, at.batch, at.first_channel);
    const PairCursor<Tile> delta_at(args.delta, my_pairs, at.batch, at.first_channel);
    const PairCursor<Tile> z_at(args.z, my_pairs, at.batch, at.first_channel);
    const PairCursor<Tile> output_at(args.output, my_pairs, at.batch, at.first_channel);
    const PairCursor<Tile> partial_sum_at(args.partial_sum, my_pairs, at.batch, at.first_channel);
    auto base_of = [&](int tile) { return at.begin + (long long)tile * kTile; };
    auto steps_of = [&](int tile) {
      const long long left = at.end - base_of(tile);
      return (int)(left < kTile ? left : kTile);
    };

    RawSequence<Tile> raw_u, raw_delta;
    RawCouple<Tile> raw_B, raw_C;
    auto start_couple = [&](RawCouple<Tile>& raw, const CoupleArray& array, int tile) {
      raw.start(array,
                array.start + at.batch * array.batch + at.group * array.group + at.first_state * array.state +
                    base_of(tile) * array.time,
                steps_of(tile), at.states);
    };
    auto start_loads = [&](int tile) {
      if (tile >= tiles) return;
      raw_u.start(args.u, u_at, my_pairs, base_of(tile), steps_of(tile), at.channels);
      raw_delta.start(args.delta, delta_at, my_pairs, base_of(tile), steps_of(tile), at.channels);
      if constexpr (Tile::kTimeB) start_couple(raw_B, args.B, tile);
      if constexpr (Tile::kTimeC && !kSummarise) start_couple(raw_C, args.C, tile);
    };
    auto commit = [&](int tile) {
      if (tile >= tiles) return;
      commit_sequence<Tile>(args, my_pairs, raw_u, u_at, raw_delta, delta_at, steps_of(tile), shared, tile % 2);
      if constexpr (Tile::kTimeB) raw_B.commit(args.B, shared.B[tile % 2]);
      if constexpr (Tile::kTimeC && !kSummarise) raw_C.commit(args.C, shared.C[tile % 2]);
    };
    auto finish_tile = [&](int tile) {
      if (kSummarise || tile < 0) return;
      RawSequence<Tile> u, z;
      const bool stores = !args.leaves_partial_sum;
      if (stores && args.D) u.start(args.u, u_at, my_pairs, base_of(tile), steps_of(tile), at.channels);
      if (stores && args.z.start) z.start(args.z, z_at, my_pairs, base_of(tile), steps_of(tile), at.channels);
      finish<Tile>(args, shared, tile % 2, my_pairs, u, u_at, z, z_at, output_at, partial_sum_at, base_of(tile),
                   steps_of(tile), at.channels, (at.states + Tile::kStates - 1) / Tile::kStates);
    };

    start_loads(0);
    __syncthreads();  // bias and D are in shared memory
    commit(0);
    start_loads(1);
    __syncthreads();
    for (int tile = 0; tile <= tiles; ++tile) {
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) == computes_first) {
          if (tile < tiles && group * Tile::kStates < at.states) mine.run(shared, channel, group, tile % 2);
        } else {
          commit(tile + 1);
          start_loads(tile + 2);
          finish_tile(tile - 1);
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
        reinterpret_cast<S*>(args.last)[(at.batch * args.channels + my_channel) * args.state + my_state + n] = mine.h[n];
      }
    }
  }
}
