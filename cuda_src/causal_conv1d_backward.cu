// The gradients of causal_conv1d: with g[t] = grad_output[t] * act'(y before act), and 0 after the last step,
//
//   grad_x[t] = sum over k of weight[k] * g[t + (width - 1) - k]  +  grad_final of x[t]
//   grad_weight[k] = sum of g[t] * x[t - (width - 1) + k],  grad_bias = sum of g[t]
//
//   thread  kItems neighbouring channels, a chunk of the steps of some rows, one after the other. It goes width - 1
//           steps beyond its chunk, for the gradients of its last inputs. Its sums for weight and bias go to scratch,
//           and sum_partials adds them up. What few have, the gradients of or by the states, it makes at the end.
//   grid    channels, then chunks, then parts of the batch. Loops on overflow.
#include "causal_conv1d.cuh"

constexpr int kConvBackwardItems = 2;
constexpr int kConvBackwardSteps = 4;

template <class Item>
__device__ __forceinline__ float g_at(const ConvArgs& of, long long row, long long channel, long long t) {
  if (t < 0 || t >= of.length) return 0;
  const char* grad = of.output + row * of.output_batch + t * of.output_time + channel * of.output_channel;
  const float g = widen(load_item<Item>(grad));
  return of.silu ? g * silu_slope(sum_at<Item>(of, row, channel, t)) : g;
}

// Gradients of x at some steps of one channel, from memory; with `initial` those before the first step too.
template <class Item>
__device__ __forceinline__ void store_gradients(const ConvBackwardArgs& args, long long row, long long channel,
                                                bool initial, long long begin, long long end) {
  const ConvArgs& of = args.of;
  const int before = of.width - 1;
#pragma unroll 1
  for (long long t = initial ? -before : begin; t < end; t = t == -1 ? begin : t + 1) {
    float gradient = 0;
#pragma unroll 1
    for (int k = 0; k <= before; ++k)
      gradient = fmaf(tap_of(of, channel, k), g_at<Item>(of, row, channel, t + before - k), gradient);
    const long long in_final = t - (of.length - before);
    if (of.final && in_final >= 0)
      gradient += widen(
          load_item<Item>(of.final + row * of.final_batch + channel * of.final_channel + in_final * of.final_tap));
    if (t >= 0)
      narrow(gradient, reinterpret_cast<Item*>(args.grad_x)[(row * of.length + t) * of.channels + channel]);
    else
      narrow(gradient, reinterpret_cast<Item*>(args.grad_initial)[(row * of.channels + channel) * before + before + t]);
  }
}

// Steps of one row; adds to the sums.
template <class Item, int kItems>
__device__ __forceinline__ void backward_windows(const ConvBackwardArgs& args, const Windows<Item, kItems>& windows,
                                                 long long row, long long channel, long long begin, long long end,
                                                 float (&weight_sums)[kConvWidth][kItems], float (&bias_sums)[kItems]) {
  using Some = Items<Item, kItems>;
  const ConvArgs& of = args.of;
  typename Windows<Item, kItems>::Window window, later = {};  // x, and g, before a step
  windows.load(window, of, row, channel, begin);
  const char* x = of.x + row * of.x_batch + channel * of.x_channel;
  const char* grad = of.output + row * of.output_batch + channel * of.output_channel;
  char* grad_x_at = args.grad_x + ((row * of.length + begin) * of.channels + channel) * sizeof(Item);
  for (long long first = begin; first < end + kBefore; first += kConvBackwardSteps) {
    Some x_items[kConvBackwardSteps] = {}, grad_items[kConvBackwardSteps] = {};
#pragma unroll
    for (int s = 0; s < kConvBackwardSteps; ++s)
      if (first + s < of.length) {
        x_items[s] = load_item<Some>(x + (first + s) * of.x_time);
        grad_items[s] = load_item<Some>(grad + (first + s) * of.output_time);
      }
#pragma unroll
    for (int s = 0; s < kConvBackwardSteps; ++s) {
      const long long t = first + s, to = t - kBefore;
      float now[kItems], g[kItems], grad_x[kItems];
#pragma unroll
      for (int c = 0; c < kItems; ++c) {
        now[c] = x_items[s].get(c);
        g[c] = grad_items[s].get(c);
        if (of.silu) g[c] *= silu_slope(windows.sum(window, now[c], c));
        if (t >= of.length) g[c] = 0;
        if (t < end) {
          bias_sums[c] += g[c];
#pragma unroll
          for (int k = 0; k < kBefore; ++k) weight_sums[k][c] = fmaf(g[c], window[k][c], weight_sums[k][c]);
          weight_sums[kBefore][c] = fmaf(g[c], now[c], weight_sums[kBefore][c]);
        }
        grad_x[c] = fmaf(windows.taps[0][c], g[c], 0.0f);
#pragma unroll
        for (int k = 1; k < kConvWidth; ++k)
          grad_x[c] = fmaf(windows.taps[k][c], later[kConvWidth - 1 - k][c], grad_x[c]);
      }
      windows.shift(window, now);
      windows.shift(later, g);
      if (to >= begin && to < end)
        reinterpret_cast<Some*>(grad_x_at + (to - begin) * of.channels * (long long)sizeof(Item))->set(grad_x);
    }
  }
}

