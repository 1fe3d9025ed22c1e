"""The scans and their gradients over shards of the time axis: what is agreed on before anything is exchanged."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuscan import _arrays, _calls, linear, linear_vjp, selective, selective_vjp
from cuscan._shards import Shard
from cuscan.linear_vjp import LinearGradients
from cuscan.selective_vjp import SelectiveGradients

from ._communicators import Communicator

_HEADER = struct.Struct("<16sqq")  # digest, steps, whether the gates may vary in time
_TEXT = 1024  # bytes of a description that ranks show each other where they disagree


def linear_scan(
    communicator: Communicator,
    a: Any,
    b: Any,
    h0: Any = None,
    *,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    return_last_state: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    timeout: float = 60.0,
) -> Any:
    """`cuscan.linear_scan` of one long axis whose shards lie on several ranks, in their order.

    Parameters
    ----------
    communicator : Communicator
        The ranks. All of them call with arguments of the same types, flags and, but for the steps, shapes.
    a, b, mask, reset, out
        This rank's shard: any number of steps, none included.
    h0 : array or scalar, optional
        Read where a sequence begins in the direction of the scan: on the first rank that has steps, the last one with
        `reverse`. On other ranks it is ignored and may be left out.
    cu_seqlens : array (sequences + 1,), optional
        The same on all ranks: offsets counted from the first step of the first rank. Sequences begin and end anywhere,
        and may span ranks. `h0` and the last state have all of them; each is read, or set, where that edge of the
        sequence is.
    return_last_state : bool
        Also return the last states. Those of sequences that end on another rank are 0, so that the sum over the ranks
        is the whole. An empty sequence is where its offset is, on the last rank at the very end.
    timeout : float
        Seconds to wait for other ranks.
    axis, reverse, out_dtype
        As in `cuscan.linear_scan`.

    Returns
    -------
    h : array
        This rank's shard of the states.
    last_state : array
        Only with `return_last_state`.

    Raises
    ------
    TypeError, ValueError
        As `cuscan.linear_scan`; and a ValueError on all ranks, before any state is exchanged, where types, shapes or
        flags disagree.
    CommunicatorError
        Other ranks did not come in time, in this call or in an earlier one.

    Notes
    -----
    See `cuscan.distributed` for what goes from rank to rank. Scratch beside that of a scan whose time is cut into
    chunks: one more array as large as its summaries, and the messages of all ranks.
    """
    arrays = {"a": a, "b": b, "mask": mask, "reset": reset, "out": out}
    given = {"h0": h0, "axis": axis, "reverse": reverse, "cu_seqlens": cu_seqlens, "out_dtype": out_dtype,
             "return_last_state": return_last_state}  # fmt: skip
    return _call(communicator, timeout, linear.linear_scan, arrays, _linear_axes(arrays, b, axis), given)


def linear_scan_vjp(
    communicator: Communicator,
    a: Any,
    h: Any,
    grad_h: Any = None,
    h0: Any = None,
    *,
    grad_last_state: Any = None,
    axis: int | None = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    grad_dtype: Any = None,
    timeout: float = 60.0,
) -> LinearGradients:
    """`cuscan.linear_scan_vjp` of one long axis whose shards lie on several ranks, in their order.

    Parameters
    ----------
    communicator, h0, cu_seqlens, timeout
        As in `cuscan.distributed.linear_scan`.
    a, h, grad_h, mask, reset
        This rank's shard.
    grad_last_state : array, optional
        Read where sequences end. On other ranks it is ignored and may be left out.
    axis, reverse, grad_dtype
        As in `cuscan.linear_scan_vjp`.

    Returns
    -------
    LinearGradients
        Those of this rank's shard. That of an `a` which is the same in all steps is the sum over the steps of all
        ranks, on every rank, added in their order. That of h0 is 0 for sequences that begin on another rank.

    Raises
    ------
    TypeError, ValueError, CommunicatorError
        As `cuscan.distributed.linear_scan`.
    """
    arrays = {"a": a, "h": h, "grad_h": grad_h, "mask": mask, "reset": reset}
    given = {"h0": h0, "grad_last_state": grad_last_state, "axis": axis, "reverse": reverse, "cu_seqlens": cu_seqlens,
             "grad_dtype": grad_dtype}  # fmt: skip
    found = _call(communicator, timeout, linear_vjp.linear_scan_vjp, arrays, _linear_axes(arrays, h, axis), given)
    assert isinstance(found, LinearGradients)
    return found


def selective_scan(
    communicator: Communicator,
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    return_states: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    timeout: float = 60.0,
) -> Any:
    """`cuscan.selective_scan` of long sequences whose shards in time lie on several ranks, in their order.

    Parameters
    ----------
    communicator, h0, cu_seqlens, return_last_state, timeout
        As in `cuscan.distributed.linear_scan`.
    u, delta, z, mask, reset, out
        This rank's shard: any number of steps, none included.
    B, C : array
        This rank's shard, or constant in time and the same on all ranks.
    A, D, delta_bias : array
        The same on all ranks.
    return_states : bool
        Also return the states that `selective_scan_vjp` starts from, counted from the first step of the shard in the
        direction of the scan.
    delta_softplus, reverse, delta_limit, layout, out_dtype
        As in `cuscan.selective_scan`.

    Returns
    -------
    y : array
        This rank's shard.
    last_state, states : array
        Only with `return_last_state` and `return_states`.

    Raises
    ------
    TypeError, ValueError, CommunicatorError
        As `cuscan.distributed.linear_scan`.
    """
    arrays = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "mask": mask,
              "reset": reset, "out": out}  # fmt: skip
    given = {"delta_softplus": delta_softplus, "return_last_state": return_last_state, "h0": h0, "reverse": reverse,
             "cu_seqlens": cu_seqlens, "delta_limit": delta_limit, "layout": layout, "return_states": return_states,
             "out_dtype": out_dtype}  # fmt: skip
    return _call(communicator, timeout, selective.selective_scan, arrays, _selective_axes(arrays, layout), given)


def selective_scan_vjp(
    communicator: Communicator,
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    *,
    grad_out: Any = None,
    grad_last_state: Any = None,
    states: Any = None,
    h0: Any = None,
    reverse: bool = False,
    mask: Any = None,
    reset: Any = None,
    cu_seqlens: Any = None,
    delta_limit: tuple[float, float] | None = None,
    layout: str = "bld",
    grad_dtype: Any = None,
    timeout: float = 60.0,
) -> SelectiveGradients:
    """`cuscan.selective_scan_vjp` of long sequences whose shards in time lie on several ranks, in their order.

    Parameters
    ----------
    communicator, h0, cu_seqlens, timeout
        As in `cuscan.distributed.linear_scan`.
    u, delta, A, B, C, D, z, delta_bias, mask, reset
        As in `cuscan.distributed.selective_scan`.
    grad_out : array, optional
        This rank's shard.
    grad_last_state : array, optional
        Read where sequences end. On other ranks it is ignored and may be left out.
    states : array, optional
        What `cuscan.distributed.selective_scan` gave here with `return_states`. Without it the scan is run again, by
        all ranks.
    delta_softplus, reverse, delta_limit, layout, grad_dtype
        As in `cuscan.selective_scan_vjp`.

    Returns
    -------
    SelectiveGradients
        Those of this rank's shard. Those of A, D, delta_bias, and of a B and C that are constant in time, are the sums
        over the steps of all ranks, on every rank, added in their order. That of h0 is 0 for sequences that begin on
        another rank.

    Raises
    ------
    TypeError, ValueError, CommunicatorError
        As `cuscan.distributed.linear_scan`.
    """
    arrays = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "mask": mask,
              "reset": reset, "grad_out": grad_out, "states": states}  # fmt: skip
    given = {"delta_softplus": delta_softplus, "grad_last_state": grad_last_state, "h0": h0, "reverse": reverse,
             "cu_seqlens": cu_seqlens, "delta_limit": delta_limit, "layout": layout,
             "grad_dtype": grad_dtype}  # fmt: skip
    found = _call(
        communicator, timeout, selective_vjp.selective_scan_vjp, arrays, _selective_axes(arrays, layout), given
    )
    assert isinstance(found, SelectiveGradients)
    return found


def _call(
    communicator: Communicator,
    timeout: float,
    function: Callable[..., Any],
    arrays: dict[str, Any],
    axes: dict[str, int],
    given: dict[str, Any],
) -> Any:
    """Agree on the call, and make it as one of several; `axes` are those of time."""
    shard = _agree(communicator, timeout, function.__name__, arrays, axes, given)
    token = _calls.team.set(_calls.Team(shard, communicator, timeout))
    try:
        # The function itself: it does not take the arrays of frameworks that have gradients of their own.
        return function.__wrapped__(**arrays, **given)  # type: ignore[attr-defined]
    finally:
        _calls.team.reset(token)


def _agree(
    communicator: Communicator,
    timeout: float,
    name: str,
    arrays: dict[str, Any],
    axes: dict[str, int],
    given: dict[str, Any],
) -> Shard:
    """Where this rank's shard lies among those of all, or a ValueError on every rank."""
    parts = [name]
    parts += [f"{key} {_described(x, axes.get(key))}" for key, x in arrays.items() if x is not None]
    edges = ("h0", "grad_last_state")  # only where sequences begin and end
    parts += [f"{key} {_described(x, None)}" for key, x in given.items() if x is not None and key not in edges]
    text = ", ".join(parts).encode()
    secret = text
    if isinstance(offsets := given["cu_seqlens"], np.ndarray):
        secret += offsets.astype(np.int64).tobytes()
    leading = next(x for key, x in arrays.items() if key in ("b", "h", "u"))
    length = leading.shape[axes[_leading(arrays)]] if _has_axis(leading, axes.get(_leading(arrays))) else 0
    gates = arrays.get("a")
    varies = int(not (hasattr(gates, "shape") and not _varies(gates, axes.get("a"))))
    header = _HEADER.pack(hashlib.blake2b(secret, digest_size=16).digest(), length, varies)
    headers = [_HEADER.unpack(row.tobytes()) for row in _all_gather(communicator, header, timeout)]
    lengths, vary = tuple(length for _, length, _ in headers), [bool(each) for *_, each in headers]
    if len({digest for digest, *_ in headers}) > 1:
        rows = _all_gather(communicator, text[:_TEXT].ljust(_TEXT), timeout)
        texts = [row.tobytes().decode(errors="replace").rstrip() for row in rows]
        other = next(i for i, (digest, *_) in enumerate(headers) if digest != headers[0][0])
        what = f"rank 0 calls {texts[0]}; rank {other} calls {texts[other]}"
        values = "" if texts[0] != texts[other] else ": the values of cu_seqlens differ"
        raise ValueError(f"the ranks disagree, so nothing was exchanged: {what}{values}")
    single = [not each and length != 1 for each, length in zip(vary, lengths, strict=True)]
    if any(single) and any(vary):
        raise ValueError(
            f"the ranks disagree, so nothing was exchanged: a is one gate for all steps on rank {single.index(True)}, "
            f"and one a step on rank {vary.index(True)}"
        )
    levels = tuple(each.size for each in getattr(communicator, "levels", ()))
    return Shard(communicator.rank, lengths, any(single), levels)


