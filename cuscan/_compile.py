"""From text to functions: CuPy's RawModule on a GPU, and NVRTC alone for reports on machines without one."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ._plan import DeviceLimits
from ._source import OPTIONS, KernelSource


class CompileError(RuntimeError):
    """A kernel's text did not compile; the message is the compiler's, with file and line in cuda_src/."""


# Dynamic shared memory that a kernel may have unasked: of 48 KiB, what is static is taken off.
STATIC_LIMIT = 16 * 1024


class Kernel:
    """A kernel of CuPy's, which `start` launches in half the time of a call."""

    def __init__(self, kernel: Any) -> None:
        import cupy

        self._kernel, self._address, self._cuda = kernel, kernel.kernel.ptr, cupy.cuda
        self._shared, self._lock = STATIC_LIMIT, threading.Lock()

    def __call__(self, *args: Any, **more: Any) -> None:
        self._kernel(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def start(self, grid: tuple[int, ...], threads: int, struct: array[int], shared: int, stream: int) -> None:
        """Launch with one argument, whose words are changed, on a stream of the current device."""
        if shared > self._shared:
            with self._lock:
                self._kernel.max_dynamic_shared_size_bytes = self._shared = max(shared, self._shared)
        struct.append(0)
        address, count = struct.buffer_info()
        struct[-1] = address  # the list of arguments
        x, y = grid if len(grid) == 2 else (*grid, 1)
        launch = (self._address, x, y, 1, threads, 1, 1, shared, stream, address + 8 * count - 8, 0)
        try:
            self._cuda.driver.launchKernel(*launch)
        except self._cuda.driver.CUDADriverError:
            self._cuda.runtime.memGetInfo()  # what a thread begins with: it makes the device's context current
            self._cuda.driver.launchKernel(*launch)


class _CupyModules:
    """Modules of one device, compiled on first use and cached on disk by CuPy."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Kernel] = {}
        self._modules: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get_function(self, source: KernelSource, name: str) -> Kernel:
        function = self._functions.get((source.text, name))
        return function or self._load(source, name)

    def _load(self, source: KernelSource, name: str) -> Kernel:
        import cupy

        with self._lock:
            module = self._modules.get(source.text)
            if module is None:
                module = cupy.RawModule(code=source.text, options=OPTIONS)
                try:
                    module.compile()
                except cupy.cuda.compiler.CompileException as error:
                    raise CompileError(str(error)) from error
                self._modules[source.text] = module
                if folder := os.environ.get("CUSCAN_DUMP"):
                    dump(source, Path(folder), int(cupy.cuda.Device().compute_capability))
            function = Kernel(module.get_function(name))
            self._functions[source.text, name] = function
            return function


@cache
def cupy_modules(device: int) -> _CupyModules:
    """The modules of a device: functions belong to the device that was current when they were loaded."""
    del device
    return _CupyModules()


@cache
def cupy_limits(device: int) -> DeviceLimits:
    """The limits of a device, as the driver says."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    return DeviceLimits(
        architecture=int(cupy.cuda.Device(device).compute_capability),
        multiprocessors=attributes["MultiProcessorCount"],
        shared_memory=attributes["MaxSharedMemoryPerBlockOptin"],
    )


# --- NVRTC alone -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What one entry point takes, as the assembler reports."""

    registers: int
    frame: int  # bytes of local memory: spills and arrays that are not in registers
    spills: int
    static_shared: int


def nvrtc_libraries() -> Iterator[Path]:
    """The NVRTC libraries of the installed wheels, newest last."""
    for entry in sys.path:
        for pattern in ("nvidia/cuda_nvrtc/lib/libnvrtc.so.*", "nvidia/cu[0-9]*/lib/libnvrtc.so.*"):
            for path in sorted(Path(entry).glob(pattern)):
                if "builtins" not in path.name and "alt" not in path.name:
                    yield path


class Nvrtc:
    """The compiler alone, with no driver: what it makes is read, not run."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, source: KernelSource, architecture: int) -> dict[str, Resources]:
        """Resources of every entry point, compiled as CuPy would."""
        return _read_report(self.build(source, architecture)[1])

    def build(self, source: KernelSource, architecture: int) -> tuple[bytes, str]:
        """The cubin, and what the assembler reports."""
        options = [*OPTIONS, "-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space"]
        options.append("--ptxas-options=-v")
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(ctypes.byref(program), source.text.encode(), b"cuscan.cu", 0, None, None)
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), encoded)
            size = ctypes.c_size_t()
            self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self._library.nvrtcGetProgramLog(program, log)
            self._library.nvrtcGetCUBINSize(program, ctypes.byref(size))
            cubin = ctypes.create_string_buffer(0 if failed else size.value)
            if not failed:
                self._library.nvrtcGetCUBIN(program, cubin)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        text = log.value.decode()
        if failed:
            raise CompileError(text)
        return cubin.raw, text


def dump(source: KernelSource, folder: Path, architecture: int) -> None:
    """Write the generated text, and if an NVRTC wheel is there what it makes of it: the cubin and its report."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:8]
    path = folder / f"{source.names[0]}-{digest}-sm_{architecture}"
    path.with_suffix(".cu").write_text(source.text, encoding="utf-8")
    for library in list(nvrtc_libraries())[-1:]:
        cubin, report = Nvrtc(library).build(source, architecture)
        path.with_suffix(".cubin").write_bytes(cubin)
        path.with_suffix(".txt").write_text(f"{library.name}, sm_{architecture}\n{report}", encoding="utf-8")


def report(write: Callable[[str], object], architecture: int = 90) -> None:
    """Compile every module for a chip and write a line for each kernel: registers, shared memory, frame.

    Needs an NVRTC wheel, and no device. Takes minutes: every kernel there is gets compiled.
    """
    from concurrent.futures import ProcessPoolExecutor  # slow to import

    from ._source import all_sources

    libraries = list(nvrtc_libraries())
    if not libraries:
        raise FileNotFoundError("NVRTC is not installed: install cuscan with the extra cuda12, cuda13 or test")
    sources = all_sources()
    total = sum(len(source.names) for source in sources.values())
    with ProcessPoolExecutor() as pool:
        jobs = {
            name: pool.submit(_compile_in_process, libraries[-1], source, architecture)
            for name, source in sources.items()
        }
        write(f"{total} kernels in {len(sources)} modules, sm_{architecture}, {libraries[-1].name}")
        write(f"{'kernel':62s} {'registers':>9s} {'shared':>7s} {'frame':>5s}")
        for name, job in jobs.items():
            for kernel, found in sorted(job.result().items()):
                shared = found.static_shared + sources[name].dynamic_shared.get(kernel, 0)
                write(f"{kernel:62s} {found.registers:9d} {shared:7d} {found.frame:5d}")


def _compile_in_process(library: Path, source: KernelSource, architecture: int) -> dict[str, Resources]:
    return Nvrtc(library).compile(source, architecture)


def _read_report(log: str) -> dict[str, Resources]:
    report = {}
    for entry in re.split(r"Compiling entry function '", log)[1:]:
        name = entry.partition("'")[0]

        def number(pattern: str, text: str = entry) -> int:
            found = re.search(pattern, text)
            return int(found[1]) if found else 0

        report[name] = Resources(
            registers=number(r"Used (\d+) registers"),
            frame=number(r"(\d+) bytes stack frame"),
            spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            static_shared=number(r"(\d+) bytes smem"),
        )
    return report
