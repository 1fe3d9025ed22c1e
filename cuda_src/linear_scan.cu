// linear_scan: h[t] = a[t] * h[t-1] + b[t] along one axis of an array, any number of rows beside it.
//
// Two kernels, each a template over the item type, over what it leaves behind, and over whether there are segments
// (mask, reset, packed sequences):
//
//   rows   the lanes of a warp own 32 neighbouring rows and walk time, each thread kSteps steps at once.
//          For rows that lie side by side in memory. Where they are of 16-bit items, a thread takes two of them as one
//          (Pair), if their addresses allow it: each has the bits it has alone.
//   time   the lanes of a warp own neighbouring packs of 16 bytes along time, each thread kRounds of them.
//          For time that is contiguous, or for few rows. A tile is loaded into shared memory while the one before it is
//          worked on. Where two rows take turns in memory, one pass takes them as one (Pair).
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
// Or a long row is taken in one pass (kOnePass): a chunk is then the one tile of one block, all of whose warps share
// it. It waits in shared memory while the block looks back for the state that enters it (linear_look_back.cuh).
//
// Position counts steps in the direction of the scan: in reverse the arrays come with their last step first and a
// negative stride.
#include "linear_look_back.cuh"

enum Part { kApply, kSummarise, kOnePass };

// In one pass: warps of a block at most, steps of a thread over rows, and its packs over time.
constexpr int kPassWarps = 16, kPassSteps = 24;
template <class T>
constexpr int kPassRounds = sizeof(T) > 4 ? 5 : 6;  // a pair takes twice the registers

// The one place where a step is formed. One that does not exist (the tail of a tile) or is masked is the identity, by
// selection: whatever was read for it does not enter.
template <class S, class Tag>
__device__ __forceinline__ Affine<S> make_step(const LinearArgs& args, S gate, S input, bool counts, Tag) {
  Affine<S> step = {Tag::gates || args.gate.start ? gate : constant_gate(args, S()), input};
  return counts ? step : Affine<S>::identity();
}

// --- rows ----------------------------------------------------------------------------------------------------

constexpr int kStepBytes = 64;  // of a thread's states in a tile

// Some steps of one row as they came from memory. Two of these alternate, so that the loads of one are under way
// while the other is worked on.
template <class T>
struct Steps {
  using S = typename Accumulated<T>::type;
  static constexpr int kSteps =
      RowsOf<S>::kRows * kStepBytes / sizeof(S) / (sizeof(S) == 16 ? 2 : 1);  // registers are few
  T gates[kSteps], inputs[kSteps];

  // Starts loading the first `steps` steps; `whole`: are they all of them, in every lane? What is not loaded is given a
  // value, or it would stay in registers from tile to tile.
  __device__ __forceinline__ void start(const LinearArgs& args, const char* gate_at, const char* input_at, int steps,
                                        bool whole) {
    if (whole) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, gate_at += args.gate.time, input_at += args.input.time) {
        gates[s] = args.gate.start ? load_item<T>(gate_at) : T();
        inputs[s] = load_item<T>(input_at);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, gate_at += args.gate.time, input_at += args.input.time) {
        gates[s] = s < steps && args.gate.start ? load_item<T>(gate_at) : T();
        inputs[s] = s < steps ? load_item<T>(input_at) : T();
      }
    }
  }
  __device__ __forceinline__ T gate(const LinearArgs&, int s, int, bool) const { return gates[s]; }
  __device__ __forceinline__ T input(int s, int, bool) const { return inputs[s]; }
};

// The same in slots of shared memory, where they wait while the block looks back. A slot is of the thread that reads it
// but where a step of the warp's rows is one piece of memory (`piece`): there eight lanes copy it.
template <class T, int kSteps>
struct StepSlots {
  T* slots;  // this thread's first, of its warp's

