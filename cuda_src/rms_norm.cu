// v = x + residual, y = weight * (v / sqrt(mean(v * v) + eps)), row by row; v is stored too where it is wanted, and is
// rounded to the item type before it is squared.
//
//   thread  kNormItems neighbouring columns, in registers between the sum and the quotient. A row that is longer than
//           a block takes rounds, which read their columns twice.
//   block   a row. Loops on overflow.
#include "rms_norm.cuh"

template <class Item>
__device__ __forceinline__ void norm_rows_of(const NormArgs& args) {
  const bool vector = args.vector;
  const int first = threadIdx.x * kNormItems, step = blockDim.x * kNormItems;
  for (long long row = blockIdx.x; row < args.rows; row += gridDim.x) {
    // v of a piece; the first time the new residual is stored.
    auto load = [&](long long column, float (&values)[kNormItems], bool stores) {
      const int count = args.width - column < kNormItems ? (int)(args.width - column) : kNormItems;
      load_piece<Item>(values, args.x + row * args.x_row + column * args.x_column, args.x_column, count, vector);
      if (args.residual) {
        float more[kNormItems];
        const char* at = args.residual + row * args.residual_row + column * args.residual_column;
        if (args.residual_wide)
          load_piece<float>(more, at, args.residual_column, count, vector);
        else
          load_piece<Item>(more, at, args.residual_column, count, vector);
#pragma unroll
        for (int n = 0; n < kNormItems; ++n) values[n] += more[n];
      }
      if (args.new_residual && stores) {
        const long long to = row * args.width + column;
        if (args.new_residual_wide)
          store_piece<float>(values, args.new_residual + to * sizeof(float), count, vector);
        else
          store_piece<Item>(values, args.new_residual + to * sizeof(Item), count, vector);
      }
#pragma unroll
      for (int n = 0; n < kNormItems; ++n) values[n] = rounded<Item>(values[n]);
    };
    auto add_squares = [](const float (&values)[kNormItems], float& sum) {
#pragma unroll
      for (int n = 0; n < kNormItems; ++n) sum = fmaf(values[n], values[n], sum);
    };
    auto load_weight = [&](long long column, float (&weight)[kNormItems]) {
      const int count = args.width - column < kNormItems ? (int)(args.width - column) : kNormItems;
      const char* at = args.weight + column * args.weight_column;
      if (args.weight) load_real_piece(weight, at, args.weight_column, count, args.weight_code);
    };
    float kept[kNormItems] = {}, other[kNormItems], weight[kNormItems], sum[1] = {0};
    if (first < args.width) {
      load(first, kept, true);
      load_weight(first, weight);
    }
    add_squares(kept, sum[0]);
    for (long long column = (long long)first + step; column < args.width; column += step) {
      load(column, other, true);
      add_squares(other, sum[0]);
    }
    sum_over_block(sum);
    const float share = norm_share(sum[0], args);
    for (long long column = first; column < args.width; column += step) {
      const int count = args.width - column < kNormItems ? (int)(args.width - column) : kNormItems;
      if (column > first) {
        load(column, kept, false);
        load_weight(column, weight);
      }
#pragma unroll
      for (int n = 0; n < kNormItems; ++n) {
        other[n] = rounded<Item>(kept[n] * share);
        if (args.weight) other[n] *= weight[n];
      }
      store_piece<Item>(other, args.y + (row * args.width + column) * sizeof(Item), count, vector);
    }
  }
}

__device__ __forceinline__ void norm_rows(const NormArgs& args) {
  if (args.item_code == kBFloat16)
    norm_rows_of<bf16_t>(args);
  else if (args.item_code == kFloat16)
    norm_rows_of<f16_t>(args);
  else
    norm_rows_of<float>(args);
}
