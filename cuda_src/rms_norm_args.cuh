// The one argument of rms_norm and of rms_norm_backward. _launch.py packs the same fields in the same order.
// Strides are in bytes. x and y are of the item type; `wide` is float32, where an array may be that or of the item
// type.
#pragma once

struct NormArgs {
  char *x, *weight, *residual, *y, *new_residual;  // all but x and y may be null
  long long x_row, x_column, weight_column, residual_row, residual_column;
  long long rows, width;
  float eps;
  int item_code, weight_code, residual_wide, new_residual_wide;
  int vector;  // columns are side by side, kNormItems of them aligned as one
};

struct NormBackwardArgs {
  NormArgs of;                 // y is the gradient of x; residual and new_residual are null
  char *grad, *grad_residual;  // the second may be null
  float* sums;                 // (parts, width), null without weight
  long long grad_row, grad_column, grad_residual_row, grad_residual_column;
  long long parts;
  int grad_code, grad_residual_code;
};
