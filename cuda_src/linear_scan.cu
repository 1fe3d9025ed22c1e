// linear_scan: h[t] = a[t] * h[t-1] + b[t] along one axis of an array, any number of rows beside it.
//
// Two kernels, each a template over the item type, over what it leaves behind, and over whether there are segments
// (mask, reset, packed sequences):
//
//   rows   the lanes of a warp own 32 neighbouring rows and walk time, each thread kSteps steps at once.
//          For rows that lie side by side in memory.
//   time   the lanes of a warp own neighbouring packs of 16 bytes along time, each thread kRounds of them.
//          For time that is contiguous, or for few rows.
//
// In both, `row_warps` warps share a row and take it in tiles: each warp folds its part of the tile to one map, leaves
// it in shared memory, and after a barrier applies its predecessors' maps to the state that enters the tile. One
// barrier a tile: the maps are double buffered, and a warp that writes those of tile k + 2 has passed the barrier of
// tile k + 1, before which everyone finished reading those of tile k. With one warp a row there is no barrier, and in
// `rows` the whole scan is serial in the thread.
//
// A long row is cut into chunks (split): the kernel run with kSummarise leaves each chunk's map in the summaries,
// a linear_scan over the summaries makes summary_input[c] the state that leaves chunk c, and the kernel proper
// starts chunk c from summary_input[c - 1]. Without split there is one chunk and no summary.
//
// A block has as many slots as row_warps fits into its warps. A slot owns one (chunk, 32 rows) or one (row, chunk) at a
// time; a slot with nothing to do works on an empty chunk of the first one, and so takes part in every barrier.
//
// Position counts steps in the direction of the scan: in reverse the arrays come with their last step first and a
// negative stride.
#include "linear_tile.cuh"

// The one place where a step is formed. One that does not exist (the tail of a tile) or is masked is the identity, by
// selection: whatever was read for it does not enter.
template <class T, class S>
__device__ __forceinline__ Affine<S> make_step(const LinearArgs& args, T gate, T input, bool counts) {
  Affine<S> step = {args.gate.start ? S(widen(gate)) : constant_gate(args, S()), widen(input)};
  return counts ? step : Affine<S>::identity();
}

// --- rows ----------------------------------------------------------------------------------------------------

// kSteps steps of one row as they came from memory. Two of these alternate, so that the loads of one are under way
// while the other is worked on.
template <class T>
struct Steps {
  static constexpr int kSteps = 32 / sizeof(typename Accumulated<T>::type);
  T gate[kSteps], input[kSteps];
  StepMarks word;  // where the first step's marks are

  // Starts loading the first `steps` steps; `real`: is there a row for every lane, and for this one?
  __device__ __forceinline__ void start(const LinearArgs& args, const char* gate_at, const char* input_at, int steps,
                                        bool all_real, bool real) {
    if (all_real && steps == kSteps) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (args.gate.start) gate[s] = load_item<T>(gate_at + s * args.gate.time);
        input[s] = load_item<T>(input_at + s * args.input.time);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (real && s < steps && args.gate.start) gate[s] = load_item<T>(gate_at + s * args.gate.time);
        if (real && s < steps) input[s] = load_item<T>(input_at + s * args.input.time);
      }
    }
  }
};

