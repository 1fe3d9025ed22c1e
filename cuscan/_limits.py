"""What a chip can do at most, the least time that a scan needs there, and how a kernel sits on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Rates: bytes read and written a second by a device copy, exponentials and FP32 operations a second."""

    copy: float
    exponentials: float
    multiply_adds: float

    @classmethod
    def nominal(cls, attributes: Mapping[str, int]) -> Limits:
        """From a device's clocks: two transfers a memory clock, 16 exponentials and 128 operations an SM and clock."""
        cycles = attributes["MultiProcessorCount"] * attributes["ClockRate"] * 1e3
        copy = attributes["MemoryClockRate"] * 1e3 * 2 * attributes["GlobalMemoryBusWidth"] / 8
        return cls(copy, 16 * cycles, 128 * cycles)


# Of cupy.cuda.Device().attributes, for plans of an H200 on machines without one.
H200 = {
    "MultiProcessorCount": 132, "ClockRate": 1_980_000, "MemoryClockRate": 3_201_000, "GlobalMemoryBusWidth": 6144,
    "MaxThreadsPerMultiProcessor": 2048, "MaxRegistersPerMultiprocessor": 65536,
    "MaxSharedMemoryPerMultiprocessor": 233472,
}  # fmt: skip


def least_selective(elements: int, state: int, *, z: bool, moved: int, limits: Limits) -> tuple[float, str]:
    """Seconds of a selective_scan with softplus, and what binds.

    `elements` u has, and `moved` bytes are read and written. Softplus and silu are two exponentials each.
    """
    special = elements * (state + 2 + 2 * z) / limits.exponentials
    return max((special, "exponentials"), (moved / limits.copy, "bytes"))


@dataclass(frozen=True)
class Residence:
    """How a kernel sits on a chip."""

    registers: int
    frame_bytes: int
    blocks_per_sm: int
    waves: float


def residence(attributes: Mapping[str, int], kernel: Any, blocks: int, threads: int, shared: int) -> Residence:
    """Of a launch: `kernel` as CuPy gives it, `shared` bytes of dynamic shared memory."""
    warps = attributes["MaxThreadsPerMultiProcessor"] // threads
    registers = attributes["MaxRegistersPerMultiprocessor"] // (math.ceil(kernel.num_regs / 8) * 8 * threads)
    memory = attributes["MaxSharedMemoryPerMultiprocessor"] // (shared + kernel.shared_size_bytes + 1024)
    resident = max(1, min(warps, registers, memory))
    waves = blocks / (resident * attributes["MultiProcessorCount"])
    return Residence(kernel.num_regs, kernel.local_size_bytes, resident, round(waves, 2))
