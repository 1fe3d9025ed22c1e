"""Calls made ready: what calls of one signature launch, checked, planned and packed once.

The signature of a call is all that its checks, its plan and its packed arguments depend on, except addresses: of each
array the kind, device, dtype, shape, strides and address modulo 16, and the options. The first call of a signature
makes it ready; later ones fill in their addresses and launch. What depends on addresses themselves, that nothing
which is written overlaps anything else, is looked at in each call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from . import _arrays
from ._arrays import Array, Call, CupyPlace, Place, _address, _bounds, _overlap, host_place
from ._plan import _forced
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

    Other arrays than NumPy's and CuPy's are adopted by `_arrays.Call`, after `refuse(arguments)`.
    """

    def __init__(
        self,
        names: Sequence[str],
        arrays: Arrays,
        options: Hashable,
        refuse: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.names = names
        self._adopted: Call | None = None
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
        device, where = None, None
        addresses = []
        signature: list[Hashable] = []
        for x in arrays:
            if x is None:
                addresses.append(0)
                signature.append(None)
                continue
            if isinstance(x, cupy_array):
                data = x.data
                address, device = data.ptr, data.device_id
                where = device
            elif isinstance(x, np.ndarray):
                address = x.ctypes.data
                where = "writable" if x.flags.writeable else "read-only"
            else:
                return False
            addresses.append(address)
            signature += (where, x.dtype, x.shape, x.strides, address & 15)
        self.arrays, self.addresses, self.device = arrays, addresses, device
        self.host: Place | None = None
        if device is None and (factory := host_place.get()):
            self.host = factory()
            signature.append(self.host.limits)
        forced = _forced.get()
        self.signature = (*signature, options, read_only, tuple(forced.items()) if forced else ())
        self._read_only = read_only
        return True

    @cached_property
    def read_only(self) -> tuple[str, ...]:
        """Names of the arrays that may not be written to."""
        return self._read_only + tuple(
            name
            for name, x in zip(self.names, self.arrays, strict=True)
            if isinstance(x, np.ndarray) and not x.flags.writeable
        )

    def check_kinds(self) -> None:
        """All arrays are of one kind, on one device."""
        if self._adopted is None:
            Call(**dict(zip(self.names, self.arrays, strict=True)))

    @property
    def in_numpy(self) -> bool:
        """Whether reference.py does it."""
        return self.device is None and self.host is None

    def place(self) -> Place | None:
        """Where the call works, if that needs nothing else."""
        if self.device is None:
            return self.host
        cupy = sys.modules["cupy"]
        if self._adopted is None and cupy.cuda.runtime.getDevice() == self.device:
            return CupyPlace(cupy, self.device, ())
        return None

    @contextlib.contextmanager
    def current(self) -> Iterator[Any]:
        """Where the call works, its device made current; adopted arrays are seen to outlive the launches."""
        if self.device is None:
            yield self.host
        elif self._adopted is not None:
            with self._adopted.place() as place:
                yield place
        else:
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                yield CupyPlace(cupy, self.device, ())


def _is_read_only(x: Any) -> bool:
    return bool(getattr(x, "__cuda_array_interface__", {"data": (0, False)})["data"][1])


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that takes one struct, packed as far as addresses are not in it."""

    source: KernelSource = field(repr=False)
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    packed: bytes
    addresses: tuple[tuple[int, int], ...]  # (word of the struct, array whose address it is)

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(f"V{len(self.packed)}")

    def start(self, place: Place, addresses: Sequence[int]) -> None:
        """Launch with these addresses: of the arguments, then of the fresh arrays."""
        packed = bytearray(self.packed)
        words = memoryview(packed).cast("q")
        for word, array in self.addresses:
            words[word] = addresses[array]
        function = place.modules.get_function(self.source, self.name)
        function(self.grid, self.block, (np.ndarray((), self._dtype, packed),))


@dataclass(frozen=True)
class Launches:
    """What all calls of a signature launch. Arguments are meant by their index."""

    fresh: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # shapes and dtypes of what is allocated: results, scratch
    changed: tuple[int, ...]  # arguments that are read and written
    written: tuple[int, ...]  # arguments that are only written
    spans: tuple[tuple[int, int], ...]  # each argument's bytes, counted from its address
    copied: tuple[int, ...]  # arguments whose items lie at odd addresses
    launches: tuple[Launch, ...] = ()

    @classmethod
    def of(cls, given: Given, *, changed: tuple[str, ...], written: tuple[str, ...], fresh: Any) -> Launches:
        """No launch yet."""
        spans, copied = [], []
        for i, x in enumerate(given.arrays):
            low, high = (0, 0) if x is None or x.size == 0 else (bound - _address(x) for bound in _bounds(x))
            spans.append((low, high))
            if high > low and not _arrays.is_aligned(x):
                copied.append(i)

        def indices(names: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(i for i, name in enumerate(given.names) if name in names and given.arrays[i] is not None)

        return cls(tuple(fresh), indices(changed), indices(written), tuple(spans), tuple(copied))

    def check_apart(self, given: Given) -> None:
        """Nothing that is written overlaps another argument."""
        addresses = given.addresses
        for target in (*self.changed, *self.written):
            low, high = self.spans[target]
            low, high = addresses[target] + low, addresses[target] + high
            for i, (below, above) in enumerate(self.spans):
                if (
                    addresses[i] + below < high
                    and low < addresses[i] + above
                    and i != target
                    and _overlap(given.arrays[target], given.arrays[i])
                ):
                    raise ValueError(f"{given.names[target]} overlaps {given.names[i]} in memory")

    def run(self, given: Given) -> list[Array]:
        """Allocate, launch, and give the fresh arrays."""
        place = given.place()
        if place is not None:
            return self._run(given, place)
        with given.current() as place:
            return self._run(given, place)

    def _run(self, given: Given, place: Any) -> list[Array]:
        if given.device is None:  # the CPU executor checks what kernels touch
            apart = (*self.changed, *self.written)
            place.keep(*(x for i, x in enumerate(given.arrays) if x is not None and i not in apart))
            place.update(*(given.arrays[i] for i in self.changed))
            for i in self.written:
                place.pointer(given.arrays[i])
        fresh = [place.allocate(shape, dtype) for shape, dtype in self.fresh]
        addresses = given.addresses + [place.pointer(x) for x in fresh]
        for launch in self.launches:
            launch.start(place, addresses)
        return fresh

    def run_on_copies(self, given: Given, function: Callable[[Arrays], Any]) -> Any:
        """Call `function` with copies of what lies at odd addresses, and copy back what it wrote."""
        with given.current() as place:
            arrays = list(given.arrays)
            for i in self.copied:
                arrays[i] = _arrays.copy_of(place, given.arrays[i])
            result = function(arrays)
            for i in self.copied:
                if i in self.changed or i in self.written:
                    _arrays.assign(given.arrays[i], arrays[i])
        return result
