"""The kernels of `ops` on a Place: plans obeyed, structs packed field by field as in cuda_src/*_args.cuh."""

from __future__ import annotations

import struct

from cuscan import _arrays, _plan
from cuscan._arrays import ITEM_CODE, Array, Place, item_name
from cuscan._calls import chosen
from cuscan._launch import _in_pieces, _start
from cuscan._plan import CONV_THREADS, CONV_WIDTH, ITEM_BYTES, NORM_ITEMS, NORM_SUMS, PRODUCT_WARPS, _ceil_div
from cuscan._selective_backward import add_partials
from cuscan._source import (
    CONV_ARGS,
    CONV_BACKWARD_ARGS,
    NORM_ARGS,
    NORM_BACKWARD_ARGS,
    PRODUCT_ARGS,
    conv_backward_source,
    conv_source,
    norm_backward_source,
    norm_source,
    product_source,
)


def _pointer(place: Place, x: Array | None) -> int:
    return 0 if x is None else place.pointer(x)


def _strides(x: Array | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if x is None else tuple(x.strides)


def _code(x: Array | None) -> int:
    return 0 if x is None else ITEM_CODE[item_name(x)]


def _is_wide(x: Array | None) -> bool:
    return x is not None and item_name(x) == "float32"


# --- causal_conv1d -------------------------------------------------------------------------------------------------


def _conv_args(
    place: Place,
    arrays: tuple[Array, Array, Array | None, Array | None, Array, Array | None],
    chunk: int,
    silu: bool,
    vector: bool,
) -> bytes:
    """ConvArgs of x, weight, bias, initial, output, final."""
    x, weight, bias, initial, output, final = arrays
    batch, length, channels = x.shape
    strides = (*x.strides, *weight.strides, *_strides(bias, 1), *_strides(initial, 3), *output.strides)
    sizes = batch, length, channels, chunk, max(1, _ceil_div(length, chunk))
    return struct.pack(
        CONV_ARGS, *(_pointer(place, each) for each in arrays), *strides, *_strides(final, 3), *sizes, _code(x),
        _code(weight), _code(bias), weight.shape[1], silu, vector,
    )  # fmt: skip


def _vector_items(items: int, weight: Array, bias: Array | None, *sequences: Array) -> int:
    """Channels a thread: so many, if it is the usual case and all comes in vectors of them, else 1."""
    channels, width = weight.shape
    item = item_name(sequences[0])
    usual = all(x is None or item_name(x) in (item, "float32") for x in (weight, bias))
    usual = usual and width == CONV_WIDTH and channels % items == 0
    return items if usual and all(_in_pieces(x, items) for x in sequences) else 1


def conv(
    place: Place,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial: Array | None,
    output: Array,
    final: Array | None,
    *,
    silu: bool,
) -> None:
    """Run a causal_conv1d with at least one row and one channel; `final` may be `initial` where there is one step."""
    batch, length, channels = x.shape
    items = _vector_items(8 // x.dtype.itemsize, weight, bias, x, output)
    plan = _plan.plan_conv(batch, length, channels // items, place.limits)
    chosen(place, plan)
    packed = _conv_args(place, (x, weight, bias, initial, output, final), plan.chunk, silu, items > 1)
    threads = batch * max(1, _ceil_div(length, plan.chunk)) * (channels // items)
    _start(place, conv_source(), "causal_conv1d", _ceil_div(threads, CONV_THREADS), CONV_THREADS, packed)


def conv_backward(
    place: Place,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial: Array | None,
    grad_output: Array,
    grad_final: Array | None,
    gradients: tuple[Array | None, ...],
    *,
    silu: bool,
) -> None:
    """Write the gradients of x, weight, bias and initial of a causal_conv1d with at least one row and one channel."""
    batch, length, channels = x.shape
    grad_x, grad_weight, grad_bias, grad_initial = gradients
    width = weight.shape[1]
    items = _vector_items(2, weight, bias, x, grad_output)
    plan = _plan.plan_conv_backward(batch, length, channels // items, place.limits)
    chosen(place, plan)
    row_parts = _ceil_div(batch, plan.part)
    parts = row_parts * max(1, _ceil_div(length, plan.chunk))
    sums = [(place.allocate((parts, channels, width), "float32"), grad_weight)]
    if grad_bias is not None:
        sums.append((place.allocate((parts, channels), "float32"), grad_bias))
    packed = _conv_args(place, (x, weight, bias, initial, grad_output, grad_final), plan.chunk, silu, items > 1)
    scratch = [place.pointer(each) for each, _ in sums]
    packed += struct.pack(
        CONV_BACKWARD_ARGS, place.pointer(grad_x), _pointer(place, grad_initial), *scratch, *[0] * (2 - len(scratch)),
        plan.part, row_parts,
    )  # fmt: skip
    blocks = _ceil_div(parts * (channels // items), CONV_THREADS)
    _start(place, conv_backward_source(), "causal_conv1d_backward", blocks, CONV_THREADS, packed)
    add_partials(place, sums, "float32")


# --- rms_norm ------------------------------------------------------------------------------------------------------


def as_rows(place: Place, x: Array) -> Array:
    """All axes but the last one as one: a view where the strides allow it, else of a copy."""
    rows, stride = 1, 0
    for size, step in reversed(list(zip(x.shape[:-1], x.strides[:-1], strict=True))):
        if size == 1:
            continue
        if rows > 1 and step != rows * stride:
            return as_rows(place, _arrays.copy_of(place, x))
        rows, stride = rows * size, stride if rows > 1 else step
    return _arrays.view(x, (rows, x.shape[-1]), (stride, x.strides[-1]))


def _norm_args(
    place: Place, x: Array, weight: Array | None, residual: Array | None, y: Array, new: Array | None, eps: float,
    *others: Array | None,
) -> bytes:  # fmt: skip
    rows, width = x.shape
    pieces = [each for each in (x, residual, *others) if each is not None]
    vector = width % NORM_ITEMS == 0 and all(_in_pieces(each, NORM_ITEMS) for each in pieces)
    return struct.pack(
        NORM_ARGS, *(_pointer(place, each) for each in (x, weight, residual, y, new)), *x.strides,
        *_strides(weight, 1), *_strides(residual, 2), rows, width, eps, _code(x), _code(weight), _is_wide(residual),
        _is_wide(new), vector,
    )  # fmt: skip


def norm(
    place: Place, x: Array, weight: Array | None, residual: Array | None, y: Array, new: Array | None, eps: float
) -> None:
    """Run an rms_norm with at least one item; y and the new residual are contiguous."""
    x = as_rows(place, x)
    residual = None if residual is None else as_rows(place, residual)
    rows, width = x.shape
    plan = _plan.plan_norm(rows, width, place.limits)
    chosen(place, plan)
    packed = _norm_args(place, x, weight, residual, y, new, eps)
    _start(place, norm_source(), "rms_norm", rows, plan.threads, packed)


def norm_backward(
    place: Place, x: Array, weight: Array | None, grad: Array, grad_residual: Array | None, grad_x: Array,
    grad_weight: Array | None, eps: float,
) -> None:  # fmt: skip
    """Write the gradients of x and weight of an rms_norm with at least one item."""
    x, grad = as_rows(place, x), as_rows(place, grad)
    grad_residual = None if grad_residual is None else as_rows(place, grad_residual)
    rows, width = x.shape
    plan = _plan.plan_norm(rows, width, place.limits)
    chosen(place, plan)
    sums = None if grad_weight is None else place.allocate((plan.parts, width), "float32")
    packed = _norm_args(place, x, weight, None, grad_x, None, eps)
    packed += struct.pack(
        NORM_BACKWARD_ARGS, place.pointer(grad), _pointer(place, grad_residual), _pointer(place, sums), *grad.strides,
        *_strides(grad_residual, 2), plan.parts, _code(grad), _code(grad_residual),
    )  # fmt: skip
    _start(place, norm_backward_source(), "rms_norm_backward", plan.parts, plan.threads, packed)
    if sums is None or grad_weight is None:
        return
    if plan.parts > NORM_SUMS:
        # In two steps: one thread a column is few threads for so many sums.
        fewer = place.allocate((NORM_SUMS, width), "float32")
        size = NORM_SUMS * width
        shape, strides = (plan.parts // NORM_SUMS, size), (4 * size, 4)
        add_partials(place, [(_arrays.view(sums, shape, strides), fewer)], "float32")
        sums = fewer
    add_partials(place, [(sums, grad_weight)], "float32")


# --- matrix_vector -------------------------------------------------------------------------------------------------


def product(place: Place, weight: Array, x: Array, bias: Array | None, add: Array | None, y: Array) -> None:
    """Run a matrix_vector with at least one row of each."""
    rows, columns = weight.shape
    items = 16 // ITEM_BYTES[item_name(weight)]
    vector = columns % items == 0 and columns < 2**28 and _in_pieces(weight, items) and _in_pieces(x, items)
    plan = _plan.plan_product(rows, _ceil_div(columns, items), place.limits)
    chosen(place, plan)
    packed = struct.pack(
        PRODUCT_ARGS, *(_pointer(place, each) for each in (weight, x, bias, add, y)), *weight.strides, *x.strides,
        *_strides(bias, 1), *_strides(add, 2), rows, columns, x.shape[0], _code(weight), _code(y), _is_wide(bias),
        _is_wide(add), vector, plan.row_warps,
    )  # fmt: skip
    most = 1 if x.shape[0] == 1 and vector else _plan.MOST_PRODUCTS
    block_rows = PRODUCT_WARPS // plan.row_warps * (1 if most == 1 else 2)
    blocks = _ceil_div(rows, block_rows)
    _start(place, product_source(most), f"matrix_vector_{most}", blocks, 32 * PRODUCT_WARPS, packed)
