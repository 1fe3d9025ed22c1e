"""Calls made ready: what calls of one signature launch, checked, planned and packed once.

The signature of a call is all that its checks, its plan and its packed arguments depend on, except addresses: of each
array the kind, device, dtype, shape, strides and address modulo 16, and the options. The first call of a signature
makes it ready: everything is checked, and the launches are recorded with made-up addresses. Every call, the first
too, then fills in its own addresses and launches. What depends on addresses themselves, that nothing which is written
overlaps anything else, is looked at in each call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from . import _arrays, _compile
from ._arrays import Array, Call, CupyPlace, Modules, Place, _address, _bounds, _overlap, host_place
from ._plan import DeviceLimits, _forced
from ._source import KernelSource

Ready = TypeVar("Ready")
Arrays = Sequence[Any]  # of an argument that was not given, None


class Cache(Generic[Ready]):
    """What was made ready, by signature. Reading takes no lock; where there is too much, the oldest goes."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._ready: dict[Hashable, Ready] = {}
        self._lock = threading.Lock()

    def get(self, signature: Hashable) -> Ready | None:
        """What is ready for this signature."""
        try:
            return self._ready.get(signature)
        except TypeError:  # an option that cannot be hashed, and will be refused
            return None

    def put(self, signature: Hashable, ready: Ready) -> Ready:
        """Remember and give it."""
        with self._lock:
            if len(self._ready) >= self._size:
                del self._ready[next(iter(self._ready))]
            self._ready[signature] = ready
        return ready


# Set while the arrays of calls are torch's tensors on a GPU: interop.torch's _Gpu, which reads and makes them.
tensor_place: ContextVar[Any] = ContextVar("tensor_place", default=None)


class Team(NamedTuple):
    """The ranks that share a call: this one's shard, how they talk, and how long one waits for the others."""

    shard: Any  # _shards.Shard
    communicator: Any
    timeout: float


# Set while a call is one of several over shards of the time axis.
team: ContextVar[Team | None] = ContextVar("team", default=None)


