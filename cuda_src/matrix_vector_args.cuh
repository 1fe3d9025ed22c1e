// The one argument of matrix_vector. _launch.py packs the same fields in the same order.
// Strides are in bytes. weight and x are of one item type, bias and add of that or float.
#pragma once

struct ProductArgs {
  char *weight, *x, *bias, *add, *y;  // bias and add may be null
  long long weight_row, weight_column, x_row, x_column, bias_row, add_row, add_column;
  long long rows, columns;  // of weight
  int batch, item_code, y_code;
  int bias_wide, add_wide;  // of float where x has 16 bits
  int vector;               // columns are side by side, in pieces of 16 bytes that are aligned
  int row_warps;            // warps that share kProductRows rows, a power of two
};