template <class T, bool kSummarise, bool kSegmented>
__device__ __forceinline__ void linear_rows(const LinearArgs& args) {
  using S = typename Accumulated<T>::type;
  using Map = typename MapOf<S, kSegmented>::type;
  constexpr int kSteps = Steps<T>::kSteps;
  __shared__ Map maps[2][kMostWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / args.row_warps, warp_in_row = warp % args.row_warps;
  const int slots = blockDim.x / 32 / args.row_warps;
  const long long row_tiles = (args.rows + 31) / 32, items = row_tiles * args.chunks;
  const long long tile = (long long)args.row_warps * kSteps;
  int parity = 0;

  for (long long first = (long long)blockIdx.x * slots; first < items; first += (long long)gridDim.x * slots) {
    const long long item = first + slot < items ? first + slot : 0;
    long long row_tile;
    const long long chunk = divide(item, row_tiles, row_tile);
    // A lane beyond the last row loads and stores nothing.
    const bool all_real = first + slot < items && row_tile * 32 + 32 <= args.rows;
    const bool real = first + slot < items && row_tile * 32 + lane < args.rows;
    const long long row = real ? row_tile * 32 + lane : 0;
    const long long begin = chunk * args.chunk;
    const long long end = begin + args.chunk < args.length ? begin + args.chunk : args.length;
    const LinearRow at = locate_row(args, row);
    Carry<Map, kSummarise> carry;
    if (!kSummarise && real) carry.state = entering_state<S, kSegmented>(args, at, row, chunk);

    auto steps_at = [&](long long base) {
      const long long left = end - base - (long long)warp_in_row * kSteps;
      return left < 0 ? 0 : left < kSteps ? (int)left : kSteps;
    };
    const StepMarks* marks_row = reinterpret_cast<const StepMarks*>(at.marks);
    auto start = [&](Steps<T>& steps, long long base) {
      const long long position = base + (long long)warp_in_row * kSteps;
      steps.start(args, at.gate + position * args.gate.time, at.input + position * args.input.time, steps_at(base),
                  all_real, real);
      if (kSegmented && steps_at(base) > 0) steps.word = marks_row[position / kMarkSteps];
    };
    // A sequence that starts from its h0 takes that into its first step, and forgets the rest.
    auto step_of = [&](const Steps<T>& raw, const StepMarks& marks, long long position, int s, int steps) -> Map {
      const bool counts = s < steps && !(kSegmented && marks.masked >> s & 1);
      Affine<S> step = make_step<T, S>(args, raw.gate[s], raw.input[s], counts);
      if constexpr (kSegmented) {
        if (marks.starts >> s & 1) step.input = apply(step, sequence_initial<S>(args, at, position + s));
        return {step.gate, step.input, (marks.resets | marks.starts) >> s & 1};
      } else {
        if (s == 0 && position == 0 && !args.initial.start) step.gate = Scalar<S>::zero();
        return step;
      }
    };
    auto process = [&](const Steps<T>& raw, long long base) {
      const int steps = steps_at(base);
      const long long position = base + (long long)warp_in_row * kSteps;
      StepMarks marks;
      if constexpr (kSegmented) marks = marks_from(raw.word, marks_row, position, steps);
      S entering = carry.state;
      if (args.row_warps > 1 || kSummarise) {
        Map own = step_of(raw, marks, position, 0, steps);
#pragma unroll
        for (int s = 1; s < kSteps; ++s) own = combine(own, step_of(raw, marks, position, s, steps));
        if (args.row_warps > 1) {
          maps[parity][warp][lane] = own;
          __syncthreads();
          entering = carry.add_all(&maps[parity][slot * args.row_warps][lane], 32, args.row_warps, warp_in_row);
          parity ^= 1;
        } else {
          carry.add(own);
        }
      }
      if (kSummarise) return;
      S states[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) states[s] = entering = apply(step_of(raw, marks, position, s, steps), entering);
      if (args.row_warps == 1) carry.state = entering;
      // The identity steps of a tail leave the state as it is, so this is h[length - 1] to the bit.
      if (args.last.start && !(kSegmented && args.ids) && real && steps > 0 && end == args.length &&
          base + (long long)(warp_in_row + 1) * kSteps >= end)
        *reinterpret_cast<S*>(at.last) = entering;
      if (kSegmented && args.last.start && real && marks.ends) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          if (marks.ends >> s & 1) store_sequence_last(args, at, position + s, states[s]);
      }
      char* to = at.output + (base + (long long)warp_in_row * kSteps) * args.output.time;
      if (args.output_code == kItemCode<T> && all_real && steps == kSteps) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) narrow(states[s], *reinterpret_cast<T*>(to + s * args.output.time));
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          if (real && s < steps) store_as(to + s * args.output.time, args.output_code, states[s]);
      }
    };
    Steps<T> even, odd;
    start(even, begin);
    // Every slot of the block takes the same number of tiles: as many as a whole chunk has.
    for (long long base = begin; base < begin + args.chunk; base += 2 * tile) {
      start(odd, base + tile);
      process(even, base);
      if (base + tile >= begin + args.chunk) break;
      start(even, base + 2 * tile);
      process(odd, base + tile);
    }
    if (kSummarise && real && warp_in_row == 0) store_summary(args, row, chunk, carry.map);
  }
}

// --- time ----------------------------------------------------------------------------------------------------