class Given:
    """The arrays of one call, with their addresses and the call's signature.

    Attributes
    ----------
    names, arrays, addresses
        Of the arguments, in one order. An argument that is None has address 0.
    read_only : tuple of str
        Names of the arrays that may not be written to.
    signature : tuple
        Hashable as far as the options are.
    device : int, optional
        Of CuPy's arrays.
    host : Place, optional
        Where NumPy arrays run kernels; None where they run in reference.py.
    in_numpy : bool
        Whether reference.py does it.
    torch : interop.torch._Gpu, optional
        Where the arrays are tensors: `tensors`, of which `arrays` are made only where a call needs them.

    Other arrays than NumPy's and CuPy's are adopted by `_arrays.Call`, after `refuse(arguments)`.
    """

    host: Any = None
    in_numpy = False
    tensors: Any = None
    _adopted: Call | None = None

    def __init__(
        self,
        names: Sequence[str],
        arrays: Arrays,
        options: Hashable,
        refuse: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.names = names
        self.torch = tensor_place.get()
        if self.torch is not None:
            self._read_tensors(arrays, options)
            return
        if self._read(arrays, options, ()):
            return
        arguments = dict(zip(names, arrays, strict=True))
        for name, x in arguments.items():
            if _arrays.is_python_scalar(x):
                raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        refuse(arguments)
        self._adopted = Call(**arguments)
        read_only = tuple(name for name, x in arguments.items() if _is_read_only(x))
        self._read(tuple(map(self._adopted.array, names)), options, read_only)

    def _read(self, arrays: Arrays, options: Hashable, read_only: tuple[str, ...]) -> bool:
        """Whether all arrays are NumPy's or CuPy's; then everything is set."""
        cupy_array = getattr(sys.modules.get("cupy"), "ndarray", ())
        device = None
        addresses = []
        signature: list[Hashable] = []
        for x in arrays:
            if x is None:
                addresses.append(0)
                signature.append(None)
            elif isinstance(x, cupy_array):
                data = x.data
                address, device = data.ptr, data.device_id
                addresses.append(address)
                signature += (device, x.dtype, x.shape, x.strides, address & 15)
            elif isinstance(x, np.ndarray):
                address = x.ctypes.data
                addresses.append(address)
                where = "writable" if x.flags.writeable else "read-only"
                signature += (where, x.dtype, x.shape, x.strides, address & 15)
            else:
                return False
        self.arrays, self.addresses, self.device = arrays, addresses, device
        if device is None:
            if factory := host_place.get():
                self.host = factory()
                signature.append(self.host.limits)
            self.in_numpy = factory is None
        self._sign(signature, options, read_only)
        return True

    def _read_tensors(self, tensors: Arrays, options: Hashable) -> None:
        addresses = []
        signature: list[Hashable] = ["torch", self.torch.index]
        for x in tensors:
            if x is None:
                addresses.append(0)
                signature.append(None)
            else:
                address = x.data_ptr()
                addresses.append(address)
                signature += (x.dtype, x.shape, x.stride(), address & 15)
        self.tensors, self.addresses, self.device = tensors, addresses, self.torch.index
        self._sign(signature, options, ())

    def _sign(self, signature: list[Hashable], options: Hashable, read_only: tuple[str, ...]) -> None:
        forced, shared = _forced.get(), team.get()
        extras = (tuple(forced.items()) if forced else (), None if shared is None else shared.shard)
        self.signature = (*signature, options, read_only, extras)
        self._read_only = read_only

    @cached_property
    def arrays(self) -> Arrays:
        """Of tensors, CuPy's over the same memory."""
        return [x if x is None else self.torch.array(x) for x in self.tensors or ()]

    def values(self, number: int) -> Array | None:
        """An argument as NumPy's where values are checked: a GPU has to wait, so there with CUSCAN_CHECK=1 only."""
        x = (self.tensors or self.arrays)[number]
        if x is None or isinstance(x, np.ndarray):
            return x
        if os.environ.get("CUSCAN_CHECK") != "1":
            return None
        return x.get() if self.tensors is None else x.cpu().numpy()

    @cached_property
    def read_only(self) -> tuple[str, ...]:
        """Names of the arrays that may not be written to."""
        return self._read_only + tuple(
            name
            for name, x in zip(self.names, self.arrays, strict=True)
            if isinstance(x, np.ndarray) and not x.flags.writeable
        )

    def by_name(self) -> dict[str, Any]:
        """The arrays by name."""
        return dict(zip(self.names, self.arrays, strict=True))

    def check(self, required: Sequence[str]) -> dict[str, Any]:
        """All arrays are of one kind, on one device, and the required ones are there; gives them by name."""
        arrays = self.by_name()
        for name in required:
            if arrays[name] is None:
                raise TypeError(f"{name} must be an array, got NoneType")
        if self._adopted is None:
            Call(**arrays)
        return arrays

    @property
    def limits(self) -> DeviceLimits:
        """Of the device that plans are made for."""
        if self.device is None:
            limits: DeviceLimits = self.host.limits
            return limits
        return _compile.cupy_limits(self.device)

    def place(self, *, on_tensors: bool) -> Any:
        """Where the call works, if that needs nothing else; on tensors, or on CuPy's arrays of them."""
        if self.device is None:
            return self.host
        cupy = sys.modules["cupy"]
        if self._adopted is None and cupy.cuda.runtime.getDevice() == self.device:
            if self.tensors is None:
                return CupyPlace(cupy, self.device, ())
            if on_tensors and watcher is None:  # which looks at CuPy's current stream
                return self.torch
        return None

    @contextlib.contextmanager
    def current(self, *, on_tensors: bool = False) -> Iterator[Any]:
        """Where the call works, its device made current; adopted arrays are seen to outlive the launches."""
        if self.device is None:
            yield self.host
        elif self.tensors is not None:
            with self.torch.current():
                yield self.torch if on_tensors else CupyPlace(sys.modules["cupy"], self.device, ())
        elif self._adopted is not None:
            with self._adopted.place() as place:
                yield place
        else:
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                yield CupyPlace(cupy, self.device, ())


def _is_read_only(x: Any) -> bool:
    return bool(getattr(x, "__cuda_array_interface__", {"data": (0, False)})["data"][1])


# --- what a signature launches ------------------------------------------------------------------------------------


def start(
    function: Any, grid: tuple[int, ...], block: tuple[int, ...], packed: Any, shared: int = 0, stream: int = 0
) -> None:
    """Launch a kernel that takes one struct, as bytes or as words that may be changed; CuPy's on this stream."""
    if isinstance(function, _compile.Kernel):
        function.start(grid, block[0], packed, shared, stream)
        return
    if shared > _compile.STATIC_LIMIT and function.max_dynamic_shared_size_bytes < shared:
        function.max_dynamic_shared_size_bytes = shared
    struct = np.ndarray((), _struct_type(memoryview(packed).nbytes), packed)
    function(grid, block, (struct,), shared_mem=shared)


@cache
def _struct_type(size: int) -> np.dtype[Any]:
    return np.dtype(f"V{size}")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that takes one struct, packed as far as addresses are not in it."""

    source: KernelSource = field(repr=False)
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    words: array[int] = field(repr=False)  # of the struct
    addresses: tuple[tuple[int, int, int], ...]  # (word, array, bytes from where that begins)

    def run(self, place: Any, _: Arrays, addresses: Sequence[int]) -> None:
        """Launch with these addresses: of the arguments, then of what is allocated."""
        words = self.words[:]
        for word, number, offset in self.addresses:
            words[word] = addresses[number] + offset
        function = place.modules.get_function(self.source, self.name)
        start(function, self.grid, self.block, words, self.shared, getattr(place, "stream", 0))


@dataclass(frozen=True)
class View:
    """An array from its first item on, with these axes."""

    array: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, arrays: Arrays) -> Array:
        """The view, of one of these arrays."""
        return _arrays.view(arrays[self.array], self.shape, self.strides)


@dataclass(frozen=True)
class Copy:
    """Items copied, or set to a number, between launches."""

    to: View
    value: View | complex

    @property
    def views(self) -> tuple[View, ...]:
        """Of the arrays that it needs."""
        return (self.to, self.value) if isinstance(self.value, View) else (self.to,)

    def run(self, place: Place, arrays: Arrays, _: Sequence[int]) -> None:
        """Copy between these arrays."""
        place.assign(self.to.of(arrays), self.value.of(arrays) if isinstance(self.value, View) else self.value)


@dataclass(frozen=True)
class Do:
    """What is done with whole arrays between launches, of which `writes` are written."""

    function: Callable[..., None]
    writes: tuple[View, ...]
    reads: tuple[View, ...]
    options: tuple[tuple[str, Hashable], ...]

    @property
    def views(self) -> tuple[View, ...]:
        """Of the arrays that it needs."""
        return self.writes + self.reads

    def run(self, place: Place, arrays: Arrays, _: Sequence[int]) -> None:
        """Do it with these arrays."""
        writes = [each.of(arrays) for each in self.writes]
        self.function(*writes, *(each.of(arrays) for each in self.reads), **dict(self.options))
        place.keep(*writes)


def do(
    place: Place, function: Callable[..., None], writes: Sequence[Array], reads: Sequence[Array], **options: Any
) -> None:
    """function(*writes, *reads, **options), in the order of the launches."""
    if not isinstance(place, Recorder):
        function(*writes, *reads, **options)
        place.keep(*writes)
        return
    written, read = (tuple(place.view(x) for x in arrays) for arrays in (writes, reads))
    place.steps.append(Do(function, written, read, tuple(options.items())))


# What runs the steps of every call, of all threads, while a cuscan.trace is open.
watcher: Callable[[Launches, Given, Any, Arrays, Sequence[int]], None] | None = None


class Told:
    """How many signatures were made ready, and which plans CUSCAN_LOG=plan has printed."""

    ready = 0
    plans: ClassVar[set[Hashable]] = set()

    @classmethod
    def tell(cls, launches: Launches) -> None:
        cls.ready += 1
        if os.environ.get("CUSCAN_LOG") != "plan":
            return
        names = ", ".join(step.name for step in launches.steps if isinstance(step, Launch))
        for plan in launches.plans:
            if (names, plan) not in cls.plans:
                cls.plans.add((names, plan))
                print(f"cuscan: {plan}\n        launches {names}", file=sys.stderr)  # noqa: T201 asked for


def chosen(place: Place, plan: Hashable) -> None:
    """Note the plan of what is being recorded."""
    if isinstance(place, Recorder):
        place.plans.append(plan)


# Made-up addresses: as numbers too large for a size or a stride, as bits of floating point no number.
_MADE_UP = (0x7FF4 << 48, 0x7FF2 << 48)
_APART = 1 << 42  # bytes from one to the next


class Recorder:
    """A Place where nothing runs: what is allocated, copied and launched is noted down.

    Its arrays are NumPy's at made-up addresses, never read, number i at base + (i + 1/2) * _APART: first those of the
    arguments, as far beyond as an argument is beyond a multiple of 16, then what is allocated.
    """

    def __init__(self, given: Given, base: int) -> None:
        self.modules: Modules = self
        self.limits = given.limits
        self.steps: list[Launch | Copy | Do] = []
        self.plans: list[Hashable] = []
        self.fresh: list[Fresh] = []
        self.base = base
        self.starts: list[int] = []
        self.arrays: dict[str, Any] = {}
        for name, x, address in zip(given.names, given.arrays, given.addresses, strict=True):
            where = self._next_start(address % 16)
            self.arrays[name] = x if x is None else _arrays.shadow(where, x.shape, x.strides, x.dtype)

    def _next_start(self, beyond: int) -> int:
        self.starts.append(self.base + len(self.starts) * _APART + _APART // 2 + beyond)
        return self.starts[-1]

    def number(self, x: Array) -> int:
        """Which array begins where this one does."""
        return self.starts.index(_address(x))

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self.fresh.append((shape, np.dtype(dtype)))
        return _arrays.shadow(self._next_start(0), shape, None, self.fresh[-1][1])

    def assign(self, to: Array, value: Array | complex) -> None:
        self.steps.append(Copy(self.view(to), self.view(value) if isinstance(value, np.ndarray) else value))

    def view(self, x: Array) -> View:
        """What is meant by one of its arrays."""
        return View(self.number(x), x.shape, x.strides)

    def keep(self, *arrays: Array) -> None:
        pass

    def pointer(self, array: Array) -> int:
        return _address(array)

    def done(self) -> None:
        pass

    def get_function(self, source: KernelSource, name: str) -> Callable[..., None]:
        return _Recorded(self, source, name)


@dataclass
class _Recorded:
    """A kernel whose launches are noted down, its addresses told from the other words of its struct."""

    recorder: Recorder
    source: KernelSource
    name: str
    max_dynamic_shared_size_bytes: int = 0

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Arrays, *, shared_mem: int) -> None:
        words = array("q", arguments[0].tobytes())
        base, starts = self.recorder.base, self.recorder.starts
        addresses = []
        for word, value in enumerate(words):
            if value >= base and (number := (value - base) // _APART) < len(starts):
                addresses.append((word, number, value - starts[number]))
                words[word] = 0
        launch = Launch(self.source, self.name, grid, block, shared_mem, words, tuple(addresses))
        self.recorder.steps.append(launch)


Fresh = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
_ALIGNED = 512  # bytes, as CuPy and torch allocate


def _joined(fresh: Sequence[Fresh], apart: Sequence[bool]) -> tuple[tuple[Fresh, ...], tuple[tuple[int, int], ...]]:
    """What is allocated for these arrays, those that are not apart as one, the last; and where in it each is."""
    allocated: list[Fresh] = []
    parts, size = [], 0
    for (shape, dtype), alone in zip(fresh, apart, strict=True):
        if alone:
            parts.append((len(allocated), 0))
            allocated.append((shape, dtype))
        else:
            parts.append((-1, size))
            size += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    if not all(apart):
        allocated.append(((size,), np.dtype(np.uint8)))
    return tuple(allocated), tuple(parts)


@dataclass(frozen=True)
class Launches:
    """What all calls of a signature do. Arrays are meant by their number: the arguments, then what is allocated."""

    changed: tuple[int, ...]  # arguments that are read and written
    written: tuple[int, ...]  # arguments that are only written
    exact: tuple[int, ...]  # arguments that may be what is written, at the same address
    hint: str  # what to say where something else overlaps
    spans: tuple[tuple[int, int], ...]  # each argument's bytes, counted from its address
    fresh: tuple[Fresh, ...] = ()  # what is allocated
    allocated: tuple[Fresh, ...] = ()  # the same, with all in one that only kernels see
    parts: tuple[tuple[int, int], ...] = ()  # in which of these each of those is, and from which byte on
    steps: tuple[Launch | Copy | Do, ...] = ()
    results: tuple[int, ...] = ()
    plans: tuple[Hashable, ...] = ()  # of the call itself first, then of what it is made of

    @classmethod
    def of(
        cls, given: Given, *, changed: Sequence[str] = (), written: Sequence[str] = (), may_be: Sequence[str] = ()
    ) -> Launches:
        """None yet. An argument that is written may be exactly one of `may_be`."""

        def numbers(names: Sequence[str]) -> tuple[int, ...]:
            return tuple(i for i, name in enumerate(given.names) if name in names and given.arrays[i] is not None)

        targets = [given.arrays[i] for i in numbers(written)]
        exact = [i for i in numbers(may_be) if any(_arrays.alike(given.arrays[i], x) for x in targets)]
        hint = f"; it may only be exactly {' or '.join(may_be)}" if may_be else ""
        spans = []
        for x in given.arrays:
            low, high = (0, 0) if x is None or x.size == 0 else (bound - _address(x) for bound in _bounds(x))
            spans.append((low, high))
        return cls(numbers(changed), numbers(written), tuple(exact), hint, tuple(spans))

    def recorded(self, given: Given, body: Callable[[Place, dict[str, Any]], Sequence[Array | None]]) -> Launches:
        """With what `body` does at a place with the given arrays; `run` gives those of its results that are not None.

        None where NumPy's own code does it.
        """
        if given.in_numpy:
            return self
        recorded = []
        # The CPU executor looks whether other made-up addresses make a difference.
        for base in _MADE_UP if given.host else _MADE_UP[:1]:
            place = Recorder(given, base)
            results = [place.number(x) for x in body(place, place.arrays) if x is not None]
            recorded.append((tuple(place.fresh), tuple(place.steps), tuple(results)))
        if recorded[0] != recorded[-1]:
            raise AssertionError("what is launched depends on addresses otherwise than by having them in a struct")
        fresh, steps, numbers = recorded[0]
        seen = {*numbers, *(view.array for step in steps if not isinstance(step, Launch) for view in step.views)}
        # The CPU executor looks after each by itself.
        apart = [given.host is not None or i in seen for i in range(len(given.arrays), len(given.arrays) + len(fresh))]
        allocated, parts = _joined(fresh, apart)
        launches = replace(self, fresh=fresh, allocated=allocated, parts=parts, steps=steps, results=numbers,
                           plans=tuple(place.plans))  # fmt: skip
        Told.tell(launches)
        return launches

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int, int, int], ...]:
        """Arguments one of which is written, and how far the second may begin before and after the first."""
        spans = self.spans
        return tuple(
            (target, i, spans[target][0] - high, spans[target][1] - low)
            for target in (*self.changed, *self.written)
            for i, (low, high) in enumerate(spans)
            if i != target and low < high
        )

    def check_apart(self, given: Given) -> None:
        """Nothing that is written overlaps another argument."""
        addresses = given.addresses
        for target, i, before, after in self._pairs:
            if (
                before < addresses[i] - addresses[target] < after
                and not (i in self.exact and addresses[i] == addresses[target])
                and _overlap(given.arrays[target], given.arrays[i])
            ):
                raise ValueError(f"{given.names[target]} overlaps {given.names[i]} in memory{self.hint}")

    @cached_property
    def _launches_only(self) -> bool:
        return all(isinstance(step, Launch) for step in self.steps)

    def run(self, given: Given) -> tuple[Array, ...]:
        """Allocate, launch, and give the results: of tensors, tensors, but CuPy's arrays where there is to copy."""
        place = given.place(on_tensors=self._launches_only)
        if place is not None:
            return self._run(given, place)
        with given.current(on_tensors=self._launches_only) as place:
            return self._run(given, place)

    def _run(self, given: Given, place: Any) -> tuple[Array, ...]:
        if given.device is None:  # the CPU executor checks what kernels touch
            apart = (*self.changed, *self.written)
            place.keep(*(x for i, x in enumerate(given.arrays) if x is not None and i not in apart))
            for i in self.changed:
                place.update(given.arrays[i])
            for i in self.written:
                place.pointer(given.arrays[i])
        arrays: list[Any] = [*(given.tensors if place is given.torch else given.arrays)]
        addresses = [*given.addresses]
        made = [place.allocate(shape, dtype) for shape, dtype in self.allocated]
        for i, start in self.parts:
            arrays.append(made[i])
            addresses.append(place.pointer(made[i]) + start)
        if watcher is not None:
            watcher(self, given, place, arrays, addresses)
        else:
            for step in self.steps:
                step.run(place, arrays, addresses)
        return tuple([arrays[i] for i in self.results])
