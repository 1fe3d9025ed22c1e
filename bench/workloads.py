"""The shapes that are measured, their inputs, and the least time that the chip needs for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import cuscan

from .limits import Limits

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def _sentences(count: int) -> list[int]:
    """Lengths of the first sentences of Python's help texts, in bytes."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(topics.values()))
    return [len(sentence.encode()) for sentence in sentences if 10 < len(sentence) < 2000][:count]


SENTENCES = _sentences(64)


@dataclass(frozen=True)
class Selective:
    """selective_scan with softplus, D and delta_bias on."""

    batch: int
    length: int
    channels: int
    state: int
    dtype: str = "bfloat16"
    layout: str = "bld"
    z: bool = False
    h0: bool = False
    mask: bool = False  # the last tenth of each row is padding
    sequences: int = 0  # packed in the one row, of random lengths
    text: bool = False  # of the lengths in bytes that sentences have
    states: bool = False
    op: str = "selective_scan"
    direction: str = "forward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        random = cupy.random.default_rng(seed)
        dtype = _dtype(self.dtype)

        def sequence(size: int) -> Any:
            shape = (self.batch, self.length, size) if self.layout == "bld" else (self.batch, size, self.length)
            return _cast(random.standard_normal(shape, dtype=cupy.float32), dtype)

        made = {
            "u": sequence(self.channels),
            "delta": sequence(self.channels),
            "A": -cupy.tile(cupy.arange(1, self.state + 1, dtype=cupy.float32), (self.channels, 1)),
            "B": sequence(self.state),
            "C": sequence(self.state),
            "D": random.standard_normal(self.channels, dtype=cupy.float32),
            "z": sequence(self.channels) if self.z else None,
            "delta_bias": random.standard_normal(self.channels, dtype=cupy.float32) - 4,
            "delta_softplus": True,
            "layout": self.layout,
        }
        if self.h0:
            states = self.sequences or self.batch
            made["h0"] = random.standard_normal((states, self.channels, self.state), dtype=cupy.float32)
        if self.mask:
            made["mask"] = cupy.tile(cupy.arange(self.length) < 0.9 * self.length, (self.batch, 1))
        if self.sequences:
            cuts = np.sort(np.random.default_rng(seed).integers(0, self.length, self.sequences - 1))
            if self.text:
                cuts = np.cumsum(SENTENCES)[:-1]
            made["cu_seqlens"] = cupy.array([0, *cuts, self.length])
        return made

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.selective_scan(**inputs, return_states=self.states)

    def row(self) -> dict[str, Any]:
        names = ("layout", "batch", "length", "channels", "state", "z", "h0", "mask", "sequences", "text", "states")
        return {name: getattr(self, name) for name in names}

    def cut(self, inputs: dict[str, Any], first: int = 0) -> tuple[Any, dict[str, Any]]:
        """A few channels of the first batch from step `first`, in float64; their index in an array of u's shape."""
        few, steps, all_states = slice(0, 2), slice(first, None), slice(None)
        bld = self.layout == "bld"
        channels = (slice(0, 1), steps, few) if bld else (slice(0, 1), few, steps)
        tokens = (slice(0, 1), steps, all_states) if bld else (slice(0, 1), all_states, steps)
        names = ("u", "delta", "z", "grad_out")
        cut = {name: inputs[name][channels] for name in names if inputs.get(name) is not None}
        cut |= {name: inputs[name][few] for name in ("A", "D", "delta_bias")}
        cut |= {name: inputs[name][tokens] for name in ("B", "C")}
        if self.h0:
            cut["h0"] = inputs["h0"][: self.sequences or 1, few]
        wide = {name: x.get().astype(np.float64) for name, x in cut.items()}
        marks = {name: inputs[name].get() for name in ("mask", "cu_seqlens") if name in inputs}
        if self.mask:
            marks["mask"] = marks["mask"][:1, steps]
        return channels, {**wide, **marks, "delta_softplus": True, "layout": self.layout}

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """A few channels against float64: the bound is for any order of rounding."""
        channels, wide = self.cut(inputs)
        y = result[0] if self.states else result
        _assert_close(y[channels].get(), cuscan.selective_scan(**wide), self.dtype)

    @property
    def useful_bytes(self) -> int:
        tokens = self.batch * self.length
        return ((3 + self.z) * tokens * self.channels + 2 * tokens * self.state) * _BYTES[self.dtype]

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        elements = self.batch * self.length * self.channels
        special = elements * (self.state + 2 + 2 * self.z) / limits.exponentials
        return max((special, "exponentials"), (self.useful_bytes / limits.copy, "bytes"))


