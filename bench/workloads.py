"""The shapes that are measured, their inputs, and the least time that the chip needs for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuscan

from .limits import Limits

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


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
    op: str = "selective_scan"

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
            cuts = np.random.default_rng(seed).integers(0, self.length, self.sequences - 1)
            made["cu_seqlens"] = cupy.array([0, *np.sort(cuts), self.length])
        return made

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.selective_scan(**inputs)

    def row(self) -> dict[str, Any]:
        names = ("layout", "batch", "length", "channels", "state", "z", "h0", "mask", "sequences")
        return {name: getattr(self, name) for name in names}

    def check(self, inputs: dict[str, Any], result: Any) -> None:
        """The first batch, a few channels, against float64: the bound is for any order of rounding."""
        few = slice(0, 2)
        channels = (slice(0, 1), slice(None), few) if self.layout == "bld" else (slice(0, 1), few, slice(None))
        cut = {name: inputs[name][channels] for name in ("u", "delta", "z") if inputs[name] is not None}
        cut |= {name: inputs[name][few] for name in ("A", "D", "delta_bias")}
        cut |= {name: inputs[name][:1] for name in ("B", "C")}
        if self.h0:
            cut["h0"] = inputs["h0"][: self.sequences or 1, few]
        wide = {name: x.get().astype(np.float64) for name, x in cut.items()}
        marks = {name: inputs[name].get() for name in ("mask", "cu_seqlens") if name in inputs}
        if self.mask:
            marks["mask"] = marks["mask"][:1]
        expected = cuscan.selective_scan(**wide, **marks, delta_softplus=True, layout=self.layout)
        _assert_close(result[channels].get(), expected, self.dtype)

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
class Linear:
    """linear_scan along `axis` of an array of `shape`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str = "float32"
    op: str = "linear_scan"

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
    Selective(256, 4, 2048, 16, h0=True),
    Selective(8, 4096, 1024, 16, mask=True),
    # The same tokens packed and in rows of equal length.
    Selective(1, 32768, 1024, 16, sequences=8),
    Selective(1, 32768, 1024, 16, sequences=64),
    Selective(1, 32768, 1024, 16, sequences=64, h0=True),
    Selective(64, 512, 1024, 16),
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
