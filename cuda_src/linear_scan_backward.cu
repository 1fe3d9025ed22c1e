// linear_scan_vjp: from the gradient of h the gradients of a, b and h0 in h[t] = a[t] * h[t-1] + b[t], in one walk from
// the last step to the first.
//
//   g[t] = p[t+1] + grad_h[t]      all that reaches h[t]; p[length] is grad_last_state
//   p[t] = conj(a[t]) * g[t]       what of it goes on to h[t-1]; p[0] is the gradient of h0
//
//   grad_b[t] = g[t]    grad_a[t] = g[t] * conj(h[t-1])
//
// p is a recurrence with the step (conj(a[t]), conj(a[t]) * grad_h[t]), and is scanned in the order of the walk as
// linear_scan.cu scans h: lanes over rows, which may be pairs, or over time, `row_warps` warps on a row, one barrier a
// tile, chunks with summaries; who owns what and where the barriers are is said there. A step needs no gate but its
// own. Of h it needs the step before: `rows` reads h one step ahead, in `time` it comes from the lane above, and lane
// 31 reads one item more.
//
// Position counts steps of the walk. In the direction of the scan, which marks and ids are in, position is the step
// length - 1 - position. What the scan forgets at a step, the walk forgets between it and the step before: there
// nothing enters, by selection.
//
// Gates that are shared have the gradients of all steps that they act on summed. Over time a thread adds up those of
// its steps (`time` then those of the lanes), and leaves one sum for each warp of a chunk; over 32 rows of a warp the
// lanes are summed at each step. The launch adds the rest, in a fixed order.
#include "linear_backward_args.cuh"
#include "linear_tile.cuh"

// One row of every array, at position 0.
struct BackwardRow : LinearRow {
  const char *states, *entering;
  char* grad_gate;
};

__device__ __forceinline__ BackwardRow locate_row(const LinearBackwardArgs& args, long long row) {
  BackwardRow at = {locate_row(args.scan, row), args.states.start, args.entering.start, args.grad_gate.start};
#pragma unroll 1
  for (int d = args.scan.row_dims - 1; d >= 0; --d) {
    long long i = row;
    row = d > 0 ? divide(row, args.scan.row_size[d], i) : 0;
    at.states += i * args.states.row[d];
    at.entering += i * args.entering.row[d];
    at.grad_gate += i * args.grad_gate.row[d];
  }
  return at;
}

// Bit s of each: the step at `position` + s.
struct WalkMarks {
  unsigned masked, resets, starts, ends;  // as in StepMarks
  unsigned forgets;                       // nothing comes from the step before in the walk
};

// The marks of the `steps` positions from `position` on, at most 31. `word` is the row's word that has the last of
// them.
__device__ __forceinline__ WalkMarks walk_marks(const LinearArgs& args, StepMarks word, const StepMarks* row,
                                                long long position, int steps) {
  if (steps <= 0) return {0, 0, 0, 0, 0};
  // In the order of the scan, and with the step before `position` if there is one: that becomes bit 0.
  const long long first = args.length - position - steps;
  StepMarks marks = marks_from(word, row, first, position > 0 ? steps + 1 : steps);
  auto walked = [&](unsigned bits) { return __brev(bits) >> (31 - steps); };
  WalkMarks walk = {walked(marks.masked) >> 1, walked(marks.resets) >> 1, walked(marks.starts) >> 1,
                    walked(marks.ends) >> 1, walked(marks.resets | marks.starts) & ((1u << steps) - 1)};
  if (position == 0 && (args.ids || !args.initial.start)) walk.forgets |= 1;
  return walk;
}

template <class S, class Tag>
__device__ __forceinline__ S conjugate_gate(const LinearArgs& args, S gate, Tag) {
  return conjugate(Tag::gates || args.gate.start ? gate : constant_gate(args, S()));
}

