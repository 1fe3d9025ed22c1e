// The one argument of causal_conv1d and of causal_conv1d_backward. _launch.py packs the same fields in the same order.
// Strides are in bytes. x, output, the states and the gradients of all these are of the item type.
#pragma once

struct ConvArgs {
  char *x, *weight, *bias, *initial, *output, *final;  // bias, initial and final may be null
  long long x_batch, x_time, x_channel;
  long long weight_channel, weight_tap, bias_channel;
  long long initial_batch, initial_channel, initial_tap;
  long long output_batch, output_time, output_channel;
  long long final_batch, final_channel, final_tap;
  long long batch, length, channels;
  long long chunk, chunks;  // steps a thread
  int item_code, weight_code, bias_code;
  int width, silu, vector;
};

// `output` and `final` of `of` are the gradients that come in, `grad_output` and `grad_final`.
struct ConvBackwardArgs {
  ConvArgs of;
  char *grad_x, *grad_initial;     // grad_initial may be null
  float *weight_sums, *bias_sums;  // (parts, channels, width) and (parts, channels); bias_sums may be null
  long long part_rows, row_parts;  // rows of the batch a thread; a part is a chunk of so many rows
};
