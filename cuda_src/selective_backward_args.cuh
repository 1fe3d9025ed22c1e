// The one argument of every kernel of selective_scan's gradients. _selective_backward.py packs the same fields in the
// same order. Strides as in selective_args.cuh: in bytes, and in the direction of the scan.
#pragma once
#include "selective_args.cuh"

// Sums over the channels of one tile, to be added over the tiles: (tile, batch, length, groups, state). Where B or C is
// constant in time, sums over batch and time instead: (part, channels, state).
struct CoupleSums {
  char* start;
  long long tile, batch, time, group, state;
};

struct SelectiveBackwardArgs {
  SequenceArray u, delta, z, grad_output;    // z and grad_output may be null
  SequenceArray grad_u, grad_delta, grad_z;  // grad_z where z is
  CoupleArray B, C;
  CoupleSums grad_B, grad_C;
  char *A, *D, *delta_bias, *states;          // D and delta_bias may be null
  char *grad_last, *grad_initial;             // may be null
  char *part_A, *part_D, *part_bias;          // (parts of the batch, chunks, channels[, state])
  char *seed, *summary_gate, *summary_input;  // (batch, summaries, state, channels), the last of time first
  char *kept, *kept_sums;                     // what each thread keeps of each slice, and of its items; if several
  long long A_channel, A_state, D_channel, bias_channel;
  long long last_batch, last_channel, last_state;  // of grad_last
  long long batch, length, channels, state, groups;
  long long slices;
  long long chunk, chunks;  // steps a chunk, whole intervals, and how many chunks the grid has
  long long left_out;       // summaries of the first chunks of time that nobody asks for
  long long summaries;      // and how many follow
  long long in_chunk;       // summaries in one of the grid's chunks
  long long part, parts;    // rows of the batch that a block does; part * parts >= batch
  double limits64[2];
  float limits32[2];
  int A_code, D_code, bias_code, grad_u_code, grad_delta_code, grad_z_code;
  int softplus, limited, starts_from_zero;  // the last: there is no h0
  int plain;                                // as in SelectiveArgs
  // With segments, and else not read.
  const StepMarks* marks;
  long long marks_batch;  // in words
  const int* ids;         // where the sequences have an h0 or a grad_last
  char *sequence_initial, *sequence_grad_last, *sequence_grad_initial;
  long long initial_sequence, initial_channel, initial_state;
  unsigned char* summary_resets;  // (batch, summaries), the last first
};
