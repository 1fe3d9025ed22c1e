"""`python -m cuscan fuzz`: draws whole problems until the time is up, and shrinks the first that fails.

Problem i of a run depends on the run's seed and i alone, so that a run can be repeated or continued anywhere.
"""

from __future__ import annotations

import json
import platform
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuscan
from cuscan import _source

from . import executors, problems
from .executors import Executor

REPORT_SECONDS = 5
SHRINK_SECONDS = 120

# What a problem is run on by turns. The order in which threads run must not matter.
EXECUTORS: dict[str, tuple[Executor, ...]] = {
    "gpu": (executors.Gpu(),),
    "host": (executors.Host(), executors.Host(order="reverse"), executors.Host(order="random", seed=1)),
    "numpy": (executors.Numpy(),),
}


def draw(seed: int, number: int) -> Any:
    """Problem `number` of the run `seed`."""
    source = random.Random(seed * 2**40 + number)
    draw = problems.draw_selective if source.random() < 0.5 else problems.draw_linear
    largest = source.choice((1024, 4096, 16384))  # small ones for speed, large ones for more than one tile
    problem = draw(source.choice, source.randint, largest=largest)
    return problems.draw_gradients(source.choice, source.randint, problem) if source.random() < 0.4 else problem


def error_of(problem: Any, executor: Executor) -> Exception | None:
    """What `problem.check(executor)` raises: a wrong value, a fault of a kernel, or an error of the library."""
    try:
        problem.check(executor)
    except Exception as error:  # noqa: BLE001 whatever it is, a problem that was drawn must not raise it
        return error
    return None


def shrink(problem: Any, executor: Executor, *, seconds: float = SHRINK_SECONDS) -> Any:
    """The simplest problem found that fails with the same type of error."""
    kind = type(error_of(problem, executor))
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for simpler in problem.simpler():
            if time.monotonic() > end:
                return problem
            if type(error_of(simpler, executor)) is kind:
                problem, found = simpler, True
                break
    return problem


def paste(problem: Any, executor: Executor) -> str:
    """Python that runs the problem again."""
    call = f"{problem!r}.check({executor!r})"
    used = set(re.findall(r"[A-Z]\w+(?=\()", call))
    lines = [f"from cuscan.testing import {', '.join(sorted(used - {'SelectiveTile'}))}"]
    lines += ["from cuscan._plan import SelectiveTile"] * ("SelectiveTile" in used)
    lines += ["from math import inf"] * bool(re.search(r"\binf\b", call))
    return "\n".join([*lines, "", call])


def default_executor() -> str:
    """The GPU if there is one, else the CPU executor if there is a compiler, else NumPy."""
    from .host import CompileError, compiler

    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return "gpu"
    except (ImportError, RuntimeError):
        pass
    try:
        compiler()
    except CompileError:
        return "numpy"
    return "host"


def run(
    say: Callable[[str], None],
    *,
    minutes: float | None = None,
    seed: int | None = None,
    count: int | None = None,
    on: str | None = None,
    record: Path | None = None,
) -> bool:
    """Fuzz until the time is up or the problems are done, whichever is first.

    Parameters
    ----------
    say : callable
        Takes lines of progress.
    minutes : float, optional
        One where `count` is absent too.
    seed : int, optional
        Drawn, and told, if absent.
    count : int, optional
        How many problems.
    on : {"gpu", "host", "numpy"}, optional
        Default: `default_executor()`.
    record : Path, optional
        Where to write what was run and found, as JSON.

    Returns
    -------
    bool
        Whether no problem failed. The first that does ends the run, and is shown as Python.
    """
    on = on or default_executor()
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    if minutes is None and count is None:
        minutes = 1
    seconds = float("inf") if minutes is None else 60 * minutes
    say(f"fuzz on {on}: {_device(on)}, seed {seed}")
    kinds: Counter[str] = Counter()
    start = told = time.monotonic()
    done, mismatch = 0, None
    while (count is None or done < count) and time.monotonic() - start < seconds:
        problem = draw(seed, done)
        executor = EXECUTORS[on][done % len(EXECUTORS[on])]
        error = error_of(problem, executor)
        done += 1
        kinds.update(f"{problem.function.__name__}: {kind}" for kind in problem.kinds())
        now = time.monotonic()
        if now - told >= REPORT_SECONDS:
            told = now
            say(f"{done} problems, {done / (now - start):.0f} a second, {_left(now - start, seconds, done, count)}")
        if error is not None:
            say(f"problem {done - 1} fails with {type(error).__name__}: {error}\nshrinking ...")
            problem = shrink(problem, executor)
            mismatch = paste(problem, executor)
            error = error_of(problem, executor)
            comment = f"{type(error).__name__}: {error}".replace("\n", "\n# ")
            say(f"\n# {comment}\n{mismatch}\n")
            break
    spent = time.monotonic() - start
    say(f"{done} problems in {spent:.1f} s, {done / spent:.0f} a second, {'one fails' if mismatch else 'none fails'}")
    if record is not None:
        facts = {
            "cuscan": cuscan.__version__,
            "kernels": _source.digest(),
            "on": on,
            "device": _device(on),
            "seed": seed,
            "problems": done,
            "seconds": round(spent, 1),
            "problems_per_second": round(done / spent, 1),
            "mismatches": [] if mismatch is None else [mismatch],
            "kinds": dict(sorted(kinds.items())),
        }
        record.write_text(json.dumps(facts, indent=1) + "\n")
    return mismatch is None


def _left(spent: float, seconds: float, done: int, count: int | None) -> str:
    left = seconds - spent
    if count is not None:
        left = min(left, (count - done) * spent / done)
    minutes, seconds = divmod(max(int(left), 0), 60)
    return f"{minutes}:{int(seconds):02} left"


def _device(on: str) -> str:
    if on != "gpu":
        return f"{platform.machine()}, NumPy {np.__version__}"
    from cupy.cuda import Device, runtime

    name: str = runtime.getDeviceProperties(Device().id)["name"].decode()
    return name
