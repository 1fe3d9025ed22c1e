// y[b] = weight @ x[b] + bias + add[b] for a few rows b. Bound by reading weight, once.
//
//   thread  pieces of kRows rows of weight, kUnroll of each under way at once; x comes from the nearest cache
//   team    row_warps warps on the same kRows rows: more of them where there are few rows
//   block   kProductWarps warps on neighbouring rows. Loops on overflow.
//
// The order of each sum: the pieces of a lane, then the lanes, nearest first, then the warps of a team.
#include "item_vector.cuh"
#include "matrix_vector_args.cuh"
#include "warp_fold.cuh"

constexpr int kProductWarps = 8;
constexpr int kUnroll = 4;

template <class Item, int kBatch, int kRows, bool kVector>
__device__ __forceinline__ void multiply_rows(const ProductArgs& args) {
  constexpr int kItems = 16 / sizeof(Item), kSums = kBatch * kRows;
  using Piece = Items<Item, kItems>;
  __shared__ float of_warps[kProductWarps][kSums];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warps = args.row_warps;
  const int team = warp / row_warps, in_team = warp % row_warps, team_lanes = 32 * row_warps;
  const long long block_rows = kProductWarps / row_warps * kRows;
  for (long long first = blockIdx.x * block_rows; first < args.rows; first += gridDim.x * block_rows) {
    const long long row = first + team * kRows;
    const char* weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)  // beyond the last row, that one
      weight[r] = args.weight + (row + r < args.rows ? row + r : args.rows - 1) * args.weight_row;
    // Lane i ends up with sum i, and has loaded then what is added to it.
    const long long to = row + lane / kBatch;
    const int b = lane % kBatch;
    const bool stores = in_team == 0 && lane < kSums && to < args.rows && b < args.batch;
    Parameter<Item> bias = {}, add = {};
    if (stores && args.bias) bias.load(args.bias + to * args.bias_row, args.bias_wide);
    if (stores && args.add) add.load(args.add + b * args.add_row + to * args.add_column, args.add_wide);
    float sums[kSums] = {};
    if constexpr (kVector) {  // rows of fewer than 2^31 bytes
      const unsigned bytes = (unsigned)args.columns * sizeof(Item), team_bytes = team_lanes * sizeof(Piece);
      for (unsigned at = (in_team * 32 + lane) * sizeof(Piece); at < bytes; at += team_bytes * kUnroll) {
        Piece items[kUnroll][kRows] = {};
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (at + u * team_bytes < bytes) items[u][r] = load_item<Piece>(weight[r] + (at + u * team_bytes));
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (at + u * team_bytes >= bytes) continue;
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            if (b >= args.batch) continue;
            const Piece x = load_item<Piece>(args.x + b * args.x_row + (at + u * team_bytes));
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
              for (int n = 0; n < kItems; ++n)
                sums[r * kBatch + b] = fmaf(items[u][r].get(n), x.get(n), sums[r * kBatch + b]);
          }
        }
      }
    } else {
#pragma unroll 1
      for (long long piece = in_team * 32 + lane; piece * kItems < args.columns; piece += team_lanes) {
#pragma unroll 1
        for (long long column = piece * kItems; column < (piece + 1) * kItems && column < args.columns; ++column) {
          float items[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) items[r] = widen(load_item<Item>(weight[r] + column * args.weight_column));
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            if (b >= args.batch) continue;
            const float x = widen(load_item<Item>(args.x + b * args.x_row + column * args.x_column));
#pragma unroll
            for (int r = 0; r < kRows; ++r) sums[r * kBatch + b] = fmaf(items[r], x, sums[r * kBatch + b]);
          }
        }
      }
    }
    float sum = fold(sums, lane, 1);
#pragma unroll
    for (int bit = kSums; bit < 32; bit *= 2) sum += from_lane_across(sum, bit);
    if (row_warps > 1) {
      if (lane < kSums) of_warps[warp][lane] = sum;
      __syncthreads();
      if (in_team == 0 && lane < kSums)
        for (int w = 1; w < row_warps; ++w) sum += of_warps[warp + w][lane];
      __syncthreads();
    }
    if (stores) {
      const int size = args.y_code == kFloat64 ? 8 : args.y_code == kFloat32 ? 4 : 2;
      sum = sum + bias.get(args.bias_wide) + add.get(args.add_wide);
      store_as(args.y + (b * args.rows + to) * size, args.y_code, sum);
    }
  }
}

// One row of x, or up to 8; only the latter takes columns that are not in pieces. The bits are the same.
template <class Item, int kBatch>
__device__ __forceinline__ void multiply_items(const ProductArgs& args) {
  if constexpr (kBatch == 1)
    multiply_rows<Item, 1, 1, true>(args);
  else if (args.vector)
    multiply_rows<Item, kBatch, 2, true>(args);
  else
    multiply_rows<Item, kBatch, 2, false>(args);
}

template <int kBatch>
__device__ __forceinline__ void multiply_by_rows(const ProductArgs& args) {
  if (args.item_code == kBFloat16)
    multiply_items<bf16_t, kBatch>(args);
  else if (args.item_code == kFloat16)
    multiply_items<f16_t, kBatch>(args);
  else
    multiply_items<float, kBatch>(args);
}
