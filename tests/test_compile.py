"""Every instantiation through NVRTC with no GPU: it compiles, keeps its state in registers, and fits."""

import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product

import pytest

from cuscan import _compile, _source

SOURCES = _source.all_sources()
PRODUCTION = (80, 90)  # frame size 0
OTHERS = (75, 86, 89, 100, 120)  # at most 32 bytes; one of them a module, by turns


def libraries():
    """The newest last; several of a major version are not told apart."""
    return {path.name: path for path in _compile.nvrtc_libraries()}


needs_nvrtc = pytest.mark.skipif(not libraries(), reason="the NVRTC wheel is not installed: nvidia-cuda-nvrtc-cu12")


@cache
def nvrtc(library):
    return _compile.Nvrtc(libraries()[library])


def compile_one(job):
    library, architecture, name = job
    return nvrtc(library).compile(SOURCES[name], architecture)


def check(reports, frame):
    """Resources by job; frame is what a kernel may keep in local memory."""
    for (library, architecture, name), report in reports.items():
        source = SOURCES[name]
        assert set(report) == set(source.names)
        for kernel, used in report.items():
            where = f"{kernel} by {library} for sm_{architecture}: {used}"
            assert used.frame <= frame, where
            assert used.spills == 0 or frame, where
            bounds = re.search(rf"__launch_bounds__\((\d+)(?:, (\d+))?\) {kernel}\(", source.text)
            threads, blocks = (int(bound or 1) for bound in bounds.groups())
            assert used.registers * threads * blocks <= 65536, where
            dynamic = source.dynamic_shared.get(kernel, 0)
            assert (dynamic > 0) == kernel.startswith("selective_scan"), where
            assert used.static_shared == 0 if dynamic else used.static_shared <= 48 * 1024, where


@needs_nvrtc
def test_one_module_for_a_hopper():
    library = next(iter(libraries()))
    job = library, 90, "selective_scan float32 1 states"
    check({job: compile_one(job)}, frame=0)


@needs_nvrtc
@pytest.mark.full
def test_every_module_for_every_architecture():
    jobs = list(product(libraries(), PRODUCTION, SOURCES))
    oldest = min(libraries(), key=lambda library: nvrtc(library).version)
    jobs += [(oldest, OTHERS[i % len(OTHERS)], name) for i, name in enumerate(SOURCES)]
    # The large ones first, so that no process is left with one at the end.
    jobs.sort(key=lambda job: -len(SOURCES[job[2]].text))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        reports = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    check({job: report for job, report in reports.items() if job[1] in PRODUCTION}, frame=0)
    check({job: report for job, report in reports.items() if job[1] in OTHERS}, frame=32)


@needs_nvrtc
@pytest.mark.full
def test_both_pinned_compilers_are_there():
    versions = {nvrtc(library).version for library in libraries()}
    assert (12, 9) in versions
    assert any(major == 13 for major, _ in versions)


@needs_nvrtc
def test_an_error_shows_file_and_line_in_cuda_src():
    source = SOURCES["linear_scan float32"]
    line = "struct Affine {"
    number = 1 + (_source.folder() / "operators.cuh").read_text().splitlines().index(line)
    broken = source.text.replace(line, f"{line} nonsense;")
    with pytest.raises(_compile.CompileError, match=rf"cuda_src/operators\.cuh\({number}\): error") as caught:
        nvrtc(next(iter(libraries()))).compile(_source.KernelSource(broken, source.names), 90)
    assert "nonsense" in str(caught.value)


@needs_nvrtc
def test_a_wrong_size_of_the_arguments_does_not_compile():
    source = SOURCES["linear_scan float32"]
    text = source.text.replace("long long length, rows,", "long long length, one_more, rows,")
    assert text != source.text
    with pytest.raises(_compile.CompileError, match=r"packed by _launch\.py field by field"):
        nvrtc(next(iter(libraries()))).compile(_source.KernelSource(text, source.names), 90)


@needs_nvrtc
def test_libraries_are_found_once():
    paths = [path.resolve() for path in _compile.nvrtc_libraries()]
    assert len(set(paths)) == len(paths)


def test_the_assemblers_report_is_read():
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers
"""
    assert _compile._read_report(log) == {
        "one": _compile.Resources(registers=40, frame=0, spills=0, static_shared=128),
        "two": _compile.Resources(registers=255, frame=16, spills=12, static_shared=0),
    }
