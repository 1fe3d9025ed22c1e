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

// Adds the edges of the sequences. A step outside of all of them is masked and forgets the sequence before it.
__device__ __forceinline__ void mark_sequences(const MarkArgs& args, StepMarks& marks, long long first, int steps,
                                               bool writes_ids) {
  const int direction = args.reverse ? -1 : 1;
  long long time = args.reverse ? args.length - 1 - first : first;
  long long id = sequence_at(args, time);
  for (int s = 0; s < steps; ++s, time += direction) {
    while (direction > 0 && id + 1 < args.sequences && offset_of(args, id + 1) <= time) ++id;
    while (direction < 0 && id >= 0 && offset_of(args, id) > time) --id;
    const unsigned bit = 1u << s;
    const bool inside = id >= 0 && time < offset_of(args, id + 1);
    if (inside) {
      const bool lowest = time == offset_of(args, id), highest = time + 1 == offset_of(args, id + 1);
      const bool begins = args.reverse ? highest : lowest;
      if (begins && args.starts == kEmpty) marks.resets |= bit;
      if (begins && (!(marks.resets & bit) || args.starts == kAlwaysMarked)) marks.starts |= bit;
      if (args.reverse ? lowest : highest) marks.ends |= bit;
    } else {
      marks.masked |= bit;
      marks.resets |= bit;
    }
    if (writes_ids) args.ids[first + s] = inside ? (int)id : 0;
  }
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
    for (int s = 0; s < steps; ++s) {
      if (args.mask.start && !load_item<unsigned char>(mask + (first + s) * args.mask.time)) marks.masked |= 1u << s;
      if (args.reset.start && load_item<unsigned char>(reset + (first + s) * args.reset.time)) marks.resets |= 1u << s;
    }
    if (args.offsets)
      mark_sequences(args, marks, first, steps, args.ids && row == 0);
    else if (first == 0 && args.starts == kEmpty)
      marks.resets |= 1;
    args.marks[row * words + first / kMarkSteps] = marks;
  }
}
