"""From the figures of a call to findings: what counts as unusual, where it comes from and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _arrays, _figures
from ._compare import Difference, Precision
from ._figures import Delta, Gates, Memory, NotFinite, Problem, Where
from ._findings import Finding
from ._performance import Plan

NARROW = {"bfloat16": 2.0**-9, "float16": 2.0**-11}  # the largest relative error of a rounding
_FLOAT16 = 65504.0
_GROWTH = math.log(1e4)  # of a state, from which it matters
_DELTA = "delta_bias = cuscan.ssm.delta_bias(channels)"


def of_types(given: dict[str, Any]) -> Iterator[Finding]:
    """Inputs on the accumulation path that are narrower than float32; an h0 that is, is widened."""
    for name in ("A", "h0", "delta", "a"):
        x = given.get(name)
        if x is None or _arrays.is_python_scalar(x) or _arrays.item_name(x) not in NARROW:
            continue
        item = _arrays.item_name(x)
        eps = NARROW[item]
        level, figure = "note", f"rounded by up to {eps:.1e}"
        cause = "it comes from a layer in that type"
        action = f"where precision matters compute {name} in float32, which costs no more than its memory"
        if name == "h0":
            given[name] = x.astype(np.float32)
            level, figure = "warning", f"each state that enters is off by up to {eps:.1e} of itself"
            cause, action = "a state was stored in the activations' type, as autocast does", "keep states in float32"
        elif name == "a":
            figure = f"no gate lies between 1 - {2 * eps:.1e} and 1: a memory of over {0.5 / eps:.0f} steps is endless"
        else:
            figure += f"; what has decayed to 1e-3 is off by up to {-math.log(_figures.DECAYED) * eps:.1%}"
        if name == "A":
            level, cause = "warning", "parameters were cast with the activations (model.bfloat16(), autocast)"
            action = "keep A_log in float32: it is small, and cuscan takes it beside bfloat16 activations"
        yield Finding(level, f"{name} is {item}", figure, cause, action)


def of_offsets(offsets: Any, length: int) -> Iterator[Finding]:
    """What is wrong with cu_seqlens; an error where the call cannot be made."""
    values = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.get()).astype(np.int64)
    wrong = np.flatnonzero(values[1:] < values[:-1])
    action = "cu_seqlens = [0, *cumsum(lengths)]"
    if len(wrong) or values[0] < 0 or values[-1] > length:
        i = int(wrong[0]) + 1 if len(wrong) else 0
        figure = f"{values[i]} at {i} after {values[i - 1]}"
        if not len(wrong):
            figure = f"{values[0]} to {values[-1]}, of [0, {length}]"
        cause = "lengths were given in the place of offsets, or were not summed"
        yield Finding("error", "cu_seqlens is out of order or out of range", figure, cause, action)
    elif values[0] > 0 or values[-1] < length:
        figure = f"{values[0] + length - values[-1]} of {length} steps are in no sequence and give 0"
        cause = "the first offset is not 0, or the last not the length"
        yield Finding("warning", "cu_seqlens does not cover the array", figure, cause, action)


def of_values(p: Problem, found: dict[str, NotFinite], gates: Gates) -> Iterator[Finding]:
    """NaN and inf of inputs and of the result, with what they came from."""
    before = []
    for name, x in found.items():
        timed = len(x.first) == 3 and name in ("u", "delta", "z", "a", "b", "result")
        where = p.where(x.first[0], x.first[1], x.first[2]) if timed else {}
        if not timed and len(x.first) > 1 and name in ("B", "C"):
            where = {"batch": x.first[0], "time": p.where(x.first[0], x.first[1], 0)["time"]}
        figure = f"the first of {x.nan} NaN and {x.inf} inf"
        if name != "result":
            action = "mend what makes it, or leave the step out by mask"
            yield Finding("error", f"{name} has {x.kind}", figure, "it came in with the data", action, where)
            if not where or x.first[1] <= found.get("result", x).first[1]:
                before.append(name)
            continue
        cause, action = "products of large inputs overflow", "scale the inputs: normalise before the scan"
        if before:
            cause = f"{' and '.join(before)} {'have' if len(before) > 1 else 'has'} NaN or inf there or before"
            action = "see that finding"
        elif gates.growth > _GROWTH:
            cause, action = "gates above 1 make the state overflow", "see the finding on gates"
        yield Finding("error", f"the result has {x.kind}", figure, cause, action, where)


def of_gates(p: Problem, g: Gates, found: dict[str, NotFinite]) -> Iterator[Finding]:
    """Divergence, underflow, and gates that do nothing."""
    selective = p.function == "selective_scan"
    cause, action = (
        "the gates are above 1 for many steps",
        "make gates at most 1, as sigmoid does, or exp of what is < 0",
    )
    if selective and bool((p.rates > 0).any()):
        cause, action = "A is positive: A_log was given in the place of A", "A = -exp(A_log): cuscan.ssm.A_from_A_log"
    elif selective:
        cause, action = "delta is negative: softplus is missing", "delta_softplus=True"
    largest = f"largest gate {g.largest:.9g}; the fastest state grows by {math.expm1(g.growth_rate):.3g} a step"
    overflow = g.overflow_predicted
    if overflow is not None and g.growth > _GROWTH and (overflow < p.length or "result" in found):
        figure = f"{largest}: float32 overflows at step {p.where(0, overflow, 0)['time']}"
        if "result" in found:
            figure += f", found at {p.where(0, found['result'].first[1], 0)['time']}"
        yield Finding("error", "the state diverges", figure, cause, action, g.growth_at)
    elif g.growth > _GROWTH:
        figure = f"{largest}, by {math.exp(min(g.growth, 700)):.3g} in all"
        figure += "" if overflow is None else f", and would overflow float32 at step {overflow}"
        yield Finding("warning", "a state grows", figure, cause, action, g.growth_at)
    elif g.above_one:
        figure = f"{g.above_one} of them, the largest {g.largest:.9g}"
        yield Finding("note", "some gates are above 1", figure, cause, action, g.largest_at)
    if g.zero_share > 0.5 or g.below_1e_30:
        yield Finding(
            "warning" if g.zero_share > 0.5 else "note", "gates underflow",
            f"smallest gate {g.smallest:.3g}, {g.zero_share:.1%} are exactly 0 in float32",
            "delta |A| is too large: a bias or softplus was applied twice, or delta is far above its usual 1e-3 to 0.1"
            if selective else "gates are far below 1",
            "look at the quantiles of delta: what a gate of 0 has forgotten no output can see", g.smallest_at,
        )  # fmt: skip
    if g.one_share > 0.5 and (selective or not g.constant):
        yield Finding(
            "warning", "most gates are exactly 1", f"{g.one_share:.1%} in float32",
            "delta |A| is below float32's resolution: delta underflows, or A is 0",
            "look at the quantiles of delta: such a state adds up and forgets nothing", g.largest_at,
        )  # fmt: skip


def of_memory(p: Problem, m: Memory) -> Iterator[Finding]:
    """A memory that is short beside the length, or finer than the gates' type."""
    selective = p.function == "selective_scan"
    if m.hidden_from_all is not None and m.hidden_from_all > 31 / 32 and p.length >= 256:
        figure = (
            f"the last output cannot see the first {m.hidden_from_all:.1%} of {p.length} steps through any "
            f"{'channel or state' if selective else 'row'}; the longest memory: {m.resolution_quantiles[-1]:.0f} steps"
        )
        cause = "delta |A| is too large for this length: delta_bias is missing or too high"
        action = "choose delta_bias for a delta from 1 / length to 0.1 (cuscan.ssm.delta_bias), or a smaller |A|"
        if not selective:
            cause, action = "gates are small beside 1 - 16 / length", "choose gates nearer to 1, if the head matters"
        yield Finding("warning" if selective else "note", "the head of the sequence is lost", figure, cause, action)
    if not selective and m.quantiles[2] > 300 and p.arrays["gates"].dtype.itemsize == 2:
        yield Finding(
            "warning", f"gates near 1 are in {p.item}", f"median memory {m.quantiles[2]:.0f} steps",
            "between 1 and the next gate below it there is nothing: 0.999 is stored as 1 in bfloat16",
            "give a constant gate as a Python number, others with float32 inputs",
        )  # fmt: skip


