"""The CPU executor: what CUDA says a kernel computes, and each fault named with its line."""

import ctypes
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuscan.testing import host
from cuscan.testing.host import HostModule, HostModules, HostPlace

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

f32, i32, u32 = np.float32, np.int32, np.uint32
FULL = 0xFFFFFFFF
RUNS = [("checked", "forward", 0), ("fast", "forward", 0), ("fast", "reverse", 0), ("fast", "random", 1)]
RUNS += [("fast", "random", 2), ("checked", "random", 3)]

SEMANTICS = r"""
#line 1 "semantics.cu"
enum Kind { up, down, exclusive, index };
template <class T>
__device__ void shuffle(const T* x, T* y, int kind, unsigned mask, int by, int width) {
    int t = threadIdx.x;
    if (!(mask >> (t % 32) & 1)) return;
    T v = x[t];
    if (kind == up) v = __shfl_up_sync(mask, v, by, width);
    else if (kind == down) v = __shfl_down_sync(mask, v, by, width);
    else if (kind == exclusive) v = __shfl_xor_sync(mask, v, by, width);
    else v = __shfl_sync(mask, v, by, width);
    y[t] = v;
}
"""
# Entry points must be readable without a preprocessor.
TYPES = {"f4": "float", "f8": "double", "i4": "int", "u4": "unsigned", "i8": "long long"}
for code, cpp in TYPES.items():
    SEMANTICS += f"""
extern "C" __global__ void shuffle_{code}(const {cpp}* x, {cpp}* y, int kind, unsigned mask, int by, int w) {{
    shuffle(x, y, kind, mask, by, w);
}}"""
SEMANTICS += r"""
extern "C" __global__ void half_warps(const int* x, int* y) {  // the halves take different branches
    int t = threadIdx.x, v = x[t];
    if (t % 32 < 16) {
        for (int d = 1; d < 16; d *= 2) v += __shfl_xor_sync(0x0000ffffu, v, d, 16);
    } else {
        for (int d = 1; d < 16; d *= 2) v = max(v, __shfl_xor_sync(0xffff0000u, v, d, 16));
        __syncwarp(0xffff0000u);
    }
    y[t] = v;
}
extern "C" __global__ void votes(unsigned* y) {
    unsigned t = threadIdx.x;
    unsigned odd = __ballot_sync(0xffffffffu, t & 1);
    int some = __any_sync(0xffffffffu, t == 40), all = __all_sync(0xffffffffu, t < 32);
    y[t] = odd ^ (some ? 2 : 0) ^ (all ? 8 : 0);
}
extern "C" __global__ void block_votes(int* y) {
    int t = threadIdx.x;
    int count = __syncthreads_count(t % 3 == 0);
    int some = __syncthreads_or(t == 5), all = __syncthreads_and(t < 64), none = __syncthreads_or(t == 640);
    y[t] = count * 1000 + some * 100 + all * 10 + none;
}
extern "C" __global__ void exited_lanes(int* y) {  // the others go on without those that left
    int t = threadIdx.x;
    if (t >= 20) return;
    y[t] = __shfl_sync(0x000fffffu, t * t, 19);
}
struct Pair { float a, b; };
template <class T, int n> __device__ T* table(int slot) {
    __shared__ T values[2][n];
    return values[slot];
}
extern "C" __global__ void shared_in_templates(float* y, double* z) {
    int t = threadIdx.x;
    __shared__ Pair pairs[32];
    table<float, 32>(0)[t] = t;
    table<double, 32>(0)[t] = 2 * t;
    table<float, 32>(1)[t] = 3 * t;
    pairs[t] = {float(t), 1};
    __syncthreads();
    y[t] = table<float, 32>(0)[31 - t] + 1000 * table<float, 32>(1)[t] + pairs[31 - t].b;
    z[t] = table<double, 32>(0)[31 - t];
}
extern "C" __global__ void dynamic(const float* x, float* y, int n) {
    extern __shared__ __align__(16) unsigned char smem[];
    float* staged = reinterpret_cast<float*>(smem);
    for (int i = threadIdx.x; i < n; i += blockDim.x) staged[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = staged[n - 1 - i];
}
struct Args { const void* x; void* y; long long n; int scale; };
extern "C" __global__ void __launch_bounds__(64, 2) by_struct(const Args args) {
    long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    for (; i < args.n; i += gridDim.x * static_cast<long long>(blockDim.x))
        static_cast<float*>(args.y)[i] = args.scale * static_cast<const float*>(args.x)[i];
}
extern "C" __global__ void indices(int* y) {
    int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    y[b * blockDim.x * blockDim.y * blockDim.z + t] =
        threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z +
        1000 * blockIdx.x + 10000 * blockIdx.y + 100000 * blockIdx.z;
}
extern "C" __global__ void atomics(int* i, unsigned* u, unsigned long long* l, float* f, int* old) {
    int t = threadIdx.x;
    old[t] = atomicAdd(i, 1);
    atomicMax(i + 1, t);
    atomicMin(i + 2, -t);
    atomicAdd(u, 2u);
    atomicExch(u + 1, 7u);
    for (unsigned seen = 0, was; (was = atomicCAS(u + 2, seen, seen + 3)) != seen;) seen = was;
    atomicAdd(l, 1ull << 40);
    atomicAdd(f, 0.5f);
}
extern "C" __global__ void arithmetic(float* y, double* z, const float* x) {
    volatile float a = x[0], b = x[1], c = x[2], tiny = x[3];
    y[0] = fmaf(a, b, c);
    y[1] = a * b + c;
    y[2] = tiny * 0.5f;
    y[3] = __uint_as_float(__float_as_uint(a) ^ 0x80000000u);
    float4 v = make_float4(1, 2, 3, 4);
    y[4] = v.w;
    y[5] = fmaxf(a, NAN);
    y[6] = rintf(2.5f);
    y[7] = min(3, 4) + max(2.0f, 1.0f);
    z[0] = fma(1 + 0x1p-30, 1 - 0x1p-30, -1.0);
    z[1] = __longlong_as_double(__double_as_longlong(2.5) + 1);
    z[2] = __popc(0xf0u) + 10 * __clz(1) + 1000 * __ffs(8);
}
extern "C" __global__ void poisoned(float* y) {  // stale values of the block before must not be seen
    __shared__ float s[4];
    y[blockIdx.x] = s[0];
    s[0] = 1;
}
extern "C" __global__ void look_back(
    const int* x, int* y, volatile int* flags, volatile int* sums, unsigned* ticket) {
    __shared__ unsigned mine;
    __shared__ int before;
    if (threadIdx.x == 0) mine = atomicAdd(ticket, 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        before = 0;
        if (mine) {
            while (flags[mine - 1] == 0) {}
            __threadfence();
            before = sums[mine - 1];
        }
        sums[mine] = before + x[mine];
        __threadfence();
        flags[mine] = 1;
    }
    __syncthreads();
    y[mine * blockDim.x + threadIdx.x] = before + x[mine];
}
extern "C" __global__ void warp_pipe(int* y) {  // one warp waits for the other in a loop
    __shared__ volatile int flag;
    __shared__ int value;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        while (flag == 0) {}
        __threadfence_block();
        y[0] = value;
    }
    if (threadIdx.x == 32) {
        value = 5;
        __threadfence_block();
        flag = 1;
    }
}
"""
STRUCT = np.dtype([("x", "u8"), ("y", "u8"), ("n", "i8"), ("scale", "i4")], align=True)
KINDS = {"up": 0, "down": 1, "xor": 2, "index": 3}


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run)))
def module(request: pytest.FixtureRequest) -> HostModule:
    mode, order, seed = request.param
    return HostModule(SEMANTICS, mode, order=order, seed=seed)