@dataclass(frozen=True)
class SelectiveBackward(Selective):
    """selective_scan_vjp of the same, the states given."""

    direction: str = "backward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        made = super().inputs(cupy, seed)
        y, made["states"] = cuscan.selective_scan(**made, return_states=True)
        made["grad_out"] = y[::-1].copy()  # any values of that shape
        return made

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.selective_scan_vjp(**inputs)

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """What is no sum over channels, for a few of them, at the last steps."""
        interval = max(0, self.length - 4096) // cuscan.STATE_INTERVAL
        channels, wide = self.cut(inputs, interval * cuscan.STATE_INTERVAL)
        wide["h0"] = inputs["states"][:1, interval, :2].get().astype(np.float64)
        expected = cuscan.selective_scan_vjp(**wide)
        for name in ("u", "delta"):
            _assert_close(getattr(result, name)[channels].get(), getattr(expected, name), self.dtype)

    @property
    def useful_bytes(self) -> int:
        tokens, item = self.batch * self.length, _BYTES[self.dtype]
        states = tokens // cuscan.STATE_INTERVAL * self.channels * self.state * 4
        return ((5 + 2 * self.z) * tokens * self.channels + 4 * tokens * self.state) * item + states

    def least(self, limits: Limits) -> tuple[float, str]:
        """13 FP32 operations an element, or its bytes."""
        elements = self.batch * self.length * self.channels * self.state
        return max((13 * elements / limits.multiply_adds, "operations"), (self.useful_bytes / limits.copy, "bytes"))


@dataclass(frozen=True)
class Update:
    """selective_state_update with everything that a Mamba layer gives it."""

    batch: int
    channels: int
    state: int
    dtype: str = "bfloat16"
    op: str = "selective_state_update"
    direction: str = "forward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        random = cupy.random.default_rng(seed)
        dtype = _dtype(self.dtype)

        def normal(*shape: int) -> Any:
            return random.standard_normal(shape, dtype=cupy.float32)

        return {
            "state": normal(self.batch, self.channels, self.state),
            "x": _cast(normal(self.batch, self.channels), dtype),
            "dt": _cast(normal(self.batch, self.channels), dtype),
            "A": -cupy.tile(cupy.arange(1, self.state + 1, dtype=cupy.float32), (self.channels, 1)),
            "B": _cast(normal(self.batch, self.state), dtype),
            "C": _cast(normal(self.batch, self.state), dtype),
            "D": normal(self.channels),
            "z": _cast(normal(self.batch, self.channels), dtype),
            "dt_bias": normal(self.channels) - 4,
            "dt_softplus": True,
        }

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.selective_state_update(**inputs)

    def row(self) -> dict[str, Any]:
        return {"batch": self.batch, "length": 1, "channels": self.channels, "state": self.state}

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """Another step from where the first one went, for a few channels, against float64."""
        del result
        few, first = (slice(None), slice(0, 2)), inputs["state"].copy()
        y = cuscan.selective_state_update(**inputs)
        wide = {name: inputs[name][few].get().astype(np.float64) for name in ("x", "dt", "z")}
        wide |= {name: inputs[name][:2].get().astype(np.float64) for name in ("A", "D", "dt_bias")}
        wide |= {name: inputs[name].get().astype(np.float64) for name in ("B", "C")}
        expected = cuscan.selective_state_update(first[few].get().astype(np.float64), **wide, dt_softplus=True)
        _assert_close(y[few].get(), expected, self.dtype)

    @property
    def useful_bytes(self) -> int:
        sequence = 4 * self.batch * self.channels + 2 * self.batch * self.state
        return 8 * self.batch * self.channels * self.state + sequence * _BYTES[self.dtype]

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        return self.useful_bytes / limits.copy, "bytes"


