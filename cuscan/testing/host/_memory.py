"""The memory that kernels may touch: a registry of arrays, and the place where arrays come from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

Array = NDArray[np.generic]

# The bits of a byte's state in checker.cpp.
_VALID, _WRITABLE, _INITIALISED = 1, 2, 4
_CELL_BYTES = 64
# An access this far beyond an array from `HostPlace.allocate` hits no other array.
_GUARD = 256


class ObjectStruct(ctypes.Structure):
    """`host::Object` of runtime.h."""

    _fields_ = [
        ("base", ctypes.c_size_t), ("size", ctypes.c_size_t), ("state", ctypes.c_size_t),
        ("cells", ctypes.c_size_t),
    ]  # fmt: skip


class _Object:
    """A run of memory: a state byte for each of its bytes, the last accesses to every four."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.state = np.zeros(high - low, np.uint8)
        self.cells: NDArray[np.uint8] | None = None

    def view(self, array: Array) -> NDArray[np.uint8]:
        """State bytes of an array's elements, shape ``array.shape + (itemsize,)``."""
        start = self.state[array.ctypes.data - self.low :]
        return as_strided(start, (*array.shape, array.itemsize), (*array.strides, 1))


class Memory:
    """The arrays that kernels may touch, and what they may do to each byte.

    Pointers travel inside argument structs, so the checker learns from here what they point at. Only bytes of
    elements count: the gaps of a strided view are out of bounds. The arrays stay referenced until `clear`.

    Parameters
    ----------
    tracking : bool
        False (the fast mode) registers nothing.
    """

    def __init__(self, *, tracking: bool = True) -> None:
        self.tracking = tracking
        self._objects: list[_Object] = []
        self._arrays: list[Array] = []

    def register(self, array: Array, *, writable: bool = True, initialised: bool = True) -> None:
        """Let kernels read ``array``, and write to it if ``writable``.

        An array registered twice, or one that overlaps others, has every right that it was given. Where
        ``initialised`` is False a read before a write is an error.
        """
        if not self.tracking or array.size == 0:
            return
        low, high = byte_bounds(array)
        overlapping = [each for each in self._objects if each.low < high and low < each.high]
        target = _Object(
            min([low, *(each.low for each in overlapping)]),
            max([high, *(each.high for each in overlapping)]),
        )
        for each in overlapping:
            target.state[each.low - target.low : each.high - target.low] |= each.state
        target.view(array)[...] |= np.uint8(_VALID | _WRITABLE * writable | _INITIALISED * initialised)
        self._objects = sorted(
            [each for each in self._objects if each not in overlapping] + [target], key=lambda each: each.low
        )
        self._arrays.append(array)

    def covers(self, array: Array) -> bool:
        """Whether every byte of ``array`` is registered."""
        return array.size == 0 or bool((self._states(array) & _VALID).all())

    def written(self, array: Array) -> NDArray[np.bool_]:
        """Which elements of ``array`` are initialised: by a kernel, or from the start."""
        initialised: NDArray[np.bool_] = np.all(self._states(array) & _INITIALISED, axis=-1)
        return initialised

    def _states(self, array: Array) -> NDArray[np.uint8]:
        low, high = byte_bounds(array)
        for each in self._objects:
            if each.low <= low and high <= each.high:
                return each.view(array)
        return np.zeros((*array.shape, array.itemsize), np.uint8)

    def clear(self) -> None:
        """Forget all arrays."""
        self._objects, self._arrays = [], []

    def table(self, more: Memory) -> ctypes.Array[ObjectStruct]:
        """The objects of both registries, by address, as the checker reads them."""
        objects = sorted(self._objects + more._objects, key=lambda each: each.low)
        for each in objects:
            if each.cells is None and bool((each.state & _WRITABLE).any()):
                count = ((each.high - each.low) // 4 + 2) * 65 // 64
                room = np.zeros((count + 1) * _CELL_BYTES, np.uint8)
                each.cells = room[-room.ctypes.data % _CELL_BYTES :]  # a cell is a cache line
        return (ObjectStruct * len(objects))(
            *(
                ObjectStruct(
                    each.low, each.high - each.low, each.state.ctypes.data,
                    0 if each.cells is None else each.cells.ctypes.data,
                )
                for each in objects
            )
        )  # fmt: skip


class Provider(Protocol):
    """What runs kernels."""

    memory: Memory
    get_function: Any


class HostPlace:
    """Where the library's launch code gets kernels, arrays and addresses when they are the CPU's.

    Parameters
    ----------
    modules : HostModules or HostModule
        What runs the kernels; its ``memory`` is where arrays are registered.
    limits : DeviceLimits, optional
        The chip that plans are made for.
    """

    def __init__(self, modules: Provider, limits: Any = None) -> None:
        self.modules, self.limits, self.memory = modules, limits, modules.memory

    def allocate(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """An array that a kernel must write before anything reads it, filled with bytes 0xFF (NaN, -1)."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = np.full(size + 3 * _GUARD, 0xFF, np.uint8)
        start = _GUARD + -buffer.ctypes.data % _GUARD
        array: Array = buffer[start : start + size].view(dtype).reshape(shape)
        self.memory.register(array, initialised=False)
        return array

    def assign(self, to: Array, value: Array | complex) -> None:
        """Copy items, or set them to a number; kernels may read them from then on."""
        to[...] = value
        self.keep(to)

    def keep(self, *arrays: Array) -> None:
        """Let kernels read these inputs, and not write to them."""
        for array in arrays:
            self.memory.register(array, writable=False)

    def update(self, *arrays: Array) -> None:
        """Let kernels read and write these arrays of the caller's."""
        for array in arrays:
            self.memory.register(array)

    def pointer(self, array: Array) -> int:
        """Address of the first element. An array seen for the first time may be written and then read."""
        if self.memory.tracking and not self.memory.covers(array):
            self.memory.register(array, initialised=False)
        return int(array.ctypes.data)

    def done(self) -> None:
        """After the last launch of a call: nothing is left to wait for."""