def of_delta(p: Problem, d: Delta) -> Iterator[Finding]:
    """Step sizes that are not what a layer begins with, and where softplus and limits bend."""
    if not d.count:
        return
    softplus, bias, median = p.options["delta_softplus"], p.arrays["delta_bias"] is not None, d.quantiles[2]
    if d.negative:
        figure = f"at {d.negative} of {d.count} steps, down to {d.quantiles[0]:.3g}"
        cause = "the limits let it" if softplus else "softplus was forgotten"
        yield Finding("warning", "delta is negative", figure, cause, "delta_softplus=True", d.least_at)
    if d.at_limit:
        share = d.at_limit / d.count
        yield Finding(
            "warning" if share > 0.05 else "note", "delta is at a limit", f"{share:.1%} of {d.count} steps",
            "delta_limit is tighter than the data", "widen the limits: no gradient passes there",
        )  # fmt: skip
    for count, what, where in (
        (d.linear, "is above 20, where softplus is linear", d.largest_at),
        (d.underflow, "is so low that softplus is 0", d.least_at),
    ):
        if count:
            share = count / d.count
            yield Finding(
                "warning" if share > 0.01 else "note", f"raw delta {what}", f"{share:.1%} of {d.count} steps",
                "the projection that makes delta is too large or exploded", "look at the norm of its weights", where,
            )  # fmt: skip
    usual = f"median {median:.3g}, where Mamba begins with 1e-3 to 0.1"
    if softplus and d.raw_least > 0:
        figure = f"the least raw delta is {d.raw_least:.3g}, and {d.quantiles[0]:.3g} after it"
        cause, action = "softplus was applied before as well", "give raw delta, or delta_softplus=False"
        yield Finding("warning", "softplus sees only positive values", figure, cause, action, d.least_at)
    elif median > 0.5:
        cause = "delta_bias is too high, or was added before as well" if bias else "delta_bias is missing"
        yield Finding("warning", "delta is large", usual, cause, _DELTA, d.largest_at)
    elif median < 1e-5:
        cause = "delta_bias is too low, or delta was scaled"
        yield Finding("warning", "delta is small", usual, cause, _DELTA, d.least_at)
    if d.constant and p.length > 1 and all(_constant(p.arrays[name]) for name in ("B", "C")):
        yield Finding(
            "note", "a convolution would do", "delta, B and C do not change in time", "nothing is selective here",
            "an FFT with the kernel C exp(delta A k) delta B computes the same",
        )  # fmt: skip


