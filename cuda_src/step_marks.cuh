// What is special about a step beyond its gate and input, as bits: made by step_marks.cu from mask, reset and
// cu_seqlens, read where the scans form their steps.
#pragma once

constexpr int kMarkSteps = 32;  // steps a word

// Bit i of each: step i of 32 consecutive positions.
struct alignas(16) StepMarks {
  unsigned masked;  // the state stays as it is, whatever the inputs hold
  unsigned resets;  // what enters is zero
  unsigned starts;  // what enters is the h0 of a packed sequence; not where `resets`, but see Starts
  unsigned ends;    // what leaves is the last state of a packed sequence
};

// The marks of the `steps` positions from `position` on, at most 32; bits from `steps` on are 0. `word` is
// row[position / 32], which may have been loaded long before, and need not be there if there are no steps.
__device__ __forceinline__ StepMarks marks_from(StepMarks word, const StepMarks* row, long long position, int steps) {
  if (steps <= 0) return {0, 0, 0, 0};
  const int shift = (int)(position % kMarkSteps);
  const unsigned keep = steps < kMarkSteps ? (1u << steps) - 1 : ~0u;
  StepMarks upper = {0, 0, 0, 0};
  if (shift + steps > kMarkSteps) {
    upper = row[position / kMarkSteps + 1];
    upper.masked <<= kMarkSteps - shift;
    upper.resets <<= kMarkSteps - shift;
    upper.starts <<= kMarkSteps - shift;
    upper.ends <<= kMarkSteps - shift;
  }
  return {(word.masked >> shift | upper.masked) & keep, (word.resets >> shift | upper.resets) & keep,
          (word.starts >> shift | upper.starts) & keep, (word.ends >> shift | upper.ends) & keep};
}

// The same, with the word loaded here.
__device__ __forceinline__ StepMarks marks_of(const StepMarks* row, long long position, int steps) {
  if (steps <= 0) return {0, 0, 0, 0};
  return marks_from(row[position / kMarkSteps], row, position, steps);
}
