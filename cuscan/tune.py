"""`python -m cuscan tune`: times problems in every order and fit that the plans can choose, on the GPU that is there.

Every candidate is timed in three runs, in turns with the others; it has their median and their spread, the largest
less the smallest. Among those that the spread does not tell from the fastest, the steadiest wins. One that is half as
slow again as the fastest in the first run gets no other.

What a fit (`LinearFit`, `SelectiveFit`) changes is never a bit of the result, which is looked at here; the best is kept
in the cache folder and used from then on. An order (`LinearOrder`, ...) fixes the bits: the best goes to the file that
CUSCAN_PLANS names, and only while it is named do calls follow it.

The scan of a model's prefill (--model) is judged by the time of the whole prefill, where its operands come from the
kernels before it and the next ones take its result.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuscan

from . import _plan, _source, _tuned, mamba
from ._arrays import _dtype
from ._plan import DeviceLimits, Lanes, Schedule, forced, watched

RUNS = 3
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
SUMMARIES = 1 << 26  # a split with more of them is not tried
Call = Callable[[], Any]
Clock = Callable[[Call], float]


# --- measuring, for bench too --------------------------------------------------------------------------------------


def milliseconds(cupy: Any, call: Call, repeats: int = 21, warm: int = 3) -> list[float]:
    """Device time of each of `repeats` calls after `warm` more, the L2 overwritten and the queue filled before each."""
    flush = cupy.empty(1 << 28, cupy.int8)
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        # These writes also keep the device busy while the host prepares the launches that are timed.
        for value in range(4):
            flush.fill(value)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(begin, end)))
    return times


def selective_arguments(
    xp: Any, batch: int, length: int, channels: int, state: int, dtype: str, layout: str, seed: int = 0
) -> dict[str, Any]:
    """Inputs of a selective_scan with softplus, D and delta_bias, as Mamba has them."""
    random = xp.random.default_rng(seed)

    def sequence(size: int) -> Any:
        shape = (batch, length, size) if layout == "bld" else (batch, size, length)
        return _cast(random.standard_normal(shape, dtype=np.float32), dtype)

    return {
        "u": sequence(channels),
        "delta": sequence(channels),
        "A": -xp.tile(xp.arange(1, state + 1, dtype=np.float32), (channels, 1)),
        "B": sequence(state),
        "C": sequence(state),
        "D": random.standard_normal(channels, dtype=np.float32),
        "delta_bias": random.standard_normal(channels, dtype=np.float32) - np.float32(4),
        "delta_softplus": True,
        "layout": layout,
    }


def linear_arguments(xp: Any, shape: tuple[int, ...], axis: int, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Inputs of a linear_scan with gates between 0 and 1."""
    random = xp.random.default_rng(seed)
    a = _cast(random.random(shape, dtype=np.float32), dtype)
    return {"a": a, "b": _cast(random.standard_normal(shape, dtype=np.float32), dtype), "axis": axis}


def _cast(x: Any, dtype: str) -> Any:
    return x.astype(_dtype(dtype), copy=False)


# --- what is tuned -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A problem: shape (batch, length, channels, state) and layout, or the shape and axis of a linear_scan."""

    shape: tuple[int, ...]
    axis: int | None = None
    dtype: str = "bfloat16"
    layout: str = "bld"

    def jobs(self, xp: Any) -> Iterator[Job]:
        """What of it is planned on its own. A linear_scan and its gradients have one plan."""
        if self.axis is not None:
            made = linear_arguments(xp, self.shape, self.axis, self.dtype)
            h = cuscan.linear_scan(**made)
            back = {"a": made["a"], "h": h, "grad_h": made["b"], "axis": self.axis}
            yield Job(self, {"forward": lambda: cuscan.linear_scan(**made),
                             "backward": lambda: cuscan.linear_scan_vjp(**back)})  # fmt: skip
            return
        batch, length, channels, state = self.shape
        made = selective_arguments(xp, batch, length, channels, state, self.dtype, self.layout)
        yield Job(self, {"forward": lambda: cuscan.selective_scan(**made)})
        y, states = cuscan.selective_scan(**made, return_states=True)
        yield Job(self, {"backward": lambda: cuscan.selective_scan_vjp(**made, grad_out=y, states=states)})


