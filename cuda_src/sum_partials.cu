// Adds partial sums, in their order: to[i] = from[0][i] + from[1][i] + ..., for up to kJobs arrays in one launch.
//
//   thread  one item of one array; neighbours read neighbours
//   grid    the items of all arrays, one array after the other
#include "item_types.cuh"
#include "sum_partials_args.cuh"

template <class R>
__device__ __forceinline__ void sum_partials(const SumArgs& args) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < args.items; i += step) {
    long long item = i;
    int job = 0;
    while (item >= args.jobs[job].count) item -= args.jobs[job++].count;
    const SumJob& of = args.jobs[job];
    const R* from = reinterpret_cast<const R*>(of.from) + item;
    R sum = *from;
#pragma unroll 8
    for (long long part = 1; part < of.parts; ++part) sum += from[part * of.count];
    store_as(of.to + item * of.size, of.code, sum);
  }
}