  __device__ __forceinline__ StepSlots(unsigned char* memory)
      : slots(reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (2 * kSteps * 32) + threadIdx.x % 32) {}
  __device__ __forceinline__ T* gate_slot(int s) const { return slots + s * 32; }
  __device__ __forceinline__ T* input_slot(int s) const { return slots + (kSteps + s) * 32; }
  __device__ __forceinline__ void start(const LinearArgs& args, const char* gate_at, const char* input_at, int steps,
                                        bool whole) const {
    if (args.gate.start) start(args, args.gate, gate_at, gate_slot(0), steps, whole);
    start(args, args.input, input_at, input_slot(0), steps, whole);
  }
  // `first`: the thread's slot of its first step.
  __device__ __forceinline__ void start(const LinearArgs& args, const LinearArray& array, const char* at, T* first,
                                        int steps, bool whole) const {
    using Piece = Items<T, 16 / sizeof(T)>;
    constexpr int kPieces = 32 * sizeof(T) / 16, kAtOnce = 32 / kPieces;  // of a step; steps of an access of the warp
    static_assert(kSteps % kAtOnce == 0, "a warp's accesses are whole steps");
    const int lane = threadIdx.x % 32, last = args.row_dims - 1;
    const char* corner = at - lane * (int)sizeof(T);
    const bool piece = whole && last >= 0 && array.row[last] == sizeof(T) && args.row_size[last] % 32 == 0 &&
                       (reinterpret_cast<size_t>(corner) | array.time) % 16 == 0;
    if (piece) {
      const char* from = corner + lane / kPieces * array.time + lane % kPieces * 16;
      Piece* to = reinterpret_cast<Piece*>(first - lane) + lane;
#pragma unroll
      for (int s = 0; s < kSteps; s += kAtOnce, from += kAtOnce * array.time, to += 32) start_copy(to, from);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, at += array.time)
        if (whole || s < steps) start_copy(first + s * 32, at);
    }
  }
  __device__ __forceinline__ T gate(const LinearArgs& args, int s, int steps, bool whole) const {
    return args.gate.start && (whole || s < steps) ? *gate_slot(s) : T();
  }
  __device__ __forceinline__ T input(int s, int steps, bool whole) const {
    return whole || s < steps ? *input_slot(s) : T();
  }
};

// What a warp works on: its 32 rows of a chunk.
struct RowsItem {
  long long row, chunk, begin, end;
  bool all_real, real;  // is there a row for every lane, and for this one? A lane beyond loads and stores nothing
  LinearRow at;
};