@dataclass(frozen=True)
class Prefill(Case):
    """The scan of a model's layers over a prompt of shape (batch, length); dtype: empty for the checkpoint's own."""

    dtype: str = ""
    folder: Path = Path()

    def jobs(self, xp: Any) -> Iterator[Job]:
        """One, whose time is the whole prefill's."""
        config, parameters = mamba.load(self.folder, xp=xp, dtype=self.dtype or None)
        model = mamba.Model(config, parameters)
        tokens = xp.random.default_rng(0).integers(0, config.vocab, self.shape)
        case = replace(self, dtype=model.dtype.name)
        yield Job(case, {"prefill": lambda: model(tokens, last_only=True)})


@dataclass(frozen=True)
class Job:
    """Calls that follow one plan."""

    case: Case
    calls: dict[str, Call]

    @property
    def name(self) -> str:
        """For the progress bar."""
        axis = "" if self.case.axis is None else f" axis {self.case.axis}"
        return f"{' and '.join(self.calls)} {self.case.shape}{axis} {self.case.dtype}"


CASES = (
    *(Case(shape) for shape in (
        (8, 4096, 1024, 16), (8, 2048, 2048, 16), (1, 2048, 5120, 16), (1, 65536, 2048, 16), (1, 65536, 256, 16),
        (1, 1048576, 64, 16), (4, 4096, 1024, 64), (2, 4096, 1024, 128), (4096, 16, 1024, 16),
    )),
    *(Case(shape, axis, "float32") for shape, axis in (
        ((8, 4096, 1536), 1), ((8, 1536, 4096), 2), ((8, 1536, 1024), 2), ((1, 131072, 512), 1),
        ((1, 16, 4194304), 2), ((1000000, 2), 0), ((1 << 28,), 0),
    )),
)  # fmt: skip


@dataclass
class Candidate:
    """One order and fit, what forces them, and the milliseconds of its runs by direction."""

    order: Any
    fit: Any
    choices: dict[str, Any]
    runs: list[dict[str, float]] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        """Of each run."""
        return [sum(run.values()) for run in self.runs]

    @property
    def median(self) -> float:
        """Of the runs."""
        return statistics.median(self.totals)

    @property
    def spread(self) -> float:
        """Of the runs: the largest less the smallest."""
        return max(self.totals) - min(self.totals)

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "order": _tuned.as_json(self.order),
            "fit": None if self.fit is None else _tuned.as_json(self.fit),
            "ms": round(self.median, 5),
            "spread_ms": round(self.spread, 5),
            "runs": [{name: round(ms, 5) for name, ms in run.items()} for run in self.runs],
        }


def choose(tried: Sequence[Candidate]) -> Candidate:
    """The steadiest of those that the spread does not tell from the fastest."""
    most = max(len(x.runs) for x in tried)  # a plan's own order may have been dropped, and then chooses its fit alone
    whole = [x for x in tried if len(x.runs) == most]
    best = min(whole, key=lambda x: x.median)
    level = [x for x in whole if x.median - best.median <= max(x.spread, best.spread)]
    return min(level, key=lambda x: (x.spread, x.median))