@dataclass(frozen=True)
class Linear:
    """linear_scan along `axis` of an array of `shape`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str = "float32"
    op: str = "linear_scan"
    direction: str = "forward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        random = cupy.random.default_rng(seed)
        dtype = _dtype(self.dtype)
        a = _cast(random.random(self.shape, dtype=cupy.float32), dtype)
        b = _cast(random.standard_normal(self.shape, dtype=cupy.float32), dtype)
        return {"a": a, "b": b, "axis": self.axis}

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.linear_scan(**inputs)

    def row(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "axis": self.axis}

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """A few rows, up to 2**22 steps, against float64."""
        rows = tuple(slice(0, 1 << 22) if d == self.axis else slice(0, 2) for d in range(len(self.shape)))
        wide = [inputs[name][rows].get().astype(np.float64) for name in ("a", "b")]
        _assert_close(result[rows].get(), cuscan.linear_scan(*wide, axis=self.axis), self.dtype)

    @property
    def useful_bytes(self) -> int:
        return 3 * int(np.prod(self.shape, dtype=np.int64)) * _BYTES[self.dtype]

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        return self.useful_bytes / limits.copy, "bytes"


@dataclass(frozen=True)
class LinearBackward(Linear):
    """linear_scan_vjp of the same."""

    direction: str = "backward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        made = super().inputs(cupy, seed)
        b = made.pop("b")
        return made | {"h": cuscan.linear_scan(made["a"], b, axis=self.axis), "grad_h": b}

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.linear_scan_vjp(**inputs)

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """A few rows, the last 2**20 steps, against float64."""
        rows = tuple(slice(-(1 << 20), None) if d == self.axis else slice(0, 2) for d in range(len(self.shape)))
        wide = [inputs[name][rows].get().astype(np.float64) for name in ("a", "h", "grad_h")]
        expected = cuscan.linear_scan_vjp(*wide, axis=self.axis)
        later = tuple(slice(1, None) if d == self.axis else slice(None) for d in range(len(self.shape)))
        _assert_close(result.b[rows].get(), expected.b, self.dtype)
        _assert_close(result.a[rows].get()[later], expected.a[later], self.dtype)

    @property
    def useful_bytes(self) -> int:
        return 5 * int(np.prod(self.shape, dtype=np.int64)) * _BYTES[self.dtype]


Load = Selective | Update | Linear


def _assert_close(actual: Any, expected: Any, dtype: str) -> None:
    """Within the rounding of the result's type, at the largest value: a wrong order or a lost step is far beyond."""
    scale = np.abs(expected).max()
    error = np.abs(actual.astype(np.float64) - expected).max()
    if not error <= (1e-4 + (2**-8 if dtype == "bfloat16" else 0)) * scale:
        raise AssertionError(f"largest error {error:.3g} at a scale of {scale:.3g}")


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


SELECTIVE = (
    Selective(8, 4096, 1024, 16),
    Selective(8, 2048, 2048, 16),
    Selective(1, 2048, 5120, 16),
    Selective(1, 65536, 2048, 16),
    Selective(1, 65536, 256, 16),
    Selective(1, 1048576, 64, 16),
    Selective(4, 4096, 1024, 64),
    Selective(2, 4096, 1024, 128),
    Selective(4096, 16, 1024, 16),
    Selective(64, 512, 2048, 16),
    Selective(8, 4096, 1024, 16, dtype="float32"),
    Selective(8, 4096, 1024, 16, layout="bdl"),
    Selective(8, 4096, 1024, 16, z=True),
    Selective(8, 4096, 1024, 16, h0=True),
    Selective(8, 4096, 1024, 16, states=True),
    Selective(256, 4, 2048, 16, h0=True),
    Selective(8, 4096, 1024, 16, mask=True),
    # The same tokens packed and in rows of equal length.
    Selective(1, 32768, 1024, 16, sequences=8),
    Selective(1, 32768, 1024, 16, sequences=64),
    Selective(1, 32768, 1024, 16, sequences=64, h0=True),
    Selective(64, 512, 1024, 16),
    Selective(1, sum(SENTENCES), 5120, 16, sequences=64, text=True),
    Selective(64, -(-sum(SENTENCES) // 64), 5120, 16),
)
LINEAR = (
    Linear((8, 4096, 1536), 1),
    Linear((8, 65536, 1536), 1),
    Linear((8, 1536, 4096), 2),
    Linear((8, 1536, 65536), 2),
    Linear((8, 1536, 1024), 2),
    Linear((8, 4096, 1536), 1, dtype="bfloat16"),
    Linear((8, 1536, 4096), 2, dtype="bfloat16"),
    Linear((1, 131072, 512), 1),
    Linear((1, 16, 4194304), 2),
    Linear((1 << 28,), 0),
    Linear((1 << 27, 2), 0),
    Linear((1000000, 2), 0),
)
SELECTIVE_BACKWARD = (
    SelectiveBackward(8, 4096, 1024, 16),
    SelectiveBackward(8, 2048, 2048, 16),
    SelectiveBackward(1, 2048, 5120, 16),
    SelectiveBackward(1, 65536, 2048, 16),
    SelectiveBackward(1, 65536, 256, 16),
    SelectiveBackward(1, 1048576, 64, 16),
    SelectiveBackward(4, 4096, 1024, 64),
    SelectiveBackward(2, 4096, 1024, 128),
    SelectiveBackward(4096, 16, 1024, 16),
    SelectiveBackward(8, 4096, 1024, 16, dtype="float32"),
    SelectiveBackward(8, 4096, 1024, 16, layout="bdl"),
    SelectiveBackward(8, 4096, 1024, 16, z=True),
    SelectiveBackward(8, 4096, 1024, 16, mask=True),
)
LINEAR_BACKWARD = tuple(LinearBackward(load.shape, load.axis, load.dtype) for load in LINEAR)
UPDATE = (Update(256, 5120, 16), Update(1, 5120, 16), Update(1024, 5120, 16))
LOADS: tuple[tuple[Load, ...], ...] = (SELECTIVE, SELECTIVE_BACKWARD, UPDATE, LINEAR, LINEAR_BACKWARD)