def _constant(x: Any) -> bool:
    x = _figures.bits(x)
    return x.ndim == 2 or bool((x == x[:, :1]).all())


def of_parameters(p: Problem) -> Iterator[Finding]:
    """A and D that are not what a layer begins with."""
    D = p.arrays["D"]
    if D is None or not bool((D.astype(np.float64) != 0).any()):
        yield Finding(
            "note", "there is no skip connection", "D is absent" if D is None else "D is all 0",
            "Mamba begins with D = 1; without it a loss is shifted from the beginning", "D = ones(channels)",
        )  # fmt: skip
    if p.shape[3] > 1 and bool((p.rates == p.rates[:, :1]).all()):
        yield Finding(
            "note", "all states of a channel decay alike", f"A is the same in all {p.shape[3]} of them",
            "A was not initialised state by state", "A_log = cuscan.ssm.s4d_real_A_log(channels, state)",
        )  # fmt: skip


def of_pads(p: Problem, changes: int) -> Iterator[Finding]:
    """Masks that are wrong, and data that looks padded and has none."""
    selective, mask = p.function == "selective_scan", p.arrays["mask"]
    if mask is not None:
        empty = ~mask[:, :, 0].any(axis=1) if selective else ~mask[0].any(axis=0)
        if count := int(empty.sum()):
            yield Finding(
                "warning", "rows are all pad", f"{count} of {empty.size}", "the mask is False at every step of them",
                "True means that a step counts (as in Hugging Face's attention_mask); leave empty rows out",
                {"batch" if selective else "row": int(empty.argmax())},
            )  # fmt: skip
        if changes:
            figure = f"{changes} masked steps would change the state without it"
            yield Finding("note", "the mask is needed", figure, "delta is not 0 at pads", "keep the mask")
    elif p.offsets is None:
        row, steps = _figures.constant_ends(p, p.arrays["u" if selective else "b"])
        if steps >= max(8, p.length // 16):
            yield Finding(
                "warning", "pads may change the state",
                f"the last {steps} of {p.length} steps are all alike, and there is no mask",
                "a padded batch: delta is above 0 at pads too, so they make the state decay and write into it, and the "
                "last state, or real positions in reverse, see that",
                "mask=attention_mask.astype(bool), or cu_seqlens for packed rows", {"batch": row},
            )  # fmt: skip


def of_output(p: Problem, y: Any, item: str) -> Iterator[Finding]:
    """Values that the result's type cannot hold."""
    if item != "float16":
        return
    size = p.xp.where(p.xp.isfinite(y), abs(y), 0)
    most, beyond = float(size.max()), int((size > _FLOAT16).sum())
    small = float(((size > 0) & (size < 2.0**-14)).mean())
    action = "out_dtype='bfloat16' or 'float32', or scale the inputs"
    if most > _FLOAT16 / 8:
        at = [int(i) for i in np.unravel_index(int(size.argmax()), size.shape)]
        figure = f"largest {most:.4g} of {_FLOAT16:.0f}, {beyond} beyond"
        cause = "float16 has few exponents"
        level = "error" if beyond else "warning"
        yield Finding(level, "the result is at risk in float16", figure, cause, action, p.where(at[0], at[1], at[2]))
    elif small > 0.1:
        figure = f"{small:.0%} are below 6.1e-5, where digits are lost"
        yield Finding("warning", "the result is at risk in float16", figure, "the values are too small for it", action)


def of_precision(q: Precision, where: Where) -> Iterator[Finding]:
    """Errors beyond the bound, or large."""
    if q.of_bound > 1:
        figure = f"{q.of_bound:.3g} times it, error {q.largest:.2e} of the RMS"
        cause, action = "a wrong kernel, compiler or chip", "python -m cuscan selftest"
        yield Finding("error", "the result is beyond its error bound", figure, cause, action, where)
    elif q.level > 1e-3:
        figure = f"error {q.level:.1e} of the RMS, {q.growth:.3g} times as large in the last quarter as in the first"
        cause, action = "gates near 1 add up many roundings, or large terms cancel", "float64 inputs, or smaller gates"
        yield Finding("warning", "float32 loses digits", figure, cause, action, where)


def of_shape(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Finding:
    """A given result that cannot be compared."""
    cause, action = "another layout, or a tuple with the last state", "give the result alone, in the layout of the call"
    return Finding("error", "the given result has another shape", f"{theirs} for {ours}", cause, action)


def of_given_values(bad: NotFinite, where: Where) -> Finding:
    """NaN and inf of a given result where cuscan's is finite."""
    cause = "it divides by products of gates that underflow, or a mask multiplies where it should select (0 * NaN)"
    figure = f"the first of {bad.nan} NaN and {bad.inf} inf"
    return Finding("error", f"the given result has {bad.kind}", figure, cause, "cuscan's result is finite", where)


def of_result(mistake: str, off: float, ours: float, where: Where) -> Finding:
    """A given result that is not what float64 gives."""
    cause = f"it is what comes out with {mistake}" if mistake else "none of the mistakes that were tried gives it"
    action = "mend that" if mistake else "compare the first steps by hand; check_monoid tests a combine of your own"
    figure = f"off by up to {off:.2e} of the RMS, cuscan's by {ours:.1e}"
    return Finding("error", "the given result is wrong", figure, cause, action, where)


def of_plan(plan: Plan) -> Iterator[Finding]:
    """A chip that idles, and copies."""
    what, took = ("expected", plan.expected_ms) if plan.measured_ms is None else ("measured", plan.measured_ms)
    few = plan.blocks < plan.multiprocessors
    if took > max(4 * plan.limit_ms, 0.1):
        cause = "memory that lies across the reads of the kernel, or a tile that does not fit this chip"
        action = "arrays contiguous along channels ('bld') or time ('bdl'); python -m cuscan tune"
        if few:
            cause = "low occupancy: few rows, and each a long chain of steps in one thread"
            action = (
                "several sequences at once; leave the plan its own choice, which cuts long chains (CUSCAN_LOG=plan)"
            )
        yield Finding(
            "warning", "the chip is far from its limit",
            f"{what} {took:.3g} ms, limit {plan.limit_ms:.3g} ms; {plan.blocks} blocks on {plan.multiprocessors} "
            f"multiprocessors, and a thread walks {plan.chain} steps", cause, action,
        )  # fmt: skip
    elif few:
        figure = f"{plan.blocks} blocks on {plan.multiprocessors} multiprocessors"
        yield Finding("note", "the call is small", figure, "few rows and steps", "more at once would cost no more time")
    for name in dict.fromkeys(plan.copies):
        if not name.startswith("fill"):
            yield Finding(
                "warning", f"{name} is copied in every call", "its memory is read and written once more",
                "its items do not lie at multiples of their size, or its axes cannot be merged to six",
                f"take {name}.copy() once, where it is made",
            )  # fmt: skip


def of_distance(name: str, bins: list[tuple[int, float, float]]) -> Iterator[Finding]:
    """Gradients that vanish or explode with the distance from the end."""
    (_, near, _), (distance, far, _) = bins[0], bins[-1]
    if len(bins) < 4 or not near > 0:
        return
    figure = f"{far / near:.1e} of the median at the end is left {distance} steps before it"
    if far < 1e-6 * near:
        cause, action = "memory is short beside the distance to the loss", "a lower delta_bias, or a loss at every step"
        yield Finding("warning", f"the gradient of {name} vanishes", figure, cause, action)
    elif far > 1e4 * near:
        action = "see the finding on gates; clip gradients"
        yield Finding("warning", f"the gradient of {name} explodes", figure, "gates above 1", action)


def of_difference(name: str, found: Difference) -> Finding:
    """A gradient that is not cuscan's."""
    cause = "neither a factor, an offset nor a shift explains it: a wrong formula"
    if found.shift:
        cause = f"it is that of the step {'before' if found.shift > 0 else 'after'}: shifted in time"
    elif found.residual < 0.1 * found.relative:
        cause = f"it is {found.factor:.4g} times cuscan's plus {found.offset:.3g} of its RMS"
    figure = f"it differs from cuscan's by {found.relative:.2e} of its RMS"
    return Finding(
        "error", f"the gradient of {name} is off", figure, cause,
        "a factor: a mean in the place of a sum, or a chain rule done twice; an offset: a term too many; a shift: g[t] "
        "takes the gate of step t + 1",
    )  # fmt: skip
