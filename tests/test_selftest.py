"""The self-test names what is wrong: a family of kernels, a missing barrier, scratch that calls share."""

import re

import numpy as np
import pytest

from cuscan import _plan, _selftest
from cuscan.__main__ import main
from cuscan.testing import host
from cuscan.testing.host import HostModules, HostPlace

FAMILY = "linear_scan_time_{summarise,apply}_float32"


@pytest.fixture(autouse=True)
def _needs_a_compiler(monkeypatch):
    try:
        host.compiler()
    except host.CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(_selftest, "gpu", lambda: ("", "it is left out here"))


class Broken:
    """The CPU executor's kernels, of a text with a mistake."""

    def __init__(self, mode, order, before, after):
        self.modules, self.change = HostModules(mode, order=order), (before, after)
        self.memory = self.modules.memory

    def get_function(self, source, name):
        text = source.text.replace(*self.change)
        assert text != source.text
        return self.modules.get_function(text, name)


def broken(monkeypatch, before, after, only=("fast", "checked")):
    def make(mode, order):
        return Broken(mode, order, before, after) if mode in only else HostModules(mode, order=order)

    monkeypatch.setattr(_selftest, "host_modules", make)


RIGHT = "multiply_add(later.gate, earlier.input, later.input)"
SWAPPED = "multiply_add(earlier.gate, later.input, earlier.input)"
WITH_BARRIER = "__syncthreads();\n        entering = carry.add_all(&maps[parity][slot * args.row_warps], 1"
WITHOUT = WITH_BARRIER.replace("__syncthreads()", "")


def run(function, **options):
    lines = []
    return function(lines.append, only=FAMILY, **options), lines


def test_all_is_well():
    right, lines = run(_selftest.run)
    assert right
    assert lines[1:] == [f"ok      block, split            {FAMILY}", "Every check passed."]
    right, lines = run(_selftest.run_streams)
    assert right
    assert lines[1:] == [f"ok      4 at once               {FAMILY}", "Every check passed."]


@pytest.mark.full
def test_gradients_of_every_type_are_well():
    lines = []
    assert _selftest.run(lines.append, only="linear_scan_backward", every=True)
    assert len(lines[1:]) == 2 * 4 + 1  # lanes over rows and over time, of four types


def test_a_wrong_kernel_is_named(monkeypatch):
    broken(monkeypatch, RIGHT, SWAPPED)
    right, lines = run(_selftest.run)
    assert not right
    assert lines[1].startswith(f"FAILED  block, split            {FAMILY}\n        AssertionError")
    assert lines[-1] == "1 of 1 families FAILED."


def test_symptom_a_missing_barrier(monkeypatch):
    broken(monkeypatch, WITH_BARRIER, WITHOUT, only=("checked",))
    right, lines = run(_selftest.run_streams)
    assert not right
    assert re.search("(RaceError|UninitialisedError): cuda_src/linear_\\w+.cuh?:[0-9]+:", lines[1]), lines[1]
    assert FAMILY in lines[1]


class Shared(HostPlace):
    """Scratch that all calls share, by shape."""

    kept: dict = {}  # noqa: RUF012

    def allocate(self, shape, dtype):
        key = shape, np.dtype(dtype)
        if len(shape) != 1:
            return super().allocate(shape, dtype)
        if key not in self.kept:
            self.kept[key] = []
        calls = self.kept[key]
        index = self.count = getattr(self, "count", -1) + 1
        while len(calls) <= index:
            calls.append(super().allocate(shape, dtype))
        return calls[index]


def test_symptom_scratch_that_calls_share(monkeypatch):
    monkeypatch.setattr(Shared, "kept", {})
    monkeypatch.setattr(_selftest, "host_place_of", Shared)
    right, lines = run(_selftest.run_streams)
    assert not right
    assert "at once gives other bits than alone" in lines[1]
    assert FAMILY in lines[1]


def test_the_command(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(_selftest, "run", lambda _, *, every: called.append(every) or not every)
    monkeypatch.setattr(_selftest, "run_streams", lambda _: called.append("streams") or True)
    assert [main(["selftest"]), main(["selftest", "--all"]), main(["selftest", "--streams"])] == [0, 1, 0]
    assert called == [False, True, "streams"]
    assert capsys.readouterr().out == ""


def test_every_type_has_its_families():
    for item in ("float32", *_selftest.OTHERS):
        families = list(_selftest._families(("bld",), item))
        names = {name for name, *_ in families}
        assert {f"linear_scan_rows_{{summarise,apply}}_{item}", f"linear_scan_time_{{summarise,apply}}_{item}"} < names
        for kind in ("selective_scan_{", "selective_scan_backward_{", "selective_state_update_vector_"):
            assert any(name.startswith(kind) and item in name for name in names)
        for *_, plans, inputs in families:
            assert all(isinstance(plan["schedule"], _plan.Schedule) for plan in plans)
            types = {given[name].dtype.name for given, _ in inputs for name in ("u", "x", "b") if name in given}
            assert types == {item}


@pytest.mark.full
@pytest.mark.parametrize(
    ("item", "of", "count"),
    [
        ("float64", ("linear", "selective_state"), 8),
        ("bfloat16", ("linear_scan_rows_{", "selective_scan_apply_bfloat16_2x8x4"), 3),
    ],
)
def test_other_types_and_gradients(item, of, count, host_executor, monkeypatch):
    few = [*_selftest._families(("bld",), item), *_selftest._linear_backward(item)]
    few = [family for family in few if family[0].startswith(of)]
    monkeypatch.setattr(_selftest, "_families", lambda *_: few)
    monkeypatch.setattr(_selftest, "host_modules", lambda *_: host_executor.modules)  # which this tier has compiled
    lines = []
    assert _selftest.run(lines.append), lines
    assert len(lines) == count + 2