def shuffled(x: np.ndarray, kind: str, by: int, width: int) -> np.ndarray:
    """PTX's shfl on whole warps, lane by lane."""
    y = x.copy()
    for t in range(len(x)):
        lane, warp = t % 32, t - t % 32
        first, last = lane // width * width, lane // width * width + width - 1
        source = {"up": lane - by, "down": lane + by, "xor": lane ^ by, "index": first + by % width}[kind]
        if (kind == "up" and source < first) or (kind in ("down", "xor") and source > last):
            source = lane
        y[t] = x[warp + source]
    return y


@pytest.mark.parametrize("code", TYPES)
@pytest.mark.parametrize("width", [2, 8, 32])
@pytest.mark.parametrize(("kind", "by"), [("up", 1), ("up", 5), ("down", 3), ("xor", 1), ("xor", 16), ("index", 11)])
def test_shuffles_read_the_lane_that_ptx_reads(code: str, width: int, kind: str, by: int) -> None:
    x = (np.arange(96) * 1.5 + 2**30).astype(code)
    for mode, order in (("checked", "forward"), ("fast", "random")):
        y = np.zeros_like(x)
        HostModule(SEMANTICS, mode, order=order).get_function(f"shuffle_{code}")(
            (1,), (96,), (x, y, i32(KINDS[kind]), u32(FULL), i32(by), i32(width))
        )
        np.testing.assert_array_equal(y, shuffled(x, kind, by, width))


def test_a_partial_mask_moves_only_its_lanes(module: HostModule) -> None:
    x, y = np.arange(64, dtype=i32), np.full(64, -1, i32)
    module.get_function("shuffle_i4")((1,), (64,), (x, y, i32(KINDS["xor"]), u32(0xF0), i32(1), i32(32)))
    expected = np.full(64, -1, i32)
    for warp in (0, 32):
        expected[warp + 4 : warp + 8] = warp + np.array([5, 4, 7, 6])
    np.testing.assert_array_equal(y, expected)


