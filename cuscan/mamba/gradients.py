"""The loss of next tokens and its gradients, by the vjp functions: the activations of all layers are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import cuscan
from cuscan import ssm

from . import ops
from ._products import linear, product, wide
from .model import Layer, Model

Array = Any


class _Kept(NamedTuple):
    """What the gradients of a block are made of, but for the layer."""

    residual: Array  # that is divided by its root mean square
    normed: Array
    xz: Array
    u: Array
    dbc: Array  # of the x-projection; low, B and C are its parts, or these normed
    low: Array
    B: Array
    C: Array
    delta: Array
    y: Array
    states: Array


def loss_and_gradients(model: Model, tokens: Any) -> tuple[Array, dict[str, Array]]:
    """Mean cross entropy of each token after the ones before it, and its gradients.

    Parameters
    ----------
    model : Model
        Of any type of weights.
    tokens : array of int (batch, length + 1)
        Whole rows, without pads. The first of a row is not predicted.

    Returns
    -------
    loss : array ()
        In nats a token, on the model's device.
    gradients : dict of str to array
        Of every parameter, by its name, in float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As of calls of the model; rows of fewer than two tokens.

    Notes
    -----
    The same call gives the same bits every time: the rows of the embedding's gradient are added up by a scan over the
    sorted tokens.
    """
    tokens = model.checked(tokens, 2)
    if tokens.shape[1] < 2:
        raise ValueError(f"rows need two tokens or more, got shape {tuple(tokens.shape)}")
    inputs, targets = tokens[:, :-1], tokens[:, 1:].ravel()
    x, residual, kept = model.embed(inputs), None, []
    for layer in model.layers:
        normed, residual = model.norm(x, layer.norm, residual)
        x, each = _forward(model, layer, normed, residual)
        kept.append(each)
    top = model.parameters["backbone.norm_f.weight"]
    x, residual = model.norm(x, top, residual)
    loss, grad = _cross_entropy(model.xp, model.logits(x).reshape(-1, model.config.vocab), targets)

    grads: dict[str, Array] = {}
    rows, grad = _rows(x), grad.astype(model.dtype, copy=False)
    head_grad = product(grad.T, rows, dtype=wide(model.dtype))
    grad = product(grad, model.head, dtype=wide(model.dtype)).reshape(x.shape)
    norm = ops.rms_norm_vjp(residual, top, eps=model.config.eps, grad_out=grad)
    grads["backbone.norm_f.weight"] = norm.weight
    grad = norm.x
    for i in reversed(range(len(kept))):
        grad = _backward(model, model.layers[i], kept.pop(), grad, f"backbone.layers.{i}.", grads)
    embedding_grad = _sum_of_rows(model.xp, inputs.ravel(), _rows(grad), model.config.vocab)
    if model.config.tied:
        embedding_grad += head_grad
    else:
        grads["lm_head.weight"] = head_grad
    grads["backbone.embeddings.weight"] = embedding_grad
    return loss, {name: grads[name].astype(wide(model.dtype), copy=False) for name in model.parameters}


def _forward(model: Model, layer: Layer, normed: Array, residual: Array) -> tuple[Array, _Kept]:
    xz = linear(normed, layer.in_proj, layer.in_bias)
    inner, z = _halves(xz)
    u = ops.causal_conv1d(inner, layer.conv, layer.conv_bias, activation="silu")
    dbc, low, B, C, delta = model.couple(layer, u)
    y, states = cuscan.selective_scan(
        u, delta, layer.A, B, C, layer.D, z, layer.dt_bias, delta_softplus=True, return_states=True
    )
    kept = _Kept(residual, normed, xz, u, dbc, low, B, C, delta, y, states)
    return linear(y, layer.out_proj, layer.out_bias), kept


def _backward(model: Model, layer: Layer, kept: _Kept, grad: Array, name: str, grads: dict[str, Array]) -> Array:
    """Gradient of what enters the block, from that of the residual stream after it; the parameters' go to grads."""
    config, xp, real = model.config, model.xp, wide(model.dtype)
    mixer = name + "mixer."
    inner, z = _halves(kept.xz)
    after = _rows(grad.astype(model.dtype, copy=False))
    grads[mixer + "out_proj.weight"] = product(after.T, _rows(kept.y), dtype=real)
    if layer.out_bias is not None:
        grads[mixer + "out_proj.bias"] = after.sum(0, dtype=real)
    scan = cuscan.selective_scan_vjp(
        kept.u, kept.delta, layer.A, kept.B, kept.C, layer.D, z, layer.dt_bias, delta_softplus=True,
        grad_out=product(after, layer.out_proj).reshape(kept.y.shape), states=kept.states,
    )  # fmt: skip
    A_log = model.parameters[mixer + "A_log"]
    grads[mixer + "A_log"] = ssm.A_from_A_log_vjp(A_log, scan.A)
    grads[mixer + "D"], grads[mixer + "dt_proj.bias"] = scan.D, scan.delta_bias

    grad_dbc = xp.empty_like(kept.dbc)
    grad_delta, parts = _rows(scan.delta), model.parts(grad_dbc)
    grads[mixer + "dt_proj.weight"] = product(grad_delta.T, _rows(kept.low), dtype=real)
    couples = [product(grad_delta, layer.dt_proj).reshape(kept.low.shape), scan.B, scan.C]
    if config.mixer_eps is not None:
        given = zip(model.parts(kept.dbc), couples, strict=True)
        couples = [ops.rms_norm_vjp(x, None, eps=config.mixer_eps, grad_out=each).x for x, each in given]
    for part, each in zip(parts, couples, strict=True):
        part[...] = each
    grads[mixer + "x_proj.weight"] = product(_rows(grad_dbc).T, _rows(kept.u), dtype=real)
    product(_rows(grad_dbc), layer.x_proj, out=_rows(scan.u), add=True)

    conv = ops.causal_conv1d_vjp(inner, layer.conv, layer.conv_bias, grad_out=scan.u, activation="silu")
    grads[mixer + "conv1d.weight"] = conv.weight[:, None]
    if layer.conv_bias is not None:
        grads[mixer + "conv1d.bias"] = conv.bias
    grad_xz = xp.empty_like(kept.xz)
    for part, each in zip(_halves(grad_xz), (conv.x, scan.z), strict=True):
        part[...] = each
    grads[mixer + "in_proj.weight"] = product(_rows(grad_xz).T, _rows(kept.normed), dtype=real)
    if layer.in_bias is not None:
        grads[mixer + "in_proj.bias"] = _rows(grad_xz).sum(0, dtype=real)
    grad_normed = product(_rows(grad_xz), layer.in_proj, dtype=real).reshape(kept.normed.shape)
    norm = ops.rms_norm_vjp(kept.residual, layer.norm, eps=config.eps, grad_out=grad_normed, grad_residual=grad)
    grads[name + "norm.weight"] = norm.weight
    return norm.x


