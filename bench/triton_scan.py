"""The linear scan as one writes it with Triton: `tl.associative_scan` over tiles, a program walking each row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def combine(gate, state, later_gate, later_state):
    return gate * later_gate, later_gate * state + later_state


@triton.jit
def scan_tiles(a, b, h, length, width, outer_stride, time_stride, STEPS: tl.constexpr, LANES: tl.constexpr):
    """h[outer, t, lane] for the rows of one outer index and LANES neighbours."""
    outer = tl.program_id(0).to(tl.int64) * outer_stride
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    steps = tl.arange(0, STEPS)
    entering = tl.zeros([LANES], tl.float32)
    for first in range(0, length, STEPS):
        t = first + steps
        inside = (t[:, None] < length) & (lanes[None, :] < width)
        at = outer + t[:, None].to(tl.int64) * time_stride + lanes[None, :]
        gate = tl.load(a + at, mask=inside, other=1.0).to(tl.float32)  # the identity, which carries the state on
        drive = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        gates, states = tl.associative_scan((gate, drive), 0, combine)
        states += gates * entering[None, :]
        tl.store(h + at, states, mask=inside)
        entering = tl.sum(tl.where(steps[:, None] == STEPS - 1, states, 0.0), 0)


def linear_scan(a: Any, b: Any, h: Any, axis: int) -> None:
    """h[t] = a[t] h[t-1] + b[t] along `axis` of contiguous tensors."""
    shape = b.shape
    outer, width = 1, 1
    for size in shape[:axis]:
        outer *= size
    for size in shape[axis + 1 :]:
        width *= size
    lanes = min(32, triton.next_power_of_2(width))
    steps = 64 if lanes == 32 else 1024
    grid = (outer, triton.cdiv(width, lanes))
    scan_tiles[grid](a, b, h, shape[axis], width, shape[axis] * width, width, steps, lanes)
