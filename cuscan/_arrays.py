"""Arrays in and out: kinds, dtype rules, checks and their messages, and the Place where a call works.

Nothing here imports CuPy unless the caller has CuPy arrays. A kernel's view of an array is its address and its
strides in bytes, which NumPy and CuPy arrays both have.
"""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np

from . import _compile
from ._plan import DeviceLimits

Array = Any  # a NumPy or CuPy array; the two share every attribute used here

# Run-time names of item types; cuda_src/item_types.cuh has the same numbers.
ITEM_CODE = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3, "complex64": 4, "complex128": 5}
REAL = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")


def item_name(x: Array) -> str:
    """Name of an array's dtype."""
    return _name_of(x.dtype)


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # NumPy makes the name anew each time, which takes microseconds


def accumulation(item: str) -> str:
    """Name of the type that items of this type are computed in."""
    return "float32" if item in ("float16", "bfloat16") else item


def is_python_scalar(x: object) -> bool:
    """Python and NumPy scalars, which take the type of the arrays beside them."""
    return _is_scalar_type(type(x))  # type: ignore[arg-type] # mypy takes types for unhashable


@cache
def _is_scalar_type(kind: type) -> bool:
    return issubclass(kind, (numbers.Number, np.generic)) and not issubclass(kind, (bool, np.bool_))


# --- Place -------------------------------------------------------------------------------------------------------


class Modules(Protocol):
    """Where kernels come from: CuPy, or the CPU executor."""

    def get_function(self, source: Any, name: str) -> Callable[..., None]:
        """Entry point `name` of the module that `source` compiles to."""


class Place(Protocol):
    """One device and stream with one allocator: where a call works."""

    modules: Modules

    @property
    def limits(self) -> DeviceLimits:
        """What plans are made for."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised C-contiguous array."""

    def assign(self, to: Array, value: Array | complex) -> None:
        """Copy items, or set them to a number."""

    def keep(self, *arrays: Array) -> None:
        """The inputs of a call, before its launches."""

    def pointer(self, array: Array) -> int:
        """Address of the first item."""

    def done(self) -> None:
        """After the last launch of a call."""


class Workspace:
    """Keeps what calls allocate while a CUDA graph is captured: the graph's launches have the addresses in them.

    Without one, it is kept as long as the process runs. ::

        with cuscan.Workspace() as workspace, stream:
            stream.begin_capture()
            y = cuscan.selective_scan(u, delta, A, B, C)
            graph = stream.end_capture()
        graph.launch(stream)    # reads what u, delta, ... hold now, and writes y
        workspace.release()     # after the last launch

    The inputs and results of a captured call must stay alive as well.
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._tokens: list[Token[Workspace]] = []

    def __enter__(self) -> Workspace:  # noqa: PYI034 Self is not in Python 3.10
        self._tokens.append(_workspace.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _workspace.reset(self._tokens.pop())

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(x.nbytes for x in self._arrays)

    def keep(self, *arrays: Array) -> None:
        """Hold on to arrays until `release`."""
        self._arrays += arrays

    def release(self) -> None:
        """Give the memory back; no graph that was captured with it may run any more."""
        self._arrays.clear()


_workspace: ContextVar[Workspace] = ContextVar("workspace", default=Workspace())  # noqa: B039 the process's own


class CupyPlace:
    """The device of the arrays, with CuPy's current stream and memory pool."""

    # Foreign inputs (DLPack, __cuda_array_interface__) stay referenced until an event after the launches has passed.
    _held: ClassVar[deque[tuple[Any, tuple[Array, ...]]]] = deque()

    def __init__(self, cupy: Any, device: int, foreign: tuple[Array, ...]) -> None:
        self._cupy = cupy
        self._device = device
        self._foreign = foreign
        stream = cupy.cuda.get_current_stream()
        self.stream = stream.ptr
        self._captured = _workspace.get() if stream.is_capturing() else None
        self.modules: Modules = _compile.cupy_modules(device)

    @property
    def limits(self) -> DeviceLimits:
        return _compile.cupy_limits(self._device)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = self._cupy.empty(shape, dtype)
        if self._captured is not None:
            self._captured.keep(array)
        return array

    def assign(self, to: Array, value: Array | complex) -> None:
        assign(to, value)

    def keep(self, *arrays: Array) -> None:
        pass

    def pointer(self, array: Array) -> int:
        return int(array.data.ptr)

    def done(self) -> None:
        if self._captured is not None:
            self._captured.keep(*self._foreign)
        elif self._foreign:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record()
            self._held.append((event, self._foreign))
            while self._held and self._held[0][0].done:
                self._held.popleft()