def test_a_partial_warp_with_its_own_mask(module: HostModule) -> None:
    x, y = np.arange(8, dtype=i32), np.zeros(8, i32)
    module.get_function("shuffle_i4")((1,), (8,), (x, y, i32(KINDS["up"]), u32(0xFF), i32(1), i32(8)))
    np.testing.assert_array_equal(y, [0, 0, 1, 2, 3, 4, 5, 6])


def test_halves_of_a_warp_wait_apart(module: HostModule) -> None:
    x, y = np.arange(64, dtype=i32), np.zeros(64, i32)
    module.get_function("half_warps")((1,), (64,), (x, y))
    np.testing.assert_array_equal(y, np.repeat([sum(range(16)), 31, sum(range(32, 48)), 63], 16))


def test_votes(module: HostModule) -> None:
    y = np.zeros(64, u32)
    module.get_function("votes")((1,), (64,), (y,))
    np.testing.assert_array_equal(y, np.repeat(u32([0xAAAAAAAA ^ 8, 0xAAAAAAAA ^ 2]), 32))


def test_block_votes(module: HostModule) -> None:
    y = np.zeros(70, i32)
    module.get_function("block_votes")((1,), (70,), (y,))
    np.testing.assert_array_equal(y, np.full(70, 24 * 1000 + 100))


def test_exited_lanes_are_not_waited_for_by_a_mask_without_them(module: HostModule) -> None:
    y = np.full(32, -1, i32)
    module.get_function("exited_lanes")((1,), (32,), (y,))
    np.testing.assert_array_equal(y, [361] * 20 + [-1] * 12)


def test_static_shared_arrays_of_templates_are_apart(module: HostModule) -> None:
    y, z, t = np.zeros(32, f32), np.zeros(32), np.arange(32)
    module.get_function("shared_in_templates")((1,), (32,), (y, z))
    np.testing.assert_array_equal(y, 31 - t + 3000 * t + 1)
    np.testing.assert_array_equal(z, 2 * (31 - t))


def test_dynamic_shared_memory_up_to_what_was_asked_for(module: HostModule) -> None:
    kernel = module.get_function("dynamic")
    n = 227 * 256
    x, y = np.arange(n, dtype=f32), np.zeros(n, f32)
    with pytest.raises(ValueError, match=r"232448 bytes of dynamic shared memory.* is 49152"):
        kernel((1,), (128,), (x, y, i32(n)), shared_mem=4 * n)
    kernel.max_dynamic_shared_size_bytes = 4 * n
    kernel((1,), (128,), (x, y, i32(n)), shared_mem=4 * n)
    np.testing.assert_array_equal(y, x[::-1])
    with pytest.raises(ValueError, match="232449"):
        kernel.max_dynamic_shared_size_bytes = 4 * n + 1


def test_a_struct_travels_by_value(module: HostModule) -> None:
    place = HostPlace(module)
    x = np.arange(1000, dtype=f32)
    y = place.allocate(1000, f32)
    assert np.isnan(y).all()
    place.keep(x)
    module.get_function("by_struct")((3,), (64,), (np.array((place.pointer(x), place.pointer(y), 1000, 3), STRUCT),))
    np.testing.assert_array_equal(y, 3 * x)


def test_indices_in_three_dimensions(module: HostModule) -> None:
    y = np.zeros(24 * 12, i32)
    module.get_function("indices")((2, 3, 2), (2, 3, 4), (y,))
    digits = itertools.product(range(2), range(3), range(2), range(4), range(3), range(2))
    np.testing.assert_array_equal(y, [int("".join(map(str, each))) for each in digits])


def test_atomics(module: HostModule) -> None:
    i, u, wide, f, old = (np.zeros(3, dtype) for dtype in (i32, u32, np.uint64, f32, i32))
    old = np.zeros(100, i32)
    module.get_function("atomics")((1,), (100,), (i, u, wide, f, old))
    np.testing.assert_array_equal(i, [100, 99, -99])
    np.testing.assert_array_equal(u, [200, 7, 300])
    assert (wide[0], f[0]) == (100 << 40, 50)
    np.testing.assert_array_equal(np.sort(old), np.arange(100))


def test_arithmetic_is_the_gpus(module: HostModule) -> None:
    a, b = f32(1 + 2**-12), f32(1 - 2**-12)
    x = np.array([a, b, -1, 1.5e-38], f32)  # half of the last is subnormal
    y, z = np.zeros(8, f32), np.zeros(3)
    module.get_function("arithmetic")((1,), (1,), (y, z, x))
    np.testing.assert_array_equal(y, f32([-(2.0**-24), a * b - 1, 0, -a, 4, a, 2, 5]))
    np.testing.assert_array_equal(z, [-(2.0**-60), np.nextafter(2.5, 3), 4 + 310 + 4000])
    assert np.finfo(f32).smallest_subnormal / f32(1) > 0  # the caller's floating point is as it was