template <class T, Part kPart, bool kSegmented>
__device__ __forceinline__ void linear_rows(const LinearArgs& args, unsigned char* memory) {
  using S = typename Accumulated<T>::type;
  using Map = typename MapOf<S, kSegmented>::type;
  constexpr int kSteps = kPart == kOnePass ? kPassSteps : Steps<T>::kSteps;
  __shared__ Map maps[kPart == kOnePass ? 1 : 2][kPart == kOnePass ? kPassWarps : kMostWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / args.row_warps, warp_in_row = warp % args.row_warps;
  const int slots = blockDim.x / 32 / args.row_warps;
  const long long row_tiles = (args.rows + 31) / 32, items = row_tiles * args.chunks;
  const long long tile = (long long)args.row_warps * kSteps;
  int parity = 0;

  auto item_of = [&](long long first) -> RowsItem {
    long long row_tile;
    RowsItem item;
    item.chunk = divide(first + slot < items ? first + slot : 0, row_tiles, row_tile);
    item.all_real = first + slot < items && row_tile * 32 + 32 <= args.rows;
    item.real = first + slot < items && row_tile * 32 + lane < args.rows;
    item.row = item.real ? row_tile * 32 + lane : 0;
    item.begin = item.chunk * args.chunk;
    item.end = item.begin + args.chunk < args.length ? item.begin + args.chunk : args.length;
    item.at = locate_row(args, item.row);
    return item;
  };
  // How many of the thread's steps exist in the tile that begins at `base`.
  auto steps_at = [&](const RowsItem& item, long long base) {
    const long long left = item.end - base - (long long)warp_in_row * kSteps;
    return !item.real || left < 0 ? 0 : left < kSteps ? (int)left : kSteps;
  };
  auto start = [&](auto&& raw, const RowsItem& item, long long base) {
    const long long position = base + (long long)warp_in_row * kSteps;
    const int steps = steps_at(item, base);
    raw.start(args, item.at.gate + position * args.gate.time, item.at.input + position * args.input.time, steps,
              item.all_real && steps == kSteps);
  };
  // A sequence that starts from its h0 takes that into its first step, and forgets the rest.
  auto step_of = [&](const auto& raw, const RowsItem& item, const StepMarks& marks, long long position, int steps,
                     int s, auto tag) -> Map {
    const bool kWhole = tag.value;
    const bool counts = kWhole || (s < steps && !(kSegmented && marks.masked >> s & 1));
    Affine<S> step =
        make_step<S>(args, widen(raw.gate(args, s, steps, kWhole)), widen(raw.input(s, steps, kWhole)), counts, tag);
    if constexpr (kSegmented) {
      if (marks.starts >> s & 1) step.input = apply(step, sequence_initial<S>(args, item.at, position + s));
      return {step.gate, step.input, (marks.resets | marks.starts) >> s & 1};
    } else {
      if (s == 0 && position == 0 && !args.initial.start) step.gate = Scalar<S>::zero();
      return step;
    }
  };
  auto look = [&](const RowsItem& item, long long position, int steps) -> StepMarks {
    if (!kSegmented) return {0, 0, 0, 0};
    return marks_of(reinterpret_cast<const StepMarks*>(item.at.marks), position, steps);
  };
  auto fold = [&](const auto& raw, const RowsItem& item, long long base) -> Map {
    const int steps = steps_at(item, base);
    const long long position = base + (long long)warp_in_row * kSteps;
    const StepMarks marks = look(item, position, steps);
    auto fold_steps = [&](auto tag) -> Map {
      Map own = step_of(raw, item, marks, position, steps, 0, tag);
#pragma unroll
      for (int s = 1; s < kSteps; ++s) own = combine(own, step_of(raw, item, marks, position, steps, s, tag));
      return own;
    };
    return item.all_real && steps == kSteps && !kSegmented ? fold_steps(Whole()) : fold_steps(Partial());
  };
  // Applies the steps to the state that enters them, and gives the one that leaves.
  auto finish = [&](const auto& raw, const RowsItem& item, long long base, S entering) -> S {
    const LinearRow& at = item.at;
    const int steps = steps_at(item, base);
    const long long position = base + (long long)warp_in_row * kSteps;
    const StepMarks marks = look(item, position, steps);
    char* to = at.output + position * args.output.time;
    if (item.all_real && steps == kSteps && !kSegmented && args.output_code == kItemCode<T>) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, to += args.output.time) {
        entering = apply(step_of(raw, item, marks, position, steps, s, Whole()), entering);
        narrow(entering, *reinterpret_cast<T*>(to));
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, to += args.output.time) {
        entering = apply(step_of(raw, item, marks, position, steps, s, Partial()), entering);
        if (kSegmented && args.last.start && marks.ends >> s & 1) store_sequence_last(args, at, position + s, entering);
        if (s < steps) store_as(to, args.output_code, entering);
      }
    }
    // The identity steps of a tail leave the state as it is, so this is h[length - 1] to the bit.
    if (args.last.start && !(kSegmented && args.ids) && steps > 0 && item.end == args.length &&
        position + kSteps >= item.end)
      *reinterpret_cast<S*>(locate_row(args, item.row).last) = entering;
    return entering;
  };

  if constexpr (kPart == kOnePass) {
    if (args.cell_pairs > 0) return clear_cells(args);
    // As in linear_time, see there; but each warp looks at one tile before, of whose rows it has one a lane.
    __shared__ Map before[kPassWarps][32];
    __shared__ S entering_tile[32];
    const LookBack<Map, true> look_back(args);
    const StepSlots<T, kSteps> raw(memory);
    const RowsItem item = item_of(take_ticket(args));
    start(raw, item, item.begin);
    wait_for_copies();
    __syncwarp();
    maps[0][warp][lane] = fold(raw, item, item.begin);
    __syncthreads();
    const int tiles = look_back.tiles_before(item.chunk);
    Map whole = Map::identity();
    if (item.real && warp == 0) {
      whole = fold_of(&maps[0][0][lane], 32, args.row_warps);
      look_back.publish(item.row, item.chunk, whole);
    }
    if (item.real && warp < tiles) before[warp][lane] = look_back.map_before(item.row, item.chunk, warp);
    __syncthreads();
    if (warp == 0) {
      S state = Scalar<S>::zero();
      if (item.real) {
        state = item.chunk < look_back.group
                    ? entering_state<S, kSegmented>(args, locate_row(args, item.row), item.row, 0)
                    : look_back.state_before(item.row, item.chunk);
        if (tiles > 0) state = apply(fold_of(&before[0][lane], 32, tiles), state);
        look_back.publish_state(item.row, item.chunk, apply(whole, state));
      }
      entering_tile[lane] = state;
    }
    __syncthreads();
    Carry<Map, false> entering;
    entering.state = entering_tile[lane];
    finish(raw, item, item.begin, entering.add_all(&maps[0][0][lane], 32, args.row_warps, warp));
  } else {
    Carry<Map, kPart == kSummarise> carry;
    auto process = [&](const Steps<T>& raw, const RowsItem& item, long long base) {
      S entering = carry.state;
      if (args.row_warps > 1 || kPart == kSummarise) {
        const Map own = fold(raw, item, base);
        if (args.row_warps > 1) {
          maps[parity][warp][lane] = own;
          __syncthreads();
          entering = carry.add_all(&maps[parity][slot * args.row_warps][lane], 32, args.row_warps, warp_in_row);
          parity ^= 1;
        } else {
          carry.add(own);
        }
      }
      if (kPart == kSummarise) return;
      const S leaving = finish(raw, item, base, entering);
      if (args.row_warps == 1) carry.state = leaving;
    };
    for (long long first = (long long)blockIdx.x * slots; first < items; first += (long long)gridDim.x * slots) {
      const RowsItem item = item_of(first);
      carry = Carry<Map, kPart == kSummarise>();
      if (kPart == kApply && item.real)
        carry.state = entering_state<S, kSegmented>(args, item.at, item.row, item.chunk);
      Steps<T> even, odd;
      start(even, item, item.begin);
      // Every slot of the block takes the same number of tiles: as many as a whole chunk has.
      for (long long base = item.begin; base < item.begin + args.chunk; base += 2 * tile) {
        start(odd, item, base + tile);
        process(even, item, base);
        if (base + tile >= item.begin + args.chunk) break;
        start(even, item, base + 2 * tile);
        process(odd, item, base + tile);
      }
      if (kPart == kSummarise && item.real && warp_in_row == 0) store_summary(args, item.row, item.chunk, carry.map);
    }
  }
}

