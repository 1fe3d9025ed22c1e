// linear_scan: h[t] = a[t] * h[t-1] + b[t] along one axis of an array, any number of rows beside it.
//
// Two kernels, each a template over the item type and over what it leaves behind:
//
//   serial   a thread owns one row (of one chunk) and walks time; the lanes of a warp own neighbouring rows.
//            For rows that lie side by side in memory.
//   block    `row_warps` warps own one row (of one chunk) and take it in tiles of row_warps * kRounds * 32 packs.
//            A thread owns kRounds packs of consecutive steps in registers.
//            For time that is contiguous, or for few rows.
//
// A long row is cut into chunks (split): the kernel run with kSummarise leaves each chunk's map in the summaries,
// a linear_scan over the summaries makes summary_input[c] the state that leaves chunk c, and the kernel proper
// starts chunk c from summary_input[c - 1]. Without split there is one chunk and no summary.
//
// Position counts steps in the direction of the scan: in reverse the arrays come with their last step first and a
// negative stride.
#include "linear_args.cuh"
#include "operators.cuh"
#include "tile_io.cuh"
#include "warp_scan.cuh"

constexpr int kRounds = 4;
constexpr int kBlockWarps = 8;

// One row of every array, at time 0.
struct LinearRow {
  const char *gate, *input, *initial;
  char *output, *last;
};

__device__ __forceinline__ LinearRow locate_row(const LinearArgs& args, long long row) {
  LinearRow at = {args.gate.start, args.input.start, args.initial.start, args.output.start, args.last.start};
  for (int d = args.row_dims - 1; d >= 0; --d) {
    long long rest = row / args.row_size[d], i = row - rest * args.row_size[d];
    at.gate += i * args.gate.row[d];
    at.input += i * args.input.row[d];
    at.initial += i * args.initial.row[d];
    at.output += i * args.output.row[d];
    at.last += i * args.last.row[d];
    row = rest;
  }
  return at;
}

__device__ __forceinline__ float constant_gate(const LinearArgs& args, float) { return args.gate32[0]; }
__device__ __forceinline__ double constant_gate(const LinearArgs& args, double) { return args.gate64[0]; }
__device__ __forceinline__ complex<float> constant_gate(const LinearArgs& args, complex<float>) {
  return {args.gate32[0], args.gate32[1]};
}
__device__ __forceinline__ complex<double> constant_gate(const LinearArgs& args, complex<double>) {
  return {args.gate64[0], args.gate64[1]};
}

// The one place where a step is formed. A step that does not exist (the tail of a tile) is the identity, by
// selection: whatever was read for it does not enter.
template <class T, class S>
__device__ __forceinline__ Affine<S> make_step(const LinearArgs& args, T gate, T input, bool exists) {
  Affine<S> step = {args.gate.start ? S(widen(gate)) : constant_gate(args, S()), widen(input)};
  return exists ? step : Affine<S>::identity();
}

// The state that enters a chunk: h0 before the first one, what its predecessor leaves before another.
template <class S>
__device__ __forceinline__ S entering_state(const LinearArgs& args, const LinearRow& at, long long row,
                                            long long chunk) {
  if (chunk > 0)
    return reinterpret_cast<const S*>(
        args.summary_input)[row * args.summary_row + (chunk - 1) * args.summary_chunk];
  return args.initial.start ? load_item<S>(at.initial) : Scalar<S>::zero();
}

template <class S>
__device__ __forceinline__ void store_summary(const LinearArgs& args, long long row, long long chunk,
                                              Affine<S> map) {
  long long i = row * args.summary_row + chunk * args.summary_chunk;
  reinterpret_cast<S*>(args.summary_gate)[i] = map.gate;
  reinterpret_cast<S*>(args.summary_input)[i] = map.input;
}

// --- serial --------------------------------------------------------------------------------------------------

// kSteps steps of one row as they came from memory. Two of these alternate, so that the loads of one are under way
// while the other is worked on: at 93 threads a multiprocessor (12288 rows on 132) this is what fills the memory
// system, not occupancy.
template <class T>
struct SerialBuffer {
  static constexpr int kSteps = 128 / sizeof(typename Accumulated<T>::type);
  T gate[kSteps], input[kSteps];

