// The gradients of rms_norm: with r = 1 / sqrt(mean(x * x) + eps) and q = x * r,
//
//   grad_x = r * (weight * grad - q * mean(q * weight * grad)) + grad_residual,  grad_weight = sum over rows of grad *
//   q
//
//   thread  kNormItems neighbouring columns, in rounds where a row is longer than a block
//   block   a part of the rows, each `parts` rows from the last; its sums for the weight are in scratch, where each
//   item has one
//           thread that adds to it, and sum_partials adds up those of the parts. Loops on overflow.
#include "rms_norm.cuh"

template <class Item>
__device__ __forceinline__ void norm_rows_backward_of(const NormBackwardArgs& args) {
  const NormArgs& of = args.of;
  const bool vector = of.vector;
  const int first = threadIdx.x * kNormItems, step = blockDim.x * kNormItems;
  for (long long part = blockIdx.x; part < args.parts; part += gridDim.x) {
    for (long long row = part; row < of.rows; row += args.parts) {
      float x[kNormItems], grad[kNormItems], weight[kNormItems];
      auto load = [&](long long column) {
        const int count = of.width - column < kNormItems ? (int)(of.width - column) : kNormItems;
        load_piece<Item>(x, of.x + row * of.x_row + column * of.x_column, of.x_column, count, vector);
        const char* at = args.grad + row * args.grad_row + column * args.grad_column;
        load_real_piece(grad, at, args.grad_column, count, args.grad_code);
#pragma unroll
        for (int n = 0; n < kNormItems; ++n) weight[n] = 1;
        if (of.weight)
          load_real_piece(weight, of.weight + column * of.weight_column, of.weight_column, count, of.weight_code);
        return count;
      };
      float sums[2] = {0, 0};
      for (long long column = first; column < of.width; column += step) {
        load(column);
#pragma unroll
        for (int n = 0; n < kNormItems; ++n) {
          sums[0] = fmaf(x[n], x[n], sums[0]);
          sums[1] = fmaf(x[n], weight[n] * grad[n], sums[1]);
        }
      }
      sum_over_block(sums);
      const float share = norm_share(sums[0], of), mean = share * sums[1] / (float)of.width;
      for (long long column = first; column < of.width; column += step) {
        const int count = load(column);
        float grad_x[kNormItems], more[kNormItems] = {};
        if (args.grad_residual) {
          const char* at = args.grad_residual + row * args.grad_residual_row + column * args.grad_residual_column;
          load_real_piece(more, at, args.grad_residual_column, count, args.grad_residual_code);
        }
        float* to = args.sums + part * of.width + column;
#pragma unroll
        for (int n = 0; n < kNormItems; ++n) {
          const float quotient = x[n] * share;
          grad_x[n] = fmaf(share, fmaf(-quotient, mean, weight[n] * grad[n]), more[n]);
          if (args.sums && n < count) to[n] = fmaf(grad[n], quotient, row > part ? to[n] : 0.0f);
        }
        store_piece<Item>(grad_x, of.y + (row * of.width + column) * sizeof(Item), count, vector);
      }
    }
  }
}

__device__ __forceinline__ void norm_rows_backward(const NormBackwardArgs& args) {
  if (args.of.item_code == kBFloat16)
    norm_rows_backward_of<bf16_t>(args);
  else if (args.of.item_code == kFloat16)
    norm_rows_backward_of<f16_t>(args);
  else
    norm_rows_backward_of<float>(args);
}