def _all_gather(communicator: Communicator, message: bytes, timeout: float) -> np.ndarray[Any, Any]:
    received = np.empty((communicator.size, len(message)), np.uint8)
    communicator.all_gather(np.frombuffer(message, np.uint8).copy(), received, timeout)
    return received


def _leading(arrays: dict[str, Any]) -> str:
    return next(key for key in arrays if key in ("b", "h", "u"))


def _has_axis(x: Any, axis: int | None) -> bool:
    return axis is not None and hasattr(x, "shape") and -len(x.shape) <= axis < len(x.shape)


def _varies(x: Any, axis: int | None) -> bool:
    """Whether it has more than one item, or none, along an axis."""
    return _has_axis(x, axis) and x.shape[axis] != 1


def _described(x: Any, axis: int | None) -> str:
    """Type and shape without the steps of an array, or a value."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype") or _arrays.is_python_scalar(x):
        return repr(x)
    shape = ["time" if axis is not None and d == axis % len(x.shape) else str(n) for d, n in enumerate(x.shape)]
    return f"{x.dtype}({', '.join(shape)})"


def _linear_axes(arrays: dict[str, Any], leading: Any, axis: Any) -> dict[str, int]:
    """The axis of time of each array from the right, as they broadcast; none where the argument is wrong."""
    if not hasattr(leading, "shape") or isinstance(axis, bool) or not isinstance(axis, (int, np.integer, type(None))):
        return {}
    dimensions = len(leading.shape)
    axis = 0 if axis is None else int(axis)
    if not -dimensions <= axis < dimensions or not dimensions:
        return {}
    from_right = axis % dimensions - dimensions
    return {key: from_right for key, x in arrays.items() if _has_axis(x, from_right)}


def _selective_axes(arrays: dict[str, Any], layout: str) -> dict[str, int]:
    last = {"bld": 1, "bdl": 2}.get(layout)
    if last is None:
        return {}
    axes = dict.fromkeys(("u", "delta", "z", "out", "grad_out"), last) | {"mask": 1, "reset": 1, "states": 1}
    for key in ("B", "C"):
        dimensions: Sequence[int] = getattr(arrays[key], "shape", ())
        if len(dimensions) > 2:
            axes[key] = 1 if layout == "bld" else len(dimensions) - 1
    return {key: axis for key, axis in axes.items() if _has_axis(arrays.get(key), axis)}
