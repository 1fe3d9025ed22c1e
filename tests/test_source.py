"""The generated kernel texts: everything flattened in, every line at its place, few names and each once."""

import re
import struct
import subprocess
import sys

import pytest

from cuscan import _source

SOURCES = _source.all_sources()
ROOT = _source.folder()
LINE = re.compile(r'#line (\d+) "(.+)"')


def places(text):
    """(file, line, text) of each line of a kernel text, as a compiler counts."""
    file, number = "", 0
    for line in text.splitlines():
        directive = LINE.fullmatch(line)
        if directive:
            number, file = int(directive[1]), directive[2]
        else:
            yield file, number, line
            number += 1


@pytest.mark.parametrize("name", SOURCES)
def test_every_line_is_where_line_says(name):
    found = {}
    for file, number, line in places(SOURCES[name].text):
        if file == "instantiations":
            continue
        assert file.startswith("cuda_src/")
        assert (file, number) not in found, "a line twice"
        found[file, number] = line
    for file in {file for file, _ in found}:
        lines = (ROOT / file.removeprefix("cuda_src/")).read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            if line.startswith("#include"):
                assert (file, number) not in found
            elif line == "#pragma once":
                assert found[file, number] == ""
            else:
                assert found[file, number] == line


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_left_to_be_found(name):
    text = SOURCES[name].text
    assert "#include" not in text
    assert "#pragma once" not in text
    assert not re.search(r"__(DATE|TIME|TIMESTAMP)__", text)
    assert not re.search(r'"(/|[A-Za-z]:\\)', text), "an absolute path"
    assert str(ROOT.parent) not in text
    assert text.isascii()
    assert text.endswith("\n")


def test_every_file_of_cuda_src_is_in_some_text():
    used = {file for source in SOURCES.values() for file, _, _ in places(source.text)}
    assert used == {f"cuda_src/{path.name}" for path in ROOT.glob("*.cu*")} | {"instantiations"}


def test_names_are_readable_few_and_mean_one_thing():
    assert sum(len(source.names) for source in SOURCES.values()) <= 410
    meanings = {}
    for source in SOURCES.values():
        for name in source.names:
            family = r"(linear_scan|selective_scan|selective_state_update|sum_partials|matrix_vector)_[A-Za-z0-9_]+"
            whole = r"step_marks|(causal_conv1d|rms_norm)(_backward)?"
            assert re.fullmatch(f"{family}|{whole}", name), name
            # Modules of 16-bit items have kernels of float32 too, for their summaries.
            meaning = source.text[source.text.index(f" {name}(") :].partition("\n}")[0].partition(";")[0]
            assert meanings.setdefault(name, meaning) == meaning


@pytest.mark.parametrize("name", SOURCES)
def test_names_are_the_entry_points(name):
    source = SOURCES[name]
    bounds = r"__launch_bounds__\(\d+(?:, (?:\d+|resident_blocks\(\d+, \d+\)))?\)"
    entry = rf'extern "C" __global__ void {bounds} (\w+)\(const \w+Args args\)'
    assert tuple(re.findall(entry, source.text)) == source.names
    assert len(set(source.names)) == len(source.names)
    assert source.text.count("__global__") == len(source.names)


@pytest.mark.parametrize("name", SOURCES)
def test_sizes_that_python_counts_on_are_asserted(name):
    tail = SOURCES[name].text.partition('"instantiations"')[2]
    (arguments,) = set(re.findall(r"\(const (\w+) args\)", tail))
    size = {
        "LinearArgs": _source.LINEAR_ARGS,
        "LinearBackwardArgs": _source.LINEAR_BACKWARD_ARGS,
        "SelectiveArgs": _source.SELECTIVE_ARGS,
        "SelectiveBackwardArgs": struct.calcsize(_source.BACKWARD_HEAD) + struct.calcsize(_source.BACKWARD_TAIL),
        "SumArgs": _source.SUM_ARGS,
        "MarkArgs": struct.calcsize(_source.MARK_ARGS),
        "UpdateArgs": struct.calcsize(_source.UPDATE_ARGS),
        "ConvArgs": struct.calcsize(_source.CONV_ARGS),
        "ConvBackwardArgs": struct.calcsize(_source.CONV_ARGS) + struct.calcsize(_source.CONV_BACKWARD_ARGS),
        "NormArgs": struct.calcsize(_source.NORM_ARGS),
        "NormBackwardArgs": struct.calcsize(_source.NORM_ARGS) + struct.calcsize(_source.NORM_BACKWARD_ARGS),
        "ProductArgs": struct.calcsize(_source.PRODUCT_ARGS),
    }[arguments]
    assert f"static_assert(sizeof({arguments}) == {size}," in tail
    shared = re.findall(r"static_assert\(sizeof\((\w+Tile<.+?>)::Shared\) == (\d+),", tail)
    tiles = re.findall(r"selective_scan(?:_backward)?<(\w+Tile<.+?>), \w+>", tail)
    assert sorted(template for template, _ in shared) == sorted(set(tiles))
    assert len(tiles) == (len(SOURCES[name].names) if arguments.startswith("Selective") else 0)
    assert SOURCES[name].dynamic_shared.keys() == (set(SOURCES[name].names) if tiles else set())


def test_every_assertion_has_a_sentence():
    for path in ROOT.glob("*.cu*"):
        for assertion in re.findall(r"static_assert\((.*?)\);", path.read_text(), re.DOTALL):
            assert re.search(r'"[^"]{10,}"$', assertion), f"{path.name}: {assertion}"


def test_texts_are_the_same_in_every_process():
    code = (
        "from hashlib import sha256; from cuscan._source import all_sources;"
        "print(*(sha256(s.text.encode()).hexdigest() for s in all_sources().values()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == len(SOURCES)


def test_the_folder_is_the_packages_or_the_checkouts():
    assert (ROOT / "operators.cuh").is_file()
    assert ROOT.name == "cuda_src"
