// y[t] = act(bias + sum over k of weight[k] * x[t - (width - 1) + k]) in each channel. Bound by memory.
//
//   thread  kItems neighbouring channels, a chunk of the steps, kConvSteps of which are loaded at once
//   grid    channels, then chunks, then the batch: neighbouring lanes have neighbouring channels. Loops on overflow.
//
// The final state may lie where the initial one does if there is one chunk, for one thread then reads the one and
// writes the other.
#include "causal_conv1d.cuh"

constexpr int kConvSteps = 8;

template <class Item, int kItems>
__device__ __forceinline__ void convolve_windows(const ConvArgs& args, long long row, long long channel,
                                                 long long begin, long long end, bool last) {
  using Some = Items<Item, kItems>;
  typename Windows<Item, kItems>::Window window;
  Windows<Item, kItems>::load(window, args, row, channel, begin);
  const Windows<Item, kItems> windows(args, channel);
  const char* x = args.x + row * args.x_batch + begin * args.x_time + channel * args.x_channel;
  char* output = args.output + row * args.output_batch + begin * args.output_time + channel * args.output_channel;
  auto one_step = [&](const Some& items) {
    float now[kItems], y[kItems];
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
      now[c] = items.get(c);
      y[c] = windows.sum(window, now[c], c);
      if (args.silu) y[c] = silu(y[c]);
    }
    reinterpret_cast<Some*>(output)->set(y);
    windows.shift(window, now);
    output += args.output_time;
  };
  long long t = begin;
  for (; t + kConvSteps <= end; t += kConvSteps) {
    Some items[kConvSteps];
#pragma unroll
    for (int s = 0; s < kConvSteps; ++s) items[s] = load_item<Some>(x + s * args.x_time);
#pragma unroll
    for (int s = 0; s < kConvSteps; ++s) one_step(items[s]);
    x += kConvSteps * args.x_time;
  }
#pragma unroll 1
  for (; t < end; ++t, x += args.x_time) one_step(load_item<Some>(x));
  if (!args.final || !last) return;
  char* final = args.final + row * args.final_batch + channel * args.final_channel;
#pragma unroll
  for (int k = 0; k < kBefore; ++k)
#pragma unroll
    for (int c = 0; c < kItems; ++c)
      narrow(window[k][c], *reinterpret_cast<Item*>(final + k * args.final_tap + c * args.final_channel));
}

template <class Item>
__device__ __forceinline__ void convolve_items(const ConvArgs& args, long long row, long long channel, long long begin,
                                               long long end, bool last) {
  char* output = args.output + row * args.output_batch + channel * args.output_channel;
#pragma unroll 1
  for (long long t = begin; t < end; ++t) {
    const float y = sum_at<Item>(args, row, channel, t);
    narrow(args.silu ? silu(y) : y, *reinterpret_cast<Item*>(output + t * args.output_time));
  }
  if (!args.final || !last) return;
  char* final = args.final + row * args.final_batch + channel * args.final_channel;
#pragma unroll 1
  for (int k = 0; k < args.width - 1; ++k)  // upwards: in place, what is read lies above what has been written
    narrow(input_at<Item>(args, row, channel, args.length - (args.width - 1) + k),
           *reinterpret_cast<Item*>(final + k * args.final_tap));
}

template <class Item>
__device__ __forceinline__ void convolve_chunks(const ConvArgs& args) {
  constexpr int kItems = 8 / sizeof(Item);
  const int items = args.vector ? kItems : 1;
  const long long groups = args.channels / items, work = groups * args.chunks * args.batch;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < work; i += step) {
    long long group, chunk;
    const long long row = divide(divide(i, groups, group), args.chunks, chunk);
    const long long channel = group * items, begin = chunk * args.chunk, next = begin + args.chunk;
    const long long end = next < args.length ? next : args.length;
    const bool last = chunk + 1 == args.chunks;
    if (args.vector)
      convolve_windows<Item, kItems>(args, row, channel, begin, end, last);
    else
      convolve_items<Item>(args, row, channel, begin, end, last);
  }
}

__device__ __forceinline__ void convolve(const ConvArgs& args) {
  if (args.item_code == kBFloat16)
    convolve_chunks<bf16_t>(args);
  else if (args.item_code == kFloat16)
    convolve_chunks<f16_t>(args);
  else
    convolve_chunks<float>(args);
}