// --- time ----------------------------------------------------------------------------------------------------

// The maps of neighbouring steps.
template <class Map, int kCount>
struct Run {
  Map map[kCount];
};

// Where a thread's first step in a tile is, in bytes from each array's start: of a pointer that goes from tile to tile
// the compiler would not know that it is one to global memory.
struct TimePlace {
  long long gate, input, output;
};

// A tile that a warp works on: the chunk of a row that is item `first` + slot of all, from `base` on.
struct TimeTile {
  long long first, row, chunk, base;
  TimePlace place;
};

// A thread's part of it.
struct TimeView {
  LinearRow at;        // with segments
  long long position;  // of its first step
  int left;            // of its steps those below this exist; the bound is more than it looks at
  StepMarks marks;     // bit r * kItems + v
  bool whole;          // is all of the warp's tile there, with nothing special about it?
};

template <class T, Part kPart, bool kSegmented>
__device__ __forceinline__ void linear_time(const LinearArgs& args, unsigned char* memory) {
  using S = typename Accumulated<T>::type;
  using Map = typename MapOf<S, kSegmented>::type;
  constexpr int kRounds = kPart == kOnePass ? kPassRounds<T> : Packs<T>::kRounds;
  using Slots = PackSlots<T, kRounds>;
  constexpr int kItems = Slots::kItems, kApart = Slots::kApart;
  __shared__ Map maps[kPart == kOnePass ? 1 : 2][kPart == kOnePass ? kPassWarps : kMostWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / args.row_warps, warp_in_row = warp % args.row_warps;
  const int slots = blockDim.x / 32 / args.row_warps;
  const long long items = args.rows * args.chunks;
  const int step = args.row_warps * kRounds * kApart, offset = (warp_in_row * kRounds * 32 + lane) * kItems;
  int parity = 0;
  Carry<Map, kPart == kSummarise> carry;
  // A pack's gates and inputs; those of 16 bits stay in registers from fold to finish.
  using Raw = Two<Items<T, kItems>>;
  constexpr bool kKept = sizeof(T) == 2 && kPart != kOnePass;
  Raw kept[kKept ? kRounds : 1];

  auto locate = [&](const TimeTile& tile) -> TimePlace {
    const LinearRow at = locate_row(args, tile.row);
    const long long position = tile.base + offset;
    return {at.gate - args.gate.start + position * args.gate.time,
            at.input - args.input.start + position * args.input.time,
            at.output - args.output.start + position * args.output.time};
  };
  auto tile_of = [&](long long first) -> TimeTile {
    TimeTile tile = {first, 0, 0, 0, {}};
    const long long item = first + slot < items ? first + slot : 0;
    if (kPart == kOnePass)
      tile.chunk = divide(item, args.rows, tile.row);
    else
      tile.row = divide(item, args.chunks, tile.chunk);
    tile.base = tile.chunk * args.chunk;
    tile.place = locate(tile);
    return tile;
  };
  auto end_of = [&](const TimeTile& tile) {
    const long long end = tile.chunk * args.chunk + args.chunk;
    return end < args.length ? end : args.length;
  };
  // Of the thread's steps those below this exist; a bound is more than it looks at.
  auto left_at = [&](const TimeTile& tile) {
    const long long left = tile.first + slot < items ? end_of(tile) - tile.base - offset : 0;
    return left < 0 ? 0 : left < 2 * kRounds * kApart ? (int)left : 2 * kRounds * kApart;
  };
  auto start = [&](const TimeTile& tile, int stage) {
    const Slots packs(memory, stage);
    const int left = left_at(tile);
    if (args.gate.start) packs.start(0, args.gate, args.gate.start + tile.place.gate, left);
    packs.start(1, args.input, args.input.start + tile.place.input, left);
  };
  // The tile after this: of the same chunk, of which every slot of the block takes as many as a whole one has, or the
  // first of another.
  auto after = [&](TimeTile tile) {
    tile.base += step;
    tile.place.gate += step * args.gate.time;
    tile.place.input += step * args.input.time;
    tile.place.output += step * args.output.time;
    if (tile.base < tile.chunk * args.chunk + args.chunk) return tile;
    return tile_of(tile.first + (long long)gridDim.x * slots);
  };
  auto view_of = [&](const TimeTile& tile) -> TimeView {
    const long long first = tile.base + offset - lane * kItems;  // of the warp
    const bool real = tile.first + slot < items;
    TimeView view = {{}, tile.base + offset, left_at(tile), {0, 0, 0, 0}, false};
    view.whole =
        real && end_of(tile) - first >= kRounds * kApart && args.input.packs && (args.gate.packs || !args.gate.start);
    if constexpr (kSegmented) {
      view.at = locate_row(args, tile.row);
      // One look of the whole warp tells whether anything is special at all.
      const StepMarks* row_marks = reinterpret_cast<const StepMarks*>(view.at.marks);
      const long long word = first / kMarkSteps + lane;
      static_assert(kRounds * kApart / kMarkSteps + 1 <= 32, "a word a lane");
      bool special = false;
      if (real && word * kMarkSteps < end_of(tile) && lane <= kRounds * kApart / kMarkSteps) {
        const StepMarks seen = row_marks[word];
        special = seen.masked | seen.resets | seen.starts | seen.ends;
      }
      if (__any_sync(kFullMask, special)) {
        view.whole = false;
#pragma unroll 1
        for (int r = 0; r < kRounds; ++r) {
          const int steps = view.left - r * kApart < kItems ? view.left - r * kApart : kItems;
          const StepMarks of_pack = marks_of(row_marks, view.position + r * kApart, steps);
          view.marks.masked |= of_pack.masked << r * kItems;
          view.marks.resets |= of_pack.resets << r * kItems;
          view.marks.starts |= of_pack.starts << r * kItems;
          view.marks.ends |= of_pack.ends << r * kItems;
        }
      }
    }
    return view;
  };
  auto read = [&](const TimeView& view, int stage, int r, auto tag) -> Raw {
    const Slots packs(memory, stage);
    Raw raw = {};  // what is not always read would stay in registers from tile to tile
    if (args.gate.start) raw.first = packs.read(tag, 0, args.gate, r, view.left);
    raw.second = packs.read(tag, 1, args.input, r, view.left);
    return raw;
  };
  auto again = [&](const TimeView& view, int stage, int r, auto tag) -> Raw {
    if constexpr (kKept)
      return kept[r];
    else
      return read(view, stage, r, tag);
  };
  // The maps of a pack's steps, from its gates and inputs.
  auto maps_of = [&](const TimeView& view, const Raw& raw, int r, auto tag) -> Run<Map, kItems> {
    const bool kWhole = tag.value;
    const StepMarks& marks = view.marks;
    Run<Map, kItems> run;
#pragma unroll
    for (int v = 0; v < kItems; ++v) {
      const int bit = r * kItems + v;
      const bool counts = kWhole || (r * kApart + v < view.left && !(kSegmented && marks.masked >> bit & 1));
      Affine<S> own = make_step<S>(args, raw.first.get(v), raw.second.get(v), counts, tag);
      if constexpr (kSegmented) {
        if (!kWhole && marks.starts >> bit & 1)
          own.input = apply(own, sequence_initial<S>(args, view.at, view.position + r * kApart + v));
        run.map[v] = {own.gate, own.input, kWhole ? 0 : (marks.resets | marks.starts) >> bit & 1};
      } else {
        if (r == 0 && v == 0 && view.position == 0 && !args.initial.start) own.gate = Scalar<S>::zero();
        run.map[v] = own;
      }
    }
    return run;
  };
  // Works on a tile as what it is.
  auto in_kind = [&](const TimeView& view, auto&& work) {
    if (!view.whole) {
      work(Partial());
    } else if constexpr (kKept) {
      if (args.gate.start)
        work(Gated());
      else
        work(Whole());
    } else {
      work(Whole());
    }
  };
  // Folds a tile: in each round the packs up to the lane's own, and the whole part of the warp.
  auto fold = [&](const TimeView& view, int stage, Run<Map, kRounds>& inclusive) -> Map {
    auto fold_packs = [&](auto tag) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const Raw raw = read(view, stage, r, tag);
        if constexpr (kKept) kept[r] = raw;
        const Run<Map, kItems> run = maps_of(view, raw, r, tag);
        inclusive.map[r] = run.map[0];
#pragma unroll
        for (int v = 1; v < kItems; ++v) inclusive.map[r] = combine(inclusive.map[r], run.map[v]);
      }
    };
    in_kind(view, fold_packs);
    Map warp_map;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      inclusive.map[r] = warp_inclusive_scan(inclusive.map[r], lane);
      const Map total = from_lane(inclusive.map[r], 31);
      warp_map = r == 0 ? total : combine(warp_map, total);
    }
    return warp_map;
  };
  // Applies it to the state that enters the warp's part.
  auto finish = [&](const TimeTile& tile, const TimeView& view, int stage, const Run<Map, kRounds>& inclusive,
                    S entering) {
    const long long position = view.position;
    const int left = view.left;
    const bool ends = args.last.start && !(kSegmented && args.ids) && end_of(tile) == args.length;
    S last = Scalar<S>::zero();  // of the thread's steps that which is the row's last
    const StepMarks& marks = view.marks;
    char* to = args.output.start + tile.place.output;
    auto finish_packs = [&](auto tag) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r, to += kApart * args.output.time) {
        const Run<Map, kItems> run = maps_of(view, again(view, stage, r, tag), r, tag);
        S state[1][kItems];
        const Map lower = from_lane_below(inclusive.map[r], 1);
        S running = lane == 0 ? entering : apply(lower, entering);
        entering = apply(from_lane(inclusive.map[r], 31), entering);
#pragma unroll
        for (int v = 0; v < kItems; ++v) state[0][v] = running = apply(run.map[v], running);
        if (tag.value && args.output.packs)
          store_pack<T>(args.output, to, state[0]);
        else
          store_packs<T>(args.output, args.output_code, to, left - r * kApart, state, beside(args, args.output));
        if (ends) {
#pragma unroll
          for (int v = 0; v < kItems; ++v)
            if (r * kApart + v == left - 1) last = state[0][v];
        }
        if (kSegmented && args.last.start) {
#pragma unroll
          for (int v = 0; v < kItems; ++v)
            if (marks.ends >> (r * kItems + v) & 1)
              store_sequence_last(args, view.at, position + r * kApart + v, state[0][v]);
        }
      }
    };
    in_kind(view, finish_packs);
    if (ends && left > 0 && left <= Slots::kReach && (left - 1) % kApart < kItems)
      store_state(locate_row(args, tile.row).last, beside(args, args.last), last);
  };

  if constexpr (kPart == kOnePass) {
    if (args.cell_pairs > 0) return clear_cells(args);
    // Two barriers: the maps of the warps are there; what enters the tile is there.
    __shared__ S entering_tile;
    const LookBack<Map, false> look_back(args);
    const TimeTile tile = tile_of(take_ticket(args));
    start(tile, 0);
    wait_for_copies();
    const TimeView view = view_of(tile);
    Run<Map, kRounds> inclusive;
    const Map own = fold(view, 0, inclusive);
    if (lane == 0) maps[0][warp] = own;
    __syncthreads();
    if (warp == 0) {
      const Map whole = fold_of(maps[0], 1, args.row_warps);
      if (lane == 0) look_back.publish(tile.row, tile.chunk, whole);
      const int tiles = look_back.tiles_before(tile.chunk);
      Map before = Map::identity();
      if (tiles > 0) {
        before = look_back.map_before(tile.row, tile.chunk, lane < tiles ? lane : tiles - 1);
        before = from_lane(warp_inclusive_scan(before, lane), tiles - 1);
      }
      S state = tile.chunk < look_back.group
                    ? entering_state<S, kSegmented>(args, locate_row(args, tile.row), tile.row, 0)
                    : look_back.state_before(tile.row, tile.chunk);
      if (tiles > 0) state = apply(before, state);
      if (lane == 0) {
        look_back.publish_state(tile.row, tile.chunk, apply(whole, state));
        entering_tile = state;
      }
    }
    __syncthreads();
    Carry<Map, false> entering;
    entering.state = entering_tile;
    finish(tile, view, 0, inclusive, entering.add_all(maps[0], 1, args.row_warps, warp));
  } else {
    TimeTile now = tile_of((long long)blockIdx.x * slots);
    int stage = 0;
    if (now.first < items) start(now, stage);
    while (now.first < items) {
      const TimeTile next = after(now);
      wait_for_copies();
      if (next.first < items) start(next, stage ^ 1);
      const bool real = now.first + slot < items;
      if (now.base == now.chunk * args.chunk) {
        carry = Carry<Map, kPart == kSummarise>();
        if (kPart == kApply && real)
          carry.state = entering_state<S, kSegmented>(args, locate_row(args, now.row), now.row, now.chunk);
      }
      const TimeView view = view_of(now);
      Run<Map, kRounds> inclusive;
      const Map own = fold(view, stage, inclusive);
      S entering = carry.state;
      if (args.row_warps > 1) {
        if (lane == 0) maps[parity][warp] = own;
        __syncthreads();
        entering = carry.add_all(&maps[parity][slot * args.row_warps], 1, args.row_warps, warp_in_row);
        parity ^= 1;
      } else {
        carry.add(own);
      }
      if (kPart == kApply)
        finish(now, view, stage, inclusive, entering);
      else if (next.base == next.chunk * args.chunk && real && lane == 0 && warp_in_row == 0)
        store_summary(args, now.row, now.chunk, carry.map);
      stage ^= 1;
      now = next;
    }
  }
}