// Works on a tile as what it is. It is `whole` if all of the thread's steps are there, none of them marked or the
// scan's first, and come and go in the type T.
template <class Work>
__device__ __forceinline__ void in_kind(const LinearArgs& args, bool whole, Work&& work) {
  if (!whole)
    work(Partial());
  else if (args.gate.start)
    work(Gated());
  else
    work(Whole());
}
// Can tiles be whole?
template <class T>
__device__ __forceinline__ bool plain_items(const LinearBackwardArgs& args) {
  const bool plain_gates = !args.grad_gate.start || args.sums == kOverTime ||
                           (args.sums == kEachStep && args.grad_gate_code == kItemCode<T>);
  return !args.wide_input && !args.wide_states && args.scan.output_code == kItemCode<T> && plain_gates;
}

// What of g goes on to the step before in the scan. A masked step lets it through, and so does one that does not exist
// (the tail of a tile), whose g is what comes.
template <class S>
__device__ __forceinline__ S pass_on(S factor, bool counts, S g) {
  return counts ? multiply(factor, g) : g;
}
// The same of two rows, with one selection for both products of a step (registers are few): one times a real number is
// that number.
template <class R>
__device__ __forceinline__ Two<R> pass_on(Two<R> factor, bool counts, Two<R> g) {
  return multiply(counts ? factor : Scalar<Two<R>>::one(), g);
}
// The step of p.
template <class S>
__device__ __forceinline__ Affine<S> walk_step(S factor, bool counts, S grad) {
  return {counts ? factor : Scalar<S>::one(), pass_on(factor, counts, grad)};
}

// The state before the first step of the scan, where `here`.
template <bool kSegmented, class S>
__device__ __forceinline__ S state_before_first(const LinearBackwardArgs& args, long long row, bool here) {
  const bool enters = here && args.entering.start && !(kSegmented && args.scan.ids);
  return enters ? load_item<S>(locate_row(args, row).entering) : Scalar<S>::zero();
}

// The gradient of a step's gate, from g and the state before, or `h0` if it is the scan's `first`. It is 0 where the
// gate acts on nothing.
template <bool kSegmented, class S>
__device__ __forceinline__ S gate_gradient(const LinearBackwardArgs& args, const BackwardRow& at,
                                           const WalkMarks& marks, int bit, long long position, bool first, S g,
                                           S before, S h0) {
  const bool packed = kSegmented && args.scan.ids;
  bool acts = !first || packed || args.entering.start;
  if (first) before = h0;
  if constexpr (kSegmented) {
    if (marks.starts >> bit & 1)
      before = load_item<S>(at.entering + args.scan.ids[args.scan.length - 1 - position] * args.entering.time);
    if ((marks.masked | marks.resets) >> bit & 1) acts = false;
  }
  return acts ? multiply(g, conjugate(before)) : Scalar<S>::zero();
}

// --- rows ----------------------------------------------------------------------------------------------------

// An item of type T, or of its accumulation type where `wide`, as it came from memory.
template <class T, bool k16Bits = sizeof(T) == 2>
struct Raw {
  T item;

  template <bool kWide>
  __device__ __forceinline__ void load(const char* at) {
    item = load_item<T>(at);
  }
  __device__ __forceinline__ void load(const char* at, bool) { load<false>(at); }
  __device__ __forceinline__ void clear() { item = T(); }
  __device__ __forceinline__ auto value(bool) const { return widen(item); }
};
template <class T>
struct Raw<T, true> {
  unsigned bits;

  template <bool kWide>
  __device__ __forceinline__ void load(const char* at) {
    if constexpr (kWide)
      bits = load_item<unsigned>(at);
    else
      bits = load_item<unsigned short>(at);
  }
  __device__ __forceinline__ void load(const char* at, bool wide) { wide ? load<true>(at) : load<false>(at); }
  __device__ __forceinline__ void clear() { bits = 0; }
  __device__ __forceinline__ float value(bool wide) const {
    return wide ? __uint_as_float(bits) : widen(T{(unsigned short)bits});
  }
};

// kSteps steps of one row as they came from memory, and the states before them. Two of these alternate, so that the
// loads of one are under way while the other is worked on.
template <class T, bool kSummarise>
struct WalkSteps {
  using S = typename Accumulated<T>::type;
  // Registers are few. Two rows of 16-bit items have as many as one has alone, and so its bits.
  static constexpr bool k16Bits = kItemCode<T> == kBFloat16 || kItemCode<T> == kFloat16;
  static constexpr int kSteps = k16Bits ? 10 : 48 / sizeof(S);
  Raw<T> gate[kSteps], grad[kSteps], before[kSteps];
  StepMarks word;  // where the last step's marks are