# Set while NumPy arrays are to run the kernels on the CPU executor instead of reference.py.
host_place: ContextVar[Callable[[], Place] | None] = ContextVar("host_place", default=None)


class ForeignError(TypeError):
    """An array of a framework that has gradients of its own, which would be lost silently."""

    def __init__(self, name: str, x: object, framework: str) -> None:
        super().__init__(f"{name} is a {type(x).__module__}.{type(x).__name__}, which cuscan.interop.{framework} takes")
        self.framework = framework


class Call:
    """The arrays of one call, of one kind, and the Place they belong to.

    Arguments come in by `array`; `place` is None where NumPy arrays run in reference.py.
    """

    def __init__(self, **arguments: Any) -> None:
        self.xp: Any = np
        self._arrays: dict[str, Array] = {}
        self._foreign: list[Array] = []
        self._device: int | None = None
        kinds: dict[str, str] = {}
        for name, x in arguments.items():
            if x is None or is_python_scalar(x):
                continue
            kinds[name], self._arrays[name] = self._import(name, x)
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
            raise TypeError(f"all arrays must be of one kind, but {listed}; nothing is moved between devices silently")
        if "CuPy" in kinds.values():
            self.xp = sys.modules["cupy"]
            devices = {name: int(x.device.id) for name, x in self._arrays.items()}
            if len(set(devices.values())) > 1:
                listed = ", ".join(f"{name} on device {d}" for name, d in devices.items())
                raise ValueError(f"all arrays must be on one device, but {listed}")
            self._device = next(iter(devices.values()))
        for name, x in self._arrays.items():
            if not x.dtype.isnative:
                raise TypeError(f"{name} must be of this machine's byte order, got {x.dtype.str}")

    def _import(self, name: str, x: Any) -> tuple[str, Array]:
        module = type(x).__module__.partition(".")[0]
        if isinstance(x, np.ndarray):
            return "NumPy", x
        if module == "cupy" and hasattr(x, "data"):
            return "CuPy", x
        if module in ("torch", "jax", "jaxlib"):
            raise ForeignError(name, x, module.removesuffix("lib"))
        if hasattr(x, "__cuda_array_interface__"):
            return "CuPy", self._adopt(_cupy(f"{name} is on a GPU").asarray(x))
        if hasattr(x, "__dlpack__"):
            if x.__dlpack_device__()[0] == 1:
                return "NumPy", np.from_dlpack(x)
            return "CuPy", self._adopt(_cupy(f"{name} is on a GPU").from_dlpack(x))
        raise TypeError(
            f"{name} must be a CuPy or NumPy array, or an object with __dlpack__ or __cuda_array_interface__, "
            f"got {type(x).__name__}"
        )

    def _adopt(self, x: Array) -> Array:
        self._foreign.append(x)
        return x

    def array(self, name: str) -> Array:
        """The argument as an array, or None where it was None or a scalar."""
        return self._arrays.get(name)

    @contextlib.contextmanager
    def place(self) -> Iterator[Place | None]:
        """Make the arrays' device current and give the Place, or None for reference.py."""
        if self._device is None:
            factory = host_place.get()
            yield factory() if factory else None
            return
        with self.xp.cuda.Device(self._device):
            place = CupyPlace(self.xp, self._device, tuple(self._foreign))
            yield place
            place.done()


def _cupy(why: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"{why}, which needs CuPy: install cuscan with the extra cuda12 or cuda13") from error
    return cupy