def test_ordered_look_back_runs_in_ticket_order(module: HostModule) -> None:
    x = np.arange(1, 21, dtype=i32)
    y, flags, sums, ticket = np.zeros(20 * 40, i32), np.zeros(20, i32), np.zeros(20, i32), np.zeros(1, u32)
    module.get_function("look_back")((20,), (40,), (x, y, flags, sums, ticket))
    np.testing.assert_array_equal(y, np.repeat(np.cumsum(x), 40))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_a_loop_that_waits_lets_the_others_run(order: str) -> None:
    y = np.zeros(1, i32)
    HostModule(SEMANTICS, "checked", order=order).get_function("warp_pipe")((1,), (64,), (y,))
    assert y[0] == 5


def test_shared_memory_is_poisoned_before_each_block() -> None:
    y = np.zeros(3, f32)
    HostModule(SEMANTICS, "fast").get_function("poisoned")((3,), (1,), (y,))
    assert np.isnan(y).all()


def test_random_orders_are_seeded_and_differ() -> None:
    def arrivals(order: str, seed: int) -> list[int]:
        i, u, wide, f, old = (np.zeros(3, dtype) for dtype in (i32, u32, np.uint64, f32, i32))
        old = np.zeros(100, i32)
        HostModule(SEMANTICS, "fast", order=order, seed=seed).get_function("atomics")(
            (1,), (100,), (i, u, wide, f, old)
        )
        return old.tolist()

    assert arrivals("forward", 0) == list(range(100))
    assert arrivals("reverse", 0) == list(range(100))[::-1]
    assert arrivals("random", 1) == arrivals("random", 1) != arrivals("random", 2)


# ---- faults --------------------------------------------------------------------------------------

