// mask, reset and cu_seqlens as the marks of step_marks.cuh: (row, word) of 32 steps each, in the direction of the
// scan.
//
//   thread  one word of one row; neighbouring threads have neighbouring rows
//   rows    those of mask and reset together, before they are broadcast; sequences are the same in all of them
//
// Offsets are read inside their array alone, and only compared, whatever they hold: nothing but the marks is written.
#include "item_types.cuh"
#include "step_marks_args.cuh"
#include "step_marks.cuh"

__device__ __forceinline__ long long offset_of(const MarkArgs& args, long long sequence) {
  const char* at = args.offsets + sequence * args.offset_step;
  return args.wide_offsets ? load_item<long long>(at) : load_item<int>(at);
}

// Bit s: is byte s not 0? Those from `steps` on are as in `beyond`. All bytes are under way at once.
__device__ __forceinline__ unsigned flags_of(const char* bytes, long long next, int steps, unsigned beyond) {
  unsigned flags = beyond;
#pragma unroll
  for (int s = 0; s < kMarkSteps; ++s)
    if (s < steps && (load_item<unsigned char>(bytes + s * next) != 0) != (beyond & 1)) flags ^= 1u << s;
  return flags;
}

// The last sequence that begins at or before `time`, or -1.
__device__ __forceinline__ long long sequence_at(const MarkArgs& args, long long time) {
  long long low = 0, high = args.sequences;
  while (low < high) {
    const long long middle = (low + high) / 2;
    if (offset_of(args, middle) <= time)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

// Bits 0 to n - 1, and all of them from 32 on.
__device__ __forceinline__ unsigned bits_below(long long n) {
  return n >= kMarkSteps ? ~0u : (1u << (n > 0 ? n : 0)) - 1;
}

// Adds the edges of the sequences. A step outside of all of them is masked and forgets the sequence before it.
__device__ __forceinline__ void mark_sequences(const MarkArgs& args, StepMarks& marks, long long first, int steps,
                                               bool writes_ids) {
  // The sequences that have a part in the word's times, lowest first; bits are times here.
  const long long time = args.reverse ? args.length - first - steps : first;
  unsigned inside = 0, lowest = 0, highest = 0;
  long long id = sequence_at(args, time);
  id = id > 0 ? id : 0;
  long long begin = offset_of(args, id);
  for (; id < args.sequences && begin < time + steps; ++id) {
    // Offsets may be anything: no difference is taken that could overflow.
    const long long end = offset_of(args, id + 1);
    const int from = begin > time ? (int)(begin - time) : 0;
    const int to = end >= time + steps ? steps : end > time ? (int)(end - time) : 0;
    if (from < to) {
      const unsigned bits = bits_below(to) & ~bits_below(from);
      inside |= bits;
      lowest &= ~bits, highest &= ~bits;  // of sequences before it, where offsets are wrong: a step has one sequence
      if (begin >= time) lowest |= 1u << from;
      if (end <= time + steps) highest |= 1u << (to - 1);
      for (int s = from; writes_ids && s < to; ++s)
        args.ids[args.reverse ? first + steps - 1 - s : first + s] = (int)id;
    }
    begin = end;
  }
  if (args.reverse) {  // from times to positions
    const int unused = kMarkSteps - steps;
    inside = __brev(inside) >> unused;
    const unsigned begins = __brev(highest) >> unused;
    highest = __brev(lowest) >> unused;
    lowest = begins;
  }
  const unsigned outside = ~inside & bits_below(steps);
  if (args.starts == kEmpty) marks.resets |= lowest;
  marks.starts |= args.starts == kAlwaysMarked ? lowest : lowest & ~marks.resets;
  marks.ends |= highest;
  marks.masked |= outside;
  marks.resets |= outside;
}

__device__ __forceinline__ void make_marks(const MarkArgs& args) {
  const long long words = (args.length + kMarkSteps - 1) / kMarkSteps, step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < args.rows * words; i += step) {
    const long long row = i % args.rows, first = i / args.rows * kMarkSteps;
    const int steps = args.length - first < kMarkSteps ? (int)(args.length - first) : kMarkSteps;
    const char *mask = args.mask.start, *reset = args.reset.start;
    long long rest = row;
#pragma unroll 1
    for (int d = args.row_dims - 1; d >= 0; --d) {
      mask += rest % args.row_size[d] * args.mask.row[d];
      reset += rest % args.row_size[d] * args.reset.row[d];
      rest /= args.row_size[d];
    }
    StepMarks marks = {0, 0, 0, 0};
    if (args.mask.start) marks.masked = ~flags_of(mask + first * args.mask.time, args.mask.time, steps, ~0u);
    if (args.reset.start) marks.resets = flags_of(reset + first * args.reset.time, args.reset.time, steps, 0);
    if (args.offsets)
      mark_sequences(args, marks, first, steps, args.ids && row == 0);
    else if (first == 0 && args.starts == kEmpty)
      marks.resets |= 1;
    args.marks[row * words + first / kMarkSteps] = marks;
  }
}
