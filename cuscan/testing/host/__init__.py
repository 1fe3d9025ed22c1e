"""Runs CUDA kernels on the CPU, checked: the very text that NVRTC gets, on NumPy arrays.

`HostModule` compiles a kernel text with g++ or clang++ and has CuPy's call form::

    module = HostModule(text, mode="checked")
    module.get_function("name")((grid,), (block,), (args,), shared_mem=0)

`HostModules` and `HostPlace` are what the library's own launch code takes in the place of CuPy.

Stricter than a GPU: a mask that names lanes which have exited or lie beyond the block, a barrier that
exited threads miss, and threads that meet in different lines are errors. Otherwise than on a GPU: blocks
run one after another in index order, so that a block may wait for those before it and for no other;
subnormal float64 are flushed as float32 are; what stands behind ``__CUDA_ARCH__`` does not run. Memory that
lies between two registered arrays belongs to nobody, but an index that is off by the distance of two arrays
is not noticed.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ._build import _MODES, compiler, is_checked, library
from ._coverage import FileCoverage, merge_coverage, module_coverage
from ._errors import (
    CompileError,
    ConstError,
    CrashError,
    DeadlockError,
    DivergenceError,
    DivisionError,
    ErrorStruct,
    KernelError,
    MaskError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    TimeLimitError,
    UninitialisedError,
    make_error,
)
from ._memory import HostPlace, Memory, ObjectStruct

__all__ = [
    "CompileError", "ConstError", "CrashError", "DeadlockError", "DivergenceError", "DivisionError",
    "FileCoverage", "HostKernel", "HostModule", "HostModules", "HostPlace", "KernelError", "MaskError",
    "Memory", "MisalignedError", "OutOfBoundsError", "RaceError", "TimeLimitError", "UninitialisedError",
    "compiler", "merge_coverage",
]  # fmt: skip

_ORDERS = ("forward", "reverse", "random")
_MAX_THREADS, _STACK_BYTES = 1024, 256 * 1024
_DYNAMIC_BYTES, _MOST_DYNAMIC_BYTES = 48 * 1024, 227 * 1024
_GRID_LIMITS, _BLOCK_LIMITS = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
_launching = threading.Lock()


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint), ("item_size", ctypes.c_uint), ("kind", ctypes.c_char),
        ("item_kind", ctypes.c_char), ("read_only", ctypes.c_bool),
    ]  # fmt: skip


class _Entry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int), ("max_threads", ctypes.c_int),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.POINTER(_Entry)), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("dynamic_bytes", ctypes.c_uint),
        ("stack_bytes", ctypes.c_uint), ("stacks", ctypes.c_void_p),
        ("objects", ctypes.POINTER(ObjectStruct)), ("object_count", ctypes.c_size_t),
        ("seed", ctypes.c_uint64), ("first_block", ctypes.c_uint64), ("timeout", ctypes.c_double),
        ("order", ctypes.c_int),
    ]  # fmt: skip


@functools.cache
def _stacks() -> int:
    """Address of the fibers' stacks, each above a page that faults."""
    area = mmap.mmap(-1, _MAX_THREADS * _STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None).mprotect
    for thread in range(_MAX_THREADS):
        protect(ctypes.c_void_p(address + thread * _STACK_BYTES), ctypes.c_size_t(mmap.PAGESIZE), 0)
    _kept.append(area)
    return address


_kept: list[mmap.mmap] = []