  __device__ __forceinline__ void start(const LinearArgs& args, const LinearRow& at, long long position,
                                        long long end) {
    const char* gate_at = at.gate + position * args.gate.time;
    const char* input_at = at.input + position * args.input.time;
    int steps = (int)(end - position < kSteps ? end - position : kSteps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        if (args.gate.start) gate[s] = load_item<T>(gate_at + s * args.gate.time);
        input[s] = load_item<T>(input_at + s * args.input.time);
      }
    }
  }
};

template <class T, bool kSummarise>
__device__ __forceinline__ void linear_serial(const LinearArgs& args) {
  using S = typename Accumulated<T>::type;
  using Buffer = SerialBuffer<T>;
  // Item (chunk, row), rows fastest. No barrier and no shuffle in this kernel: threads may leave.
  for (long long item = (long long)blockIdx.x * blockDim.x + threadIdx.x; item < args.rows * args.chunks;
       item += (long long)gridDim.x * blockDim.x) {
    long long chunk = item / args.rows, row = item - chunk * args.rows;
    long long begin = chunk * args.chunk;
    long long end = begin + args.chunk < args.length ? begin + args.chunk : args.length;
    LinearRow at = locate_row(args, row);
    char* output_at = at.output + begin * args.output.time;
    S state = kSummarise ? Scalar<S>::zero() : entering_state<S>(args, at, row, chunk);
    Affine<S> folded = Affine<S>::identity();

    auto process = [&](const Buffer& buffer, long long position) {
      int steps = (int)(end - position < Buffer::kSteps ? end - position : Buffer::kSteps);
#pragma unroll
      for (int s = 0; s < Buffer::kSteps; ++s) {
        Affine<S> step = make_step<T, S>(args, buffer.gate[s], buffer.input[s], s < steps);
        if (kSummarise) {
          folded = combine(folded, step);
        } else {
          state = apply(step, state);
          if (s < steps) store_as(output_at, args.output_code, state);
          output_at += args.output.time;
        }
      }
    };
    Buffer even, odd;
    even.start(args, at, begin, end);
    for (long long position = begin; position < end; position += 2 * Buffer::kSteps) {
      odd.start(args, at, position + Buffer::kSteps, end);
      process(even, position);
      even.start(args, at, position + 2 * Buffer::kSteps, end);
      process(odd, position + Buffer::kSteps);
    }
    if (kSummarise)
      store_summary(args, row, chunk, folded);
    else if (args.last.start && end == args.length)
      *reinterpret_cast<S*>(at.last) = state;
  }
}

// --- block ---------------------------------------------------------------------------------------------------

// The packs of one array that a thread owns in one round; `position` is the first, kItems steps follow it.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const LinearArray& array, const char* row, long long position,
                                             long long end) {
  constexpr int V = Pack<T>::kItems;
  Pack<T> pack;
  if (array.packs && position + V <= end) {
    const bool down = array.time < 0;  // the pack's last step has the lowest address
    Pack<T> stored = load_item<Pack<T>>(row + (down ? position + V - 1 : position) * array.time);
#pragma unroll
    for (int v = 0; v < V; ++v) pack.item[v] = down ? stored.item[V - 1 - v] : stored.item[v];
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (position + v < end) pack.item[v] = load_item<T>(row + (position + v) * array.time);
  }
  return pack;
}

template <class T, class S>
__device__ __forceinline__ void store_pack(const LinearArgs& args, char* row, long long position, long long end,
                                           const S (&state)[Pack<T>::kItems]) {
  constexpr int V = Pack<T>::kItems;
  if (args.output.packs && position + V <= end) {
    const bool down = args.output.time < 0;
    Pack<T> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) narrow(down ? state[V - 1 - v] : state[v], pack.item[v]);
    *reinterpret_cast<Pack<T>*>(row + (down ? position + V - 1 : position) * args.output.time) = pack;
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (position + v < end)
        store_as(row + (position + v) * args.output.time, args.output_code, state[v]);
  }
}

