"""What can go wrong in a kernel, as exceptions that name the kernel, block, thread, file and line."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

Index = tuple[int, int, int]


class CompileError(Exception):
    """The host compiler refuses the kernel text; the message is the compiler's."""


class KernelError(RuntimeError):
    """A kernel did what it must not.

    Attributes
    ----------
    kernel : str
        Name of the entry point.
    block, thread : tuple of int
        Indices (x, y, z).
    file, line : str, int
        As the ``#line`` directives of the kernel text say; "" and 0 where the place is not known.
    missing : list of tuple of int
        Threads that were waited for and did not come.
    """

    def __init__(
        self,
        message: str,
        kernel: str = "",
        block: Index = (0, 0, 0),
        thread: Index = (0, 0, 0),
        file: str = "",
        line: int = 0,
        missing: list[Index] | None = None,
    ) -> None:
        place = f"{file}:{line}: " if file else ""
        super().__init__(f"{place}{kernel}, block {block}, thread {thread}: {message}")
        self.kernel, self.block, self.thread = kernel, block, thread
        self.file, self.line, self.missing = file, line, missing or []


class OutOfBoundsError(KernelError):
    """An access outside every registered array, or beyond the bounds of a shared or local one."""


class MisalignedError(KernelError):
    """An access at an address that its type does not allow."""


class UninitialisedError(KernelError):
    """A read of memory that nothing has written."""


class ConstError(KernelError):
    """A write to an array that is an input."""


class RaceError(KernelError):
    """Two threads access the same bytes, one of them writes, and nothing orders them."""


class DivergenceError(KernelError):
    """Threads that should meet in a barrier, shuffle or vote are elsewhere or have exited."""


class DeadlockError(KernelError):
    """Every thread waits for another."""


class MaskError(KernelError):
    """A mask without its caller, a lane read that is not in the mask, or a width that is no power of two."""


class DivisionError(KernelError):
    """An integer division by zero."""


class CrashError(KernelError):
    """A trap, or a signal that would have ended the process. The checked mode tells more."""


class TimeLimitError(KernelError):
    """The launch ran longer than its time limit."""


class PlaceStruct(ctypes.Structure):
    _fields_ = [("op", ctypes.c_char_p), ("file", ctypes.c_char_p), ("line", ctypes.c_int)]


class ErrorStruct(ctypes.Structure):
    """`host::Error` of runtime.h."""

    _fields_ = [
        ("kind", ctypes.c_int), ("thread", ctypes.c_int), ("other", ctypes.c_int),
        ("other_block", ctypes.c_int), ("block", ctypes.c_uint * 3),
        ("at", PlaceStruct), ("other_at", PlaceStruct),
        ("pc", ctypes.c_size_t), ("other_pc", ctypes.c_size_t), ("address", ctypes.c_size_t),
        ("size", ctypes.c_uint), ("write", ctypes.c_int), ("missing", ctypes.c_ubyte * 1024),
    ]  # fmt: skip


# In the order of `host::Kind` of runtime.h.
_CLASSES: tuple[type[KernelError], ...] = (
    KernelError, OutOfBoundsError, MisalignedError, UninitialisedError, ConstError, RaceError,
    DivergenceError, DeadlockError, MaskError, CrashError, DivisionError, CrashError, TimeLimitError,
    OutOfBoundsError,
)  # fmt: skip
_STACK_OVERFLOW, _NO_CALLER, _BAD_WIDTH = 13, -1, -2


def make_error(error: ErrorStruct, kernel: str, grid: Index, block: Index, library: Path) -> KernelError:
    """The exception for what a launch reported."""

    def index(thread: int) -> Index:
        return _index(thread, block)

    def place(at: PlaceStruct, pc: int) -> tuple[str, int]:
        if at.line:
            return at.file.decode(), at.line
        return locate(library, pc) if pc else ("", 0)

    file, line = place(error.at, error.pc)
    missing = [thread for thread in range(1024) if error.missing[thread]]
    x, y, z = error.block
    message = _message(error, index, place(error.other_at, error.other_pc), missing)
    if error.other_block:
        earlier = x + grid[0] * (y + grid[1] * z) + error.other_block
        message += f" in block {_index(earlier, grid)}"
    late = [index(thread) for thread in missing]
    kind: type[KernelError] = _CLASSES[error.kind]
    return kind(message, kernel, (x, y, z), index(error.thread), file, line, late)


def _index(number: int, shape: Index) -> Index:
    return number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])


def _message(error: ErrorStruct, index: Callable[[int], Index], other: tuple[str, int], missing: list[int]) -> str:
    op = (error.at.op or b"").decode()
    access = f"{'write' if error.write else 'read'} of {error.size} bytes at {error.address:#x}"
    kind = _CLASSES[error.kind]
    if error.kind == _STACK_OVERFLOW:
        return "stack overflow"
    if kind is OutOfBoundsError:
        return f"{access} outside every array" if error.size else f"index {error.address} is out of bounds"
    if kind is MisalignedError:
        return f"address {error.address:#x} is not a multiple of {error.size}"
    if kind is UninitialisedError:
        return f"{access}, which nothing has written"
    if kind is ConstError:
        return f"{access}, in an array that is read-only"
    if kind is RaceError:
        where = f"{other[0]}:{other[1]}" if other[0] else "an unknown line"
        return f"{access} races with the one at {where} by thread {index(error.other)}"
    if kind is DivergenceError and not missing:
        elsewhere = (error.other_at.op or b"").decode()
        return f"{op} meets thread {index(error.other)} in {elsewhere} at {other[0]}:{other[1]}"
    if kind in (DivergenceError, DeadlockError):
        if not missing:
            return f"no thread gets on; this one is in {op or 'a loop'}"
        return f"{op} waits for {_ranges(error, missing)}"
    if kind is MaskError:
        return f"{op}: {_mask_fault(error)}"
    if kind is DivisionError:
        return "integer division by zero"
    if kind is TimeLimitError:
        return "the time limit of the launch is over"
    return op or f"memory fault at {error.address:#x}"


def _mask_fault(error: ErrorStruct) -> str:
    if error.other == _NO_CALLER:
        return "the calling lane is not in its own mask"
    if error.other == _BAD_WIDTH:
        return "the width is not a power of two up to 32"
    return f"lane {error.thread % 32} reads lane {error.other % 32}, which is not in the mask"


def _ranges(error: ErrorStruct, missing: list[int]) -> str:
    """Say which threads are missing, by linear index, as in "threads 3, 32-63 (exited), thread 5 (...)"."""
    parts = []
    for reason, words in ((1, "exited"), (2, "waiting elsewhere"), (3, "beyond the block")):
        which = [thread for thread in missing if error.missing[thread] == reason]
        # Within a run of consecutive numbers the difference to the position is constant.
        runs = itertools.groupby(enumerate(which), lambda pair: pair[1] - pair[0])
        ends = [[thread for _, thread in run] for _, run in runs]
        texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends]
        if texts:
            parts.append(f"thread{'s' if len(which) > 1 else ''} {', '.join(texts)} ({words})")
    return ", ".join(parts)


def locate(library: Path, pc: int) -> tuple[str, int]:
    """File and line of the instruction before ``pc``, skipping what the prelude inlined there."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return "", 0
    command = [tool, "-i", "-e", str(library), hex(pc - 1)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for each in lines:
        file, _, number = each.partition(":")
        if not file.endswith("prelude.h") and number.split()[0].isdigit():
            return file, int(number.split()[0])
    return "", 0
