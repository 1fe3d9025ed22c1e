"""The shapes that are measured, their inputs, and the least time that the chip needs for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import cuscan
from cuscan._limits import Limits
from cuscan.testing import oracle
from cuscan.tune import linear_arguments, selective_arguments

CHECKED = 256  # steps that the oracle checks
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
    last: bool = False  # the last state is given
    op: str = "selective_scan"
    direction: str = "forward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        random = cupy.random.default_rng(seed + 1)
        sizes = self.batch, self.length, self.channels, self.state
        made = selective_arguments(cupy, *sizes, self.dtype, self.layout, seed)
        if self.z:
            made["z"] = _cast(random.standard_normal(made["u"].shape, dtype=cupy.float32), _dtype(self.dtype))
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
        return lambda: cuscan.selective_scan(**inputs, return_states=self.states, return_last_state=self.last)

    def row(self) -> dict[str, Any]:
        names = (
            "layout",
            "batch",
            "length",
            "channels",
            "state",
            "z",
            "h0",
            "mask",
            "sequences",
            "text",
            "states",
            "last",
        )
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
        wide = {name: _host(x).astype(np.float64) for name, x in cut.items()}
        marks = {name: _host(inputs[name]) for name in ("mask", "cu_seqlens") if name in inputs}
        if self.mask:
            marks["mask"] = marks["mask"][:1, steps]
        return channels, {**wide, **marks, "delta_softplus": True, "layout": self.layout}

    def check(self, inputs: dict[str, Any], result: Any, *, bounded: bool = True) -> None:
        """A few channels: their first steps against the oracle and its bound, all against float64."""
        channels, wide = self.cut(inputs)
        y = _host((result[0] if isinstance(result, tuple) else result)[channels])
        _assert_close(y, cuscan.selective_scan(**wide), self.dtype)
        if not bounded:
            return
        first = slice(0, min(CHECKED, self.length))
        time = 1 if self.layout == "bld" else 2
        for name in ("u", "delta", "z", "B", "C", "mask"):
            if name in wide:
                along = 1 if name == "mask" else time
                wide[name] = wide[name][(slice(None),) * along + (first,)]
        if "cu_seqlens" in wide:
            wide["cu_seqlens"] = np.minimum(wide["cu_seqlens"], first.stop)
        expected = oracle.selective_scan(**wide)
        oracle.assert_scan_close(y[(slice(None),) * time + (first,)], expected.value, expected.bound)

    @property
    def work(self) -> tuple[str, int]:
        """What is counted against the chip's rate, besides bytes."""
        elements = self.batch * self.length * self.channels
        return "exponentials", elements * (self.state + 1 + 2 * self.z)  # one for a softplus, two for a silu

    @property
    def useful_bytes(self) -> int:
        tokens = self.batch * self.length
        return ((3 + self.z) * tokens * self.channels + 2 * tokens * self.state) * _BYTES[self.dtype]

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        return _least(limits, self.work, self.useful_bytes)


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

    def check(self, inputs: dict[str, Any], result: Any, *, bounded: bool = True) -> None:
        """What is no sum over channels, for a few of them, at the last steps, against the oracle."""
        del bounded  # these have no bound
        interval = max(0, self.length - CHECKED) // cuscan.STATE_INTERVAL
        channels, wide = self.cut(inputs, interval * cuscan.STATE_INTERVAL)
        wide["h0"] = _host(inputs["states"][:1, interval, :2]).astype(np.float64)
        expected = oracle.selective_scan_vjp(**wide)
        for name in ("u", "delta"):
            _assert_close(_host(getattr(result, name)[channels]), expected[name], self.dtype)

    @property
    def useful_bytes(self) -> int:
        tokens, item = self.batch * self.length, _BYTES[self.dtype]
        states = tokens // cuscan.STATE_INTERVAL * self.channels * self.state * 4
        return ((5 + 2 * self.z) * tokens * self.channels + 4 * tokens * self.state) * item + states

    @property
    def work(self) -> tuple[str, int]:
        """13 FP32 operations an element."""
        return "operations", 13 * self.batch * self.length * self.channels * self.state

    @property
    def slots(self) -> int:
        """Lanes that an instruction takes, 22 an element: those of the recurrences and the sums over channels."""
        return 22 * self.batch * self.length * self.channels * self.state


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
        return {"layout": "", "batch": self.batch, "length": 1, "channels": self.channels, "state": self.state}

    def check(self, inputs: dict[str, Any], result: Any, *, bounded: bool = True) -> None:
        """Another step from where the first one went, for a few channels, against float64."""
        del result, bounded
        few, first = (slice(None), slice(0, 2)), inputs["state"].copy()
        y = cuscan.selective_state_update(**inputs)
        wide = {name: _host(inputs[name][few]).astype(np.float64) for name in ("x", "dt", "z")}
        wide |= {name: _host(inputs[name][:2]).astype(np.float64) for name in ("A", "D", "dt_bias")}
        wide |= {name: _host(inputs[name]).astype(np.float64) for name in ("B", "C")}
        expected = cuscan.selective_state_update(_host(first[few]).astype(np.float64), **wide, dt_softplus=True)
        _assert_close(_host(y[few]), expected, self.dtype)

    @property
    def useful_bytes(self) -> int:
        sequence = 4 * self.batch * self.channels + 2 * self.batch * self.state
        return 8 * self.batch * self.channels * self.state + sequence * _BYTES[self.dtype]

    @property
    def work(self) -> tuple[str, int]:
        """One exponential an element."""
        return "exponentials", self.batch * self.channels * self.state

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        return _least(limits, self.work, self.useful_bytes)