FAULTS = r"""
#line 1 "faults.cu"
#define FULL 0xffffffffu
__device__ __forceinline__ float load(const float* x, long long i) {
    return x[i];  // out_of_bounds_read
}
extern "C" __global__ void out_of_bounds_read(const float* x, float* y) {
    y[threadIdx.x] = load(x, threadIdx.x + 1);
}
extern "C" __global__ void out_of_bounds_write(float* x, float* y) {
    if (threadIdx.x == 3)
        y[-1] = x[0];  // out_of_bounds_write
}
extern "C" __global__ void null_pointer(float* x, float* y) {
    float* nothing = x - reinterpret_cast<long long>(x) / 4;
    y[0] = *nothing;  // null_pointer
}
extern "C" __global__ void static_index(float* x, float* y) {
    __shared__ float s[32], guard[32];
    s[threadIdx.x] = guard[threadIdx.x] = x[0];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x + 1];  // static_index
}
extern "C" __global__ void dynamic_index(float* x, float* y) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[0];  // dynamic_index
    y[threadIdx.x] = 0;
}
extern "C" __global__ void atomic_beyond(float* x, float* y) {
    atomicAdd(x + 32, 1.0f);  // atomic_beyond
}
extern "C" __global__ void misaligned(float* x, float* y) {
    float4 v = *reinterpret_cast<const float4*>(x + threadIdx.x);  // misaligned
    y[threadIdx.x] = v.w;
}
extern "C" __global__ void uninitialised_shared(float* x, float* y) {
    __shared__ float s[32];
    if (threadIdx.x != 7) s[threadIdx.x] = x[0];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // uninitialised_shared
}
extern "C" __global__ void write_to_input(const float* x, float* y) {
    const_cast<float*>(x)[threadIdx.x] = 1;  // write_to_input
}
extern "C" __global__ void shared_race(float* x, float* y) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[t % 32];  // shared_race
    float v = s[(t + 1) % 64];  // other: shared_race
    y[t % 32] = v;
}
extern "C" __global__ void overwrite_race(float* x, float* y) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncwarp();
    float v = s[31 - t];  // overwrite_race
    s[t] = v;  // other: overwrite_race
}
extern "C" __global__ void shuffle_orders_nothing(float* x, float* y) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[t];
    float v = __shfl_up_sync(FULL, x[t], 1);
    y[t] = v + s[31 - t];  // shuffle_orders_nothing
}
extern "C" __global__ void global_race(float* x, float* y) {
    y[0] = threadIdx.x;  // global_race
}
extern "C" __global__ void race_between_blocks(float* x, float* y) {
    if (threadIdx.x == 0)
        y[blockIdx.x / 2] = 1;  // race_between_blocks
}
extern "C" __global__ void plain_for_atomic(float* x, float* y) {
    if (threadIdx.x % 2) atomicAdd(y, 1.0f);  // plain_for_atomic
    else y[0] += 1;
}
extern "C" __global__ void no_barrier_before_release(float* x, float* y, volatile int* flag) {
    if (blockIdx.x == 0) {
        y[threadIdx.x] = 1;
        if (threadIdx.x == 0) {
            __threadfence();
            flag[0] = 1;
        }
    } else {
        if (threadIdx.x == 0) {
            while (flag[0] == 0) {}
            __threadfence();
        }
        __syncthreads();
        x[threadIdx.x] = y[31 - threadIdx.x];  // no_barrier_before_release
    }
}
extern "C" __global__ void no_fence(float* x, float* y, volatile int* flag) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        y[0] = 1;
        flag[0] = 1;
    }
    if (blockIdx.x == 1 && threadIdx.x == 0) {
        while (flag[0] == 0) {}
        __threadfence();
        x[0] = y[0];  // no_fence
    }
}
extern "C" __global__ void half_at_barrier(float* x, float* y) {
    if (threadIdx.x < 40)
        __syncthreads();  // half_at_barrier
}
extern "C" __global__ void two_barriers(float* x, float* y) {
    if (threadIdx.x < 32)
        __syncthreads();  // other: two_barriers
    else
        __syncthreads();  // two_barriers
}
extern "C" __global__ void barrier_meets_shuffle(float* x, float* y) {
    if (threadIdx.x % 2)
        __syncthreads();  // barrier_meets_shuffle
    else
        y[threadIdx.x] = __shfl_sync(FULL, 1.0f, 0);  // other: barrier_meets_shuffle
}
extern "C" __global__ void exited_lane_in_mask(float* x, float* y) {
    if (threadIdx.x % 32 == 9) return;
    y[threadIdx.x] = __shfl_xor_sync(FULL, 1.0f, 1);  // exited_lane_in_mask
}
extern "C" __global__ void lanes_in_two_places(float* x, float* y) {
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_xor_sync(FULL, 1.0f, 1);  // other: lanes_in_two_places
    else
        y[threadIdx.x] = __shfl_xor_sync(FULL, 2.0f, 1);  // lanes_in_two_places
}
extern "C" __global__ void caller_not_in_mask(float* x, float* y) {
    y[threadIdx.x] = __shfl_xor_sync(0xfffffffeu, 1.0f, 2);  // caller_not_in_mask
}
extern "C" __global__ void reads_a_lane_outside(float* x, float* y) {
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_down_sync(0xffffu, 1.0f, 1);  // reads_a_lane_outside
}
extern "C" __global__ void bad_width(float* x, float* y) {
    y[threadIdx.x] = __shfl_down_sync(FULL, 1.0f, 1, 12);  // bad_width
}
extern "C" __global__ void circle(float* x, float* y) {
    if (threadIdx.x == 0) __syncwarp(3u);  // circle
    if (threadIdx.x == 1) __syncwarp(6u);
    if (threadIdx.x == 2) __syncwarp(5u);
}
extern "C" __global__ void flag_never_set(float* x, float* y) {
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    while (flag == 0) {}  // flag_never_set
}
extern "C" __global__ void divides_by_zero(float* x, float* y) {
    y[0] = static_cast<int>(x[1] + 7) / static_cast<int>(x[0]);  // divides_by_zero
}
extern "C" __global__ void traps(float* x, float* y) {
    if (blockIdx.x == 1 && threadIdx.x == 2) __trap();  // traps
}
__device__ __noinline__ int deeper(volatile int* above, int n) {  // recurses
    volatile int here[256];
    here[0] = n + above[0];
    return n < 0 ? 0 : deeper(here, n + 1) + here[0];
}
extern "C" __global__ void recurses(float* x, float* y) {
    volatile int start[1];
    start[0] = 0;
    y[0] = deeper(start, 1);
}
extern "C" __global__ void endless(float* x, float* y) {
    for (;;) x[1] = x[0] + 1;  // endless
}
extern "C" __global__ void right(float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];
}
"""


def line_of(fault: str) -> int:
    (line,) = (i for i, text in enumerate(FAULTS.splitlines()[2:], 1) if text.endswith(f" // {fault}"))
    return line


def provoke(
    fault: str, mode: str = "checked", *, grid: int = 1, threads: int = 32, extra: tuple[Any, ...] = (),
    shared_mem: int = 0, **options: Any,
) -> host.KernelError:  # fmt: skip
    module = HostModule(FAULTS, mode, **options)
    place = HostPlace(module)
    x, y = place.allocate(32, f32), place.allocate(32, f32)
    x[:], y[:] = 0, 0
    place.update(x, y)
    if fault == "write_to_input":
        x = np.zeros(32, f32)
    with pytest.raises(host.KernelError) as caught:
        module.get_function(fault)((grid,), (threads,), (x, y, *extra), shared_mem=shared_mem)
    right = np.zeros(32, f32)
    module.get_function("right")((1,), (32,), (np.arange(32, dtype=f32), right))  # the interpreter is well
    np.testing.assert_array_equal(right, np.arange(32))
    error = caught.value
    assert error.kernel == fault
    assert error.file == "faults.cu"
    assert error.line == line_of(fault)
    where = f"faults.cu:{error.line}: {fault}, block {error.block}, thread {error.thread}: "
    assert str(error).startswith(where)
    return error


FLAG = (np.zeros(1, i32),)


