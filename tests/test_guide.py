"""The examples of docs/testing.md run, and print what they say."""

import re
from pathlib import Path

import pytest

from cuscan.testing import host

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

GUIDE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"^ *print\(.*\)  # (.*)$|^# prints: (.*)$", re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_prints_what_it_says(example, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(example, {"__name__": "guide"})
    expected = [here or below for here, below in EXPECTED.findall(example)]
    assert capsys.readouterr().out.splitlines() == expected


def test_there_are_examples_of_all_three():
    assert len(EXAMPLES) == 5
    assert all(any(name in example for example in EXAMPLES) for name in ("linear_problems", "Monoid", "HostModule"))