@dataclass(frozen=True)
class Linear:
    """linear_scan along `axis` of an array of `shape`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str = "float32"
    scalar: bool = False  # the gate is a number
    op: str = "linear_scan"
    direction: str = "forward"

    def inputs(self, cupy: Any, seed: int = 0) -> dict[str, Any]:
        made = linear_arguments(cupy, self.shape, self.axis, self.dtype, seed)
        return made | {"a": 0.875} if self.scalar else made

    def call(self, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: cuscan.linear_scan(**inputs)

    def row(self) -> dict[str, Any]:
        """Time is the middle axis ("bld") or the last ("bdl")."""
        others = [size for d, size in enumerate(self.shape) if d != self.axis]
        batch, channels = (1, 1, *others)[-2:]
        layout = "bdl" if self.axis == len(self.shape) - 1 else "bld"
        sizes = {"layout": layout, "batch": batch, "length": self.length, "channels": channels, "state": 1}
        return sizes | {"shape": list(self.shape), "axis": self.axis, "scalar": self.scalar}

    @property
    def length(self) -> int:
        """Steps of a row."""
        return self.shape[self.axis]

    def check(self, inputs: dict[str, Any], result: Any, *, bounded: bool = True) -> None:
        """A few rows: their first steps against the oracle and its bound, up to 2**22 against float64."""
        rows = tuple(slice(0, 1 << 22) if d == self.axis else slice(0, 2) for d in range(len(self.shape)))
        a, b = (x if isinstance(x, float) else _host(x[rows]).astype(np.float64) for x in (inputs["a"], inputs["b"]))
        h = _host(result[rows])
        _assert_close(h, cuscan.linear_scan(a, b, axis=self.axis), self.dtype)
        if not bounded:
            return
        first = tuple(slice(0, CHECKED) if d == self.axis else slice(None) for d in range(len(self.shape)))
        expected = oracle.linear_scan(np.broadcast_to(a, b.shape)[first], b[first], axis=self.axis)
        oracle.assert_scan_close(h[first], expected.value, expected.bound)

    @property
    def useful_bytes(self) -> int:
        return (3 - self.scalar) * int(np.prod(self.shape, dtype=np.int64)) * _BYTES[self.dtype]

    @property
    def work(self) -> tuple[str, int]:
        """One fused multiply-add a step."""
        return "operations", int(np.prod(self.shape, dtype=np.int64))

    def least(self, limits: Limits) -> tuple[float, str]:
        """Seconds, and what binds."""
        return _least(limits, self.work, self.useful_bytes)


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

    def check(self, inputs: dict[str, Any], result: Any, *, bounded: bool = True) -> None:
        """A few rows: the last 2**20 steps against float64, the very last ones against the oracle."""
        del bounded
        for steps, vjp in ((1 << 20, cuscan.linear_scan_vjp), (CHECKED, oracle.linear_scan_vjp)):
            rows = tuple(slice(-steps, None) if d == self.axis else slice(0, 2) for d in range(len(self.shape)))
            wide = [_host(inputs[name][rows]).astype(np.float64) for name in ("a", "h", "grad_h")]
            expected = vjp(*wide, axis=self.axis)
            grad_a, grad_b = (expected["a"], expected["b"]) if isinstance(expected, dict) else expected[:2]
            later = tuple(slice(1, None) if d == self.axis else slice(None) for d in range(len(self.shape)))
            _assert_close(_host(result.b[rows]), grad_b, self.dtype)
            _assert_close(_host(result.a[rows])[later], grad_a[later], self.dtype)

    @property
    def useful_bytes(self) -> int:
        return 5 * int(np.prod(self.shape, dtype=np.int64)) * _BYTES[self.dtype]

    @property
    def work(self) -> tuple[str, int]:
        """A fused multiply-add and a product a step."""
        return "operations", 2 * int(np.prod(self.shape, dtype=np.int64))


Load = Selective | Update | Linear


def _least(limits: Limits, work: tuple[str, int], useful_bytes: int) -> tuple[float, str]:
    """Seconds that the chip needs for the work and for the bytes, the larger; and which it is."""
    name, count = work
    rate = limits.exponentials if name == "exponentials" else limits.multiply_adds
    return max((count / rate, name), (useful_bytes / limits.copy, "bytes"))


def _assert_close(actual: Any, expected: Any, dtype: str) -> None:
    """Within the rounding of the result's type, at the largest value: a wrong order or a lost step is far beyond."""
    scale = np.abs(expected).max()
    error = np.abs(actual.astype(np.float64) - expected).max()
    if not error <= (1e-4 + (2**-8 if dtype == "bfloat16" else 0)) * scale:
        raise AssertionError(f"largest error {error:.3g} at a scale of {scale:.3g}")