  // Starts loading the first `steps` steps, of which `states` have a state before them.
  __device__ __forceinline__ void start(const LinearBackwardArgs& args, const BackwardRow& at, long long position,
                                        int steps, int states) {
    start_array(gate, args.scan.gate, at.gate + position * args.scan.gate.time, false, steps);
    start_array(grad, args.scan.input, at.input + position * args.scan.input.time, args.wide_input, steps);
    if (!kSummarise)
      start_array(before, args.states, at.states + (position + 1) * args.states.time, args.wide_states, states);
  }

  // Every item is given a value, and the address goes from item to item: items that are not always loaded and products
  // of strides would stay in registers from tile to tile.
  static __device__ __forceinline__ void start_array(Raw<T> (&to)[kSteps], const LinearArray& array, const char* at,
                                                     bool wide, int exist) {
    // One branch for all: of two loads into a register, one of which is done, the second waits for the first.
    if (sizeof(T) == 2 && wide)
      start_items<true>(to, array, at, exist);
    else
      start_items<false>(to, array, at, exist);
  }
  template <bool kWide>
  static __device__ __forceinline__ void start_items(Raw<T> (&to)[kSteps], const LinearArray& array, const char* at,
                                                     int exist) {
    if (array.start && exist == kSteps) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, at += array.time) to[s].template load<kWide>(at);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s, at += array.time)
        if (array.start && s < exist)
          to[s].template load<kWide>(at);
        else
          to[s].clear();
    }
  }
};

