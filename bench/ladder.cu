// The steps that the design is built from, each as plainly as it can be written. Not part of the library: its own
// kernels are in cuda_src/. float32, contiguous arrays, no options.

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kItems = 8;                       // consecutive steps of a thread
constexpr long long kTile = kThreads * kItems;  // steps of a block at once
constexpr int kGroup = 32;                      // tiles that look back at each other: the lanes of a warp

// A step is the map h -> a h + b, and so is a run of steps.
struct Map {
  float a, b;
};

__device__ Map identity() { return {1.0f, 0.0f}; }

__device__ Map combine(Map earlier, Map later) { return {earlier.a * later.a, fmaf(later.a, earlier.b, later.b)}; }

// ---- one thread a channel ------------------------------------------------------------------------------------------

// y[batch, t, channel]; a thread keeps all states of its channel. `A` is times log2(e).
template <int kStates>
__device__ void selective_thread(const float* u, const float* delta, const float* A, const float* B, const float* C,
                                 float* y, int batch, int length, int channels) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= batch * channels) return;
  const int row = i / channels, channel = i % channels;
  float h[kStates] = {}, gate[kStates];
  for (int n = 0; n < kStates; ++n) gate[n] = A[channel * kStates + n];
  for (int t = 0; t < length; ++t) {
    const long long step = (long long)row * length + t;
    const float d = delta[step * channels + channel], input = d * u[step * channels + channel];
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      h[n] = fmaf(exp2f(d * gate[n]), h[n], input * B[step * kStates + n]);
      sum = fmaf(C[step * kStates + n], h[n], sum);
    }
    y[step * channels + channel] = sum;
  }
}

extern "C" __global__ void selective_thread_4(const float* u, const float* delta, const float* A, const float* B,
                                              const float* C, float* y, int batch, int length, int channels) {
  selective_thread<4>(u, delta, A, B, C, y, batch, length, channels);
}

extern "C" __global__ void selective_thread_16(const float* u, const float* delta, const float* A, const float* B,
                                               const float* C, float* y, int batch, int length, int channels) {
  selective_thread<16>(u, delta, A, B, C, y, batch, length, channels);
}

extern "C" __global__ void selective_thread_64(const float* u, const float* delta, const float* A, const float* B,
                                               const float* C, float* y, int batch, int length, int channels) {
  selective_thread<64>(u, delta, A, B, C, y, batch, length, channels);
}

// ---- within a block --------------------------------------------------------------------------------------------

// The maps of all lanes up to and with this one: Hillis and Steele's scan, five rounds without a barrier.
__device__ Map scan_warp(Map own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Map earlier = {__shfl_up_sync(~0u, own.a, distance), __shfl_up_sync(~0u, own.b, distance)};
    if (lane >= distance) own = combine(earlier, own);
  }
  return own;
}

// The maps of all threads up to and with this one; `total` is that of the block. All threads of the block call it.
__device__ Map scan_block_by_shuffle(Map own, Map& total) {
  __shared__ Map of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  own = scan_warp(own);
  if (lane == 31) of_warps[warp] = own;
  __syncthreads();
  Map before = identity();
  total = of_warps[0];
  for (int w = 1; w < kWarps; ++w) {
    if (w == warp) before = total;
    total = combine(total, of_warps[w]);
  }
  __syncthreads();  // of_warps is written again by the next call
  return warp > 0 ? combine(before, own) : own;
}

// The same by Blelloch's scan in shared memory: half the operations, twice the steps, a barrier in each.
__device__ Map scan_block_work_efficient(Map own, Map& total) {
  __shared__ Map tree[kThreads];
  const int i = threadIdx.x;
  tree[i] = own;
  for (int distance = 1; distance < kThreads; distance *= 2) {  // up: sums of pairs, of fours, ...
    __syncthreads();
    const int at = 2 * distance * (i + 1) - 1;
    if (at < kThreads) tree[at] = combine(tree[at - distance], tree[at]);
  }
  __syncthreads();
  total = tree[kThreads - 1];
  __syncthreads();
  if (i == 0) tree[kThreads - 1] = identity();
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {  // down: what lies before each
    __syncthreads();
    const int at = 2 * distance * (i + 1) - 1;
    if (at < kThreads) {
      const Map left = tree[at - distance];
      tree[at - distance] = tree[at];
      tree[at] = combine(tree[at], left);
    }
  }
  __syncthreads();
  const Map before = tree[i];
  __syncthreads();  // tree is written again by the next call
  return combine(before, own);
}

// h[row, t]: a block walks a row, a step a thread.
template <bool kByShuffle>
__device__ void scan_rows(const float* a, const float* b, float* h, long long length) {
  const long long row = blockIdx.x * length;
  float entering = 0.0f;
  for (long long first = 0; first < length; first += kThreads) {
    const long long t = first + threadIdx.x;
    const Map step = t < length ? Map{a[row + t], b[row + t]} : identity();
    Map total;
    const Map until = kByShuffle ? scan_block_by_shuffle(step, total) : scan_block_work_efficient(step, total);
    if (t < length) h[row + t] = fmaf(until.a, entering, until.b);
    entering = fmaf(total.a, entering, total.b);
  }
}

