"""The fuzzer finds planted faults, makes them small, and tells what it did."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import mutation
import numpy as np
import pytest

import cuscan
from cuscan import __main__, _calls, _source, linear, reference, reference_vjp
from cuscan.testing import Host, LinearProblem, Numpy, fuzz, host, problems

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_a_run_on_numpy_passes_and_is_recorded(tmp_path, capsys):
    record = tmp_path / "record.json"
    arguments = ["fuzz", "--on", "numpy", "--problems", "60", "--seed", "7", "--jobs", "1", "--record", str(record)]
    assert __main__.main(arguments) == 0
    told = capsys.readouterr().out
    assert re.search(r"^60 problems in [\d.]+ s, \d+ a second, none fails$", told, re.MULTILINE)
    facts = json.loads(record.read_text())
    assert (facts["problems"], facts["seed"], facts["on"], facts["mismatches"]) == (60, 7, "numpy", [])
    assert facts["kernels"] == _source.digest()
    functions = {name: sum(facts["kinds"].get(f"{name}: {values}", 0) for values in problems.VALUES)
                 for name in ("linear_scan", "selective_scan", "linear_scan_vjp", "selective_scan_vjp")}  # fmt: skip
    assert sum(functions.values()) == 60
    assert min(functions.values()) > 5
    assert __main__.main([*arguments, "--jobs", "2"]) == 0
    again = json.loads(record.read_text())
    assert (facts.pop("jobs"), again.pop("jobs")) == (1, 2)
    for timed in ("seconds", "problems_per_second"):
        del facts[timed], again[timed]
    assert again == facts


def test_problems_depend_on_seed_and_number_alone():
    first = [fuzz.draw(3, i) for i in range(20)]
    assert [fuzz.draw(3, i) for i in reversed(range(20))][::-1] == first
    assert len({repr(problem) for problem in first}) == 20
    assert fuzz.draw(4, 0) != first[0]


@pytest.fixture
def broken_reverse(monkeypatch):
    """In reverse, more than 20 steps: the 21st is off by one. The gradients' own scans are in packed sequences."""
    right = reference.linear_scan

    def linear_scan(a, b, h0, out, *, axis, reverse, cu_seqlens, **options):
        last = right(a, b, h0, out, axis=axis, reverse=reverse, cu_seqlens=cu_seqlens, **options)
        if reverse and b.shape[axis] > 20 and cu_seqlens is None:
            np.moveaxis(out, axis, 0)[20] += 1
        return last

    monkeypatch.setattr(reference, "linear_scan", linear_scan)


REVERSED = "from cuscan.testing import LinearProblem, Numpy\n\nLinearProblem(shape=(21,), reverse=True).check(Numpy())"
SMALL = LinearProblem(shape=(1,))
WORK = fuzz._work_in_process


def work_on_broken(run, job, pipe):
    """In all jobs but the first every problem fails, and is the same."""
    if job > 0:
        fuzz.draw, fuzz.error_of = lambda *_: SMALL, lambda *_: ValueError("planted")
    while job == 0 and min(run.at[1:]) < 0:
        time.sleep(0.01)
    WORK(run, job, pipe)


def work_and_die(run, job, pipe):
    """A process that ends without a word in the tenth problem."""
    right = fuzz.error_of
    fuzz.error_of = lambda *case: os._exit(3) if run.at[job] == 9 else right(*case)
    WORK(run, job, pipe)


@pytest.mark.usefixtures("broken_reverse")
def test_a_fault_is_found_shrunk_and_shown_as_python(capsys, tmp_path):
    record = tmp_path / "record.json"
    arguments = ["fuzz", "--on", "numpy", "--problems", "500", "--seed", "1", "--jobs", "1", "--record", str(record)]
    assert __main__.main(arguments) == 1
    assert REVERSED in capsys.readouterr().out
    (mismatch,) = json.loads(record.read_text())["mismatches"]
    assert mismatch["python"] == REVERSED
    assert mismatch["error"].startswith("AssertionError: the result under Plan(): 1 of 21 elements")
    with pytest.raises(AssertionError, match="1 of 21 elements"):
        exec(REVERSED, {})
    assert isinstance(fuzz.error_of(fuzz.draw(1, mismatch["problem"]), Numpy()), AssertionError)


