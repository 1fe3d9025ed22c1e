"""From templates to text: the whole of what a compiler sees, headers flattened in, instantiations named.

The text is CuPy's cache key, so it holds everything that could change the code. `#line` makes a compiler's
messages point at the files in cuda_src/.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ._plan import (
    BLOCK_WARPS,
    CONV_BACKWARD_BLOCKS,
    CONV_BLOCKS,
    CONV_THREADS,
    ITEM_BYTES,
    MOST_PRODUCTS,
    NORM_THREADS,
    PASS_WARPS,
    PRODUCT_WARPS,
    STATE_INTERVAL,
    UPDATE_THREADS,
    BackwardTile,
    Lanes,
    SelectiveKind,
    SelectiveTile,
    UpdateKind,
    backward_kind,
    backward_tile,
    selective_kinds,
    selective_tiles,
    update_kinds,
)

# Options that fix the bits: no contraction but the written one. CuPy adds -ftz=true.
OPTIONS = ("-std=c++17", "-fmad=false")

_CPP = {
    "float32": "float",
    "bfloat16": "bf16_t",
    "float16": "f16_t",
    "float64": "double",
    "complex64": "complex<float>",
    "complex128": "complex<double>",
}

# The argument structs of cuda_src/*_args.cuh as _launch.py packs them. The text asserts the sizes.
LINEAR_ARRAY = "<9q"
LINEAR_TAIL = "<2q2d2f" + "8q" + "4q" + "3i4x"
LINEAR_SEGMENTS = "<4q"
LINEAR_ARGS = 6 * struct.calcsize(LINEAR_ARRAY) + struct.calcsize(LINEAR_TAIL) + struct.calcsize(LINEAR_SEGMENTS)
LINEAR_BACKWARD_TAIL = "<5i4x"
LINEAR_BACKWARD_ARGS = LINEAR_ARGS + 3 * struct.calcsize(LINEAR_ARRAY) + struct.calcsize(LINEAR_BACKWARD_TAIL)
_SEQUENCE_ARRAY, _COUPLE_ARRAY = "4q2i", "6q3i4x"
SELECTIVE_HEAD = "<" + 5 * _SEQUENCE_ARRAY + 2 * _COUPLE_ARRAY + "6q" + "7q" + "3q" + "5q"
SELECTIVE_TAIL = "<4q" + "2d2f" + "9i4x" + "6q"
SELECTIVE_ARGS = struct.calcsize(SELECTIVE_HEAD) + struct.calcsize(SELECTIVE_TAIL)
MARK_ARGS = "<" + 2 * "8q" + "3q" + "8q" + "2q" + "4i"
MARK_THREADS = 128


@dataclass(frozen=True)
class KernelSource:
    """A module: its whole text, the names of its entry points, and the dynamic shared memory of those that take it."""

    text: str
    names: tuple[str, ...]
    dynamic_shared: dict[str, int] = field(default_factory=dict)


@cache
def folder() -> Path:
    """The folder cuda_src: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


