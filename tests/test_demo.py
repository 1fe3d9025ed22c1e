"""The demo's checks can fail, its tables fit a terminal, and its hand-worked numbers are right."""

import io
from fractions import Fraction

import numpy as np
import pytest

import cuscan
from cuscan import demo
from cuscan.__main__ import main


def by_definition(a, b):
    """Sum over s <= t of b[s] a[s+1] ... a[t], in fractions."""
    a, b = [Fraction(x) for x in a], [Fraction(x) for x in b]
    h = []
    for t in range(len(b)):
        terms = list(b[: t + 1])
        for s in range(t):
            for r in range(s + 1, t + 1):
                terms[s] *= a[r]
        h.append(sum(terms))
    return h


def in_order(earlier, later):
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def swapped(earlier, later):
    return in_order(later, earlier)


def hillis_steele(combine):
    """Give a linear_scan with the association of a warp, in the place of the real one."""

    def scan(a, b, *, reverse=False):
        maps = list(zip(a.tolist(), b.tolist(), strict=True))
        maps = maps[::-1] if reverse else maps
        distance = 1
        while distance < len(maps):
            maps = maps[:distance] + [combine(maps[i - distance], maps[i]) for i in range(distance, len(maps))]
            distance *= 2
        h = [value for _, value in maps]
        return np.array(h[::-1] if reverse else h)

    return scan


@pytest.mark.parametrize(("a", "b", "forward", "reverse"), [case[1:] for case in demo.HAND_WORKED])
def test_hand_worked_values(a, b, forward, reverse):
    assert by_definition(a, b) == list(forward)
    assert by_definition(a[::-1], b[::-1])[::-1] == list(reverse)


def test_hand_worked_repetitions():
    _, a, b, forward, reverse = demo.HAND_WORKED[1]
    assert by_definition(a * 3, b * 3) == list(forward + demo.REPEATED * 2)
    assert by_definition((a * 3)[::-1], (b * 3)[::-1])[::-1] == list(demo.REPEATED_REVERSE * 2 + reverse)


def test_only_changing_gates_show_a_swapped_order(monkeypatch, capsys):
    """Of the two sequences' verdicts and that of the repetitions, the first stays ok."""
    monkeypatch.setattr(cuscan, "linear_scan", hillis_steele(in_order))
    assert demo.hand_worked(np)
    assert verdicts(capsys) == ["ok", "ok", "ok"]
    monkeypatch.setattr(cuscan, "linear_scan", hillis_steele(swapped))
    assert not demo.hand_worked(np)
    assert verdicts(capsys) == ["ok", "WRONG", "WRONG"]


def verdicts(capsys):
    words = capsys.readouterr().out.split()
    return [word for word in words if word in ("ok", "WRONG")]


def test_demo_fits_a_terminal_and_passes(capsys):
    assert main(["demo", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"cuscan {cuscan.__version__} on ")
    assert max(map(len, out.splitlines())) <= 80
    first_words = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [first_words.count(length) for length in ("256", "512", "1024", "2048")] == [2, 2, 2, 0]
    assert "WRONG" not in out


@pytest.mark.parametrize("error", [1e-4, np.nan])
def test_an_error_beyond_the_bound_fails_the_demo(error, monkeypatch, capsys):
    right = cuscan.selective_scan

    def wrong(*arguments, **options):
        y = right(*arguments, **options)
        (y[0] if isinstance(y, tuple) else y)[0, -1] += error
        return y

    monkeypatch.setattr(cuscan, "selective_scan", wrong)
    assert main(["demo", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert out.splitlines()[-1].startswith("A CHECK FAILED")


def test_bfloat16_rounds_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0, 3e38], np.float32)
    x = np.concatenate([x, ties])
    np.testing.assert_array_equal(demo.bfloat16(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_progress_bar_only_after_two_seconds_and_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now = [0.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(demo.sys, "stderr", Terminal())
    progress = demo._Progress(4)
    progress.advance(1)
    assert demo.sys.stderr.getvalue() == ""
    now[0] = 3.0
    progress.advance(1)
    assert demo.sys.stderr.getvalue() == f"\r   [{'#' * 20}{' ' * 20}]  50 %"
    monkeypatch.setattr(demo.sys, "stderr", io.StringIO())
    progress.advance(1)
    assert demo.sys.stderr.getvalue() == ""


def test_info_names_versions_and_device(capsys):
    assert main(["info"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["cuscan"] == cuscan.__version__
    assert facts["numpy"] == np.__version__
    assert facts["device"]
