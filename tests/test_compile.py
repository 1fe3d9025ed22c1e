"""Every instantiation through NVRTC with no GPU: it compiles, keeps its state in registers, and fits."""

import re
from functools import cache

import pytest

from cuscan import _compile, _source

SOURCES = _source.all_sources()
OTHERS = (75, 86, 89, 100, 120)
SIXTH = sorted(SOURCES, key=lambda name: name.split()[0])[::6]  # of each family


KILOBYTES = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # of shared memory a multiprocessor


def libraries():
    """The newest last; several of a major version are not told apart."""
    return {path.name: path for path in _compile.nvrtc_libraries()}


needs_nvrtc = pytest.mark.skipif(not libraries(), reason="the NVRTC wheel is not installed: nvidia-cuda-nvrtc-cu12")


@cache
def nvrtc(library):
    return _compile.Nvrtc(libraries()[library])


def check(library, architecture, name, frame=0):
    """Compile a module, of whose kernels none may keep more than `frame` bytes in local memory.

    Whether one has so many of the registers it may have that another compiler could run out of them.
    """
    source = SOURCES[name]
    report = nvrtc(library).compile(source, architecture)
    assert set(report) == set(source.names)
    scarce = False
    for kernel, used in report.items():
        where = f"{kernel} by {library} for sm_{architecture}: {used}"
        assert used.frame <= frame, where
        assert used.spills == 0 or frame, where
        dynamic = source.dynamic_shared.get(kernel, 0)
        bounds = re.search(
            rf"__launch_bounds__\((\d+)(?:, (?:resident_blocks\()?(\d+)[^)]*\)?)?\) {kernel}\(", source.text
        )
        threads, blocks = (int(bound or 1) for bound in bounds.groups())
        blocks = max(1, min(blocks, KILOBYTES[architecture] * 1024 // (dynamic + 1024)))
        most = min(255, 65536 // (threads * blocks))
        assert used.registers <= most, where
        # The compiler takes what it may have; only where that is all there is may another one need more.
        scarce |= used.registers > 0.9 * 255
        assert (dynamic > 0) == kernel.startswith("selective_scan"), where
        assert used.static_shared == 0 if dynamic else used.static_shared <= 48 * 1024, where
    return scarce


@needs_nvrtc
def test_one_module_for_a_hopper():
    check(next(iter(libraries())), 90, "selective_scan float32 1 states")


@needs_nvrtc
@pytest.mark.full
@pytest.mark.parametrize("name", SOURCES)
def test_every_module(name):
    """With no frame, by turns by the newest compiler for sm_90 and by the oldest for sm_80.

    If registers are scarce, by the other pair too. A sixth of each family of kernels is also compiled for one other
    architecture and by one of the compilers, by turns, where 32 bytes of frame may be.
    """
    oldest, newest = (pick(libraries(), key=lambda library: nvrtc(library).version) for pick in (min, max))
    pairs = [(newest, 90), (oldest, 80)]
    first = list(SOURCES).index(name) % 2
    if check(*pairs[first], name) and newest != oldest:
        check(*pairs[1 - first], name)
    if name in SIXTH:
        turn = SIXTH.index(name)
        check((oldest, newest)[turn % 2], OTHERS[turn % len(OTHERS)], name, frame=32)


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
