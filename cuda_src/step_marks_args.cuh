// The one argument of step_marks. _launch.py packs the same fields in the same order.
#pragma once
#include "step_marks.cuh"

constexpr int kMarkRowDims = 6;

// mask or reset, in bytes; `start` is the first step in the direction of the scan, or null.
struct FlagArray {
  const char* start;
  long long time;
  long long row[kMarkRowDims];
};

// How a row or sequence starts: from its h0; without one, like a reset; or from it, with `starts` also where it resets,
// for the gradient of h0 is 0 there.
enum Starts { kFromState = 0, kEmpty = 1, kAlwaysMarked = 2 };

struct MarkArgs {
  FlagArray mask, reset;
  const char* offsets;  // of the sequences along time, one more than there are; may be null
  long long offset_step, sequences;
  long long length, rows, row_size[kMarkRowDims];
  StepMarks* marks;  // (rows, words)
  int* ids;          // (length,): the sequence of each position inside one; may be null
  int row_dims, wide_offsets, reverse;
  int starts;  // Starts
};