# --- checks ------------------------------------------------------------------------------------------------------


def check_item(name: str, x: Array, allowed: Sequence[str]) -> str:
    """Name of x's dtype, which must be one of `allowed`."""
    item = item_name(x)
    if item not in allowed:
        raise TypeError(f"{name} must be {_either(allowed)}, got {item}")
    return item


def check_same_item(first: tuple[str, Array], second: tuple[str, Array], allowed: Sequence[str] = ()) -> None:
    """The second's dtype must be the first's, or one of `allowed`."""
    (name, x), (other, y) = first, second
    if item_name(y) not in (item_name(x), *allowed):
        expected = _either([f"{name}'s {item_name(x)}", *(a for a in allowed if a != item_name(x))])
        raise TypeError(f"{other} must be {expected}, got {item_name(y)}")


def check_shape(name: str, x: Array, expected: tuple[int, ...], axes: str, hint: str = "") -> None:
    """x's shape must be `expected`, whose axes are named."""
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must have shape {axes} = {expected}, got {tuple(x.shape)}{hint}")


def check_flag(name: str, x: object) -> bool:
    """A flag is a bool: an array in its place is a shifted argument."""
    if x is True or x is False:
        return x
    if not isinstance(x, np.bool_):
        raise TypeError(f"{name} must be True or False, got {type(x).__name__}")
    return bool(x)


def check_limits(name: str, limits: Any) -> tuple[float, float] | None:
    """A range that delta is clipped to, as floats."""
    if limits is None:
        return None
    try:
        lowest, highest = (float(x) for x in limits)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of numbers, got {limits!r}") from None
    if not lowest <= highest:
        raise ValueError(f"{name} must be (lowest, highest) with lowest <= highest, got {limits!r}")
    return lowest, highest


def check_marks(mask: Array | None, reset: Array | None, cu_seqlens: Array | None) -> None:
    """mask and reset are bool, cu_seqlens (n+1,) integers."""
    for name, x in (("mask", mask), ("reset", reset)):
        if x is not None:
            check_item(name, x, ("bool",))
    if cu_seqlens is not None:
        check_item("cu_seqlens", cu_seqlens, ("int32", "int64"))
        if cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
            raise ValueError(f"cu_seqlens must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")


def check_offsets(cu_seqlens: np.ndarray[Any, Any], length: int) -> None:
    """Offsets ascend within the axis of time."""
    values = cu_seqlens.astype(np.int64)
    if values[0] < 0 or values[-1] > length:
        raise ValueError(f"cu_seqlens must lie in [0, {length}], got {values[0]} to {values[-1]}")
    if len(wrong := np.flatnonzero(values[1:] < values[:-1])):
        i = int(wrong[0])
        raise ValueError(f"cu_seqlens must not descend, got {values[i + 1]} at {i + 1} after {values[i]}")


def output_item(item: str, out_dtype: Any, out: Array | None, argument: str = "out_dtype") -> np.dtype[Any]:
    """Dtype of the result: out_dtype, else out's, else the input's, never a change between real and complex."""
    allowed = COMPLEX if item in COMPLEX else REAL
    if out_dtype is None:
        if out is not None:
            check_item("out", out, allowed)
            return _dtype(item_name(out))
        return _dtype(item)
    name = out_dtype if isinstance(out_dtype, str) else np.dtype(out_dtype).name
    if name not in allowed:
        raise TypeError(f"{argument} must be {_either(allowed)} for inputs of {item}, got {name}")
    if out is not None and item_name(out) != name:
        raise TypeError(f"out must have out_dtype's {name}, got {item_name(out)}")
    return _dtype(name)


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # whoever has bfloat16 arrays has it

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def check_out(out: Array, shape: tuple[int, ...]) -> None:
    """Out is writable and of this shape."""
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have the result's shape {shape}, got {tuple(out.shape)}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array")
    check_places("out", out)


