"""Every line of cuda_src/ runs on the CPU; what is behind an architecture's own branch is not compiled there."""

import sys

import mutation
import numpy as np
import pytest
import test_mamba_ops
import test_state_update

import cuscan
from cuscan import _source
from cuscan.testing import Host, Layout, LinearGradientProblem, LinearProblem, Plan, host

try:
    host.compiler()
except host.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

DIVIDE = """
extern "C" __global__ void divide_all(const long long* x, const long long* y, int count, long long* to) {
  for (int i = 0; i < count; ++i) to[i] = divide(x[i], y[i], to[count + i]);
}
"""


def check_division(executor):
    """divide() of linear_scan.cu on both sides of 2^32: no test has as many rows."""
    random = np.random.default_rng(0)
    x, y = (random.integers(1, 2 ** random.integers(1, 62, 1000)) for _ in range(2))
    source = _source.KernelSource("\n".join(_source._flatten("linear_scan.cu", set())) + DIVIDE, ("divide_all",))
    results = executor.launch(
        source, "divide_all", (1,), (1,), (x, y, np.int32(len(x)), np.zeros(2 * len(x), np.int64))
    )[-1]
    np.testing.assert_array_equal(results.reshape(2, -1), np.divmod(x, y))


def check_large_angles(executor):
    """unit_at_angle() where the angle is reduced in float64, and where it is taken as 0."""
    u, B, h0 = np.ones((1, 1, 1), np.float32), np.ones((1, 1, 1), np.complex64), np.ones((1, 1, 1), np.complex64)
    for angle, cosine in ((1e6, np.cos(1e6)), (3e13, 1)):
        A = np.full((1, 1), -1 + angle * 1j, np.complex64)
        y = executor(cuscan.selective_scan, {"u": u, "delta": u, "A": A, "B": B, "C": B, "h0": h0})
        np.testing.assert_allclose(y, 2 * (np.exp(-1) * cosine + 1), rtol=1e-6)


def check_one_pass(executor):
    """Rows that are taken in one pass, of more tiles than a group has; a plan without chunks leaves them so."""
    # Rows apart and side by side, a row along time, and two that take turns.
    shapes = (("rows", (37, 309), 1), ("rows", (309, 64), 0), ("time", (1, 32 * 768 + 700), 1), ("time", (1101, 2), 0))
    for lanes, shape, axis in shapes:
        plans = tuple(Plan(schedule="split", lanes=lanes, row_warps=warps) for warps in (1, 2))
        for h0 in (None, Layout()):
            LinearProblem(shape=shape, axis=axis, h0=h0, last=True, plans=plans).check(executor)


def check_pairs(executor):
    """Two rows of 16-bit items a thread: with a number for a gate, with tails, and stored in another type."""
    plans = (Plan(schedule="serial"), Plan(schedule="split", lanes="rows", chunk=40))
    for a, h0, out_dtype in ((1.0, None, None), (Layout(), Layout(), "float32")):
        for dtype in ("bfloat16", "float16"):
            sizes = {"shape": (70, 72), "axis": 0, "dtype": dtype, "out_dtype": out_dtype}
            of = LinearProblem(**sizes, a=a, h0=h0, plans=plans)
            of.check(executor)
            LinearGradientProblem(of, Layout(), Layout(), grad_dtype=out_dtype).check(executor)


def test_division_of_64_bits():
    check_division(Host())


@pytest.mark.full
def test_every_line_runs(capsys):
    executor = Host("coverage")
    for problem in mutation.problems_for(""):
        problem.check(executor)
    for dtype in ("complex64", "complex128"):
        LinearProblem(dtype=dtype, a=1.0).check(executor)
    for dtype in ("bfloat16", "float32"):  # whole tiles over time
        for a in (1.0, Layout(), Layout(steps=(1, 0))):
            of = LinearProblem(shape=(1, 1104), axis=1, dtype=dtype, a=a, reverse=True)
            of.check(executor)
            LinearGradientProblem(of, Layout()).check(executor)
    packed = LinearProblem(shape=(16, 2), axis=0, h0=Layout(), cu_seqlens=Layout(), lengths=(2, 14))
    LinearGradientProblem(packed, Layout(), Layout()).check(executor)
    check_one_pass(executor)
    check_pairs(executor)
    check_division(executor)
    check_large_angles(executor)
    test_state_update.check_all(executor.modules)
    test_mamba_ops.check_all(executor.modules)
    report = executor.modules.coverage()
    with capsys.disabled():
        for file, lines in report.items():
            sys.stdout.write(f"\n{file:40}{len(lines.covered):5} lines run, {len(lines.uncovered)} do not")
    assert {file: sorted(lines.uncovered) for file, lines in report.items() if lines.uncovered} == {}
    files = {f"cuda_src/{path.name}" for path in _source.folder().glob("*.cu")}
    assert files <= set(report)