def _halves(xz: Array) -> tuple[Array, Array]:
    half = xz.shape[-1] // 2
    return xz[..., :half], xz[..., half:]


def _rows(x: Array) -> Array:
    """(batch * length, width)."""
    return x.reshape(-1, x.shape[-1])


def _cross_entropy(xp: Any, logits: Array, targets: Array) -> tuple[Array, Array]:
    """The mean loss, and its gradient, which takes the logits' place."""
    rows = xp.arange(len(targets))
    logits -= logits.max(1, keepdims=True)
    chosen = logits[rows, targets]
    xp.exp(logits, out=logits)
    total = logits.sum(1)
    loss = (xp.log(total) - chosen).mean()
    logits /= total[:, None] * len(targets)
    logits[rows, targets] -= logits.dtype.type(1 / len(targets))
    return loss, logits


def _sum_of_rows(xp: Any, tokens: Array, rows: Array, vocab: int) -> Array:
    """For each token of the vocabulary the sum of its rows, in their order."""
    order = xp.argsort(tokens, kind="stable")
    tokens = tokens[order]
    first = xp.ones(len(tokens), bool)
    first[1:] = tokens[1:] != tokens[:-1]
    sums = cuscan.linear_scan(1.0, rows.astype(wide(rows.dtype), copy=False)[order], axis=0, reset=first[:, None])
    every = xp.arange(vocab)
    last = xp.searchsorted(tokens, every, side="right") - 1
    last = xp.maximum(last, 0)
    return xp.where((tokens[last] == every)[:, None], sums[last], sums.dtype.type(0))