@pytest.mark.parametrize(
    ("fault", "expected", "options", "thread", "words"),
    [
        ("out_of_bounds_read", host.OutOfBoundsError, {}, 31, "read of 4 bytes"),
        ("out_of_bounds_write", host.OutOfBoundsError, {}, 3, "write of 4 bytes"),
        ("null_pointer", host.OutOfBoundsError, {}, 0, "at 0x"),
        ("static_index", host.OutOfBoundsError, {}, 31, "index 32 is out of bounds"),
        ("dynamic_index", host.OutOfBoundsError, {"shared_mem": 80}, 20, "write of 4 bytes"),
        ("atomic_beyond", host.OutOfBoundsError, {}, 0, "outside every array"),
        ("misaligned", host.MisalignedError, {}, 1, "not a multiple of 16"),
        ("uninitialised_shared", host.UninitialisedError, {}, 7, "nothing has written"),
        ("write_to_input", host.ConstError, {}, 0, "read-only"),
        ("shared_race", host.RaceError, {"threads": 64}, None, "races with the one at"),
        ("overwrite_race", host.RaceError, {}, None, "races with"),
        ("shuffle_orders_nothing", host.RaceError, {}, None, "races with"),
        ("global_race", host.RaceError, {}, 1, "write of 4 bytes .* by thread (0, 0, 0)"),
        ("race_between_blocks", host.RaceError, {"grid": 2}, 0, "by thread (0, 0, 0) in block (0, 0, 0)"),
        ("plain_for_atomic", host.RaceError, {}, None, "races with"),
        ("no_barrier_before_release", host.RaceError, {"grid": 2, "extra": FLAG}, None, "in block (0, 0, 0)"),
        ("no_fence", host.RaceError, {"grid": 2, "extra": FLAG}, 0, "in block (0, 0, 0)"),
        ("flag_never_set", host.DeadlockError, {}, None, "a loop of volatile reads"),
        ("divides_by_zero", host.DivisionError, {}, 0, "division by zero"),
        ("recurses", host.OutOfBoundsError, {"threads": 1}, 0, "stack overflow"),
    ],
)
def test_faults_that_the_checked_mode_names(
    fault: str, expected: type, options: dict[str, Any], thread: int | None, words: str
) -> None:
    FLAG[0][:] = 0
    error = provoke(fault, **options)
    assert type(error) is expected
    for part in words.split(" .* "):
        assert part in str(error)
    if thread is not None:
        assert error.thread == (thread, 0, 0)
    assert error.block == (options.get("grid", 1) - 1, 0, 0)


@pytest.mark.parametrize(("mode", "order"), [("checked", "forward"), ("fast", "forward"), ("fast", "random")])
@pytest.mark.parametrize(
    ("fault", "expected", "threads", "missing", "words"),
    [
        ("half_at_barrier", host.DivergenceError, 64, range(40, 64), "threads 40-63 (exited)"),
        ("exited_lane_in_mask", host.DivergenceError, 64, None, "(exited)"),
        ("circle", host.DeadlockError, 3, [1], "thread 1 (waiting elsewhere)"),
        ("caller_not_in_mask", host.MaskError, 32, [], "the calling lane is not in its own mask"),
        ("reads_a_lane_outside", host.MaskError, 32, [], "lane 15 reads lane 16"),
        ("bad_width", host.MaskError, 32, [], "width"),
    ],
)
def test_divergence_is_an_error_in_every_mode(
    mode: str, order: str, fault: str, expected: type, threads: int, missing: Any, words: str
) -> None:
    error = provoke(fault, mode, order=order, threads=threads)
    assert type(error) is expected
    assert words in str(error)
    if missing is not None:
        assert error.missing == [(thread, 0, 0) for thread in missing]


@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize("fault", ["two_barriers", "barrier_meets_shuffle", "lanes_in_two_places"])
def test_threads_that_meet_in_two_places_are_named_with_both(mode: str, fault: str) -> None:
    error = provoke(fault, mode, threads=64 if fault == "two_barriers" else 32)
    assert type(error) is host.DivergenceError
    assert f"at faults.cu:{line_of('other: ' + fault)}" in str(error)


def test_both_sides_of_a_race_are_named() -> None:
    for fault, threads in (("shared_race", 64), ("overwrite_race", 32)):
        assert f"faults.cu:{line_of('other: ' + fault)}" in str(provoke(fault, threads=threads))


def test_a_partial_warp_is_missing_in_a_full_mask() -> None:
    module = HostModule(FAULTS, "fast")
    y = np.zeros(32, f32)
    with pytest.raises(host.DivergenceError, match=r"thread 9 \(exited\), threads 20-31 \(beyond the block\)"):
        module.get_function("exited_lane_in_mask")((1,), (20,), (y, y))


@pytest.mark.parametrize("mode", ["checked", "fast"])
def test_a_trap_and_an_endless_loop_end_the_launch(mode: str) -> None:
    error = provoke("traps", mode, grid=2)
    assert (type(error), error.block, error.thread) == (host.CrashError, (1, 0, 0), (2, 0, 0))
    error = provoke("endless", mode, timeout=0.2)
    assert type(error) is host.TimeLimitError


