"""`python -m cuscan fuzz`: draws whole problems until the time is up, and shrinks those that fail.

Problem i of a run depends on the run's seed and i alone, so that a run can be repeated or continued anywhere. Its jobs
take the next number each, so that however many they are, the problems are those from 0 on.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

import cuscan
from cuscan import _source

from . import executors, problems
from .executors import Executor

REPORT_SECONDS = 5
SHRINK_SECONDS = 120
MOST_GPU_JOBS = 16  # each has a context in the GPU's memory

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


def shrink(
    problem: Any, executor: Executor, *, seconds: float = SHRINK_SECONDS, stop: Callable[[], bool] = lambda: False
) -> Any:
    """The simplest problem found that fails with the same type of error; `problem` itself if it does not fail again."""
    error = error_of(problem, executor)
    end = time.monotonic() + seconds
    found = error is not None
    while found:
        found = False
        for simpler in problem.simpler():
            if time.monotonic() > end or stop():
                return problem
            if type(error_of(simpler, executor)) is type(error):
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


Tell = Callable[[str, Any], None]  # what happened, and its facts


@dataclass
class _Run:
    """What the jobs of a run share; they may be in processes of their own."""

    on: str
    seed: int
    count: int | None
    end: float
    lock: Any
    given: Any  # how many problems
    stopped: Any
    at: Any  # the problem of each job

    def take(self, job: int) -> int | None:
        """The number of the next problem."""
        with self.lock:
            number: int = self.given.value
            if self.stopped.value or number == self.count or time.monotonic() >= self.end:
                return None
            self.given.value += 1
        self.at[job] = number
        return number

    def case(self, number: int) -> tuple[Any, Executor]:
        """A problem, and what it is run on."""
        return draw(self.seed, number), EXECUTORS[self.on][number % len(EXECUTORS[self.on])]


def _work(run: _Run, job: int, tell: Tell) -> None:
    """Problems until the run is over or one fails."""
    while (number := run.take(job)) is not None:
        problem, executor = run.case(number)
        error = error_of(problem, executor)
        tell("done", [f"{problem.function.__name__}: {kind}" for kind in problem.kinds()])
        if error is not None and not run.stopped.value:  # Ctrl-C ends a compiler too
            tell("says", f"problem {number} fails with {type(error).__name__}: {error}\nshrinking ...")
            problem = shrink(problem, executor, stop=lambda: bool(run.stopped.value))
            error = error_of(problem, executor) or error
            tell("fails", _mismatch(number, f"{type(error).__name__}: {error}", problem, executor))
            return


def _mismatch(number: int, error: str, problem: Any, executor: Executor) -> dict[str, Any]:
    return {"problem": number, "error": error, "python": paste(problem, executor)}


def _work_in_process(run: _Run, job: int, pipe: Any) -> None:
    _work(run, job, lambda *message: pipe.send(message))


def _in_processes(run: _Run, jobs: int, tell: Tell) -> None:
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    running: dict[Any, tuple[int, Any]] = {}
    pipe: Any
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process alone
        try:
            for job in range(jobs):
                ours, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=_work_in_process, args=(run, job, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = job, process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while running:
            for pipe in connection.wait(list(running)):
                try:
                    tell(*pipe.recv())
                except EOFError:
                    job, process = running.pop(pipe)
                    process.join()
                    if process.exitcode:
                        _died(run, run.at[job], process.exitcode, tell)
    finally:
        for _, process in running.values():
            process.terminate()


def _died(run: _Run, number: int, code: int, tell: Tell) -> None:
    """A process ended without a word, as after a fault of the memory."""
    error = f"the process ended with exit code {code}"
    if number < 0:
        raise RuntimeError(f"{error} before its first problem")
    tell("fails", _mismatch(number, error, *run.case(number)))


@contextlib.contextmanager
def _stopped_by_ctrl_c(stopped: Any) -> Iterator[None]:
    """The first Ctrl-C sets `stopped`, another one is as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        stopped.value = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Tally:
    """What all jobs have done, and lines of progress."""

    say: Callable[[str], None]
    seconds: float
    count: int | None
    start: float
    told: float = 0.0
    done: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, what: str, facts: Any) -> None:
        if what == "says":
            self.say(facts)
        elif what == "done":
            self.done += 1
            self.kinds.update(facts)
            spent = time.monotonic() - self.start
            if spent - self.told >= REPORT_SECONDS:
                self.told = spent
                left = _left(spent, self.seconds, self.done, self.count)
                self.say(f"{self.done} problems, {self.done / spent:.0f} a second, {left}")
        elif facts["python"] not in (known["python"] for known in self.mismatches):  # jobs find the same fault
            self.mismatches.append(facts)
            self.say("\n# {}\n{}\n".format(facts["error"].replace("\n", "\n# "), facts["python"]))


def run(
    say: Callable[[str], None],
    *,
    minutes: float | None = None,
    seed: int | None = None,
    count: int | None = None,
    on: str | None = None,
    jobs: int | None = 1,
    record: Path | None = None,
) -> bool:
    """Fuzz until the time is up or the problems are done, whichever is first, or until Ctrl-C.

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
    jobs : int, optional
        Processes that run problems, 1 for this one. None is one a core, on a GPU 16 at most.
    record : Path, optional
        Where to write what was run and found, as JSON.

    Returns
    -------
    bool
        Whether no problem failed. One that does ends its job, the others go on; it is shown as Python.
    """
    on = on or default_executor()
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    if minutes is None and count is None:
        minutes = 1
    if jobs is None:
        jobs = min(os.cpu_count() or 1, MOST_GPU_JOBS if on == "gpu" else 2**16)
    jobs = max(1, jobs if count is None else min(jobs, count))
    seconds = float("inf") if minutes is None else 60 * minutes
    start = time.monotonic()
    tally = _Tally(say, seconds, count, start)
    spawn = multiprocessing.get_context("spawn")
    shared = _Run(
        on,
        seed,
        count,
        start + seconds,
        contextlib.nullcontext() if jobs == 1 else spawn.Lock(),
        given=spawn.RawValue("q", 0),
        stopped=spawn.RawValue("b", 0),
        at=spawn.RawArray("q", [-1] * jobs),
    )
    with _stopped_by_ctrl_c(shared.stopped):
        say(f"fuzz on {on}: {_device(on)}, seed {seed}, {jobs} job{'s' * (jobs > 1)}")
        if jobs == 1:
            _work(shared, 0, tally)
        else:
            _in_processes(shared, jobs, tally)
    spent = time.monotonic() - start
    failed = len(tally.mismatches)
    found = "none fails" if not failed else "one fails" if failed == 1 else f"{failed} fail"
    say(f"{tally.done} problems in {spent:.1f} s, {tally.done / spent:.0f} a second, {found}")
    if record is not None:
        facts = {
            "cuscan": cuscan.__version__,
            "kernels": _source.digest(),
            "on": on,
            "device": _device(on),
            "seed": seed,
            "jobs": jobs,
            "problems": tally.done,
            "seconds": round(spent, 1),
            "problems_per_second": round(tally.done / spent, 1),
            "mismatches": tally.mismatches,
            "kinds": dict(sorted(tally.kinds.items())),
        }
        record.write_text(json.dumps(facts, indent=1) + "\n")
    return not failed


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
