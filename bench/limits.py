"""The chip's ceilings, measured in the run that they are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cuscan
from cuscan._limits import Limits
from cuscan.tune import milliseconds

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


def host_microseconds(cupy: Any, call: Callable[[], object], repeats: int = 101) -> float:
    """Host time of a call like earlier ones, on an idle device: the median."""
    times = []
    for _ in range(repeats):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def graph_milliseconds(cupy: Any, call: Callable[[], object], repeats: int = 21) -> list[float]:
    """Device time of replays of the call from a CUDA graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cuscan.Workspace() as workspace, stream:
        call()  # nothing is compiled during the capture
        stream.begin_capture()
        try:
            kept = call()
        finally:
            graph = stream.end_capture()
        times = milliseconds(cupy, lambda: graph.launch(stream), repeats)
        stream.synchronize()
    del kept
    workspace.release()
    return times


def clock_milliseconds(call: Callable[[], object], wait: Callable[[Any], object], repeats: int = 10) -> float:
    """Time a call by the clock, of calls one after another: for what works on streams of its own."""
    wait(call())
    begin = time.perf_counter()
    for _ in range(repeats):
        last = call()
    wait(last)
    return (time.perf_counter() - begin) / repeats * 1e3


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