class _Serial:
    """Numbers blocks over all launches, so that the record of an access tells in which launch it was."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> int:
        self._next += count
        return self._next - count


_serial = _Serial()


class HasText(Protocol):
    """A kernel text with a name, such as `cuscan._source.KernelSource`."""

    @property
    def text(self) -> str:
        """The whole generated text."""


class HostKernel:
    """An entry point, called as CuPy's kernels are.

    Attributes
    ----------
    max_dynamic_shared_size_bytes : int
        What a launch may ask for, 48 KiB until it is set, at most 227 KiB.
    """

    def __init__(self, module: HostModule, entry: _Entry) -> None:
        self._module, self._entry = module, entry
        self.name: str = entry.name.decode()
        self._parameters: list[_Parameter] = [entry.parameters[i] for i in range(entry.count)]
        self._dynamic_limit = _DYNAMIC_BYTES

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Dynamic shared memory that a launch may ask for."""
        return self._dynamic_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if not 0 <= size <= _MOST_DYNAMIC_BYTES:
            raise ValueError(f"{self.name}: {size} bytes of shared memory, chips have {_MOST_DYNAMIC_BYTES} at most")
        self._dynamic_limit = size

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Run all threads of the grid.

        Parameters
        ----------
        grid, block : sequence of int
            Up to three sizes.
        args : sequence
            For a struct a structured NumPy array of no dimension, for a pointer an array (or its address as
            a 64-bit scalar), for a number a NumPy scalar of the parameter's very type.
        shared_mem : int
            Bytes of dynamic shared memory.

        Raises
        ------
        TypeError, ValueError
            What the driver would refuse, or should.
        KernelError
            What a thread did.
        """
        most = min(_MAX_THREADS, self._entry.max_threads)
        if math.prod(block) > most:
            raise ValueError(f"{self.name}: a block of {math.prod(block)} threads, {most} at most")
        grid, block = self._shape("grid", grid, _GRID_LIMITS), self._shape("block", block, _BLOCK_LIMITS)
        if not 0 <= shared_mem <= self._dynamic_limit:
            raise ValueError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, "
                f"but max_dynamic_shared_size_bytes is {self._dynamic_limit}"
            )
        if len(args) != len(self._parameters):
            raise ValueError(f"{self.name}: {len(args)} arguments, {len(self._parameters)} expected")
        passed = Memory(tracking=self._module.memory.tracking)
        values = [self._value(i, arg, passed) for i, arg in enumerate(args)]
        self._module.launch(self._entry, grid, block, values, shared_mem, passed)

    def _shape(self, what: str, shape: Sequence[int], limits: tuple[int, int, int]) -> tuple[int, int, int]:
        sizes = (*shape, 1, 1, 1)[:3]
        fits = all(1 <= size <= most for size, most in zip(sizes, limits, strict=True))
        if not 1 <= len(shape) <= 3 or not fits:
            raise ValueError(f"{self.name}: {what} {tuple(shape)}, expected sizes from 1 to {limits}")
        return sizes[0], sizes[1], sizes[2]

    def _value(self, position: int, arg: Any, passed: Memory) -> np.ndarray[Any, Any]:
        """An array whose bytes are the argument's; array arguments of pointers go into ``passed``."""
        parameter = self._parameters[position]
        kind, size = parameter.kind.decode(), parameter.size
        what = f"{self.name}: argument {position}"
        if not isinstance(arg, np.ndarray | np.generic):
            raise TypeError(f"{what} is a {type(arg).__name__}, expected a NumPy array or scalar")
        value = np.asarray(arg)
        if kind == "p" and isinstance(arg, np.ndarray):
            item, item_size = parameter.item_kind.decode(), parameter.item_size
            if item not in "sv" and (value.dtype.kind, value.itemsize) != (item, item_size):
                raise TypeError(f"{what} is an array of {value.dtype}, expected items {item}{item_size}")
            if not self._module.memory.covers(value):
                passed.register(value, writable=not parameter.read_only and value.flags.writeable)
            return np.array(value.ctypes.data, np.uint64)
        expected = {"p": "iu", "s": "V"}.get(kind, kind)
        if value.ndim or value.dtype.kind not in expected or value.itemsize != size:
            name = {"s": "a struct", "p": "an array or an address"}.get(kind, f"type {kind}{size}")
            raise TypeError(
                f"{what} has type {value.dtype}, shape {value.shape} and {value.itemsize} bytes, "
                f"expected {name} of {size} bytes"
            )
        return value