// A block has kBlockWarps / row_warps slots; a slot owns one (row, chunk), chunks fastest. Within a tile, warp w of
// the slot owns the packs [w * kRounds * 32, (w + 1) * kRounds * 32), round r of them the r-th 32, lane i the i-th.
// The order of association: a pack by its thread, packs by Hillis-Steele, rounds, warps, tiles one after another.
//
// One barrier a tile, between the warps' totals and their use. The totals are double buffered: a warp that writes
// those of tile k + 2 has passed the barrier of tile k + 1, before which everyone finished reading those of tile k.
template <class T, bool kSummarise>
__device__ __forceinline__ void linear_block(const LinearArgs& args) {
  using S = typename Accumulated<T>::type;
  using Map = Affine<S>;
  constexpr int V = Pack<T>::kItems;
  __shared__ Map totals[2][kBlockWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / args.row_warps, warp_in_row = warp % args.row_warps;
  const int slots = kBlockWarps / args.row_warps;
  const long long items = args.rows * args.chunks;
  const long long tile = (long long)args.row_warps * kRounds * 32 * V;
  int parity = 0;

  for (long long first_item = (long long)blockIdx.x * slots; first_item < items;
       first_item += (long long)gridDim.x * slots) {
    // A slot beyond the last item works on an empty chunk of item 0: it takes part in every barrier.
    const bool real = first_item + slot < items;
    const long long item = real ? first_item + slot : 0;
    const long long row = item / args.chunks, chunk = item - row * args.chunks;
    const long long begin = chunk * args.chunk;
    long long end = begin + args.chunk < args.length ? begin + args.chunk : args.length;
    if (!real) end = begin;
    const LinearRow at = locate_row(args, row);
    S entering = kSummarise || !real ? Scalar<S>::zero() : entering_state<S>(args, at, row, chunk);
    Map folded = Map::identity();

    for (long long base = begin; base < begin + args.chunk; base += tile, parity ^= 1) {
      long long position[kRounds];
      Map step[kRounds][V], before[kRounds], round_total[kRounds];
      Pack<T> gates[kRounds], inputs[kRounds];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        position[r] = base + (((long long)warp_in_row * kRounds + r) * 32 + lane) * V;
        if (args.gate.start)
          gates[r] = load_pack<T>(args.gate, at.gate, position[r], end);
        inputs[r] = load_pack<T>(args.input, at.input, position[r], end);
      }
      Map warp_total;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        Map own;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          step[r][v] = make_step<T, S>(args, gates[r].item[v], inputs[r].item[v], position[r] + v < end);
          own = v == 0 ? step[r][v] : combine(own, step[r][v]);
        }
        Map inclusive = warp_inclusive_scan(own, lane);
        before[r] = from_lane_below(inclusive, 1);
        round_total[r] = from_last_lane(inclusive);
        warp_total = r == 0 ? round_total[r] : combine(warp_total, round_total[r]);
      }
      if (args.row_warps > 1) {
        if (lane == 0) totals[parity][warp] = warp_total;
        __syncthreads();
      }
      if (kSummarise) {
        for (int w = 0; w < args.row_warps; ++w) {
          Map total = args.row_warps > 1 ? totals[parity][slot * args.row_warps + w] : warp_total;
          folded = base == begin && w == 0 ? total : combine(folded, total);
        }
        continue;
      }
      // The concrete state that enters this warp, and the one that enters the next tile.
      S state = entering;
      if (args.row_warps > 1) {
        for (int w = 0; w < args.row_warps; ++w) {
          if (w == warp_in_row) state = entering;
          entering = apply(totals[parity][slot * args.row_warps + w], entering);
        }
      } else {
        entering = apply(warp_total, entering);
      }
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        S running = lane == 0 ? state : apply(before[r], state);
        S states[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          running = apply(step[r][v], running);
          states[v] = running;
          if (position[r] + v == args.length - 1 && real && args.last.start)
            *reinterpret_cast<S*>(at.last) = running;
        }
        store_pack<T>(args, at.output, position[r], end, states);
        state = apply(round_total[r], state);
      }
    }
    if (kSummarise && real && lane == 0 && warp_in_row == 0) store_summary(args, row, chunk, folded);
  }
}