template <class T, bool kSummarise, bool kSegmented, class Map>
__device__ __forceinline__ void walk_rows(const LinearBackwardArgs& args, Map (&maps)[2][kMostWarps][32]) {
  using S = typename Map::State;
  using Steps = WalkSteps<T, kSummarise>;
  constexpr int kSteps = Steps::kSteps;
  const LinearArgs& scan = args.scan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / scan.row_warps, warp_in_row = warp % scan.row_warps;
  const int slots = blockDim.x / 32 / scan.row_warps;
  const long long row_tiles = (scan.rows + 31) / 32, items = row_tiles * scan.chunks;
  const long long tile = (long long)scan.row_warps * kSteps;
  const bool plain = plain_items<T>(args), over_time = args.grad_gate.start && args.sums == kOverTime;
  int parity = 0;

  for (long long first = (long long)blockIdx.x * slots; first < items; first += (long long)gridDim.x * slots) {
    const long long item = first + slot < items ? first + slot : 0;
    long long row_tile;
    const long long chunk = divide(item, row_tiles, row_tile);
    // A lane beyond the last row loads and stores nothing.
    const bool may_be_whole = plain && row_tile * 32 + 32 <= scan.rows;
    const bool real = first + slot < items && row_tile * 32 + lane < scan.rows;
    const long long row = real ? row_tile * 32 + lane : 0;
    const long long begin = chunk * scan.chunk, limit = begin + scan.chunk;
    BackwardRow at = locate_row(args, row);
    if (over_time) at.grad_gate += (chunk * scan.row_warps + warp_in_row) * args.grad_gate.time;
    const StepMarks* marks_row = reinterpret_cast<const StepMarks*>(at.marks);
    Carry<Map, kSummarise> carry;
    if (!kSummarise && real) carry.state = entering_state<S, kSegmented>(scan, at, row, chunk);
    S sum = Scalar<S>::zero();  // of the gates' gradients, with kOverTime

    auto steps_at = [&](long long base) {
      const long long end = limit < scan.length ? limit : scan.length;
      const long long left = end - base - (long long)warp_in_row * kSteps;
      return !real || left < 0 ? 0 : left < kSteps ? (int)left : kSteps;
    };
    auto start = [&](Steps& raw, long long base) {
      const long long position = base + (long long)warp_in_row * kSteps;
      const int steps = steps_at(base);
      raw.start(args, at, position, steps, position + steps < scan.length ? steps : steps - 1);
      if (kSegmented && steps > 0) raw.word = marks_row[(scan.length - position - steps) / kMarkSteps];
    };
    auto process = [&](const Steps& raw, long long base) {
      const int steps = steps_at(base);
      const long long position = base + (long long)warp_in_row * kSteps;
      WalkMarks marks = {0, 0, 0, 0, 0};
      if constexpr (kSegmented) marks = walk_marks(scan, raw.word, marks_row, position, steps);
      const bool marked = marks.masked | marks.resets | marks.starts | marks.ends | marks.forgets;
      const bool whole = may_be_whole && steps == kSteps && position + kSteps < scan.length && !marked;
      // A sequence that ends takes the gradient of its last state into that step.
      auto grad_of = [&](int s, auto tag) {
        const bool kWhole = tag.value;
        S grad = raw.grad[s].value(!kWhole && args.wide_input);
        if (kSegmented && !kWhole && scan.initial.start && marks.ends >> s & 1)
          grad = add(grad, sequence_initial<S>(scan, at, scan.length - 1 - position - s));
        return grad;
      };
      auto counts = [&](int s, auto tag) {
        const bool kWhole = tag.value;
        return kWhole || (s < steps && !(kSegmented && marks.masked >> s & 1));
      };
      auto factor_of = [&](int s, auto tag) { return conjugate_gate<S>(scan, raw.gate[s].value(false), tag); };
      auto step_of = [&](int s, auto tag) -> Map {
        Affine<S> step = walk_step(factor_of(s, tag), counts(s, tag), grad_of(s, tag));
        if constexpr (kSegmented) {
          const bool kWhole = tag.value;
          return {step.gate, step.input, kWhole ? 0 : marks.forgets >> s & 1};
        } else {
          if (s == 0 && position == 0 && !scan.initial.start) step.gate = Scalar<S>::zero();
          return step;
        }
      };
      S entering = carry.state;
      if (scan.row_warps > 1 || kSummarise) {
        Map own;
        in_kind(scan, whole, [&](auto tag) {
          own = step_of(0, tag);
#pragma unroll
          for (int s = 1; s < kSteps; ++s) own = combine(own, step_of(s, tag));
        });
        if (scan.row_warps > 1) {
          maps[parity][warp][lane] = own;
          __syncthreads();
          entering = carry.add_all(&maps[parity][slot * scan.row_warps][lane], 32, scan.row_warps, warp_in_row);
          parity ^= 1;
        } else {
          carry.add(own);
        }
      }
      if (kSummarise) return;
      char* to = at.output + position * scan.output.time;
      char* gate_to = at.grad_gate + position * args.grad_gate.time;
      in_kind(scan, whole, [&](auto tag) {
        const bool kWhole = tag.value;
        const int first_step = position + steps == scan.length ? steps - 1 : -1;
        S h0 = Scalar<S>::zero();
        if (!kWhole) h0 = state_before_first<kSegmented, S>(args, row, first_step >= 0);
#pragma unroll
        for (int s = 0; s < kSteps; ++s, to += scan.output.time, gate_to += args.grad_gate.time) {
          const S grad = grad_of(s, tag), g = !kWhole && marks.forgets >> s & 1 ? grad : add(entering, grad);
          entering = pass_on(factor_of(s, tag), counts(s, tag), g);
          if (kWhole) {
            narrow(g, *reinterpret_cast<T*>(to));
            const S grad_gate = multiply(g, conjugate(raw.before[s].value(false)));
            if (args.grad_gate.start && !over_time) narrow(grad_gate, *reinterpret_cast<T*>(gate_to));
            if (over_time) sum = add(sum, grad_gate);
            continue;
          }
          if (kSegmented && scan.last.start && marks.starts >> s & 1)
            store_sequence_last(scan, at, scan.length - 1 - position - s,
                                marks.resets >> s & 1 ? Scalar<S>::zero() : entering);
          if (s < steps) store_as(to, scan.output_code, marks.masked >> s & 1 ? Scalar<S>::zero() : g);
          if (!args.grad_gate.start) continue;
          S grad_gate = gate_gradient<kSegmented>(args, at, marks, s, position + s, s == first_step, g,
                                                  raw.before[s].value(args.wide_states), h0);
          if (over_time && s < steps) sum = add(sum, grad_gate);
          if constexpr (RowsOf<S>::kRows == 1)  // the gates of pairs are not shared
            if (args.sums == kOverLanes) grad_gate = warp_sum(grad_gate, lane);
          if (!over_time && s < steps && (args.sums != kOverLanes || lane == 0))
            store_as(gate_to, args.grad_gate_code, grad_gate);
        }
      });
      if (scan.row_warps == 1) carry.state = entering;
      // The steps of a tail let through what comes, so this is p[0].
      if (scan.last.start && !(kSegmented && scan.ids) && steps > 0 && position + steps == scan.length)
        *reinterpret_cast<S*>(locate_row(scan, row).last) =
            marks.resets >> (steps - 1) & 1 ? Scalar<S>::zero() : entering;
    };
    Steps even, odd;
    start(even, begin);
    // Every slot of the block takes the same number of tiles: as many as a whole chunk has.
    for (long long base = begin; base < limit; base += 2 * tile) {
      start(odd, base + tile);
      process(even, base);
      if (base + tile >= limit) break;
      start(even, base + 2 * tile);
      process(odd, base + tile);
    }
    if (kSummarise && real && warp_in_row == 0) store_summary(scan, row, chunk, carry.map);
    if (!kSummarise && over_time && real) store_as(at.grad_gate, args.grad_gate_code, sum);
  }
}

