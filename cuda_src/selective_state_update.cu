// One step of selective_scan, for decoding: the state is changed in place.
//
//     h = exp(dt A) h + dt x B        y = (sum_n C h + D x) silu(z)
//
// Bound by reading and writing the state, so a thread issues all its loads before it waits for one of them. Only the
// state's wait, for the slot that tells where it is.
//
//   thread  kItems neighbouring states of one channel (16 bytes as computed), in kRows rows of the batch, so that A is
//           read once for kRows rows
//   team    2^team_bits lanes on one channel, kRows at least: together kItems << team_bits states. More take rounds.
//   block   2^column_bits neighbouring channels, so that a warp reads one run of memory; what teams are left go over
//           rows
//   grid    x over channels, y over rows, so that no division is needed to find one's place. Both loop on overflow.
//
// Of each kRows lanes, lane i forms dt and dt * x of the team's row i and hands them to the others, gets the row's sum
// over the states, and stores its y. The sum's order is that of the lanes: i and i + 2 are added, then these two sums,
// then the groups of kRows lanes, nearest first, then the rounds. Every lane takes part in every shuffle: one that has
// no row or no channel reads the last there is, and stores nothing.
#include "operators.cuh"
#include "activations.cuh"
#include "selective_types.cuh"
#include "selective_update_args.cuh"

constexpr int kUpdateThreads = 128;  // a block
constexpr int kRows = 4;
constexpr unsigned kEveryLane = 0xffffffffu;

template <bool kFirst, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

// Neighbouring states, aligned as one: what one access brings. Items of 16 bits stay in words until they are used, for
// a compiler that takes words apart waits for them.
template <class Item, int N>
struct alignas(sizeof(Item) * N) Piece {
  Item item[N];
  __device__ __forceinline__ Item get(int n) const { return item[n]; }
};
template <class Item>
struct alignas(8) Piece16 {
  unsigned word[2];
  __device__ __forceinline__ Item get(int n) const { return Item{(unsigned short)(word[n / 2] >> n % 2 * 16)}; }
};
template <>
struct Piece<bf16_t, 4> : Piece16<bf16_t> {};
template <>
struct Piece<f16_t, 4> : Piece16<f16_t> {};

template <class Item, class S, int N>
__device__ __forceinline__ void round_piece(const S (&values)[N], Piece<Item, N>& to) {
  if constexpr (sizeof(Item) == 2) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      Item lower, upper;
      narrow(values[n], lower);
      narrow(values[n + 1], upper);
      to.word[n / 2] = lower.bits | (unsigned)upper.bits << 16;
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) to.item[n] = values[n];
  }
}

// One item of type Item, or of type float where Item has 16 bits (`wide`); it too is converted where it is used.
template <class Item>
struct OneItem {
  Item item;
  __device__ __forceinline__ void load(const char* at, bool) { item = load_item<Item>(at); }
  __device__ __forceinline__ Item get(bool) const { return item; }
};
template <class Item>
struct OneItem16 {
  unsigned bits;
  __device__ __forceinline__ void load(const char* at, bool wide) {
    bits = wide ? load_item<unsigned>(at) : load_item<unsigned short>(at);
  }
  __device__ __forceinline__ float get(bool wide) const {
    return wide ? __uint_as_float(bits) : widen(Item{(unsigned short)bits});
  }
};
template <>
struct OneItem<bf16_t> : OneItem16<bf16_t> {};
template <>
struct OneItem<f16_t> : OneItem16<f16_t> {};

template <class R>
__device__ __forceinline__ R from_lane_across(R x, int distance) {
  return __shfl_xor_sync(kEveryLane, x, distance);
}