def _flatten(name: str, seen: set[str]) -> list[str]:
    lines = [f'#line 1 "cuda_src/{name}"']
    for number, line in enumerate((folder() / name).read_text(encoding="utf-8").splitlines(), start=1):
        include = re.fullmatch(r'#include "(.+)"', line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        if include[1] not in seen:
            seen.add(include[1])
            lines += _flatten(include[1], seen)
        lines.append(f'#line {number + 1} "cuda_src/{name}"')
    return lines


def _module(
    file: str, arguments: tuple[str, int], entries: dict[str, str], shared: dict[str, int] | None = None
) -> KernelSource:
    size = f'static_assert(sizeof({arguments[0]}) == {arguments[1]}, "packed by _launch.py field by field");'
    tail = ['#line 1 "instantiations"', size, *entries.values()]
    names = tuple(name for name, text in entries.items() if text.startswith('extern "C"'))
    return KernelSource("\n".join(_flatten(file, set()) + tail) + "\n", names, shared or {})


@cache
def marks_source() -> KernelSource:
    """The kernel that makes marks of mask, reset and cu_seqlens."""
    entry = (
        f'extern "C" __global__ void __launch_bounds__({MARK_THREADS}) step_marks(const MarkArgs args) '
        "{ make_marks(args); }"
    )
    return _module("step_marks.cu", ("MarkArgs", struct.calcsize(MARK_ARGS)), {"step_marks": entry})


_LINEAR_PARTS = {"apply": "kApply", "summarise": "kSummarise", "pass": "kOnePass"}


def linear_name(lanes: Lanes, part: str, item: str, *, segmented: bool = False, pairs: bool = False) -> str:
    """Entry point of a linear_scan kernel that does one of _LINEAR_PARTS; `pairs`: a thread takes two rows."""
    return "_".join(["linear_scan", lanes.value, part, *["segmented"] * segmented, *["pairs"] * pairs, item])


def linear_shapes(part: str, item: str, *, segmented: bool) -> list[tuple[Lanes, bool]]:
    """The linear_scan kernels of a part that there are: lanes, and whether a thread takes two rows."""
    single, small = [(lanes, False) for lanes in Lanes], ITEM_BYTES[item] == 2
    if part != "pass":
        return [*single, (Lanes.ROWS, True)] if small and not segmented else single
    if ITEM_BYTES[item] > 4 or segmented:
        return []
    return [(Lanes.TIME, False)] if small else [*single, (Lanes.TIME, True)]


def _linear_bounds(lanes: Lanes, part: str, item: str, *, segmented: bool, pairs: bool) -> tuple[int, int]:
    """Threads of a block, and blocks a multiprocessor that the registers are bounded for."""
    if part == "pass":
        return (32 * BLOCK_WARPS, 3) if pairs else (32 * PASS_WARPS, 2)
    if item == "complex128":
        return 32 * BLOCK_WARPS, 1
    if lanes is Lanes.ROWS and (ITEM_BYTES[item] > 2 or segmented):
        return 48 * BLOCK_WARPS, 1
    many = lanes is Lanes.TIME and ITEM_BYTES[item] <= 4 and not segmented
    return (40 if many else 32) * BLOCK_WARPS, 2


@cache
def linear_source(item: str, *, segmented: bool = False) -> KernelSource:
    """Every linear_scan kernel that a call on this item type can need."""
    from ._arrays import accumulation

    entries = {}
    # Summaries are in the accumulation type, and scanned by the same kernels.
    wanted = [(item, part) for part in _LINEAR_PARTS]
    if accumulation(item) != item:
        wanted.append((accumulation(item), "apply"))
    for each, part in wanted:
        for lanes, pairs in linear_shapes(part, each, segmented=segmented):
            name = linear_name(lanes, part, each, segmented=segmented, pairs=pairs)
            threads, blocks = _linear_bounds(lanes, part, each, segmented=segmented, pairs=pairs)
            items = f"Pair<{_CPP[each]}>" if pairs else _CPP[each]
            template = f"{items}, {_LINEAR_PARTS[part]}, {_flags(segmented)}"
            entries[name] = (
                f'extern "C" __global__ void __launch_bounds__({threads}, {blocks}) {name}(const LinearArgs args) {{\n'
                f"  extern __shared__ __align__(16) unsigned char memory[];\n"
                f"  linear_{lanes.value}<{template}>(args, memory);\n}}"
            )
    return _module("linear_scan.cu", ("LinearArgs", LINEAR_ARGS), entries)


def linear_backward_name(lanes: Lanes, item: str, *, segmented: bool, pairs: bool = False) -> str:
    """Entry point of a linear_scan_backward kernel; `pairs`: a thread takes two rows."""
    words = [*["segmented"] * segmented, *["pairs"] * pairs]
    return "_".join(["linear_scan_backward", lanes.value, *words, item])


@cache
def linear_backward_source(item: str, *, segmented: bool) -> KernelSource:
    """Every linear_scan_backward kernel of an item type."""
    entries = {}
    paired = [(Lanes.ROWS, True)] * (ITEM_BYTES[item] == 2 and not segmented)
    for lanes, pairs in [*((lanes, False) for lanes in Lanes), *paired]:
        # Half the registers are too few for a complex128, and with segments for some compilers and chips; for rows they
        # are bounded for three blocks of four warps, for pairs of rows for two of eight.
        few = segmented or item == "complex128"
        halved = not few and (pairs or lanes is Lanes.TIME)
        threads = 32 * BLOCK_WARPS if few or halved else 48 * BLOCK_WARPS
        name = linear_backward_name(lanes, item, segmented=segmented, pairs=pairs)
        items = f"Pair<{_CPP[item]}>" if pairs else _CPP[item]
        entries[name] = (
            f'extern "C" __global__ void __launch_bounds__({threads}, {2 if halved else 1}) '
            f"{name}(const LinearBackwardArgs args) "
            f"{{ linear_backward_{lanes.value}<{items}, {_flags(segmented)}>(args); }}"
        )
    return _module("linear_scan_backward.cu", ("LinearBackwardArgs", LINEAR_BACKWARD_ARGS), entries)


def _flags(*values: bool) -> str:
    return ", ".join(str(value).lower() for value in values)


def selective_name(kind: SelectiveKind, tile: SelectiveTile, summarise: bool) -> str:
    """Entry point of a selective_scan kernel."""
    parts = ["selective_scan", "summarise" if summarise else "apply", *_words(kind)]
    return "_".join([*parts, f"{tile.states}x{tile.groups}x{tile.warps}"])


def _words(kind: SelectiveKind) -> list[str]:
    return [
        kind.item,
        *["complex"] * kind.complex,
        *["time"] * kind.time_fast,
        *["constB"] * (not kind.time_B),
        *["constC"] * (not kind.time_C),
        *["segmented"] * kind.segmented,
    ]


@cache
def selective_source(kind: SelectiveKind) -> KernelSource:
    """Every selective_scan kernel that a call of this kind can need."""
    entries, shared = {"interval": f"static_assert(kStateInterval == {STATE_INTERVAL});"}, {}
    for i, tile in enumerate(selective_tiles(kind)):
        template = ", ".join(
            [_CPP[kind.item], _CPP[kind.state]]
            + [str(size) for size in (tile.states, tile.groups, tile.warps)]
            + [_flags(kind.time_fast, kind.time_B, kind.time_C, kind.segmented)]
        )
        entries[f"shared memory of {template}"] = (
            f"static_assert(sizeof(SelectiveTile<{template}>::Shared) == {tile.shared_memory(kind)}, "
            f'"the plan counts on this much shared memory");'
        )
        for summarise in (False, True) if i == 0 else (False,):
            name = selective_name(kind, tile, summarise)
            shared[name] = tile.shared_memory(kind)
            # Marks, and runs along time that they cut, take registers.
            blocks = tile.blocks - (kind.segmented and (kind.time_fast or tile.states == 8))
            bounds = f"{tile.threads}, resident_blocks({blocks}, {shared[name]})"
            entries[name] = (
                f'extern "C" __global__ void __launch_bounds__({bounds}) '
                f"{name}(const SelectiveArgs args) {{\n"
                f"  extern __shared__ __align__(16) unsigned char memory[];\n"
                f"  selective_scan<SelectiveTile<{template}>, {_flags(summarise)}>(args, memory);\n}}"
            )
    return _module("selective_scan.cu", ("SelectiveArgs", SELECTIVE_ARGS), entries, shared)


BACKWARD_HEAD = "<" + 7 * _SEQUENCE_ARRAY + 2 * _COUPLE_ARRAY + 2 * "6q" + "4q2q3q3q2q" + "4q3q" + "6q"
BACKWARD_TAIL = "<7q" + "2d2f" + "10i" + "10q"


def backward_name(kind: SelectiveKind, tile: BackwardTile, summarise: bool) -> str:
    """Entry point of a selective_scan_backward kernel."""
    parts = ["selective_scan_backward", *["summarise"] * summarise, *_words(kind)]
    return "_".join([*parts, f"{tile.states}x4x{tile.channels}x{tile.steps}"])


@cache
def backward_source(kind: SelectiveKind) -> KernelSource:
    """Both selective_scan_backward kernels of a kind."""
    tile = backward_tile(kind)
    sizes = [str(size) for size in (tile.states, tile.channels, tile.steps)]
    flags = _flags(kind.time_fast, kind.time_B, kind.time_C, kind.segmented)
    template = f"BackwardTile<{', '.join([_CPP[kind.item], _CPP[kind.state], *sizes, flags])}>"
    entries = {"interval": f"static_assert(kStateInterval == {STATE_INTERVAL});"}
    shared = {}
    for summarise, struct_, memory, blocks in (
        (False, "Shared", tile.shared_memory(kind), 1),
        (True, "Summary", tile.summary_memory(kind), 3 if kind.time_fast and kind.segmented else 4),
    ):
        name = backward_name(kind, tile, summarise)
        shared[name] = memory
        entries[struct_] = f'static_assert(sizeof({template}::{struct_}) == {memory}, "the plan counts on this much");'
        entries[name] = (
            f'extern "C" __global__ void __launch_bounds__({tile.threads}, {blocks}) '
            f"{name}(const SelectiveBackwardArgs args) {{\n"
            f"  extern __shared__ __align__(16) unsigned char memory[];\n"
            f"  selective_scan_backward<{template}, {_flags(summarise)}>(args, memory);\n}}"
        )
    size = struct.calcsize(BACKWARD_HEAD) + struct.calcsize(BACKWARD_TAIL)
    return _module("selective_scan_backward.cu", ("SelectiveBackwardArgs", size), entries, shared)


SUM_JOBS, SUM_JOB, SUM_THREADS = 5, "<4q2i", 256
SUM_ARGS = SUM_JOBS * struct.calcsize(SUM_JOB) + 8


@cache
def sum_source() -> KernelSource:
    """The kernels that add partial sums."""
    entries = {
        f"sum_partials_{real}": (
            f'extern "C" __global__ void __launch_bounds__({SUM_THREADS}) sum_partials_{real}(const SumArgs args) '
            f"{{ sum_partials<{_CPP[real]}>(args); }}"
        )
        for real in ("float32", "float64")
    }
    return _module("sum_partials.cu", ("SumArgs", SUM_ARGS), entries)


UPDATE_ARGS = "<11q" + "3q8q2q3q3q3q5q" + "2d2f" + "12i"  # the addresses first


def update_name(kind: UpdateKind) -> str:
    """Entry point of a selective_state_update kernel."""
    return f"selective_state_update_{'vector' if kind.vector else 'single'}_{kind.item}_{kind.state}"


@cache
def update_source(item: str, state: str) -> KernelSource:
    """Both selective_state_update kernels of an item type of x and one of the state."""
    entries = {}
    for kind in (UpdateKind(item, state, vector) for vector in (True, False)):
        name = update_name(kind)
        template = ", ".join([_CPP[item], _CPP[state], _CPP[kind.computed], str(kind.vector).lower()])
        entries[name] = (
            f'extern "C" __global__ void __launch_bounds__({UPDATE_THREADS}, {kind.blocks}) '
            f"{name}(const UpdateArgs args) {{ selective_state_update<{template}>(args); }}"
        )
    return _module("selective_state_update.cu", ("UpdateArgs", struct.calcsize(UPDATE_ARGS)), entries)


# A call's item type is told apart once a thread, not by kernels of its own.
CONV_ARGS = "<6q" + "15q5q" + "6i"
CONV_BACKWARD_ARGS = "<4q2q"  # after those of the forward
NORM_ARGS = "<5q" + "5q2q" + "f5i"
NORM_BACKWARD_ARGS = "<3q" + "4q1q" + "2i"
PRODUCT_ARGS = "<5q" + "7q2q" + "7i4x"


def _plain_source(name: str, arguments: tuple[str, int], bounds: str, call: str, file: str = "") -> KernelSource:
    """A module of one kernel that hands its argument to a function."""
    entry = (
        f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(const {arguments[0]} args) {{ {call}(args); }}'
    )
    return _module(file or f"{name}.cu", arguments, {name: entry})


@cache
def conv_source() -> KernelSource:
    """The kernel of causal_conv1d."""
    arguments = "ConvArgs", struct.calcsize(CONV_ARGS)
    return _plain_source("causal_conv1d", arguments, f"{CONV_THREADS}, {CONV_BLOCKS}", "convolve")


@cache
def conv_backward_source() -> KernelSource:
    """The kernel of its gradients."""
    arguments = "ConvBackwardArgs", struct.calcsize(CONV_ARGS) + struct.calcsize(CONV_BACKWARD_ARGS)
    bounds = f"{CONV_THREADS}, {CONV_BACKWARD_BLOCKS}"
    return _plain_source("causal_conv1d_backward", arguments, bounds, "convolve_backward")


@cache
def norm_source() -> KernelSource:
    """The kernel of rms_norm."""
    return _plain_source("rms_norm", ("NormArgs", struct.calcsize(NORM_ARGS)), f"{NORM_THREADS}, 1", "norm_rows")


@cache
def norm_backward_source() -> KernelSource:
    """The kernel of its gradients."""
    arguments = "NormBackwardArgs", struct.calcsize(NORM_ARGS) + struct.calcsize(NORM_BACKWARD_ARGS)
    return _plain_source("rms_norm_backward", arguments, f"{NORM_THREADS}, 1", "norm_rows_backward")


@cache
def product_source(most: int) -> KernelSource:
    """The kernel of matrix_vector for at most so many rows of x: 1 or MOST_PRODUCTS."""
    arguments = "ProductArgs", struct.calcsize(PRODUCT_ARGS)
    call, bounds = f"multiply_by_rows<{most}>", f"{32 * PRODUCT_WARPS}, {4 if most == 1 else 2}"
    return _plain_source(f"matrix_vector_{most}", arguments, bounds, call, "matrix_vector.cu")


def all_sources() -> dict[str, KernelSource]:
    """Every module there is, by a readable name."""
    sources = {"step_marks": marks_source()}
    for segmented in (False, True):
        for item in _CPP:
            words = " ".join([item, *["segmented"] * segmented])
            sources[f"linear_scan {words}"] = linear_source(item, segmented=segmented)
            sources[f"linear_scan_backward {words}"] = linear_backward_source(item, segmented=segmented)
    for kind in selective_kinds():
        words = " ".join(_words(kind)).replace("const", "constant ")
        sources[f"selective_scan {words} {kind.states} states"] = selective_source(kind)
        sources[f"selective_scan_backward {words}"] = backward_source(backward_kind(kind))
    sources["sum_partials"] = sum_source()
    for item, state in dict.fromkeys((kind.item, kind.state) for kind in update_kinds()):
        sources[f"selective_state_update {item}, state {state}"] = update_source(item, state)
    sources["causal_conv1d"], sources["causal_conv1d_backward"] = conv_source(), conv_backward_source()
    sources["rms_norm"], sources["rms_norm_backward"] = norm_source(), norm_backward_source()
    for most in (1, MOST_PRODUCTS):
        sources[f"matrix_vector {most}"] = product_source(most)
    return sources


def digest() -> str:
    """Of all that decides what runs: the generated texts and the plan's tables."""
    from . import _plan

    state = hashlib.sha256()
    for source in all_sources().values():
        state.update(source.text.encode())
    thresholds = {name: value for name, (value, _) in _plan.THRESHOLDS.items()}
    state.update(repr((thresholds, OPTIONS)).encode())
    return state.hexdigest()[:16]