def check_places(name: str, x: Array) -> None:
    """What is written to has a place for each item."""
    if x.size and 0 in _used_strides(x):
        raise ValueError(f"{name} must have a place for each item, got a broadcast view with strides {x.strides}")


def _address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def _used_strides(x: Array) -> list[int]:
    return [stride for stride, size in zip(x.strides, x.shape, strict=True) if size > 1]


def alike(x: Array, y: Array) -> bool:
    """Whether items of the same type lie in the same order, from wherever the two begin."""
    return bool(x.dtype == y.dtype and tuple(x.shape) == tuple(y.shape) and _used_strides(x) == _used_strides(y))


def _bounds(x: Array) -> tuple[int, int]:
    low = high = _address(x)
    for stride, size in zip(x.strides, x.shape, strict=True):
        low += min(0, stride * (size - 1))
        high += max(0, stride * (size - 1))
    return low, high + x.dtype.itemsize


def _overlap(x: Array, y: Array) -> bool:
    if x.size == 0 or y.size == 0:
        return False
    (x_low, x_high), (y_low, y_high) = _bounds(x), _bounds(y)
    if x_high <= y_low or y_high <= x_low:
        return False
    try:
        # The exact answer is a question about addresses alone, so NumPy can give it for device memory too.
        ours, theirs = (shadow(_address(each), each.shape, each.strides, each.dtype) for each in (x, y))
        return bool(np.shares_memory(ours, theirs, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def shadow(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """An array at an address that is not NumPy's, never read; C-contiguous without `strides`."""
    interface = {"version": 3, "data": (address, True), "shape": shape, "strides": strides}
    interface["typestr"] = f"|V{dtype.itemsize}"  # which NumPy has a name for
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)


def view(x: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """The same memory from x's first item on, with other axes."""
    if isinstance(x, np.ndarray):
        return np.lib.stride_tricks.as_strided(x, shape, strides)
    return type(x)(shape, x.dtype, x.data, strides)


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def usable(place: Place, *arrays: Array | None) -> list[Array]:
    """The inputs as a kernel can read them: copies of those whose items lie at odd addresses, all kept."""
    prepared = [x if x is None or is_aligned(x) else copy_of(place, x) for x in arrays]
    place.keep(*(x for x in prepared if x is not None))
    return prepared


def is_aligned(x: Array) -> bool:
    """Whether every item lies at a multiple of its size, as a kernel's loads and stores need."""
    size = x.dtype.itemsize
    return _address(x) % size == 0 and all(stride % size == 0 for stride in _used_strides(x))


def copy_of(place: Place, x: Array) -> Array:
    """A C-contiguous copy."""
    copy = place.allocate(tuple(x.shape), x.dtype)
    place.assign(copy, x)
    return copy


def assign(to: Array, value: Array | complex) -> None:
    """Copy items, at whatever addresses they are; CuPy's own copies fault on odd ones."""
    if isinstance(to, np.ndarray) or isinstance(value, (int, float, complex)):
        to[...] = value
    else:
        _bytes(to)[...] = _bytes(value)


def _bytes(x: Array) -> Array:
    """A CuPy array's bytes, along a last axis."""
    return type(x)((*x.shape, x.dtype.itemsize), np.uint8, x.data, (*x.strides, 1))


# --- layouts -----------------------------------------------------------------------------------------------------


def merge_axes(
    sizes: tuple[int, ...], strides: dict[str, tuple[int, ...]], by: str
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The fewest axes that walk the same items of all arrays, the one with `by`'s smallest stride last."""
    axes = [d for d, size in enumerate(sizes) if size != 1]
    axes.sort(key=lambda d: -abs(strides[by][d]))
    merged_sizes: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for d in axes:
        if merged_sizes and all(merged[name][-1] == sizes[d] * strides[name][d] for name in strides):
            merged_sizes[-1] *= sizes[d]
            for name in strides:
                merged[name][-1] = strides[name][d]
        else:
            merged_sizes.append(sizes[d])
            for name in strides:
                merged[name].append(strides[name][d])
    return tuple(merged_sizes), {name: tuple(values) for name, values in merged.items()}