def test_a_job_that_finds_a_fault_ends_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz, "_work_in_process", work_on_broken)
    told, record = [], tmp_path / "record.json"
    assert not fuzz.run(told.append, on="numpy", count=40, seed=7, jobs=3, record=record)
    facts = json.loads(record.read_text())
    (mismatch,) = facts["mismatches"]  # two jobs have found it
    assert mismatch["problem"] in range(40)
    assert (mismatch["error"], mismatch["python"]) == ("ValueError: planted", fuzz.paste(SMALL, Numpy()))
    assert sum("shrinking ..." in line for line in told) == 2
    assert facts["problems"] == 40
    assert told[-1].endswith(", one fails")


def test_a_process_that_dies_is_a_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fuzz, "_work_in_process", work_and_die)
    record = tmp_path / "record.json"
    assert not fuzz.run(print, on="numpy", count=30, seed=1, jobs=2, record=record)
    facts = json.loads(record.read_text())
    case = fuzz.paste(fuzz.draw(1, 9), Numpy())
    assert facts["mismatches"] == [{"problem": 9, "error": "the process ended with exit code 3", "python": case}]
    assert facts["problems"] == 29
    assert "29 problems in " in capsys.readouterr().out


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_a_run_as_its_time_does(jobs, tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "cuscan", "fuzz", "--on", "numpy", "--minutes", "10", "--jobs", str(jobs)]
    process = subprocess.Popen(
        [*command, "--record", record],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        first = process.stdout.readline()
        assert first.startswith("fuzz on numpy"), first
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        told, _ = process.communicate(timeout=60)
    assert re.fullmatch(r"\d+ problems in [\d.]+ s, \d+ a second, none fails\n", told)
    assert process.returncode == 0
    assert json.loads(record.read_text())["jobs"] == jobs


def test_a_fault_of_packed_sequences_is_shrunk_to_the_one_that_shows_it(monkeypatch):
    right = reference.linear_scan

    def linear_scan(*arguments, cu_seqlens=None, **options):
        last = right(*arguments, cu_seqlens=cu_seqlens, **options)
        if cu_seqlens is not None:
            last[np.diff(cu_seqlens) == 0] += 1
        return last

    monkeypatch.setattr(reference, "linear_scan", linear_scan)
    told = []
    assert not fuzz.run(told.append, on="numpy", count=200, seed=1)
    assert "\nLinearProblem(shape=(1,), cu_seqlens=Layout(), lengths=(0,)).check(Numpy())" in told[-2]


@pytest.mark.usefixtures("broken_reverse")
def test_shrinking_keeps_the_type_of_error():
    problem = LinearProblem(shape=(3, 40), axis=1, reverse=True, dtype="float64")
    assert isinstance(fuzz.error_of(problem, Numpy()), AssertionError)
    assert fuzz.shrink(problem, Numpy()) == LinearProblem(shape=(21,), reverse=True)


def test_what_does_not_fail_again_is_shown_as_it_was(monkeypatch):
    right, errors = reference.linear_scan, [OSError("once")]

    def linear_scan(*arguments, **options):
        if errors:
            raise errors.pop()
        return right(*arguments, **options)

    monkeypatch.setattr(reference, "linear_scan", linear_scan)
    told = []
    assert not fuzz.run(told.append, on="numpy", count=50, seed=0)
    number = int(re.match(r"problem (\d+) fails with OSError: once\n", told[-3])[1])
    assert told[-2] == f"\n# OSError: once\n{fuzz.paste(fuzz.draw(0, number), Numpy())}\n"


def test_an_error_of_the_library_is_a_failure(monkeypatch):
    monkeypatch.setattr(reference, "selective_scan", lambda *_, **__: 1 / 0)
    told = []
    assert not fuzz.run(told.append, on="numpy", count=50, seed=0)
    assert "ZeroDivisionError" in told[-2]
    assert re.search(r"^Selective(Gradient)?Problem\(.*\).check\(Numpy\(\)\)$", told[-2], re.MULTILINE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("combine(Affine<S> earlier, Affine<S> later)", "combine(Affine<S> later, Affine<S> earlier)"),
        ("__syncthreads();", ";"),
    ],
)
def test_a_fault_in_a_kernel_is_found(right, wrong, tmp_path, monkeypatch):
    for path in _source.folder().iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace(right, wrong))
    monkeypatch.setattr(_source, "folder", lambda: tmp_path)
    monkeypatch.setattr(linear, "_READY", _calls.Cache())  # calls that are ready launch the right kernels
    _source.linear_source.cache_clear()
    executor, source = Host(), random.Random(0)
    drawn = (problems.draw_linear(source.choice, source.randint, dtype=("float32",), largest=2000) for _ in range(40))
    found = next(problem for problem in drawn if fuzz.error_of(problem, executor) is not None)
    small = fuzz.shrink(found, executor, seconds=10)
    _source.linear_source.cache_clear()
    assert small.b == small.a == problems.Layout()
    assert len(small.shape) == 1


