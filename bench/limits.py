"""The chip's ceilings, measured in the run that they are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RATES = r"""
extern "C" __global__ void exponentials(float* out, int rounds) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = threadIdx.x * 1e-6f + i;
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  if (sum == 12345.0f) out[0] = sum;
}
extern "C" __global__ void multiply_adds(float* out, int rounds) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = threadIdx.x * 1e-6f + i;
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("fma.rn.ftz.f32 %0, %0, %0, %0;" : "+f"(x[i]));
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  if (sum == 12345.0f) out[0] = sum;
}
"""


@dataclass(frozen=True)
class Limits:
    """Rates: bytes read and written a second by a device copy, exponentials and FP32 operations a second."""

    copy: float
    exponentials: float
    multiply_adds: float


def milliseconds(cupy: Any, call: Callable[[], object], repeats: int = 21) -> list[float]:
    """Device time of each of `repeats` calls, the L2 cache overwritten and the queue filled before each."""
    flush = cupy.empty(1 << 28, cupy.int8)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        # These writes also keep the device busy while the host prepares the launches that are timed.
        for value in range(4):
            flush.fill(value)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(begin, end)))
    return times


def host_microseconds(cupy: Any, call: Callable[[], object], repeats: int = 101) -> float:
    """Host time of a call like earlier ones, on an idle device: the median."""
    times = []
    for _ in range(repeats):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(cupy: Any) -> Limits:
    """Copy bandwidth, exponential rate and FP32 rate of the current device."""
    source = cupy.zeros(1 << 31, cupy.int8)
    target = cupy.empty_like(source)
    copy = statistics.median(milliseconds(cupy, lambda: cupy.cuda.runtime.memcpy(
        target.data.ptr, source.data.ptr, source.nbytes, 3)))  # fmt: skip
    module = cupy.RawModule(code=_RATES)
    out = cupy.zeros(1, cupy.float32)
    blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    rounds = cupy.int32(4096)
    rates = []
    for name in ("exponentials", "multiply_adds"):
        kernel = module.get_function(name)
        took = statistics.median(milliseconds(cupy, lambda kernel=kernel: kernel((blocks,), (256,), (out, rounds))))
        rates.append(blocks * 256 * 8 * 4096 / took * 1e3)
    return Limits(2 * source.nbytes / copy * 1e3, *rates)