@pytest.mark.parametrize("fault", ["null_pointer", "divides_by_zero"])
def test_a_crash_in_the_fast_mode_is_an_exception(fault: str) -> None:
    assert type(provoke(fault, "fast")) is host.CrashError


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("fault", ["shared_race", "overwrite_race"])
def test_a_missing_barrier_is_a_race_in_every_order(fault: str, order: str) -> None:
    module = HostModule(FAULTS, "checked", order=order)
    x, y = np.zeros(64, f32), np.zeros(64, f32)
    with pytest.raises(host.RaceError):
        module.get_function(fault)((1,), (64 if fault == "shared_race" else 32,), (x, y))


# ---- arrays --------------------------------------------------------------------------------------


def by_struct(modules: HostModules, x: np.ndarray, y: np.ndarray, n: int) -> None:
    place = HostPlace(modules)
    args = np.array((place.pointer(x), place.pointer(y), n, 2), STRUCT)
    modules.get_function(SEMANTICS, "by_struct")((1,), (64,), (args,))


def test_outputs_are_uninitialised_until_written() -> None:
    modules = HostModules()
    place = HostPlace(modules)
    x, y, z = place.allocate(10, f32), place.allocate(10, f32), place.allocate(10, f32)
    with pytest.raises(host.UninitialisedError):
        by_struct(modules, x, y, 10)
    source = np.arange(10, dtype=f32)
    place.keep(source)
    by_struct(modules, source, y, 6)
    np.testing.assert_array_equal(modules.memory.written(y), np.arange(10) < 6)
    by_struct(modules, y, z, 6)
    with pytest.raises(host.UninitialisedError):
        by_struct(modules, y, z, 7)
    np.testing.assert_array_equal(z[:6], 4 * source[:6])


def test_the_gaps_of_a_view_are_out_of_bounds() -> None:
    modules = HostModules()
    place = HostPlace(modules)
    x, y = np.zeros((10, 2), f32), place.allocate(10, f32)
    place.keep(x[:, 0])
    with pytest.raises(host.OutOfBoundsError):
        by_struct(modules, x[:, 0], y, 2)
    place.keep(x[:, 1])
    by_struct(modules, x[:, 0], y, 10)
    np.testing.assert_array_equal(y, np.zeros(10))


def test_an_array_that_is_input_and_output_has_both_rights() -> None:
    modules = HostModules()
    place = HostPlace(modules)
    x = np.arange(10, dtype=f32)
    place.keep(x[::-1])
    with pytest.raises(host.ConstError):
        by_struct(modules, x, x, 10)
    place.update(x)
    by_struct(modules, x, x, 10)
    np.testing.assert_array_equal(x, 2 * np.arange(10))


def test_neighbours_of_an_allocation_belong_to_nobody() -> None:
    modules = HostModules()
    place, memory = HostPlace(modules), modules.memory
    arrays = [place.allocate((3, 5), dtype) for dtype in (f32, np.float64, np.uint8, np.complex64)]
    assert all(array.ctypes.data % 256 == 0 and array.flags.c_contiguous for array in arrays)
    for array in arrays:
        assert memory.covers(array)
        beyond = np.frombuffer((ctypes.c_char * 8).from_address(array.ctypes.data + array.nbytes), np.uint8)
        assert not memory.covers(beyond)
    memory.clear()
    assert not memory.covers(arrays[0])


