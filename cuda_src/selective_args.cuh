// The one argument of every selective_scan kernel. _launch.py packs the same fields in the same order.
// Strides are in bytes; an axis that an array lacks has stride 0. In reverse, `start` is the last step and the time
// strides are negated, so that the kernel only knows the direction of the scan.
#pragma once
#include "step_marks.cuh"

// (batch, length, channels): u, delta, z, output.
struct SequenceArray {
  char* start;
  long long batch, time, channel;
  int wide;    // items of float32 where u has 16 bits; delta may be either
  int vector;  // items are of u's type, and each run that a thread moves is aligned and exists whole or not at all
};

// B and C: (batch, length, groups, state), or (channels, state) where constant in time.
struct CoupleArray {
  char* start;
  long long batch, time, group, channel, state;
  int wide, vector, code;
};

constexpr int kStateInterval = 32;  // steps from one saved state to the next

struct SelectiveArgs {
  SequenceArray u, delta, z, output, partial_sum;
  CoupleArray B, C;
  char *A, *D, *delta_bias, *initial, *last;  // may be null, but for A
  char* states;                               // (batch, intervals, channels, state), may be null
  long long A_channel, A_state, D_channel, bias_channel;
  long long initial_batch, initial_channel, initial_state;
  char* seed;                          // (batch, chunks, state, channels): entry c is the state that leaves chunk c
  char *summary_gate, *summary_input;  // of the same shape
  long long batch, length, channels, state, groups;
  long long first_state, slices;  // this launch's slices of the states
  long long chunk, chunks;        // steps a chunk; chunk * chunks >= length
  double limits64[2];
  float limits32[2];  // delta_limit, in the type that it is applied in
  int A_code, D_code, bias_code, output_code;
  int adds_to_partial_sum, leaves_partial_sum;
  int softplus, limited;
  int plain;  // everything that is there is vectors, one slice, no limits
  // With segments, and else not read.
  const StepMarks* marks;  // (batch, words), or one row for all; null if nothing is special
  long long marks_batch;   // in words
  const int* ids;          // the sequence of each position, where there are sequence_initial or sequence_last
  char *sequence_initial, *sequence_last;  // strided like `initial` and packed like `last`, sequences for batch
  unsigned char* summary_resets;           // (batch, chunks)
};