class HostModule:
    """A kernel text, compiled for the CPU.

    Parameters
    ----------
    code : str, Path or KernelSource
        CUDA C++ with entry points ``extern "C" __global__ void name(...)``, or the file it is in.
    mode : {"checked", "checked-O0", "fast", "coverage"}
        "checked" finds faults before they happen, and so does "checked-O0", which compiles in a third of the time and
        runs at two thirds of the speed; "fast" runs at full speed, and a wild write may crash the interpreter;
        "coverage" counts the executed lines.
    order : {"forward", "reverse", "random"}
        In which order threads run where the kernel leaves it open.
    seed : int
        Of the random order.
    memory : Memory, optional
        Arrays that pointers in structs lead to. Arrays that are arguments need no registering.
    timeout : float
        Seconds that a launch may take.

    Raises
    ------
    CompileError
        The text does not compile, or there is no compiler.
    """

    def __init__(
        self,
        code: str | Path | HasText,
        mode: str = "checked",
        *,
        order: str = "forward",
        seed: int = 0,
        memory: Memory | None = None,
        timeout: float = 60.0,
    ) -> None:
        if isinstance(code, Path):
            text = f'#line 1 "{code}"\n{code.read_text()}'
        else:
            text = code if isinstance(code, str) else code.text
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}, expected {', '.join(map(repr, _MODES))}")
        self._mode = mode
        self._order, self._seed, self._timeout = _ORDERS.index(order), seed, timeout
        self.memory = Memory(tracking=is_checked(mode)) if memory is None else memory
        self.path = library(text, mode)
        with _launching:  # a library's first use of its thread-local data beside the loading of another can deadlock
            self._library = ctypes.CDLL(str(self.path))
        self._counted: list[dict[str, FileCoverage]] = []
        entries = ctypes.cast(self._library.cuscan_entries, ctypes.POINTER(_Entry))
        named = itertools.takewhile(lambda entry: entry.name, (entries[i] for i in itertools.count()))
        self._kernels = {entry.name.decode(): HostKernel(self, entry) for entry in named}

    def get_function(self, name: str) -> HostKernel:
        """The entry point ``name``.

        Raises
        ------
        KeyError
            The text has none of this name.
        """
        return self._kernels[name]

    def launch(
        self,
        entry: _Entry,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: list[np.ndarray[Any, Any]],
        shared_mem: int,
        passed: Memory,
    ) -> None:
        """Run a kernel whose arguments are checked."""
        addresses = (ctypes.c_void_p * (len(values) + 1))(*(value.ctypes.data for value in values))
        error = ErrorStruct()
        with _launching:  # the stacks are shared
            table = self.memory.table(passed)
            request = _Launch(
                ctypes.pointer(entry), addresses, grid, block, shared_mem, _STACK_BYTES, _stacks(), table,
                len(table), self._seed, _serial.take(math.prod(grid)), self._timeout, self._order,
            )  # fmt: skip
            self._library.cuscan_launch(ctypes.byref(request), ctypes.byref(error))
        if error.kind:
            raise make_error(error, entry.name.decode(), grid, block, self.path)

    def coverage(self) -> dict[str, FileCoverage]:
        """Lines that ran since the text was loaded, by file, in mode "coverage".

        Lines of templates that no entry point uses are in neither set.
        """
        if self._mode != "coverage":
            raise ValueError(f"the text was compiled in mode {self._mode!r}, expected 'coverage'")
        self._counted.append(module_coverage(self._library, self.path))
        self._counted = [merge_coverage(self._counted)]
        return self._counted[0]


class HostModules:
    """Compiles and runs kernels for the library's launch code: a provider of modules without a GPU.

    Parameters
    ----------
    mode, order, seed, timeout
        As in `HostModule`.

    Attributes
    ----------
    memory : Memory
        Where arrays that kernels touch must be registered; `HostPlace` does it.
    """

    def __init__(self, mode: str = "checked", *, order: str = "forward", seed: int = 0, timeout: float = 60.0) -> None:
        self.memory = Memory(tracking=is_checked(mode))
        self._make = functools.partial(
            HostModule, mode=mode, order=order, seed=seed, memory=self.memory, timeout=timeout
        )
        self._modules: dict[str, HostModule] = {}

    def get_function(self, source: str | HasText, name: str) -> HostKernel:
        """The kernel ``name`` of a text."""
        text = source if isinstance(source, str) else source.text
        if text not in self._modules:
            self._modules[text] = self._make(text)
        return self._modules[text].get_function(name)

    def coverage(self) -> dict[str, FileCoverage]:
        """Lines that ran in any text of this provider, by file, in mode "coverage"."""
        return merge_coverage([module.coverage() for module in self._modules.values()])