template <class T, bool kSegmented>
__device__ __forceinline__ void linear_backward_rows(const LinearBackwardArgs& args) {
  using Map = typename MapOf<typename Accumulated<T>::type, kSegmented>::type;
  __shared__ Map maps[2][kMostWarps][32];
  if (args.summarise)
    walk_rows<T, true, kSegmented>(args, maps);
  else
    walk_rows<T, false, kSegmented>(args, maps);
}

// --- time ----------------------------------------------------------------------------------------------------

// A thread's items in a tile, as many and at the same steps as Packs has gates: one pack a round, or two where Item is
// float beside gates of 16 bits.
template <class T, class Item>
struct WalkPacks {
  static constexpr int kItems = Pack<T>::kItems, kApart = Packs<T>::kApart, kRounds = Packs<T>::kRounds;
  static constexpr int kOfPack = Pack<Item>::kItems, kPacks = kItems / kOfPack;
  using Some = Items<Item, kOfPack>;
  Some pack[kRounds][kPacks];

  // As in Packs, but every item is given a value, as in WalkSteps.
  __device__ __forceinline__ void start(const LinearArray& array, const char* at, int left) {
    if (array.packs && left >= Packs<T>::kReach) {
      if (array.time < 0) at -= (kOfPack - 1) * sizeof(Item);  // the lowest item of a pack
#pragma unroll
      for (int r = 0; r < kRounds; ++r, at += (kApart - kItems) * array.time)
#pragma unroll
        for (int p = 0; p < kPacks; ++p, at += kOfPack * array.time) pack[r][p] = load_item<Some>(at);
    } else {
#pragma unroll
      for (int r = 0; r < kRounds; ++r, at += (kApart - kItems) * array.time)
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          Pack<Item> items;
#pragma unroll
          for (int v = 0; v < kOfPack; ++v, at += array.time)
            items.item[v] = array.start && r * kApart + p * kOfPack + v < left ? load_item<Item>(at) : Item();
          pack[r][p] = *reinterpret_cast<const Some*>(&items);
        }
    }
  }
  __device__ __forceinline__ void settle(const LinearArray& array, int left) {
    const bool down = array.packs && left >= Packs<T>::kReach && array.time < 0;
    if (sizeof(Item) == 2 || down) {
#pragma unroll
      for (int i = 0; i < kRounds * kPacks; ++i)
        pack[i / kPacks][i % kPacks] = in_order(pack[i / kPacks][i % kPacks], sizeof(Item) > 2 || down);
    }
  }
};

// Items of type T, or with kWide of its accumulation type where `wide`.
template <class T, bool kWide>
struct RawPacks : WalkPacks<T, T> {
  __device__ __forceinline__ void start(const LinearArray& array, bool, const char* at, int left) {
    WalkPacks<T, T>::start(array, at, left);
  }
  __device__ __forceinline__ void settle(const LinearArray& array, bool, int left) {
    WalkPacks<T, T>::settle(array, left);
  }
  __device__ __forceinline__ auto value(bool, int r, int v) const { return this->pack[r][0].get(v); }
};
template <class T>
struct RawPacks<T, true> {
  using S = typename Accumulated<T>::type;
  union {
    WalkPacks<T, T> own;
    WalkPacks<T, S> other;
  };