def _host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.get()


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


TARGETS = (
    (8, 4096, 1024, 16),
    (8, 2048, 2048, 16),
    (1, 2048, 5120, 16),
    (1, 65536, 2048, 16),
    (1, 65536, 256, 16),
    (1, 1048576, 64, 16),
    (4, 4096, 1024, 64),
    (2, 4096, 1024, 128),
)
FIRST = TARGETS[0]
SELECTIVE = (
    *(Selective(*sizes) for sizes in TARGETS),
    *(Selective(*sizes, dtype="float32") for sizes in TARGETS),
    Selective(4096, 16, 1024, 16),
    Selective(64, 512, 2048, 16),
    Selective(256, 4, 2048, 16, h0=True),
    Selective(*FIRST, layout="bdl"),
    Selective(*FIRST, z=True),
    Selective(*FIRST, h0=True, last=True),
    Selective(*FIRST, states=True),
    Selective(*FIRST, mask=True),
    # The same tokens packed and in rows of equal length.
    Selective(1, 32768, 1024, 16, sequences=8),
    Selective(1, 32768, 1024, 16, sequences=64),
    Selective(1, 32768, 1024, 16, sequences=64, h0=True),
    Selective(64, 512, 1024, 16),
    Selective(1, sum(SENTENCES), 5120, 16, sequences=64, text=True),
    Selective(64, -(-sum(SENTENCES) // 64), 5120, 16),
)
SELECTIVE_BACKWARD = (
    *(SelectiveBackward(*sizes) for sizes in TARGETS),
    SelectiveBackward(4096, 16, 1024, 16),
    SelectiveBackward(64, 512, 2048, 16),
    SelectiveBackward(256, 4, 2048, 16, h0=True),
    SelectiveBackward(*FIRST, dtype="float32"),
    SelectiveBackward(*FIRST, layout="bdl"),
    SelectiveBackward(*FIRST, z=True),
    SelectiveBackward(*FIRST, mask=True),
)
LINEAR = (
    *(Linear((8, length, 1536), 1) for length in (4096, 16384, 65536, 1024)),
    *(Linear((8, 1536, length), 2) for length in (4096, 16384, 65536, 1024)),
    Linear((8, 4096, 1536), 1, dtype="bfloat16"),
    Linear((8, 1536, 4096), 2, dtype="bfloat16"),
    Linear((1, 131072, 512), 1),
    Linear((1, 16, 4194304), 2),
    Linear((1 << 28,), 0),
    Linear((1 << 27, 2), 0),
    Linear((1000000, 2), 0),
)
SCALAR = (Linear((12288, 4096), 1, scalar=True), Linear((1 << 26,), 0, scalar=True))
LINEAR_BACKWARD = tuple(LinearBackward(load.shape, load.axis, load.dtype) for load in LINEAR)
UPDATE = (Update(256, 5120, 16), Update(1, 5120, 16), Update(1024, 5120, 16))
# Time against length, with the target of 4096 steps.
LENGTHS = tuple(
    make(8, length, 1024, 16) for make in (Selective, SelectiveBackward) for length in (256, 1024, 16384, 65536)
)
LOADS: tuple[tuple[Load, ...], ...] = (
    SELECTIVE, SELECTIVE_BACKWARD, LINEAR, LINEAR_BACKWARD, UPDATE, SCALAR, LENGTHS
)  # fmt: skip
