"""What a Mamba block needs around its scan: short convolution, normalisation, and a matrix times a few rows.

CuPy arrays run kernels of our own, NumPy arrays the NumPy below; other kinds are a TypeError. Items are float32,
bfloat16 or float16, with NumPy also float64. Sums are in float32 (float64 for float64) and in a fixed order: the same
call gives the same bits every time. A call of a kind that was seen before costs little more than its launches, and
may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuscan import _arrays, _calls, _plan
from cuscan._arrays import Array, Place
from cuscan.reference import _silu

from . import _ops_launch

WIDTHS = range(2, 9)  # of a convolution
MOST_ROWS = _plan.MOST_PRODUCTS  # of matrix_vector's x


class ConvGradients(NamedTuple):
    """Gradients of causal_conv1d, None for inputs that were None."""

    x: Any
    weight: Any
    bias: Any
    initial_state: Any


class NormGradients(NamedTuple):
    """Gradients of rms_norm, None for inputs that were None."""

    x: Any
    weight: Any


# --- calls ---------------------------------------------------------------------------------------------------------

_Arguments = dict[str, Any]
_Results = Sequence[Array]


class _Function:
    """What the calls of one function share: its checks, its NumPy, its kernels, and what is ready by signature.

    Both ways give the results that are wanted, in one order.
    """

    def __init__(
        self,
        names: Sequence[str],
        required: Sequence[str],
        check: Callable[[_Arguments, Any], None],
        in_numpy: Callable[[_Arguments, Any], _Results],
        launch: Callable[[Place, _Arguments, Any], _Results],
        *,
        changed: Sequence[str] = (),
        written: Sequence[str] = (),
    ) -> None:
        self._names, self._required = names, required
        self._check, self._in_numpy, self._launch = check, in_numpy, launch
        self._changed, self._written = changed, written
        self._ready: _calls.Cache[_calls.Launches] = _calls.Cache()

    def __call__(self, arrays: _calls.Arrays, options: Hashable) -> _Results:
        given = _calls.Given(self._names, arrays, options, _refuse)
        launches = self._ready.get(given.signature) or self._ready.put(given.signature, self._make(given, options))
        launches.check_apart(given)
        return self._in_numpy(given.by_name(), options) if given.in_numpy else launches.run(given)

    def _make(self, given: _calls.Given, options: Hashable) -> _calls.Launches:
        """Check what the signature tells, plan and pack."""
        arrays = given.check(self._required)
        self._check(arrays, options)
        if not given.in_numpy and arrays["x"].dtype == np.float64:
            raise TypeError("x is float64, which only NumPy arrays can be here")
        for name in self._changed:
            if name in given.read_only:
                raise TypeError(f"{name} is changed in place and must be writable, got a read-only array")
            _arrays.check_places(name, arrays[name])

        def body(place: Place, arrays: _Arguments) -> _Results:
            prepared = dict(zip(arrays, _arrays.usable(place, *arrays.values()), strict=True))
            results = self._launch(place, prepared, options)
            for name in (*self._changed, *self._written):  # copies, where items were at odd addresses
                if arrays[name] is not None and prepared[name] is not arrays[name]:
                    place.assign(arrays[name], prepared[name])
            return [next((arrays[n] for n in self._written if prepared[n] is x), x) for x in results]

        return _calls.Launches.of(given, changed=self._changed, written=self._written).recorded(given, body)


def _refuse(arguments: _Arguments) -> None:
    for name, x in arguments.items():
        if x is not None and not isinstance(x, np.ndarray) and type(x).__module__.partition(".")[0] != "cupy":
            kind = f"{type(x).__module__}.{type(x).__name__}"
            raise TypeError(f"{name} must be a NumPy or CuPy array, got a {kind}")


def _check_axes(name: str, x: Array, axes: str) -> None:
    if x.ndim != axes.count(",") + 1 - axes.endswith(",)"):
        raise ValueError(f"{name} must have axes {axes}, got shape {tuple(x.shape)}")


def _real(x: Array) -> Any:
    """The type that items of x are computed in."""
    return np.dtype(_arrays.accumulation(_arrays.item_name(x))).type


# --- causal_conv1d -------------------------------------------------------------------------------------------------


class _ConvOptions(NamedTuple):
    silu: bool
    final: bool = False


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    initial_state: Any = None,
    activation: str | None = None,
    out: Any = None,
    return_final_state: bool = False,
) -> Any:
    """Short causal convolution of each channel along time (Gu and Dao, "Mamba", 2023, figure 3)::

        y[t] = act(bias + sum over k of weight[k] * x[t - (width - 1) + k])

    where x before the first step is the initial state, or 0.

    Parameters
    ----------
    x : array (batch, length, channels)
        float32, bfloat16 or float16 (NumPy: or float64), of any strides; fastest with the channels side by side.
    weight : array (channels, width)
        Of any real floating dtype; width is 2 to 8. Width 4 is the fastest.
    bias : array (channels,), optional
        Of any real floating dtype.
    initial_state : array (batch, channels, width - 1), optional
        The last width - 1 inputs before the first step, the latest last, in x's dtype.
    activation : {"silu"}, optional
        act(y) = y * sigmoid(y), that of `selective_scan`'s gate. Default: none.
    out : array (batch, length, channels), optional
        Where to write y, in x's dtype. Must not overlap an input.
    return_final_state : bool
        Whether to return the state after the last step too.

    Returns
    -------
    y : array (batch, length, channels)
        In x's dtype: a fresh C-contiguous array, or `out`.
    final_state : array (batch, channels, width - 1)
        With `return_final_state`: the initial state of what follows, in x's dtype.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape or value, or one that overlaps `out`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan.mamba.ops import causal_conv1d
    >>> x = np.array([1, 0, 0, 2], np.float32)[None, :, None]             # batch 1, length 4, 1 channel
    >>> weight = np.array([[1, 10, 100]], np.float32)                     # width 3
    >>> y, state = causal_conv1d(x, weight, return_final_state=True)
    >>> y.ravel(), state.ravel()
    (array([100.,  10.,   1., 200.], dtype=float32), array([0., 2.], dtype=float32))
    """
    options = _ConvOptions(_is_silu(activation), _arrays.check_flag("return_final_state", return_final_state))
    y, *final = _CONV((x, weight, bias, initial_state, out), options)
    y = y if out is None else out
    return (y, *final) if return_final_state else y


def causal_conv1d_update(state: Any, x: Any, weight: Any, bias: Any = None, *, activation: str | None = None) -> Any:
    """One step of `causal_conv1d`, for decoding: the same bits as its, with the state changed in place.

    Parameters
    ----------
    state : array (batch, channels, width - 1)
        The last inputs, the latest last, in x's dtype. Changed in place.
    x : array (batch, channels)
        float32, bfloat16 or float16 (NumPy: or float64).
    weight, bias, activation
        As of `causal_conv1d`.

    Returns
    -------
    y : array (batch, channels)
        In x's dtype, fresh and C-contiguous.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a state that cannot be written to.
    ValueError
        An argument of the wrong shape or value, or one that overlaps the state.
    """
    return _CONV_UPDATE((state, x, weight, bias), _ConvOptions(_is_silu(activation)))[0]


def causal_conv1d_vjp(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    grad_out: Any,
    initial_state: Any = None,
    grad_final_state: Any = None,
    activation: str | None = None,
) -> ConvGradients:
    """Gradients of `causal_conv1d`, from those of its results::

        g[t] = grad_out[t] * act'(y before act)            0 after the last step
        grad_x[t] = sum over k of weight[k] * g[t + (width - 1) - k]  +  what grad_final_state has for x[t]
        grad_weight[k] = sum over batch and t of g[t] * x[t - (width - 1) + k]
        grad_bias = sum over batch and t of g[t]

    Parameters
    ----------
    x, weight, bias, initial_state, activation
        As `causal_conv1d` had them.
    grad_out : array (batch, length, channels)
        Gradient of y, in x's dtype.
    grad_final_state : array (batch, channels, width - 1), optional
        Gradient of the final state, in x's dtype.

    Returns
    -------
    ConvGradients
        x, weight, bias, initial_state: each in its input's dtype and shape, None where the input was None.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape or value.

    Notes
    -----
    Scratch on the GPU: (width + 1) * channels float32 for each part that batch and time are cut into, at most as many
    parts as give each multiprocessor 512 threads, or one.
    """
    results = iter(
        _CONV_VJP((x, weight, bias, grad_out, initial_state, grad_final_state), _ConvOptions(_is_silu(activation)))
    )
    return ConvGradients(*(None if given is None else next(results) for given in (x, weight, bias, initial_state)))


def _is_silu(activation: object) -> bool:
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    return activation == "silu"


def _check_conv(arrays: _Arguments, _: _ConvOptions) -> None:
    x, weight, update = arrays["x"], arrays["weight"], "state" in arrays
    _check_axes("x", x, "(batch, channels)" if update else "(batch, length, channels)")
    _arrays.check_item("x", x, _arrays.REAL)
    _check_axes("weight", weight, "(channels, width)")
    shape, width = tuple(x.shape), int(weight.shape[1])
    _arrays.check_shape("weight", weight, (shape[-1], width), "(channels, width)")
    if width not in WIDTHS:
        raise ValueError(f"weight must have a width of {WIDTHS[0]} to {WIDTHS[-1]}, got {width}")
    if arrays["bias"] is not None:
        _arrays.check_shape("bias", arrays["bias"], shape[-1:], "(channels,)")
    for name in ("weight", "bias"):
        if arrays[name] is not None:
            _arrays.check_item(name, arrays[name], _arrays.REAL)
    for name in ("state", "initial_state", "grad_final_state"):
        if (state := arrays.get(name)) is not None:
            _arrays.check_shape(name, state, (shape[0], shape[-1], width - 1), "(batch, channels, width - 1)")
            _arrays.check_same_item(("x", x), (name, state))
    for name in ("out", "grad_out"):
        if (y := arrays.get(name)) is not None:
            _arrays.check_same_item(("x", x), (name, y))
            _arrays.check_shape(name, y, shape, "x's (batch, length, channels)")
    if arrays.get("out") is not None:
        _arrays.check_out(arrays["out"], shape)


@np.errstate(all="ignore")
def _conv_inputs(x: Array, weight: Array, bias: Array | None, initial: Array | None) -> tuple[Array, Array, Array]:
    """In the type that is computed in: the inputs from the state on, the weights, and what the activation is of."""
    real, (batch, length, channels), width = _real(x), x.shape, weight.shape[1]
    before = np.zeros((batch, width - 1, channels), real) if initial is None else initial.transpose(0, 2, 1)
    inputs = np.concatenate([before.astype(real), x.astype(real)], axis=1)
    taps = weight.astype(real)
    total = np.zeros((batch, length, channels), real)
    if bias is not None:
        total += bias.astype(real)
    for k in range(width):
        total += taps[:, k] * inputs[:, k : k + length]
    return inputs, taps, total


@np.errstate(all="ignore")
def _conv_numpy(arrays: _Arguments, options: _ConvOptions) -> _Results:
    x, weight = arrays["x"], arrays["weight"]
    inputs, _, y = _conv_inputs(x, weight, arrays["bias"], arrays["initial_state"])
    y = (_silu(y) if options.silu else y).astype(x.dtype)
    if arrays["out"] is not None:
        arrays["out"][...] = y
    if not options.final:
        return (y,)
    final = inputs[:, x.shape[1] :].transpose(0, 2, 1)
    return y, np.ascontiguousarray(final.astype(x.dtype))


def _conv_launch(place: Place, arrays: _Arguments, options: _ConvOptions) -> _Results:
    x, weight, initial = arrays["x"], arrays["weight"], arrays["initial_state"]
    y = place.allocate(x.shape, x.dtype) if arrays["out"] is None else arrays["out"]
    batch, _, channels = x.shape
    final = place.allocate((batch, channels, weight.shape[1] - 1), x.dtype) if options.final else None
    if batch and channels:
        _ops_launch.conv(place, x, weight, arrays["bias"], initial, y, final, silu=options.silu)
    return (y,) if final is None else (y, final)


def _conv_update_launch(place: Place, arrays: _Arguments, options: _ConvOptions) -> _Results:
    x, state = arrays["x"], arrays["state"]
    y = place.allocate(x.shape, x.dtype)
    if x.size:
        steps = [
            _arrays.view(each, (x.shape[0], 1, x.shape[1]), (each.strides[0], 0, each.strides[1])) for each in (x, y)
        ]
        _ops_launch.conv(place, steps[0], arrays["weight"], arrays["bias"], state, steps[1], state, silu=options.silu)
    return (y,)


def _conv_vjp_launch(place: Place, arrays: _Arguments, options: _ConvOptions) -> _Results:
    x, weight, bias, initial = inputs = [arrays[name] for name in ("x", "weight", "bias", "initial_state")]
    made = [None if each is None else place.allocate(each.shape, each.dtype) for each in inputs]
    if x.shape[0] and x.shape[2]:
        grads = arrays["grad_out"], arrays["grad_final_state"]
        _ops_launch.conv_backward(place, x, weight, bias, initial, *grads, tuple(made), silu=options.silu)
    else:
        for each in made:
            if each is not None and each.size:
                place.assign(each, 0)
    return [each for each in made if each is not None]


def _conv_update_numpy(arrays: _Arguments, options: _ConvOptions) -> _Results:
    state, x = arrays["state"], arrays["x"]
    given = {"x": x[:, None], "weight": arrays["weight"], "bias": arrays["bias"], "initial_state": state, "out": None}
    y, final = _conv_numpy(given, _ConvOptions(options.silu, final=True))
    state[...] = final
    return (y[:, 0],)


@np.errstate(all="ignore")
def _conv_vjp_numpy(arrays: _Arguments, options: _ConvOptions) -> _Results:
    x, weight, bias, initial = (arrays[name] for name in ("x", "weight", "bias", "initial_state"))
    length, width = x.shape[1], weight.shape[1]
    inputs, taps, total = _conv_inputs(x, weight, bias, initial)
    g = arrays["grad_out"].astype(total.dtype)
    if options.silu:
        share = 1 / (1 + np.exp(-total))
        g *= share + total * share * (1 / (1 + np.exp(total)))
    grad_inputs = np.zeros_like(inputs)
    for k in range(width):
        grad_inputs[:, k : k + length] += taps[:, k] * g
    if arrays["grad_final_state"] is not None:
        grad_inputs[:, length:] += arrays["grad_final_state"].astype(total.dtype).transpose(0, 2, 1)
    grad_weight = np.stack([(g * inputs[:, k : k + length]).sum((0, 1)) for k in range(width)], axis=1)
    results = [grad_inputs[:, width - 1 :].astype(x.dtype), grad_weight.astype(weight.dtype)]
    if bias is not None:
        results.append(g.sum((0, 1)).astype(bias.dtype))
    if initial is not None:
        results.append(grad_inputs[:, : width - 1].transpose(0, 2, 1).astype(x.dtype))
    return [np.ascontiguousarray(each) for each in results]


_CONV = _Function(
    ("x", "weight", "bias", "initial_state", "out"), ("x", "weight"), _check_conv, _conv_numpy, _conv_launch,
    written=("out",),
)  # fmt: skip
_CONV_UPDATE = _Function(
    ("state", "x", "weight", "bias"), ("state", "x", "weight"), _check_conv, _conv_update_numpy, _conv_update_launch,
    changed=("state",),
)  # fmt: skip
_CONV_VJP = _Function(
    ("x", "weight", "bias", "grad_out", "initial_state", "grad_final_state"), ("x", "weight", "grad_out"), _check_conv,
    _conv_vjp_numpy, _conv_vjp_launch,
)  # fmt: skip


# --- rms_norm ------------------------------------------------------------------------------------------------------


class _NormOptions(NamedTuple):
    eps: float
    returns_residual: bool = False
    residual_dtype: Any = None

    def item(self, arrays: _Arguments) -> Any:
        """Dtype of the new residual, None without one."""
        if not self.returns_residual:
            return None
        like = arrays["x"] if arrays["residual"] is None else arrays["residual"]
        return _arrays.output_item(_arrays.item_name(like), self.residual_dtype, None, "residual_dtype")


def rms_norm(x: Any, weight: Any, *, eps: float, residual: Any = None, residual_dtype: Any = None) -> Any:
    """Divide each row by its root mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)::

        v = x + residual                                   rounded to residual_dtype: the new residual
        y = weight * (v / sqrt(mean(v * v) + eps))         v, and the quotient, rounded to x's dtype

    as Hugging Face's Mamba does it: the mean in float32, the weight times a quotient of x's dtype.

    Parameters
    ----------
    x : array (..., width)
        float32, bfloat16 or float16 (NumPy: or float64).
    weight : array (width,) or None
        Of any real floating dtype; None is 1.
    eps : float
        Added to the mean of the squares.
    residual : array (..., width), optional
        Added to x before the norm: in x's dtype or float32.
    residual_dtype : dtype, optional
        Of the new residual: x's or float32. Default: that of the residual.

    Returns
    -------
    y : array (..., width)
        In x's dtype, fresh and C-contiguous.
    new_residual : array (..., width)
        If `residual` or `residual_dtype` is given: x + residual, or x.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan.mamba.ops import rms_norm
    >>> rms_norm(np.array([[3, -4, 0, 0]], np.float32), None, eps=0)
    array([[ 1.2, -1.6,  0. ,  0. ]], dtype=float32)
    """
    returns = residual is not None or residual_dtype is not None
    results = _NORM((x, weight, residual), _NormOptions(float(eps), returns, residual_dtype))
    return tuple(results) if returns else results[0]


def rms_norm_vjp(x: Any, weight: Any, *, eps: float, grad_out: Any, grad_residual: Any = None) -> NormGradients:
    """Gradients of `rms_norm`, from that of its y and, if there is one, of the new residual::

        r = 1 / sqrt(mean(x * x) + eps),  q = x * r
        grad_x = r * (weight * grad_out - q * mean(q * weight * grad_out)) + grad_residual
        grad_weight = sum over rows of grad_out * q

    Parameters
    ----------
    x : array (..., width)
        What was divided: rms_norm's x, or where it had a residual the new one, whose gradient is that of both.
    weight, eps
        As `rms_norm` had them.
    grad_out : array (..., width)
        Gradient of y: in any real floating dtype.
    grad_residual : array (..., width), optional
        Gradient of the new residual: in any real floating dtype.

    Returns
    -------
    NormGradients
        x in x's dtype, and weight in its own, None where it was None.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape.
    """
    results = _NORM_VJP((x, weight, grad_out, grad_residual), _NormOptions(float(eps)))
    return NormGradients(results[0], None if weight is None else results[1])


def _check_norm(arrays: _Arguments, options: _NormOptions) -> None:
    x, weight = arrays["x"], arrays["weight"]
    if x.ndim == 0:
        raise ValueError("x must have axes (..., width), got a scalar")
    item = _arrays.check_item("x", x, _arrays.REAL)
    if weight is not None:
        _arrays.check_item("weight", weight, _arrays.REAL)
        _arrays.check_shape("weight", weight, tuple(x.shape[-1:]), "(width,)")
    for name in ("residual", "grad_out", "grad_residual"):
        if (like := arrays.get(name)) is not None:
            _arrays.check_shape(name, like, tuple(x.shape), "x's")
            if name == "residual":
                _arrays.check_same_item(("x", x), (name, like), _wider(item))
            else:
                _arrays.check_item(name, like, _arrays.REAL)
    if (dtype := options.item(arrays)) is not None and dtype.name not in (item, *_wider(item)):
        raise TypeError(f"residual_dtype must be x's {item} or float32, got {dtype.name}")


def _wider(item: str) -> tuple[str, ...]:
    return () if item == "float64" else ("float32",)


@np.errstate(all="ignore")
def _norm_numpy(arrays: _Arguments, options: _NormOptions) -> _Results:
    x, weight, residual = arrays["x"], arrays["weight"], arrays["residual"]
    real = _real(x)
    value, results = x.astype(real), list[Array]()
    if options.returns_residual:
        if residual is not None:
            value += residual.astype(real)
        results.append(np.ascontiguousarray(value.astype(options.item(arrays))))
        value = value.astype(x.dtype).astype(real)
    share = _share(value, options.eps)
    y = (value * share).astype(x.dtype)
    if weight is not None:
        y = (weight.astype(real) * y.astype(real)).astype(x.dtype)
    return [np.ascontiguousarray(y), *results]


def _norm_launch(place: Place, arrays: _Arguments, options: _NormOptions) -> _Results:
    x, dtype = arrays["x"], options.item(arrays)
    y = place.allocate(x.shape, x.dtype)
    new = None if dtype is None else place.allocate(x.shape, dtype)
    if x.size:
        _ops_launch.norm(place, x, arrays["weight"], arrays["residual"], y, new, options.eps)
    return (y,) if new is None else (y, new)


def _norm_vjp_launch(place: Place, arrays: _Arguments, options: _NormOptions) -> _Results:
    x, weight, grad = arrays["x"], arrays["weight"], arrays["grad_out"]
    grad_x = place.allocate(x.shape, x.dtype)
    grad_weight = None if weight is None else place.allocate(weight.shape, weight.dtype)
    if x.size:
        _ops_launch.norm_backward(place, x, weight, grad, arrays["grad_residual"], grad_x, grad_weight, options.eps)
    elif weight is not None and weight.size:
        place.assign(grad_weight, 0)
    return (grad_x,) if grad_weight is None else (grad_x, grad_weight)


def _share(value: Array, eps: float) -> Array:
    """1 / root mean square of each row."""
    real = value.dtype.type
    square = (value * value).sum(-1, keepdims=True) / real(max(value.shape[-1], 1))
    return real(1) / np.sqrt(square + real(eps))


@np.errstate(all="ignore")
def _norm_vjp_numpy(arrays: _Arguments, options: _NormOptions) -> _Results:
    x, weight, grad_residual = arrays["x"], arrays["weight"], arrays["grad_residual"]
    real = _real(x)
    value, grad = x.astype(real), arrays["grad_out"].astype(real)
    share = _share(value, options.eps)
    quotient = value * share
    weighted = grad if weight is None else weight.astype(real) * grad
    mean = (quotient * weighted).sum(-1, keepdims=True) / real(max(x.shape[-1], 1))
    grad_x = share * (weighted - quotient * mean)
    if grad_residual is not None:
        grad_x += grad_residual.astype(real)
    results = [np.ascontiguousarray(grad_x.astype(x.dtype))]
    if weight is not None:
        results.append((grad * quotient).sum(tuple(range(x.ndim - 1))).astype(weight.dtype))
    return results


_NORM = _Function(("x", "weight", "residual"), ("x",), _check_norm, _norm_numpy, _norm_launch)
_NORM_VJP = _Function(
    ("x", "weight", "grad_out", "grad_residual"), ("x", "grad_out"), _check_norm, _norm_vjp_numpy, _norm_vjp_launch
)


# --- matrix_vector -------------------------------------------------------------------------------------------------


def matrix_vector(weight: Any, x: Any, *, bias: Any = None, add: Any = None, out_dtype: Any = None) -> Any:
    """Multiply a few rows by a matrix that is read once, where a stream may be capturing::

        y[b] = weight @ x[b] + bias + add[b]

    Parameters
    ----------
    weight : array (out, in)
        float32, bfloat16 or float16 (NumPy: or float64); fastest with `in` side by side, in rows that begin at
        multiples of 16 bytes.
    x : array (batch, in)
        At most 8 rows, in weight's dtype.
    bias : array (out,), optional
        In weight's dtype or float32.
    add : array (batch, out), optional
        Added to the result, in weight's dtype or float32.
    out_dtype : dtype, optional
        Dtype of y: float16, bfloat16, float32 or float64. Default: x's.

    Returns
    -------
    y : array (batch, out)
        Fresh and C-contiguous; rounded once, after the additions.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        An argument of the wrong shape, or more than 8 rows.
    """
    return _PRODUCT((weight, x, bias, add), out_dtype)[0]


def _check_product(arrays: _Arguments, out_dtype: Any) -> None:
    weight, x = arrays["weight"], arrays["x"]
    _check_axes("weight", weight, "(out, in)")
    _check_axes("x", x, "(batch, in)")
    _arrays.check_item("weight", weight, _arrays.REAL)
    _arrays.check_same_item(("weight", weight), ("x", x))
    _arrays.check_shape("x", x, (x.shape[0], weight.shape[1]), "(batch, in)")
    if x.shape[0] > MOST_ROWS:
        raise ValueError(f"x must have at most {MOST_ROWS} rows, got {x.shape[0]}; more are for matmul")
    shapes = {"bias": (weight.shape[0],), "add": (x.shape[0], weight.shape[0])}
    for name, shape in shapes.items():
        if arrays[name] is not None:
            _arrays.check_same_item(("weight", weight), (name, arrays[name]), _wider(_arrays.item_name(weight)))
            _arrays.check_shape(name, arrays[name], shape, "(out,)" if name == "bias" else "(batch, out)")
    _product_item(x, out_dtype)


def _product_item(x: Array, out_dtype: Any) -> np.dtype[Any]:
    return _arrays.output_item(_arrays.item_name(x), out_dtype, None)


@np.errstate(all="ignore")
def _product_numpy(arrays: _Arguments, out_dtype: Any) -> _Results:
    weight, x = arrays["weight"], arrays["x"]
    real = _real(x)
    y = x.astype(real) @ weight.astype(real).T
    for name in ("bias", "add"):
        if arrays[name] is not None:
            y += arrays[name].astype(real)
    return (np.ascontiguousarray(y.astype(_product_item(x, out_dtype))),)


def _product_launch(place: Place, arrays: _Arguments, out_dtype: Any) -> _Results:
    weight, x = arrays["weight"], arrays["x"]
    y = place.allocate((x.shape[0], weight.shape[0]), _product_item(x, out_dtype))
    if y.size:
        _ops_launch.product(place, weight, x, arrays["bias"], arrays["add"], y)
    return (y,)


_PRODUCT = _Function(("weight", "x", "bias", "add"), ("weight", "x"), _check_product, _product_numpy, _product_launch)
