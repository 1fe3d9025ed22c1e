"""Hypothesis strategies that draw whole problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ._hypothesis import hypothesis
from .problems import VALUES, LinearProblem, SelectiveProblem, draw_gradients, draw_linear, draw_selective

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


T = TypeVar("T")


def linear_problems(
    *, dtype: Sequence[str] | None = None, values: Sequence[str] = VALUES, largest: int = 16384, plans: int = 2
) -> SearchStrategy[LinearProblem]:
    """Calls of `cuscan.linear_scan`: shapes around the edges of tiles, layouts, strides, dtypes and options.

    A third have a mask, a third a reset, and a quarter are packed sequences; half of these have NaN where no result
    may depend on it.

    Parameters
    ----------
    dtype : sequence of str, optional
        Item types of a and b to draw from. Default: all; bfloat16 where ml_dtypes is installed.
    values : sequence of {"exact", "real", "nan"}
        Kinds of values; see `cuscan.testing.problems`.
    largest : int
        About how many items b has at most.
    plans : int
        How many forced plans `LinearProblem.check` runs beside the plan's own choice.

    Returns
    -------
    SearchStrategy of LinearProblem

    Raises
    ------
    ImportError
        Hypothesis is not installed.
    """
    return _problems(draw_linear, dtype=dtype, values=values, largest=largest, plans=plans)


def selective_problems(
    *, dtype: Sequence[str] | None = None, values: Sequence[str] = VALUES, largest: int = 32768, plans: int = 2
) -> SearchStrategy[SelectiveProblem]:
    """Calls of `cuscan.selective_scan`, as `linear_problems` draws those of `linear_scan`.

    Parameters
    ----------
    dtype, values, plans
        As there; `dtype` is that of u and z.
    largest : int
        About how many states there are at most, over all steps.

    Returns
    -------
    SearchStrategy of SelectiveProblem

    Raises
    ------
    ImportError
        Hypothesis is not installed.
    """
    return _problems(draw_selective, dtype=dtype, values=values, largest=largest, plans=plans)


def gradient_problems(scans: SearchStrategy[LinearProblem | SelectiveProblem]) -> SearchStrategy[Any]:
    """Calls of `cuscan.linear_scan_vjp` and `cuscan.selective_scan_vjp`.

    Parameters
    ----------
    scans : SearchStrategy
        The calls whose gradients these are: `linear_problems`, `selective_problems` or both.

    Returns
    -------
    SearchStrategy of LinearGradientProblem and SelectiveGradientProblem

    Raises
    ------
    ImportError
        Hypothesis is not installed.
    """
    st: Any = hypothesis().strategies
    drawn: SearchStrategy[Any] = st.composite(lambda draw: draw_gradients(*_by(st, draw), draw(scans)))()
    return drawn


def _by(st: Any, draw: Callable[[Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How `problems` draws: one of some choices, or an int."""
    return lambda choices: draw(st.sampled_from(choices)), lambda low, high: draw(st.integers(low, high))


def _problems(draw_problem: Callable[..., T], **options: Any) -> SearchStrategy[T]:
    st: Any = hypothesis().strategies
    drawn: SearchStrategy[T] = st.composite(lambda draw: draw_problem(*_by(st, draw), **options))()
    return drawn