// The sums of one channel, of any width, in scratch.
template <class Item>
__device__ __forceinline__ void add_items(const ConvArgs& of, long long row, long long channel, long long begin,
                                          long long end, float* weight_sums, float* bias_sum) {
#pragma unroll 1
  for (long long t = begin; t < end; ++t) {
    const float g = g_at<Item>(of, row, channel, t);
    if (bias_sum) *bias_sum += g;
#pragma unroll 1
    for (int k = 0; k < of.width; ++k)
      weight_sums[k] = fmaf(g, input_at<Item>(of, row, channel, t - (of.width - 1) + k), weight_sums[k]);
  }
}

template <class Item>
__device__ __forceinline__ void backward_chunks(const ConvBackwardArgs& args) {
  constexpr int kItems = kConvBackwardItems;
  const ConvArgs& of = args.of;
  const int items = of.vector ? kItems : 1;
  const long long groups = of.channels / items, work = groups * of.chunks * args.row_parts;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < work; i += step) {
    long long group, chunk;
    const long long part = divide(i, groups, group), row_part = divide(part, of.chunks, chunk);
    const long long channel = group * items, begin = chunk * of.chunk, next = begin + of.chunk;
    const long long end = next < of.length ? next : of.length, first_row = row_part * args.part_rows;
    const long long rows_end = first_row + args.part_rows < of.batch ? first_row + args.part_rows : of.batch;
    float* to_weight = args.weight_sums + (part * of.channels + channel) * of.width;
    float* to_bias = args.bias_sums ? args.bias_sums + part * of.channels + channel : nullptr;
    const long long first_final = of.length - (of.width - 1);
    const long long plain_end = of.final && first_final < end ? (first_final > begin ? first_final : begin) : end;
    if (of.vector) {
      float weight_sums[kConvWidth][kItems] = {}, bias_sums[kItems] = {};
      const Windows<Item, kItems> windows(of, channel);
#pragma unroll 1
      for (long long row = first_row; row < rows_end; ++row)
        backward_windows(args, windows, row, channel, begin, end, weight_sums, bias_sums);
#pragma unroll
      for (int c = 0; c < kItems; ++c) {
#pragma unroll
        for (int k = 0; k < kConvWidth; ++k) to_weight[c * kConvWidth + k] = weight_sums[k][c];
        if (to_bias) to_bias[c] = bias_sums[c];
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < of.width; ++k) to_weight[k] = 0;
      if (to_bias) *to_bias = 0;
#pragma unroll 1
      for (long long row = first_row; row < rows_end; ++row)
        add_items<Item>(of, row, channel, begin, end, to_weight, to_bias);
    }
    // What the windows leave out: gradients of the initial state, and those that the final state has a share in.
#pragma unroll 1
    for (long long row = first_row; row < rows_end; ++row) {
#pragma unroll 1
      for (int c = 0; c < items; ++c)
        store_gradients<Item>(args, row, channel + c, begin == 0 && args.grad_initial, of.vector ? plain_end : begin,
                              end);
    }
  }
}

__device__ __forceinline__ void convolve_backward(const ConvBackwardArgs& args) {
  if (args.of.item_code == kBFloat16)
    backward_chunks<bf16_t>(args);
  else if (args.of.item_code == kFloat16)
    backward_chunks<f16_t>(args);
  else
    backward_chunks<float>(args);
}