// The sums over a team of y[0] to y[kRows - 1]: lane i of every kRows gets that of y[i].
template <class R>
__device__ __forceinline__ R sum_over_team(const R (&y)[kRows], int lane, int team) {
  static_assert(kRows == 4, "two exchanges, each of which halves the rows that a lane has");
  const bool upper = lane & 2, odd = lane & 1;
  const R sent[2] = {upper ? y[0] : y[2], upper ? y[1] : y[3]};
  R kept[2] = {upper ? y[2] : y[0], upper ? y[3] : y[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i) kept[i] += from_lane_across(sent[i], 2);
  R sum = odd ? kept[1] : kept[0];
  sum += from_lane_across(odd ? kept[0] : kept[1], 1);
  for (int distance = kRows; distance < team; distance *= 2) sum += from_lane_across(sum, distance);
  return sum;
}

// Item: x and z. StateItem: the state in memory. S: the state, and A, B, C, as computed.
// kVector: states are side by side in state, A, B and C and come in aligned pieces; A is of type S, B and C are not
// wide, D and dt_bias are of type R or Item; and no array, nor a slot of the state, spans 2^31 bytes.
template <class Item, class StateItem, class S, bool kVector>
__device__ __forceinline__ void selective_state_update(const UpdateArgs& args) {
  using R = typename Accumulated<Item>::type;
  using Couple = typename ItemOfCouple<Item, S>::type;
  using Offset = typename Choose<kVector, unsigned, long long>::type;
  constexpr int kItems = 16 / sizeof(S);
  using CouplePiece = Piece<typename Choose<kVector, Couple, S>::type, kItems>;
  using StatePiece = Piece<typename Choose<kVector, StateItem, S>::type, kItems>;

  const int team = 1 << args.team_bits, lane = threadIdx.x & (team - 1), own = lane % kRows;
  const int my_team = threadIdx.x >> args.team_bits;
  const int block_columns = 1 << args.column_bits;
  const int block_rows = kRows * (kUpdateThreads >> args.team_bits >> args.column_bits);
  const Offset batch = args.batch, channels = args.channels, states = args.states;
  const Offset A_step = kVector ? sizeof(S) : args.A_state, state_step = kVector ? sizeof(StateItem) : args.state_state;
  const Offset B_step = kVector ? sizeof(Couple) : args.B_state, C_step = kVector ? sizeof(Couple) : args.C_state;

  // A turn: block_columns channels, block_rows rows, and a round of the states. From one turn to the next nothing is
  // kept but the sum over the rounds so far: registers are for what is under way.
  Offset columns = (Offset)blockIdx.x * block_columns, rows = (Offset)blockIdx.y * block_rows, round = 0;
  R sum = 0;
  while (columns < channels && rows < batch) {
    auto existing = [&](Offset row) { return row < batch ? row : batch - 1; };
    const Offset my_channel = columns + (my_team & (block_columns - 1));
    const Offset channel = my_channel < channels ? my_channel : channels - 1;
    const Offset first_row = rows + (my_team >> args.column_bits) * kRows, row = existing(first_row + own);
    const bool mine = first_row + own < batch && my_channel < channels;
    const Offset first = round + lane * kItems;  // of my states, of which `count` exist
    const int count = first >= states ? 0 : states - first < kItems ? (int)(states - first) : kItems;
    const Offset some = kVector && count == 0 ? 0 : first;
    const Offset group = args.group_channels == args.channels ? 0 : channel / (Offset)args.group_channels;
    auto place = [&](char* array, Offset row, long long row_step, long long channel_step) {
      return array + (row * (Offset)row_step + channel * (Offset)channel_step);
    };
    auto piece_place = [&](char* array, int r, long long row_step, long long group_step, Offset step) {
      return array + (existing(first_row + r) * (Offset)row_step + group * (Offset)group_step + some * step);
    };

    long long slot = row;
    if (args.slots) {
      const char* at = place(args.slots, row, args.slots_batch, 0);
      slot = args.slots_wide ? load_item<long long>(at) : load_item<int>(at);
    }
    const bool bias_wide = args.bias_code == kItemCode<R>, D_wide = args.D_code == kItemCode<R>;
    OneItem<Item> x_item, dt_item, z_item = {}, bias_item = {}, D_item = {};
    R bias = 0, D = 0;
    x_item.load(place(args.x, row, args.x_batch, args.x_channel), false);
    dt_item.load(place(args.dt, row, args.dt_batch, args.dt_channel), args.dt_wide);
    if (args.z) z_item.load(place(args.z, row, args.z_batch, args.z_channel), false);
    if (args.dt_bias) {
      const char* at = place(args.dt_bias, 0, 0, args.bias_channel);
      if constexpr (kVector)
        bias_item.load(at, bias_wide);
      else
        bias = load_real<R>(at, args.bias_code);
    }
    if (args.D) {
      const char* at = place(args.D, 0, 0, args.D_channel);
      if constexpr (kVector)
        D_item.load(at, D_wide);
      else
        D = load_real<R>(at, args.D_code);
    }

    Piece<S, kItems> A;
    CouplePiece B[kRows], C[kRows];
    StatePiece h[kRows];
    char* state_at[kRows];
    const char* A_at = place(args.A, 0, 0, args.A_channel) + some * A_step;
    if constexpr (kVector) {
      A = load_item<Piece<S, kItems> >(A_at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        B[r] = load_item<CouplePiece>(piece_place(args.B, r, args.B_batch, args.B_group, B_step));
        C[r] = load_item<CouplePiece>(piece_place(args.C, r, args.C_batch, args.C_group, C_step));
      }
    } else {
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        A.item[n] = Scalar<S>::zero();
        if (n < count) load_as(A.item[n], A_at + n * A_step, args.A_code);
      }
    }
    const bool written = mine && slot >= 0 && slot < args.state_slots;
    const long long slot_offset = (written ? slot : 0) * args.state_slot;
    const unsigned live = __ballot_sync(kEveryLane, written) >> (threadIdx.x % 32 - own);  // bit r: is that of row r?
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Offset in_slot = channel * (Offset)args.state_channel + first * state_step;
      state_at[r] = args.state + __shfl_sync(kEveryLane, slot_offset, r, kRows) + in_slot;
      h[r] = {};
      if (kVector && count > 0 && live >> r & 1) h[r] = load_item<StatePiece>(state_at[r]);
    }
    __syncwarp();  // or a compiler moves loads past the branch on softplus, where they wait for dt

    const R x = x_item.get(false);
    if (kVector) bias = bias_item.get(bias_wide), D = D_item.get(D_wide);
    R delta = dt_item.get(args.dt_wide) + bias;
    if (args.softplus) delta = softplus(delta);
    if (args.limited) delta = clip(delta, limit(args, 0, R()), limit(args, 1, R()));
    const R drive = delta * x;
    R y[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const R row_delta = __shfl_sync(kEveryLane, delta, r, kRows);
      const R row_drive = __shfl_sync(kEveryLane, drive, r, kRows);
      if constexpr (!kVector) {
        const char* B_at = piece_place(args.B, r, args.B_batch, args.B_group, B_step);
        const char* C_at = piece_place(args.C, r, args.C_batch, args.C_group, C_step);
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
          B[r].item[n] = C[r].item[n] = Scalar<S>::zero();
          if (n >= count) continue;
          OneItem<Couple> B_item, C_item;
          B_item.load(B_at + n * B_step, args.B_wide);
          C_item.load(C_at + n * C_step, args.C_wide);
          B[r].item[n] = B_item.get(args.B_wide);
          C[r].item[n] = C_item.get(args.C_wide);
          if (live >> r & 1) h[r].item[n] = widen(load_item<StateItem>(state_at[r] + n * state_step));
        }
      }
      S state[kItems];
      y[r] = 0;
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const Affine<S> step = {gate_of(row_delta, scale_rate(A.item[n])), multiply(row_drive, widen(B[r].get(n)))};
        state[n] = apply(step, widen(h[r].get(n)));
        if (kVector ? count > 0 : n < count) y[r] = contract(widen(C[r].get(n)), state[n], y[r]);
      }
      if constexpr (kVector) {
        Piece<StateItem, kItems> rounded;
        round_piece(state, rounded);
        if (count > 0 && live >> r & 1) *reinterpret_cast<Piece<StateItem, kItems>*>(state_at[r]) = rounded;
      } else {
#pragma unroll
        for (int n = 0; n < kItems; ++n)
          if (n < count && live >> r & 1) narrow(state[n], *reinterpret_cast<StateItem*>(state_at[r] + n * state_step));
      }
    }
    sum += sum_over_team(y, lane, team);

    round += team * kItems;
    if (round < states) continue;
    if (args.D) sum = multiply_add(D, x, sum);
    if (args.z) sum = sum * silu(R(z_item.get(false)));
    if (mine && lane < kRows)
      store_as(place(args.output, row, args.output_batch, args.output_channel), args.output_code, written ? sum : R(0));
    round = 0;
    sum = 0;
    rows += (Offset)gridDim.y * block_rows;
    if (rows < batch) continue;
    rows = (Offset)blockIdx.y * block_rows;
    columns += (Offset)gridDim.x * block_columns;
  }
}