def order_candidates(planner: str, problem: Any, limits: DeviceLimits, own: Any) -> list[Candidate]:
    """Every order that can be forced on this problem, its own first."""
    length, tries = problem.length, []
    chunks = [chunk for chunk in CHUNKS if chunk < length]
    if planner == "plan_backward":
        parts = sorted({1, own.parts, problem.batch})
        tries = [{"chunk": chunk, "parts": n} for n in parts for chunk in (*chunks, length)]
    else:
        splits: list[dict[str, Any]] = [{"schedule": Schedule.SPLIT, "chunk": chunk} for chunk in chunks]
        rows = problem.rows if planner == "plan_linear" else problem.batch * problem.channels * problem.state
        splits = [x for x in splits if -(-length // x["chunk"]) * rows <= SUMMARIES]
        schedules = [{"schedule": schedule} for schedule in Schedule if schedule is not Schedule.SPLIT] + splits
        if planner == "plan_linear":
            beside = not problem.time_fast and problem.rows >= 32
            lanes = {own.order.lanes, Lanes.ROWS if beside else Lanes.TIME}
            tries = [{**x, "lanes": y, "row_warps": w} for x in schedules for y in sorted(lanes, key=str)
                     for w in _tuned.WARPS if x["schedule"] is _named(x["schedule"], y, w)]  # fmt: skip
            if own.order.one_pass:
                tries += [{"schedule": Schedule.SPLIT, "one_pass": True, "lanes": own.order.lanes, "row_warps": w}
                          for w in (*_tuned.WARPS, _plan.PASS_WARPS)]  # fmt: skip
        else:
            tries = [{**x, "tile": tile} for x in schedules for tile in _plan.selective_tiles(problem.kind)]
    found = {own.order: Candidate(own.order, getattr(own, "fit", None), _tuned.order_choices(problem, own.order))}
    for choices in tries:
        try:
            with forced(**choices):
                plan = getattr(_plan, planner)(problem, limits)
        except ValueError:  # a schedule that this function has not
            continue
        split = choices.get("schedule") is Schedule.SPLIT
        if (not split or plan.chunks > 1) and _forces(planner, problem, limits, plan.order):
            fit = getattr(plan, "fit", None)
            found.setdefault(plan.order, Candidate(plan.order, fit, _tuned.order_choices(problem, plan.order)))
    return list(found.values())


def _named(schedule: Schedule, lanes: Lanes, row_warps: int) -> Schedule:
    """The schedule as a plan of linear_scan would call it: one warp on 32 rows is serial, all else a block's."""
    if schedule is Schedule.SPLIT:
        return schedule
    return Schedule.SERIAL if lanes is Lanes.ROWS and row_warps == 1 else Schedule.BLOCK


def _forces(planner: str, problem: Any, limits: DeviceLimits, order: Any) -> bool:
    with forced(**_tuned.order_choices(problem, order)):
        return bool(getattr(_plan, planner)(problem, limits).order == order)


def fit_candidates(planner: str, problem: Any, limits: DeviceLimits, of: Candidate) -> list[Candidate]:
    """Every fit that this order can have, `of`'s own first."""
    found = {of.fit: of}
    for choices in _tuned.fits_of(problem, of.order):
        with forced(**{**of.choices, **choices}):
            plan = getattr(_plan, planner)(problem, limits)
        if plan.order == of.order:
            found.setdefault(plan.fit, Candidate(plan.order, plan.fit, {**of.choices, **choices}))
    return list(found.values())


# --- the sweep -----------------------------------------------------------------------------------------------------


def tune_job(job: Job, clock: Clock, progress: Progress) -> dict[str, Any]:
    """The row of a job: its problem, its own plan, the best, and all that was tried."""
    with forced(untuned=object()), watched() as plans:  # as no call before, so that it is planned
        for call in job.calls.values():
            call()
    planner, problem, limits, own = plans[0]
    orders = order_candidates(planner, problem, limits, own)
    _time(job, orders, clock, progress)
    best = choose(orders)
    fits = []
    for each in (best,) if best is orders[0] else (orders[0], best):
        several = fit_candidates(planner, problem, limits, each)
        if len(several) > 1:
            _same_bits(job, several)
            _time(job, several, clock, progress)
        fits.append(choose(several))
    return {
        "function": _tuned.FUNCTIONS[planner][0],
        "directions": list(job.calls),
        "shape": list(job.case.shape),
        "axis": job.case.axis,
        "dtype": job.case.dtype,
        "layout": job.case.layout,
        "chip": [limits.architecture, limits.multiprocessors],
        "problem": _tuned.as_json(problem),
        "own": orders[0].as_json(),
        "best": fits[-1].as_json(),
        "fits": [{"order": _tuned.as_json(x.order), "fit": _tuned.as_json(x.fit)} for x in fits if x.fit is not None],
        "tried": [x.as_json() for x in orders],
    }


def _time(job: Job, candidates: Sequence[Candidate], clock: Clock, progress: Progress) -> None:
    """Time each of these that has not been, in turns."""
    left = [x for x in candidates if not x.runs]
    for run in range(RUNS):
        if run == 1:
            best = min(x.median for x in candidates)
            left = [x for x in left if x.median <= 1.5 * best]
        for i, each in enumerate(left):
            progress(job.name, (run + i / len(left)) / RUNS)
            with forced(**each.choices):
                each.runs.append({name: clock(call) for name, call in job.calls.items()})


def _same_bits(job: Job, candidates: Sequence[Candidate]) -> None:
    """A fit that changes a bit is a bug of the kernels, and is not kept."""
    for name, call in job.calls.items():
        first = None
        for each in candidates:
            with forced(**each.choices):
                made = call()
            arrays = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
            bits = [x.view(np.uint8) for x in arrays]
            first = first or bits
            if not all(bool((x == y).all()) for x, y in zip(first, bits, strict=True)):
                raise AssertionError(f"{job.name}: {name} has other bits with {each.fit} than with {candidates[0].fit}")


class Progress:
    """A bar on a terminal's last line; elsewhere nothing."""

    def __init__(self, total: int, file: Any = None) -> None:
        self._total, self._done = total, 0
        self._file = sys.stderr if file is None else file

    def __call__(self, name: str, part: float) -> None:
        """A part of the job is done."""
        if self._file.isatty():
            share = (self._done + part) / self._total
            bar = "#" * int(24 * share)
            self._file.write(f"\r[{bar:<24}] {100 * share:3.0f} %  {name[:60]:60}")
            self._file.flush()

    def next(self) -> None:
        """The job is done."""
        self._done += 1
        self("", 0)

    def end(self) -> None:
        """Leave the line."""
        if self._file.isatty():
            self._file.write("\n")


def sweep(
    write: Callable[[str], object], xp: Any, cases: Iterable[Case], clock: Clock, minutes: float | None = None
) -> list[dict[str, Any]]:
    """Tune the cases, one line each, as far as the time goes; the rows of a record."""
    cases, rows, began = list(cases), [], time.monotonic()
    progress = Progress(len(cases))
    for case in cases:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            write(f"the time is up: {case} and what follows is left out")
            break
        with forced(untuned=True):
            for job in case.jobs(xp):
                rows.append(row := tune_job(job, clock, progress))
                own, best = row["own"], row["best"]
                kept = "as planned" if own["order"] == best["order"] else f"order {best['order']}"
                write(
                    f"{job.name}: {own['ms']:.4f} ms planned, {best['ms']:.4f} +- {best['spread_ms']:.4f} best, {kept}"
                )
        progress.next()
    progress.end()
    return rows


def keep(write: Callable[[str], object], rows: Sequence[dict[str, Any]], plans: Path | None) -> None:
    """Fits go to the cache folder; better orders than the plans' own to `plans`, beside those of other problems."""
    fits = [{"function": row["function"], "problem": row["problem"], **fit} for row in rows for fit in row["fits"]]
    if fits:
        write(f"fits are in {_tuned.keep_fits(rows[0]['chip'], fits)}")
    better = [
        {"function": row["function"], "problem": row["problem"], "order": row["best"]["order"]}
        for row in rows
        if row["best"]["order"] != row["own"]["order"]
    ]
    if plans is None:
        write(f"{len(better)} orders are better than the plans' own: name a file in CUSCAN_PLANS to have them there")
        return
    tuned = [(row["function"], row["problem"]) for row in rows]
    old = json.loads(plans.read_text(encoding="utf-8"))["plans"] if plans.exists() else []
    better += [entry for entry in old if (entry["function"], entry["problem"]) not in tuned]
    plans.write_text(json.dumps({"plans": better}, indent=1) + "\n", encoding="utf-8")
    write(f"orders are in {plans}: calls follow them while CUSCAN_PLANS names it")


def run(
    write: Callable[[str], object],
    *,
    record: Path | None = None,
    minutes: float | None = None,
    selective: Sequence[str] = (),
    linear: Sequence[str] = (),
    dtype: str | None = None,
    layout: str = "bld",
    model: Path | None = None,
    prompt: str = "1,2048",
) -> None:
    """Tune on the current device, these problems and this checkpoint's, or CASES."""
    import cupy

    cases = [Case(_sizes(x), None, dtype or "bfloat16", layout) for x in selective]
    for x in linear:
        shape, _, axis = x.partition("@")
        sizes = _sizes(shape)
        cases.append(Case(sizes, int(axis or -1) % len(sizes), dtype or "float32"))
    if any(case.axis is None and len(case.shape) != 4 for case in cases):
        raise ValueError("--selective takes batch,length,channels,state")
    if model:
        cases.append(Prefill(_sizes(prompt), dtype=dtype or "", folder=model))
        if len(cases[-1].shape) != 2:
            raise ValueError("--prompt takes batch,length")
    plans = os.environ.get("CUSCAN_PLANS")
    if plans and Path(plans).exists():
        _tuned.user_orders()  # what is wrong there shows before anything is timed

    def clock(call: Call) -> float:
        (first,) = milliseconds(cupy, call, 1, 1)
        return first if first > 20 else statistics.median(milliseconds(cupy, call, 7, 1))

    rows = sweep(write, cupy, cases or CASES, clock, minutes)
    keep(write, rows, Path(plans) if plans else None)
    if record:
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        found = {"digest": _source.digest(), "device": name, "runs": RUNS, "rows": []}
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(found).replace('"rows": []', f'"rows": [\n{lines}\n]')
        record.write_text(text + "\n", encoding="utf-8")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))