extern "C" __global__ void scan_rows_by_shuffle(const float* a, const float* b, float* h, long long length) {
  scan_rows<true>(a, b, h, length);
}

extern "C" __global__ void scan_rows_work_efficient(const float* a, const float* b, float* h, long long length) {
  scan_rows<false>(a, b, h, length);
}

// ---- one row, across blocks ------------------------------------------------------------------------------------

// A thread's steps of a tile, and the map of all of them.
struct Run {
  Map steps[kItems];
  Map all;
};

__device__ Run load_run(const float* a, const float* b, long long tile, long long length) {
  Run run;
  run.all = identity();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const long long t = tile * kTile + threadIdx.x * kItems + i;
    run.steps[i] = t < length ? Map{a[t], b[t]} : identity();
    run.all = i == 0 ? run.steps[0] : combine(run.all, run.steps[i]);
  }
  return run;
}

// What enters the thread's steps, from what enters the tile; `total` is the tile's map.
__device__ float enter_run(const Run& run, float entering, Map& total) {
  __shared__ Map until[kThreads];
  until[threadIdx.x] = scan_block_by_shuffle(run.all, total);
  __syncthreads();
  const float h = threadIdx.x ? fmaf(until[threadIdx.x - 1].a, entering, until[threadIdx.x - 1].b) : entering;
  __syncthreads();
  return h;
}

__device__ void apply_run(const Run& run, float h, float* out, long long tile, long long length) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    h = fmaf(run.steps[i].a, h, run.steps[i].b);
    const long long t = tile * kTile + threadIdx.x * kItems + i;
    if (t < length) out[t] = h;
  }
}

// One block: tile after tile.
extern "C" __global__ void one_block(const float* a, const float* b, float* h, long long length) {
  float entering = 0.0f;
  for (long long tile = 0; tile * kTile < length; ++tile) {
    const Run run = load_run(a, b, tile, length);
    Map total;
    apply_run(run, enter_run(run, entering, total), h, tile, length);
    entering = fmaf(total.a, entering, total.b);
  }
}

// Three kernels: the map of each tile; the states between the tiles; every tile again.
extern "C" __global__ void summarise_tiles(const float* a, const float* b, float* gates, float* drives,
                                           long long length) {
  const Run run = load_run(a, b, blockIdx.x, length);
  Map total;
  scan_block_by_shuffle(run.all, total);
  if (threadIdx.x == 0) {
    gates[blockIdx.x] = total.a;
    drives[blockIdx.x] = total.b;
  }
}

// `leaving` is one_block's result on the tiles' maps.
extern "C" __global__ void apply_tiles(const float* a, const float* b, const float* leaving, float* h,
                                       long long length) {
  const Run run = load_run(a, b, blockIdx.x, length);
  Map total;
  apply_run(run, enter_run(run, blockIdx.x ? leaving[blockIdx.x - 1] : 0.0f, total), h, blockIdx.x, length);
}

__device__ void wait_for(const unsigned* flag, unsigned value) {
  while (*(const volatile unsigned*)flag != value) {
  }
  __threadfence();
}

__device__ void tell(unsigned* flag, unsigned value) {
  __threadfence();
  atomicExch(flag, value);
}

__device__ float read_fresh(const float* at) { return *(const volatile float*)at; }

// One pass: a tile tells its map as soon as it has it, and looks back at those before it in its group; only the state
// that leaves a group goes from group to group. What is folded is the same in every run, so the bits are too. Tiles are
// numbered as their blocks begin to run, so that none waits for a block that has no room yet. `round` counts the calls.
extern "C" __global__ void one_pass(const float* a, const float* b, float* h, float* gates, float* drives,
                                    float* leaving, unsigned* told, unsigned* group_told, unsigned* ticket,
                                    long long length, unsigned tiles, unsigned round) {
  __shared__ unsigned number;
  __shared__ float from_before;
  if (threadIdx.x == 0) number = atomicAdd(ticket, 1u) - (round - 1) * tiles;
  __syncthreads();
  const unsigned tile = number, group = tile / kGroup, place = tile % kGroup;
  const Run run = load_run(a, b, tile, length);
  Map total;
  scan_block_by_shuffle(run.all, total);
  if (threadIdx.x == 0) {
    gates[tile] = total.a;
    drives[tile] = total.b;
    tell(&told[tile], round);
  }
  if (threadIdx.x < 32) {
    Map earlier = identity();
    if (threadIdx.x < place) {
      const unsigned other = group * kGroup + threadIdx.x;
      wait_for(&told[other], round);
      earlier = {read_fresh(&gates[other]), read_fresh(&drives[other])};
    }
    __syncwarp();
    earlier = scan_warp(earlier);
    if (threadIdx.x == 31) {
      float state = 0.0f;
      if (group > 0) {
        wait_for(&group_told[group - 1], round);
        state = read_fresh(&leaving[group - 1]);
      }
      state = fmaf(earlier.a, state, earlier.b);
      from_before = state;
      if (place == kGroup - 1) {
        leaving[group] = fmaf(total.a, state, total.b);
        tell(&group_told[group], round);
      }
    }
  }
  __syncthreads();
  apply_run(run, enter_run(run, from_before, total), h, tile, length);
}