  __device__ __forceinline__ RawPacks() : other{} {}
  __device__ __forceinline__ void start(const LinearArray& array, bool wide, const char* at, int left) {
    if (wide)
      other.start(array, at, left);
    else
      own.start(array, at, left);
  }
  __device__ __forceinline__ void settle(const LinearArray& array, bool wide, int left) {
    if (wide)
      other.settle(array, left);
    else
      own.settle(array, left);
  }
  __device__ __forceinline__ S value(bool wide, int r, int v) const {
    return wide ? other.pack[r][v / other.kOfPack].get(v % other.kOfPack) : own.pack[r][0].get(v);
  }
};

template <class T, bool kSummarise, bool kSegmented, bool kWide, class Map>
__device__ __forceinline__ void walk_time(const LinearBackwardArgs& args, Map (&maps)[2][kMostWarps]) {
  using S = typename Map::State;
  constexpr int kItems = Pack<T>::kItems, kApart = Packs<T>::kApart, kRounds = Packs<T>::kRounds;
  const LinearArgs& scan = args.scan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slot = warp / scan.row_warps, warp_in_row = warp % scan.row_warps;
  const int slots = blockDim.x / 32 / scan.row_warps;
  const long long items = scan.rows * scan.chunks;
  const long long tile = (long long)scan.row_warps * kRounds * kApart;
  // Only 16-bit items take more instructions than memory has time for; others would need more registers.
  const bool plain = sizeof(T) == 2 && (kSummarise || !kWide) && plain_items<T>(args);
  const bool over_time = args.grad_gate.start && args.sums == kOverTime;
  const bool packs = scan.output.packs && (over_time || args.grad_gate.packs || !args.grad_gate.start);
  int parity = 0;

  for (long long first = (long long)blockIdx.x * slots; first < items; first += (long long)gridDim.x * slots) {
    const bool real = first + slot < items;
    long long chunk;
    const long long row = divide(real ? first + slot : 0, scan.chunks, chunk);
    const long long begin = chunk * scan.chunk;
    long long end = begin + scan.chunk < scan.length ? begin + scan.chunk : scan.length;
    if (!real) end = begin;
    const BackwardRow at = locate_row(args, row);
    Carry<Map, kSummarise> carry;
    if (!kSummarise && real) carry.state = entering_state<S, kSegmented>(scan, at, row, chunk);
    S sum = Scalar<S>::zero();  // of the gates' gradients, with kOverTime

    for (long long base = begin; base < begin + scan.chunk; base += tile, parity ^= 1) {
      const long long position = base + (warp_in_row * kRounds * 32 + lane) * kItems;
      // Of the steps from `position`, those below `left` exist; the bound is more than a thread looks at.
      const int left = (int)(end - position < 2 * kRounds * kApart ? end - position : 2 * kRounds * kApart);
      WalkPacks<T, T> gates;
      RawPacks<T, kWide> grads, states;
      gates.start(scan.gate, at.gate + position * scan.gate.time, left);
      grads.start(scan.input, args.wide_input, at.input + position * scan.input.time, left);
      // The states of these steps and, of the one after the last, where that is in the next chunk.
      const int states_left = left + (end < scan.length);
      Raw<T> after;  // the state that follows lane 31
      after.clear();
      if (!kSummarise) {
        const char* states_at = at.states + position * args.states.time;
        states.start(args.states, args.wide_states, states_at, states_left);
        constexpr int kAfter = (kRounds - 1) * kApart + kItems;
        if (args.states.start && lane == 31 && states_left > kAfter)
          after.load(states_at + kAfter * args.states.time, args.wide_states);
      }
      // Of the whole warp: is every step there, with a state before it in the row?
      bool whole = plain && packs && states_left + lane * kItems > kRounds * kApart;
      WalkMarks marks = {0, 0, 0, 0, 0};  // bit r * kItems + v
      if constexpr (kSegmented) {
        // One look of the whole warp, together with the items, tells whether anything is special at all.
        const StepMarks* row_marks = reinterpret_cast<const StepMarks*>(at.marks);
        const long long high = scan.length - 1 - (position - lane * kItems);  // in the order of the scan
        const long long low = high - kRounds * kApart < 0 ? 0 : high - kRounds * kApart;
        const long long word = low / kMarkSteps + lane;
        static_assert(kRounds * kApart / kMarkSteps + 2 <= 32, "a word a lane");
        bool special = false;
        if (word * kMarkSteps <= high + 1 && word * kMarkSteps < scan.length) {
          const StepMarks seen = row_marks[word];
          special = seen.masked | seen.resets | seen.starts | seen.ends;
        }
        if (__any_sync(kFullMask, special || position == 0)) {
          whole = false;
#pragma unroll 1
          for (int r = 0; r < kRounds; ++r) {
            const int steps = left - r * kApart < kItems ? left - r * kApart : kItems;
            if (steps <= 0) break;
            const long long here = position + r * kApart, lowest = scan.length - here - steps;
            const WalkMarks of_pack = walk_marks(scan, row_marks[lowest / kMarkSteps], row_marks, here, steps);
            marks.masked |= of_pack.masked << r * kItems;
            marks.resets |= of_pack.resets << r * kItems;
            marks.starts |= of_pack.starts << r * kItems;
            marks.ends |= of_pack.ends << r * kItems;
            marks.forgets |= of_pack.forgets << r * kItems;
          }
        }
      }
      gates.settle(scan.gate, left);
      grads.settle(scan.input, args.wide_input, left);
      if (!kSummarise) states.settle(args.states, args.wide_states, states_left);

      Map before[kRounds], total[kRounds], warp_map;
      auto counts = [&](int r, int v, auto tag) {
        const bool kWhole = tag.value;
        return kWhole || (r * kApart + v < left && !(kSegmented && marks.masked >> (r * kItems + v) & 1));
      };
      auto factor_of = [&](int r, int v, auto tag) { return conjugate_gate<S>(scan, gates.pack[r][0].get(v), tag); };
      auto grad_of = [&](int r, int v, auto tag) {
        const bool kWhole = tag.value;
        S grad = grads.value(!kWhole && args.wide_input, r, v);
        if (kSegmented && !kWhole && scan.initial.start && marks.ends >> (r * kItems + v) & 1)
          grad = add(grad, sequence_initial<S>(scan, at, scan.length - 1 - position - (r * kApart + v)));
        return grad;
      };
      in_kind(scan, whole, [&](auto tag) {
        const bool kWhole = tag.value;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
#pragma unroll
          for (int v = 0; v < kItems; ++v) {
            Affine<S> step = walk_step(factor_of(r, v, tag), counts(r, v, tag), grad_of(r, v, tag));
            Map map;
            if constexpr (kSegmented) {
              map = {step.gate, step.input, kWhole ? 0 : marks.forgets >> (r * kItems + v) & 1};
            } else {
              if (r == 0 && v == 0 && position == 0 && !scan.initial.start) step.gate = Scalar<S>::zero();
              map = step;
            }
            total[r] = v == 0 ? map : combine(total[r], map);
          }
        }
      });
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const Map inclusive = warp_inclusive_scan(total[r], lane);
        before[r] = from_lane_below(inclusive, 1);
        total[r] = from_lane(inclusive, 31);
        warp_map = r == 0 ? total[r] : combine(warp_map, total[r]);
      }
      S entering = carry.state;
      if (scan.row_warps > 1) {
        if (lane == 0) maps[parity][warp] = warp_map;
        __syncthreads();
        entering = carry.add_all(&maps[parity][slot * scan.row_warps], 1, scan.row_warps, warp_in_row);
      } else {
        carry.add(warp_map);
      }
      if (kSummarise) continue;
      in_kind(scan, whole, [&](auto tag) {
        const bool kWhole = tag.value;
        S h0 = Scalar<S>::zero();
        if (!kWhole)
          h0 = state_before_first<kSegmented, S>(args, row,
                                                 position < scan.length && position + kRounds * kApart >= scan.length);
        char* output_at = at.output + position * scan.output.time;
        char* grad_gate_at = at.grad_gate + position * args.grad_gate.time;
#pragma unroll
        for (int r = 0; r < kRounds;
             ++r, output_at += kApart * scan.output.time, grad_gate_at += kApart * args.grad_gate.time) {
          S grad_input[1][kItems], grad_gate[1][kItems];
          S running = lane == 0 ? entering : apply(before[r], entering);
          auto state_of = [&](int r, int v) { return states.value(!kWhole && args.wide_states, r, v); };
          // The state after the pack's last.
          const S next = state_of(r + 1 < kRounds ? r + 1 : r, 0);
          S following = from_lane(lane == 0 ? next : state_of(r, 0), (lane + 1) % 32);
          if (r == kRounds - 1 && lane == 31) following = after.value(!kWhole && args.wide_states);
#pragma unroll
          for (int v = 0; v < kItems; ++v) {
            const int bit = r * kItems + v;
            const S grad = grad_of(r, v, tag), g = !kWhole && marks.forgets >> bit & 1 ? grad : add(running, grad);
            running = pass_on(factor_of(r, v, tag), counts(r, v, tag), g);
            grad_input[0][v] = !kWhole && marks.masked >> bit & 1 ? Scalar<S>::zero() : g;
            const S state = v + 1 < kItems ? state_of(r, v + 1 < kItems ? v + 1 : v) : following;
            if (kWhole) {
              grad_gate[0][v] = multiply(g, conjugate(state));
              continue;
            }
            const bool exists = r * kApart + v < left;
            const long long here = position + r * kApart + v;
            const bool first_step = here == scan.length - 1;
            if (args.grad_gate.start) {
              grad_gate[0][v] = gate_gradient<kSegmented>(args, at, marks, bit, here, first_step, g, state, h0);
              if (over_time && exists) sum = add(sum, grad_gate[0][v]);
            }
            const S left_over = marks.resets >> bit & 1 ? Scalar<S>::zero() : running;  // for the h0 before this step
            if (kSegmented && scan.last.start && marks.starts >> bit & 1)
              store_sequence_last(scan, at, scan.length - 1 - here, left_over);
            if (scan.last.start && !(kSegmented && scan.ids) && exists && first_step)
              *reinterpret_cast<S*>(at.last) = left_over;
          }
          entering = apply(total[r], entering);
          if (kWhole) {
            store_pack<T>(scan.output, output_at, grad_input[0]);
            if (over_time) {
#pragma unroll
              for (int v = 0; v < kItems; ++v) sum = add(sum, grad_gate[0][v]);
            } else if (args.grad_gate.start) {
              store_pack<T>(args.grad_gate, grad_gate_at, grad_gate[0]);
            }
          } else {
            store_packs<T>(scan.output, scan.output_code, output_at, left - r * kApart, grad_input);
            if (args.grad_gate.start && !over_time)
              store_packs<T>(args.grad_gate, args.grad_gate_code, grad_gate_at, left - r * kApart, grad_gate);
          }
        }
      });
    }
    if (kSummarise && real && lane == 0 && warp_in_row == 0) store_summary(scan, row, chunk, carry.map);
    if (!kSummarise && over_time) {
      sum = warp_sum(sum, lane);
      if (real && lane == 0)
        store_as(at.grad_gate + (chunk * scan.row_warps + warp_in_row) * args.grad_gate.time, args.grad_gate_code, sum);
    }
  }
}

template <class T, bool kSegmented>
__device__ __forceinline__ void linear_backward_time(const LinearBackwardArgs& args) {
  using Map = typename MapOf<typename Accumulated<T>::type, kSegmented>::type;
  __shared__ Map maps[2][kMostWarps];
  // Only beside gates of 16 bits are there items of another type, the accumulation type.
  constexpr bool kMayBeWide = sizeof(T) == 2;
  if (args.summarise)
    walk_time<T, true, kSegmented, kMayBeWide>(args, maps);
  else if (kMayBeWide && (args.wide_input || args.wide_states))
    walk_time<T, false, kSegmented, kMayBeWide>(args, maps);
  else
    walk_time<T, false, kSegmented, false>(args, maps);
}