template <class T, bool kSummarise, bool kSegmented>
__device__ __forceinline__ void linear_time(const LinearArgs& args) {
  using S = typename Accumulated<T>::type;
  using Map = typename MapOf<S, kSegmented>::type;
  constexpr int kItems = Pack<T>::kItems, kApart = Packs<T>::kApart, kRounds = Packs<T>::kRounds;
  __shared__ Map maps[2][kMostWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / args.row_warps, warp_in_row = warp % args.row_warps;
  const int slots = blockDim.x / 32 / args.row_warps;
  const long long items = args.rows * args.chunks;
  const long long tile = (long long)args.row_warps * kRounds * kApart;
  int parity = 0;

  for (long long first = (long long)blockIdx.x * slots; first < items; first += (long long)gridDim.x * slots) {
    const bool real = first + slot < items;
    long long chunk;
    const long long row = divide(real ? first + slot : 0, args.chunks, chunk);
    const long long begin = chunk * args.chunk;
    long long end = begin + args.chunk < args.length ? begin + args.chunk : args.length;
    if (!real) end = begin;
    const LinearRow at = locate_row(args, row);
    Carry<Map, kSummarise> carry;
    if (!kSummarise && real) carry.state = entering_state<S, kSegmented>(args, at, row, chunk);

    for (long long base = begin; base < begin + args.chunk; base += tile, parity ^= 1) {
      const long long position = base + (warp_in_row * kRounds * 32 + lane) * kItems;
      // Of the steps from `position`, those below `left` exist; the bound is more than a thread looks at.
      const int left = (int)(end - position < 2 * kRounds * kApart ? end - position : 2 * kRounds * kApart);
      Packs<T> gates, inputs;
      if (args.gate.start) gates.start(args.gate, at.gate + position * args.gate.time, left);
      inputs.start(args.input, at.input + position * args.input.time, left);
      StepMarks marks = {0, 0, 0, 0};  // bit r * kItems + v
      if constexpr (kSegmented) {
        // One look of the whole warp, together with the items, tells whether anything is special at all.
        const StepMarks* row_marks = reinterpret_cast<const StepMarks*>(at.marks);
        const long long word = (position - lane * kItems) / kMarkSteps + lane;
        static_assert(kRounds * kApart / kMarkSteps + 1 <= 32, "a word a lane");
        bool special = false;
        if (word * kMarkSteps < end && lane <= kRounds * kApart / kMarkSteps) {
          const StepMarks seen = row_marks[word];
          special = seen.masked | seen.resets | seen.starts | seen.ends;
        }
        if (__any_sync(kFullMask, special)) {
#pragma unroll 1
          for (int r = 0; r < kRounds; ++r) {
            const int steps = left - r * kApart < kItems ? left - r * kApart : kItems;
            const StepMarks of_pack = marks_of(row_marks, position + r * kApart, steps);
            marks.masked |= of_pack.masked << r * kItems;
            marks.resets |= of_pack.resets << r * kItems;
            marks.starts |= of_pack.starts << r * kItems;
            marks.ends |= of_pack.ends << r * kItems;
          }
        }
      }
      if (args.gate.start) gates.settle(args.gate, left);
      inputs.settle(args.input, left);

      Affine<S> step[kRounds][kItems];
      Map before[kRounds], total[kRounds], warp_map;
      auto map_of = [&](int r, int v) -> Map {
        if constexpr (kSegmented)
          return {step[r][v].gate, step[r][v].input, (marks.resets | marks.starts) >> (r * kItems + v) & 1};
        else
          return step[r][v];
      };
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        Map own;
#pragma unroll
        for (int v = 0; v < kItems; ++v) {
          const long long here = position + r * kApart + v;
          const bool counts = r * kApart + v < left && !(kSegmented && marks.masked >> (r * kItems + v) & 1);
          step[r][v] = make_step<T, S>(args, gates.pack[r].item[v], inputs.pack[r].item[v], counts);
          if (!kSegmented && r == 0 && v == 0 && position == 0 && !args.initial.start)
            step[r][v].gate = Scalar<S>::zero();
          if (kSegmented && marks.starts >> (r * kItems + v) & 1)
            step[r][v].input = apply(step[r][v], sequence_initial<S>(args, at, here));
          own = v == 0 ? map_of(r, v) : combine(own, map_of(r, v));
        }
        const Map inclusive = warp_inclusive_scan(own, lane);
        before[r] = from_lane_below(inclusive, 1);
        total[r] = from_lane(inclusive, 31);
        warp_map = r == 0 ? total[r] : combine(warp_map, total[r]);
      }
      S entering = carry.state;
      if (args.row_warps > 1) {
        if (lane == 0) maps[parity][warp] = warp_map;
        __syncthreads();
        entering = carry.add_all(&maps[parity][slot * args.row_warps], 1, args.row_warps, warp_in_row);
      } else {
        carry.add(warp_map);
      }
      if (kSummarise) continue;
      S state[kRounds][kItems];
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        S running = lane == 0 ? entering : apply(before[r], entering);
#pragma unroll
        for (int v = 0; v < kItems; ++v) state[r][v] = running = apply(map_of(r, v), running);
        entering = apply(total[r], entering);
      }
      store_packs<T>(args.output, args.output_code, at.output + position * args.output.time, left, state);
      if (args.last.start && !(kSegmented && args.ids) && end == args.length && base + tile >= end) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
#pragma unroll
          for (int v = 0; v < kItems; ++v)
            if (r * kApart + v == left - 1) *reinterpret_cast<S*>(at.last) = state[r][v];
      }
      if (kSegmented && args.last.start) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
#pragma unroll
          for (int v = 0; v < kItems; ++v)
            if (marks.ends >> (r * kItems + v) & 1)
              store_sequence_last(args, at, position + r * kApart + v, state[r][v]);
      }
    }
    if (kSummarise && real && lane == 0 && warp_in_row == 0) store_summary(args, row, chunk, carry.map);
  }
}
