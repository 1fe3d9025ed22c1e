"""Kernel text to shared library, with the host's C++ compiler, kept by the hash of all that matters."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cuscan._tuned import cache_folder

from ._errors import CompileError

_HERE = Path(__file__).parent
_SOURCES = ("prelude.h", "runtime.h", "runtime.cpp", "checker.cpp")
_COMMON = (
    "-std=c++17", "-fPIC", "-w", "-gdwarf-4", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing",
    "-fvisibility=hidden",
)  # fmt: skip
# Two libraries must not share a template's static shared array.
_GCC = ("-fno-gnu-unique",)
# -O1 keeps accesses where the text has them; loops must stay loops, since calls of memcpy are not checked.
_CHECKED = ("-fsanitize=thread,alignment,bounds,integer-divide-by-zero", "-fno-tree-loop-distribute-patterns")
_CHECKED_GCC = ("--param=tsan-distinguish-volatile=1",)
_CHECKED_CLANG = ("-mllvm", "-tsan-distinguish-volatile=1")
_MODES = {
    "fast": ("-O2",),
    "checked": ("-O1", *_CHECKED),
    "checked-O0": ("-O0", *_CHECKED),
    "coverage": ("-O0", "--coverage", "-DCUSCAN_COVERAGE"),
}
# The runtime calls these if they are there, which alone does not take them out of libgcov.
_LINK: dict[str, tuple[str, ...]] = dict.fromkeys(_MODES, ())
_LINK["coverage"] = ("--coverage", "-Wl,-u,__gcov_dump", "-Wl,-u,__gcov_reset")

_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^()]*\)\s*)?([\w:][\w:<>\s]*?)\s+(\w+)\s*\[\s*\]\s*;"
)
_BOUNDS = r"(?:__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)\s*)?"
_ENTRY = re.compile(rf'extern\s+"C"\s+{_BOUNDS}__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(')
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)


@functools.cache
def compiler() -> tuple[str, str]:
    """Command and version of the C++ compiler: CXX, else g++, else clang++.

    Raises
    ------
    CompileError
        There is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
            return path, asked.stdout
    raise CompileError("no C++ compiler: install g++ or clang++, or set CXX")


def is_checked(mode: str) -> bool:
    """Whether accesses are looked at."""
    return mode.startswith("checked")


@functools.cache
def _flags(mode: str) -> tuple[str, ...]:
    clang = "clang" in compiler()[1]
    flags = (*_COMMON, *(() if clang else _GCC), *_MODES[mode])
    if is_checked(mode):
        flags += _CHECKED_CLANG if clang else _CHECKED_GCC
    # Without the instruction, fmaf is exact still, in the C library and slowly.
    cpu = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpu.exists() and re.search(r"\bfma\b", cpu.read_text()):
        flags += ("-mfma",)
    return flags


def _run(folder: Path, *command: str) -> None:
    names = f"-fdebug-prefix-map={folder}="  # files keep the names that #line gives them
    call = [compiler()[0], names, *command]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.strip())


def _build(name: str, key: str, sources: dict[str, str], *command: str) -> Path:
    """The folder with the results of ``command`` on ``sources``, from the cache if it is there."""
    digest = hashlib.sha256("\0".join((key, *sources.values(), *command)).encode()).hexdigest()[:24]
    target = cache_folder() / f"{name}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        for each, text in sources.items():
            (folder / each).write_text(text)
        _run(folder, *command)
        try:
            folder.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


@functools.cache
def _runtime(mode: str) -> tuple[str, list[str]]:
    """The prelude's text, and the compiled runtime."""
    texts = {name: (_HERE / name).read_text() for name in _SOURCES}
    options = (*_COMMON, "-O2", "-c")
    names = ["runtime.cpp", "checker.cpp"] if is_checked(mode) else ["runtime.cpp"]
    folder = _build("runtime", compiler()[1], texts, *options, *names)
    return texts["prelude.h"], [str(folder / name.replace(".cpp", ".o")) for name in names]


def library(text: str, mode: str) -> Path:
    """The shared library of a kernel text, ``mode`` as in `HostModule`.

    Raises
    ------
    CompileError
        The text is not C++, or has no entry point ``extern "C" __global__ void name(...)``.
    """
    entries = _ENTRY.findall(_NO_CODE.sub(" ", text))
    if not entries:
        raise CompileError('the text has no entry point: extern "C" __global__ void name(...)')
    rows = (f'CuscanKernel<&{name}>::entry("{name}", cuscan_bound({"".join(bounds)})),' for *bounds, name in entries)
    # The one change to the text: an array of unknown length is a pointer.
    kernel = _DYNAMIC.sub(
        lambda found: (
            f"static {found[1]} *const {found[2]} = ({found[1]} *)cuscan_dynamic_shared;" + "\n" * found[0].count("\n")
        ),
        text,
    )
    glue = '\n#line 1 "prelude.h"\nextern "C" __attribute__((visibility("default"))) const CuscanEntry '
    glue += f"cuscan_entries[] = {{{' '.join(rows)} {{}}}};\n"
    prelude, objects = _runtime(mode)
    sources = {"prelude.h": prelude, "kernel.cu": kernel + glue}
    flags = ("-include", "prelude.h", *_flags(mode), "-x", "c++", "kernel.cu", "-c", "-o", "kernel.o")
    folder = _build(mode, compiler()[1] + "".join((*objects, *_LINK[mode])), sources, *flags)
    return _link(folder, objects, mode)


def _link(folder: Path, objects: list[str], mode: str) -> Path:
    target = folder / "kernel.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernel.so"
            _run(folder, "-shared", *_LINK[mode], "kernel.o", *objects, "-o", str(made), "-lrt")
            made.replace(target)
    return target