def test_empty_arrays_and_broadcasts_are_arrays() -> None:
    modules = HostModules()
    place = HostPlace(modules)
    empty, wide = np.zeros((0, 3), f32), np.broadcast_to(f32(1.5), (7,))
    place.keep(empty, wide)
    y = place.allocate(1, f32)
    by_struct(modules, empty, empty, 0)
    by_struct(modules, wide, y, 1)
    assert y[0] == 3


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected", "words"),
    [
        (lambda k, a: k((1,), (8,), a[:-1]), ValueError, "2 arguments, 3 expected"),
        (lambda k, a: k((1,), (8,), (*a, i32(1))), ValueError, "4 arguments, 3 expected"),
        (lambda k, a: k((1,), (8,), (*a[:2], 8)), TypeError, "argument 2 is a int"),
        (lambda k, a: k((1,), (8,), (*a[:2], 8.0)), TypeError, "argument 2 is a float"),
        (lambda k, a: k((1,), (8,), (*a[:2], np.int64(8))), TypeError, "argument 2 has type int64"),
        (lambda k, a: k((1,), (8,), (*a[:2], f32(8))), TypeError, "argument 2 has type float32"),
        (lambda k, a: k((1,), (8,), (a[0].astype(float), *a[1:])), TypeError, "array of float64"),
        (lambda k, a: k((1,), (8,), (a[0].astype(i32), *a[1:])), TypeError, "array of int32"),
        (lambda k, a: k((1,), (8,), (f32(1), *a[1:])), TypeError, "argument 0"),
        (lambda k, a: k((1,), (1025,), a), ValueError, "a block of 1025"),
        (lambda k, a: k((1,), (512, 3), a), ValueError, "a block of 1536 threads, 1024 at most"),
        (lambda k, a: k((1,), (1, 1, 65), a), ValueError, "block"),
        (lambda k, a: k((0,), (8,), a), ValueError, "grid"),
        (lambda k, a: k((1, 65536), (8,), a), ValueError, "grid"),
        (lambda k, a: k((2**31,), (8,), a), ValueError, "grid"),
        (lambda k, a: k((1,), (8,), a, shared_mem=49153), ValueError, "49153 bytes of dynamic shared memory"),
        (lambda k, a: k((1,), (8,), a, shared_mem=-1), ValueError, "-1 bytes"),
    ],
)
def test_what_a_driver_refuses_or_should(
    call: Callable[[host.HostKernel, tuple[Any, ...]], None], expected: type[Exception], words: str
) -> None:
    x, y = np.arange(8, dtype=f32), np.zeros(8, f32)
    kernel = HostModule(SEMANTICS, "fast").get_function("dynamic")
    with pytest.raises(expected, match=words):
        call(kernel, (x, y, i32(8)))
    assert not y.any()
    kernel((1,), (8,), (x, y, i32(8)), shared_mem=32)
    np.testing.assert_array_equal(y, x[::-1])


def test_structs_of_the_wrong_size_and_too_many_threads_for_the_launch_bounds() -> None:
    kernel = HostModule(SEMANTICS, "fast").get_function("by_struct")
    with pytest.raises(TypeError, match=r"28 bytes, expected a struct of 32 bytes"):
        kernel((1,), (8,), (np.zeros((), np.dtype([("x", "u8"), ("y", "u8"), ("n", "i8"), ("k", "i4")])),))
    with pytest.raises(ValueError, match="a block of 65 threads, 64 at most"):
        kernel((1,), (65,), (np.zeros((), STRUCT),))


def test_texts_that_do_not_compile() -> None:
    with pytest.raises(host.CompileError, match=r"broken\.cu:3"):
        HostModule('#line 1 "broken.cu"\nextern "C" __global__ void k(int n)\n{\n    undeclared = 1; }\n')
    with pytest.raises(host.CompileError, match="no entry point"):
        HostModule('__global__ void k(int n) {}  // extern "C" __global__ void k(int n)')
    with pytest.raises(KeyError):
        HostModule(SEMANTICS, "fast").get_function("absent")


def test_a_file_of_the_users_own_and_a_kernel_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text('extern "C" __global__ void twice(double* y) {\n    y[threadIdx.x] *= 2;\n}\n')
    y = np.arange(4.0)
    HostModule(path).get_function("twice")((1,), (4,), (y,))
    np.testing.assert_array_equal(y, [0, 2, 4, 6])
    with pytest.raises(host.OutOfBoundsError) as caught:
        HostModule(path).get_function("twice")((1,), (5,), (y,))
    assert (caught.value.file, caught.value.line, caught.value.thread) == (str(path), 2, (4, 0, 0))
    HostModules("fast").get_function(SimpleNamespace(text=path.read_text()), "twice")((1,), (3,), (y,))
    np.testing.assert_array_equal(y[1:3], [8, 16])


# ---- coverage ------------------------------------------------------------------------------------

COVERED = r"""#line 1 "cuda_src/clamp.cuh"
template <class T>
__device__ __forceinline__ T clamp(T x, T low) {
    if (x < low) {
        return low;
    }
    return x;
}
#line 1 "cuda_src/kernel.cu"
extern "C" __global__ void k(const float* x, float* y, int n) {
    int t = threadIdx.x;
    if (t < n) y[t] = clamp(x[t], 0.0f);
    __syncthreads();
    if (n == 100)
        y[t] = 0;
}
"""


@pytest.mark.skipif(shutil.which("gcov") is None, reason="gcov is not installed")
def test_coverage_tells_lines_by_file_and_adds_up_launches() -> None:
    modules = HostModules("coverage")
    x, y = np.arange(1, 9, dtype=f32), np.zeros(8, f32)
    modules.get_function(COVERED, "k")((1,), (8,), (x, y, i32(8)))
    np.testing.assert_array_equal(x, y)
    report = modules.coverage()
    assert list(report) == ["cuda_src/clamp.cuh", "cuda_src/kernel.cu"]
    assert report["cuda_src/clamp.cuh"].uncovered == {4}
    assert {3, 6} <= report["cuda_src/clamp.cuh"].covered
    assert report["cuda_src/kernel.cu"].uncovered == {6}
    modules.get_function(COVERED, "k")((1,), (8,), (-x, y, i32(8)))
    assert not modules.coverage()["cuda_src/clamp.cuh"].uncovered
    assert not HostModules("coverage").coverage()