@pytest.mark.full
def test_a_run_on_the_cpu_executor(host_executor, monkeypatch):
    executor = host_executor  # whose kernels are compiled
    monkeypatch.setitem(fuzz.EXECUTORS, "host", (lambda function, arguments: executor(function, **arguments),))
    assert fuzz.run(print, on="host", count=150, seed=0)


@pytest.mark.full
@pytest.mark.parametrize(
    "problems_of",
    [
        mutation.linear_problems,
        mutation.selective_problems,
        mutation.linear_gradient_problems,
        mutation.selective_gradient_problems,
    ],
)
def test_what_mutants_are_tried_on_passes_without_a_fault(problems_of):
    executors = [Host(), Host(order="random", seed=1)]
    for number, problem in enumerate(problems_of()):
        problem.check(executors[number % 2])


def test_a_fault_of_gradients_is_shrunk(monkeypatch):
    right = reference_vjp.selective_scan_vjp

    def selective_scan_vjp(u, *arguments, **options):
        gradients = right(u, *arguments, **options)
        if u.shape[1] > 20:
            gradients["delta"][:, 20] += 1
        return gradients

    monkeypatch.setattr(reference_vjp, "selective_scan_vjp", selective_scan_vjp)
    told = []
    assert not fuzz.run(told.append, on="numpy", count=200, seed=1)
    expected = "\nSelectiveGradientProblem(of=SelectiveProblem(length=21)).check(Numpy())"
    assert expected in told[-2]
    assert "# AssertionError: delta under Plan(): " in told[-2]


def test_what_a_mutant_runs_are_the_problems_of_its_kernels():
    functions = {
        file: {problem.function.__name__ for problem in mutation.problems_for(file)}
        for file in (
            "linear_scan.cu",
            "selective_tile.cuh",
            "activations.cuh",
            "sum_partials.cu",
            "selective_scan_backward.cu",
            "",
        )
    }
    both = {"linear_scan_vjp", "selective_scan_vjp"}
    assert functions == {
        "linear_scan.cu": {"linear_scan"},
        "selective_tile.cuh": {"selective_scan"},
        "activations.cuh": {"selective_scan", "selective_scan_vjp"},
        "sum_partials.cu": both,
        "selective_scan_backward.cu": {"selective_scan_vjp"},
        "": {"linear_scan", "selective_scan"} | both,
    }


def test_mutants_are_the_same_every_time_and_of_all_kinds():
    mutants = set(mutation.all_mutants())
    assert {mutant.kind for mutant in mutants} == {kind for kind, _, _ in mutation.RULES}
    for mutant in mutants:
        line = (_source.folder() / mutant.file).read_text().splitlines()[mutant.number - 1]
        assert mutant.before in line
        assert mutant.after != mutant.before
    for file, quota in mutation.quotas(140).items():
        first = list(mutation.chosen(file, 0))
        assert first == list(mutation.chosen(file, 0))
        assert len(first) >= quota or file == "operators.cuh"


def test_the_record_of_mutants_adds_up_and_explains_every_survivor():
    record = json.loads(mutation.RECORD.read_text())
    assert record == mutation.summed(record["files"])
    assert record["score"] >= 0.95
    assert set(record["files"]) <= set(mutation.FILES)
    unexplained = [each for file in record["files"].values() for each in file["survivors"] if not each["because"]]
    assert unexplained == []


def test_a_case_names_what_it_uses():
    problem = fuzz.draw(
        0, next(i for i in range(1000) if "tile" in repr(fuzz.draw(0, i)) and "inf" in repr(fuzz.draw(0, i)))
    )
    scope = {}
    exec(fuzz.paste(problem, Host()).rpartition("\n")[0], scope)
    assert {"SelectiveTile", "inf", "Host", "SelectiveProblem"} <= set(scope)
    assert eval(repr(problem), scope) == problem
    assert cuscan.selective_scan is problem.function
