// The one argument of every selective_state_update kernel. _launch.py packs the same fields in the same order,
// the addresses first: they are all that differs between two calls of one signature.
// Strides are in bytes; an axis that an array lacks has stride 0.
#pragma once

struct UpdateArgs {
  char *state, *x, *dt, *A, *B, *C, *D, *z, *dt_bias, *slots, *output;  // D, z, dt_bias and slots may be null
  long long state_slot, state_channel, state_state;
  long long x_batch, x_channel, dt_batch, dt_channel, z_batch, z_channel, output_batch, output_channel;
  long long A_channel, A_state;
  long long B_batch, B_group, B_state;
  long long C_batch, C_group, C_state;
  long long D_channel, bias_channel, slots_batch;
  long long batch, channels, states, group_channels, state_slots;  // group_channels: channels that share B and C
  double limits64[2];
  float limits32[2];            // dt_limit, in the type that it is applied in
  int dt_wide, B_wide, C_wide;  // items of float32 where x has 16 bits
  int A_code, D_code, bias_code, output_code;
  int slots_wide;  // slots are of 64 bits
  int softplus, limited;
  int team_bits, column_bits;  // lanes on a channel, and channels side by side in a block, as powers of two
};
