"""The README's examples run, and what it names exists."""

import importlib
import re
from pathlib import Path

import pytest

import cuscan
from cuscan.demo import device

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"^print\(.*?\)  # (.*)$", re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_prints_what_it_says(example, capsys):
    if "import torch" in example:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    if "import jax" in example:
        pytest.importorskip("jax", reason="JAX is not installed")
    module, _ = device()
    exec(example.replace("import cupy as cp", f"import {module.__name__} as cp"), {"__name__": "readme"})
    expected = EXPECTED.findall(example)
    assert expected
    assert capsys.readouterr().out.splitlines() == expected


def test_there_is_an_example_of_each_kind():
    assert any("import cupy as cp" in example for example in EXAMPLES)
    assert any("__dlpack__" in example for example in EXAMPLES)


def test_commands_use_extras_that_exist():
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert [block.count("\n") for block in blocks] == [2, 2, 2]
    project = (ROOT / "pyproject.toml").read_text()
    optional = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", project, re.DOTALL | re.MULTILINE)[1]
    declared = set(re.findall(r"^(\w+) = \[", optional, re.MULTILINE))
    named = {extra for group in re.findall(r'"\.\[(.*?)\]"', README) for extra in group.split(",")}
    assert named == {"test", "cuda12", "cuda13"}
    assert named <= declared


def test_named_files_exist():
    named = re.findall(r"`((?:cuda_src|cuscan)/.*?)`", README) + re.findall(r"\]\((?!https?:)(.*?)\)", README)
    assert "docs/levels.svg" in named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_table_has_every_public_name():
    rows = re.findall(r"^\|( `cuscan\..*?)\|", README, re.MULTILINE)
    table = {name for row in rows for name in re.findall(r" `cuscan\.([\w.]+)", row)}
    assert set(cuscan.__all__) - {"__version__"} <= {name.partition(".")[0] for name in table}
    for name in table:
        parent, _, leaf = f"cuscan.{name}".rpartition(".")
        assert hasattr(importlib.import_module(parent), leaf) or importlib.import_module(f"cuscan.{name}")


def test_environment_variables_are_those_the_package_reads():
    sources = [*(ROOT / "cuscan").rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(CUSCAN_[A-Z_]+)"', path.read_text())}
    assert set(re.findall(r"CUSCAN_[A-Z_]+", README)) == read
