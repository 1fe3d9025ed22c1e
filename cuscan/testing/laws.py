"""The laws that every scan rests on, checked on a user's monoid, or on CUDA code through the executors.

A chain of items may be cut anywhere and folded piece by piece only if `combine` is associative, and padded only if
there is an identity. Neither is seen in a scan's result as long as the cuts stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuscan._source import _CPP, KernelSource, _flatten

from ._hypothesis import hypothesis

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from .executors import Gpu, Host

Array = NDArray[Any]


def same(x: Any, y: Any) -> bool:
    """Equal in every element, and NaN to NaN."""
    left, right = np.asarray(x), np.asarray(y)
    return left.shape == right.shape and bool(np.all((left == right) | ((left != left) & (right != right))))


@dataclass(frozen=True)
class Monoid:
    """What is to be checked.

    Attributes
    ----------
    combine : callable
        combine(earlier, later).
    identity : object
        Neutral on both sides of `values`.
    values : SearchStrategy
        Items on which `combine` is exact, such as small integers.
    later_only : SearchStrategy, optional
        More items, on which the identity is neutral as the *later* operand; as the earlier one it need not be.
        (The affine map with an infinite gate is one: gate * 0 is NaN. So a tail may be padded, and a head not.)
    fold : callable, optional
        fold(items) of at least one item, in order: the scan of your own. Default: `combine` from the left.
    apply, states : callable and SearchStrategy, optional
        apply(item, state), for items that are maps, and what they are applied to.
    equal : callable
        equal(x, y).
    """

    combine: Callable[[Any, Any], Any]
    identity: Any
    values: SearchStrategy[Any]
    later_only: SearchStrategy[Any] | None = None
    fold: Callable[[Sequence[Any]], Any] | None = None
    apply: Callable[[Any, Any], Any] | None = None
    states: SearchStrategy[Any] | None = None
    equal: Callable[[Any, Any], bool] = same


def check_monoid(monoid: Monoid, *, examples: int = 100, longest: int = 70) -> None:
    """Check the laws of a monoid::

        combine(combine(x, y), z) = combine(x, combine(y, z))
        combine(x, identity) = x = combine(identity, x)
        fold(xs + ys) = combine(fold(xs), fold(ys))
        apply(combine(x, y), s) = apply(y, apply(x, s))        and        apply(identity, s) = s

    Parameters
    ----------
    monoid : Monoid
        The operator.
    examples : int
        How many a law.
    longest : int
        Items that are folded at most.

    Raises
    ------
    AssertionError
        A law is broken; the message names it and the simplest items found.
    ImportError
        Hypothesis is not installed.
    """
    st = hypothesis().strategies
    combine, values = monoid.combine, monoid.values
    fold = monoid.fold or partial(reduce, combine)

    def associativity(x: Any, y: Any, z: Any) -> tuple[Any, Any]:
        return combine(combine(x, y), z), combine(x, combine(y, z))

    def later_identity(x: Any) -> tuple[Any, Any]:
        return combine(x, monoid.identity), x

    def earlier_identity(x: Any) -> tuple[Any, Any]:
        return combine(monoid.identity, x), x

    def homomorphism(xs: list[Any], ys: list[Any]) -> tuple[Any, Any]:
        return fold(xs + ys), combine(fold(xs), fold(ys))

    _check(monoid, associativity, examples, values, values, values)
    _check(monoid, later_identity, examples, values)
    _check(monoid, earlier_identity, examples, values)
    items = st.lists(values, min_size=1, max_size=longest)
    _check(monoid, homomorphism, examples, items, items)
    if (apply := monoid.apply) is not None:

        def action(x: Any, y: Any, state: Any) -> tuple[Any, Any]:
            return apply(combine(x, y), state), apply(y, apply(x, state))

        def neutral_action(state: Any) -> tuple[Any, Any]:
            return apply(monoid.identity, state), state

        _check(monoid, action, examples, values, values, monoid.states)
        _check(monoid, neutral_action, examples, monoid.states)
    if monoid.later_only is not None:
        _check(monoid, later_identity, examples, monoid.later_only)


def _check(monoid: Monoid, law: Callable[..., tuple[Any, Any]], examples: int, *strategies: Any) -> None:
    tool: Any = hypothesis()

    def check(items: tuple[Any, ...]) -> None:
        left, right = law(*items)
        if not monoid.equal(left, right):
            listed = ", ".join(map(repr, items))
            raise AssertionError(f"{law.__name__.replace('_', ' ')} is broken by {listed}: {left!r} is not {right!r}")

    # What was found once is found again without the database, which would be written into the user's folder.
    phases = tool.Phase.generate, tool.Phase.shrink
    settings = tool.settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=phases)
    settings(tool.given(tool.strategies.tuples(*strategies))(check))()


# --- CUDA --------------------------------------------------------------------------------------------------------

_KERNELS = """
#line 1 "laws"
static_assert(sizeof({map}) == {size}, "fields");
extern "C" __global__ void law_identity({map}* to) {{ *to = {identity}; }}
extern "C" __global__ void law_combine(const {map}* earlier, const {map}* later, {map}* to) {{
  *to = combine(*earlier, *later);
}}
extern "C" __global__ void law_fold(const {map}* items, int count, {map}* to) {{
{fold}
}}
"""
_APPLY = """
extern "C" __global__ void law_apply(const {map}* map, const {state}* state, {state}* to) {{
  *to = apply(*map, *state);
}}
"""
_SERIAL_FOLD = "  *to = items[0];\n  for (int i = 1; i < count; ++i) *to = combine(*to, items[i]);"
_WARP_FOLD = """  const int lane = threadIdx.x;
  {map} total = {map}::identity();
  for (int i = 0; i < count; i += 32) {{
    const {map} own = i + lane < count ? items[i + lane] : {map}::identity();
    const {map} warp = from_lane(warp_inclusive_scan(own, lane), 31);
    total = i == 0 ? warp : combine(total, warp);
  }}
  if (lane == 0) *to = total;"""


def cuda_monoid(
    text: str,
    executor: Host | Gpu,
    *,
    map: str,  # noqa: A002 the name of the thing
    dtype: DTypeLike,
    fields: int,
    identity: str,
    values: SearchStrategy[Any],
    later_only: SearchStrategy[Any] | None = None,
    fold: str = _SERIAL_FOLD,
    threads: int = 1,
    state: str | None = None,
    states: SearchStrategy[Any] | None = None,
) -> Monoid:
    """The monoid of CUDA code: its own `combine` runs, in a small kernel around it.

    Parameters
    ----------
    text : str
        CUDA C++ with ``__device__ Map combine(Map earlier, Map later)``, and ``State apply(Map, State)`` with `state`.
    executor : Host or Gpu
        Where it runs.
    map : str
        The C++ type of an item: a struct of `fields` numbers of `dtype`.
    dtype : dtype
        Of the fields of items and states.
    fields : int
        How many an item has.
    identity : str
        A C++ expression.
    values, later_only : SearchStrategy
        As in `Monoid`: tuples of an item's fields.
    fold : str
        Statements that write the fold of ``items[0]`` to ``items[count - 1]`` to ``*to``, run by `threads` threads.
    threads : int
        Threads of the one block that folds.
    state, states : str and SearchStrategy, optional
        The C++ type of what maps are applied to, and tuples of its fields.

    Returns
    -------
    Monoid
        Its items are tuples.
    """
    kind = np.dtype(dtype)
    text += _KERNELS.format(map=map, size=fields * kind.itemsize, identity=identity, fold=fold)
    if state is not None:
        text += _APPLY.format(map=map, state=state)
    source = KernelSource(text, ())

    def call(name: str, size: int, *items: Any, block: int = 1) -> tuple[Any, ...]:
        arguments = [x if isinstance(x, np.int32) else np.array(x, kind) for x in items]
        return tuple(executor.launch(source, name, (1,), (block,), (*arguments, np.zeros(size, kind)))[-1].tolist())

    def folded(items: Sequence[Any]) -> Any:
        return call("law_fold", fields, items, np.int32(len(items)), block=threads)

    return Monoid(
        combine=lambda earlier, later: call("law_combine", fields, earlier, later),
        identity=call("law_identity", fields),
        values=values,
        later_only=later_only,
        fold=folded,
        apply=None if state is None else lambda item, x: call("law_apply", len(x), item, x),
        states=states,
    )


def affine_monoid(item: str, executor: Host | Gpu) -> Monoid:
    """The struct of cuda_src/operators.cuh, folded by the scan of cuda_src/warp_scan.cuh.

    Parameters
    ----------
    item : {"float32", "float64", "complex64", "complex128"}
        The type of the state.
    executor : Host or Gpu
        Where it runs.
    """
    st = hypothesis().strategies
    is_complex = np.dtype(item).kind == "c"
    real = np.zeros(0, item).real.dtype
    # Powers of these gates stay small, so that a long fold is exact too.
    units: list[tuple[int, ...]] = [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)] if is_complex else [(1,), (-1,), (0,)]
    states = st.tuples(*[st.integers(-8, 8)] * (1 + is_complex))
    name = f"Affine<{_CPP[item]}>"
    return cuda_monoid(
        "\n".join(_flatten("warp_scan.cuh", set())),
        executor,
        map=name,
        dtype=real,
        fields=2 + 2 * is_complex,
        identity=f"{name}::identity()",
        values=st.builds(operator.add, st.sampled_from(units), states),
        # Not of a complex gate: its product with 1 has a term inf * 0 in C as well as here.
        later_only=None if is_complex else st.tuples(st.sampled_from([np.inf, -np.inf, np.nan]), st.integers(-8, 8)),
        fold=_WARP_FOLD.format(map=name),
        threads=32,
        state=_CPP[item],
        states=states,
    )


# Segmented maps with the flag as a number, so that all fields are of one type.
_FLAT = """
#line 1 "laws"
struct Flat {{
  {real} gate, input, resets;
  static __device__ Flat identity() {{ return {{1, 0, 0}}; }}
}};
__device__ Segmented<{real}> cut(Flat x) {{ return {{x.gate, x.input, x.resets != 0}}; }}
__device__ Flat flat(Segmented<{real}> x) {{ return {{x.gate, x.input, ({real})x.resets}}; }}
__device__ Flat combine(Flat earlier, Flat later) {{ return flat(combine(cut(earlier), cut(later))); }}
__device__ {real} apply(Flat map, {real} state) {{ return apply(cut(map), state); }}
__device__ Flat from_lane(Flat x, int lane) {{ return flat(from_lane(cut(x), lane)); }}
__device__ Flat warp_inclusive_scan(Flat own, int lane) {{ return flat(warp_inclusive_scan(cut(own), lane)); }}
"""


def segmented_monoid(item: str, executor: Host | Gpu) -> Monoid:
    """The maps of cuda_src/operators.cuh that may forget what comes before them, as (gate, input, flag).

    Parameters
    ----------
    item : {"float32", "float64"}
        The type of the state.
    executor : Host or Gpu
        Where it runs.
    """
    st = hypothesis().strategies
    units, states = st.sampled_from([1, -1, 0]), st.integers(-8, 8)
    # The gate of a map that forgets is never used, so it may be anything.
    hidden = st.tuples(st.sampled_from([1, np.nan, np.inf]), states, st.just(1))
    monoid = cuda_monoid(
        "\n".join(_flatten("warp_scan.cuh", set())) + _FLAT.format(real=_CPP[item]),
        executor,
        map="Flat",
        dtype=item,
        fields=3,
        identity="Flat::identity()",
        values=st.tuples(units, states, st.just(0)) | hidden,
        fold=_WARP_FOLD.format(map="Flat"),
        threads=32,
        state=_CPP[item],
        states=st.tuples(states),
    )
    return replace(monoid, equal=lambda x, y: same(x[1:], y[1:]) and (x[-1] == 1 or same(x[0], y[0])))
