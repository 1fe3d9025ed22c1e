"""The model: embedding, blocks, head; over a prompt, and token by token with states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cuscan
from cuscan import ssm

from . import _products, checkpoint, ops
from ._products import linear
from .config import Config

Array = Any


class Layer(NamedTuple):
    """Parameters of a block, as its kernels read them."""

    norm: Array
    in_proj: Array
    in_bias: Array | None
    conv: Array  # (channels, taps)
    conv_bias: Array | None
    x_proj: Array
    dt_proj: Array
    dt_bias: Array
    A: Array  # float32
    D: Array
    out_proj: Array
    out_bias: Array | None


@dataclass
class State:
    """What a model remembers of the tokens before, a batch of them; `Model.step` changes it in place.

    Attributes
    ----------
    conv : list of array (batch, channels, conv - 1)
        Of each layer: the latest inputs of its convolution.
    scan : list of array (batch, channels, state)
        Of each layer: the state of its scan, float32.
    """

    conv: list[Array]
    scan: list[Array]

    def copy(self) -> State:
        """One with memory of its own."""
        return State([x.copy() for x in self.conv], [x.copy() for x in self.scan])


class Model:
    """A Mamba language model (Gu and Dao, "Mamba", 2023, section 3.4) on NumPy or CuPy arrays::

        x = embedding[tokens]
        each block:   u, z = in_proj(norm(x));  u = silu(conv(u));  dt, B, C = x_proj(u)
                      x += out_proj(selective_scan(u, dt_proj(dt), -exp(A_log), B, C, D, z, softplus))
        logits = head(norm(x))

    Activations have the type of the weights, sums are in float32 and rounded once, and so is the residual stream with
    `Config.residual_in_fp32`.

    Parameters
    ----------
    config : Config
        The sizes.
    parameters : mapping of str to array
        By the names of `Config.shapes`, all NumPy's or all CuPy's: matrices and convolutions of one type (float32,
        bfloat16, float16; NumPy: or float64), the others of any real floating type.

    Raises
    ------
    ValueError
        Parameters that are missing, left over, or of another shape.
    TypeError
        Matrices of several types.

    Examples
    --------
    >>> import numpy as np
    >>> from cuscan import mamba
    >>> config = mamba.Config(vocab=256, width=8, layers=2)
    >>> model = mamba.Model(config, mamba.initial_parameters(config, seed=0))
    >>> model(np.array([[72, 101, 108]])).shape
    (1, 3, 256)
    >>> model.generate(np.array([[72, 101, 108]]), 5).shape
    (1, 5)
    """

    def __init__(self, config: Config, parameters: Mapping[str, Array]) -> None:
        checkpoint.check(config, parameters)
        self.config = config
        self.parameters = parameters
        self._embedding = parameters["backbone.embeddings.weight"]
        self.head = self._embedding if config.tied else parameters["lm_head.weight"]
        self.dtype = self._embedding.dtype
        self.xp: Any = _products.module(self._embedding)
        for name, x in parameters.items():
            if x.ndim > 1 and not name.endswith("A_log") and x.dtype != self.dtype:
                raise TypeError(f"{name} is {x.dtype.name}, and backbone.embeddings.weight {self.dtype.name}")
        self.layers = [self._layer(f"backbone.layers.{i}.") for i in range(config.layers)]
        self.residual_dtype = _products.wide(self.dtype) if config.residual_in_fp32 else self.dtype

    def _layer(self, name: str) -> Layer:
        get, mixer = self.parameters.get, name + "mixer."
        return Layer(
            norm=get(name + "norm.weight"),
            in_proj=get(mixer + "in_proj.weight"),
            in_bias=get(mixer + "in_proj.bias"),
            conv=self.parameters[mixer + "conv1d.weight"][:, 0],
            conv_bias=get(mixer + "conv1d.bias"),
            x_proj=get(mixer + "x_proj.weight"),
            dt_proj=get(mixer + "dt_proj.weight"),
            dt_bias=get(mixer + "dt_proj.bias"),
            A=ssm.A_from_A_log(self.parameters[mixer + "A_log"]),
            D=get(mixer + "D"),
            out_proj=get(mixer + "out_proj.weight"),
            out_bias=get(mixer + "out_proj.bias"),
        )

    def __call__(
        self,
        tokens: Any,
        *,
        mask: Any = None,
        state: State | None = None,
        last_only: bool = False,
        return_state: bool = False,
    ) -> Any:
        """Logits of the token that follows each one.

        Parameters
        ----------
        tokens : array of int (batch, length)
            At least one token in each row. Lists and NumPy arrays are copied to the device of the weights.
        mask : array of bool (batch, length), optional
            False where a row is padded, on the left or on the right: each row gives what it gives alone. Not together
            with `state`.
        state : State, optional
            Of the tokens before these; it is not changed.
        last_only : bool
            Only those after the last token that counts.
        return_state : bool
            Also return the state after the last token that counts.

        Returns
        -------
        logits : array (batch, length, vocab), or (batch, vocab) with `last_only`
            float32 (float64 for float64); anything where the mask is False.
        state : State
            Only with `return_state`.

        Raises
        ------
        TypeError
            Tokens or a mask of another type.
        ValueError
            Another shape, tokens outside the vocabulary (seen on NumPy arrays), or a mask beside a state.
        """
        tokens = self.checked(tokens, 2)
        end = None
        if mask is not None:
            if state is not None:
                raise ValueError("a mask goes with no state: pads would stand between the tokens before and these")
            mask = self.xp.asarray(mask)
            if mask.dtype != bool:
                raise TypeError(f"mask must be of bool, got {mask.dtype.name}")
            if mask.shape != tokens.shape:
                raise ValueError(f"mask must have the tokens' shape {tuple(tokens.shape)}, got {tuple(mask.shape)}")
            if self.xp is np and not mask.any(1).all():
                raise ValueError(f"mask is False in all of row {mask.any(1).argmin()}")
            end = self.xp.where(mask, self.xp.arange(1, tokens.shape[1] + 1), 0).max(1)
        after = State([], [])
        x, residual = self.embed(tokens), None
        for i, layer in enumerate(self.layers):
            x, residual = self.norm(x, layer.norm, residual)
            before = None if state is None else (state.conv[i], state.scan[i])
            x = self._block(layer, x, before=before, mask=mask, end=end, after=after)
        if last_only:
            last = np.s_[:, -1] if end is None else (self.xp.arange(len(tokens)), end - 1)
            x, residual = _rows(x, last), _rows(residual, last)
        logits = self.logits(self.norm(x, self.parameters["backbone.norm_f.weight"], residual)[0])
        return (logits, after) if return_state else logits

    def embed(self, tokens: Array) -> Array:
        """Rows of the embedding."""
        return _rows(self._embedding, tokens)

    def norm(self, x: Array, weight: Array, residual: Array | None) -> tuple[Array, Array]:
        """The norm of x + residual, and that sum."""
        normed, total = ops.rms_norm(
            x, weight, eps=self.config.eps, residual=residual, residual_dtype=self.residual_dtype
        )
        return normed, total

    def logits(self, x: Array) -> Array:
        """The head."""
        return linear(x, self.head, dtype=_products.wide(self.dtype))

    def couple(self, layer: Layer, u: Array, product: Callable[..., Array] = linear) -> tuple[Array, ...]:
        """What the scan takes beside u: the x-projection, its three parts as they are used, and delta."""
        config = self.config
        dbc = product(u, layer.x_proj)
        parts = self.parts(dbc)
        if config.mixer_eps is not None:
            parts = tuple(ops.rms_norm(x, None, eps=config.mixer_eps) for x in parts)
        return (dbc, *parts, product(parts[0], layer.dt_proj))

    def parts(self, dbc: Array) -> tuple[Array, ...]:
        """Views of what the x-projection gives for dt, B and C."""
        rank, state = self.config.rank, self.config.state
        return dbc[..., :rank], dbc[..., rank : rank + state], dbc[..., rank + state :]

    def _block(
        self,
        layer: Layer,
        x: Array,
        *,
        before: tuple[Array, Array] | None,
        mask: Array | None,
        end: Array | None,
        after: State,
    ) -> Array:
        """out_proj of a layer; appends to `after`."""
        xz = linear(x, layer.in_proj, layer.in_bias)
        inner, z = xz[..., : self.config.channels], xz[..., self.config.channels :]
        if mask is not None:  # the convolution sees zeros where pads are, as it does before the first step
            bits = inner.view(f"u{inner.itemsize}")
            inner = self.xp.where(mask[..., None], bits, bits.dtype.type(0)).view(inner.dtype)
        conv, h0 = before or (None, None)
        u, conv = ops.causal_conv1d(
            inner, layer.conv, layer.conv_bias, initial_state=conv, activation="silu", return_final_state=True
        )
        _, _, B, C, delta = self.couple(layer, u)
        y, last = cuscan.selective_scan(
            u, delta, layer.A, B, C, layer.D, z, layer.dt_bias, delta_softplus=True, return_last_state=True, h0=h0,
            mask=mask,
        )  # fmt: skip
        if end is not None:
            conv = self._latest(inner, end)
        after.conv.append(conv)
        after.scan.append(last)
        return linear(y, layer.out_proj, layer.out_bias)

    def _latest(self, x: Array, end: Array) -> Array:
        """The inputs before each row's end, those before the first step zero: the state of the convolution."""
        taps = self.config.conv - 1
        step = end[:, None] + self.xp.arange(-taps, 0)
        bits = x.view(f"u{x.itemsize}")[self.xp.arange(len(x))[:, None], self.xp.maximum(step, 0)]
        bits = self.xp.where((step >= 0)[..., None], bits, bits.dtype.type(0))
        return self.xp.ascontiguousarray(bits.transpose(0, 2, 1)).view(x.dtype)

    def step(self, tokens: Any, state: State) -> Array:
        """Logits after one more token of each row; the state is changed in place.

        On CuPy arrays up to 8 rows run kernels of our own, the same as `capture`, and more run cuBLAS.

        Parameters
        ----------
        tokens : array of int (batch,)
            The next tokens.
        state : State
            After the tokens before: `model(..., return_state=True)[1]`.

        Returns
        -------
        array (batch, vocab)
            Logits, float32 (float64 for float64).

        Raises
        ------
        TypeError, ValueError
            As of calls of the model.
        """
        tokens = self.checked(tokens, 1)
        return self.advance(self.embed(tokens), state)

    def advance(self, x: Array, state: State) -> Array:
        """`step` from rows of the embedding on."""
        config, residual = self.config, None
        product = _few_rows if self.xp is not np and len(x) <= ops.MOST_ROWS else linear
        for layer, conv, scan in zip(self.layers, state.conv, state.scan, strict=True):
            x, residual = self.norm(x, layer.norm, residual)
            xz = product(x, layer.in_proj, layer.in_bias)
            inner, z = xz[:, : config.channels], xz[:, config.channels :]
            u = ops.causal_conv1d_update(conv, inner, layer.conv, layer.conv_bias, activation="silu")
            _, _, B, C, delta = self.couple(layer, u, product)
            y = cuscan.selective_state_update(
                scan, u, delta, layer.A, B, C, layer.D, z, layer.dt_bias, dt_softplus=True
            )
            x = product(y, layer.out_proj, layer.out_bias)
        x, _ = self.norm(x, self.parameters["backbone.norm_f.weight"], residual)
        return product(x, self.head, dtype=_products.wide(self.dtype))

    def capture(self, state: State) -> CapturedStep:
        """`step` as a CUDA graph, which the host launches at once.

        Parameters
        ----------
        state : State
            CuPy arrays of at most 8 rows. The graph reads and changes these very arrays; they are not changed here.

        Returns
        -------
        CapturedStep
            A function of tokens (batch,) that gives logits (batch, vocab). They lie in the same memory at each call.

        Raises
        ------
        TypeError
            NumPy arrays.
        ValueError
            More rows.
        """
        return CapturedStep(self, state)

    def generate(
        self, prompt: Any, count: int, *, mask: Any = None, temperature: float = 0.0, seed: int | None = None
    ) -> Array:
        """Tokens that follow a prompt: it is read at once, then each token is one step.

        Parameters
        ----------
        prompt : array of int (batch, length)
            At least one token in each row.
        count : int
            How many to make.
        mask : array of bool (batch, length), optional
            False where the prompt is padded.
        temperature : float
            0 takes the likeliest token each time, others draw from softmax(logits / temperature).
        seed : int, optional
            The same one gives the same tokens.

        Returns
        -------
        array of int64 (batch, count)
            The tokens, without the prompt.

        Raises
        ------
        TypeError, ValueError
            As of calls of the model; a temperature below 0.
        """
        if not 0 <= temperature < np.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
        logits, state = self(prompt, mask=mask, last_only=True, return_state=True)
        advance: Callable[[Array], Array] = partial(self.step, state=state)
        if self.xp is not np and len(logits) <= ops.MOST_ROWS and count > 1:
            advance = self.capture(state)
        made = self.xp.empty((len(logits), count), np.int64)
        draws = self.xp.asarray(np.random.default_rng(seed).random((count, len(logits), 1), np.float32))
        for i in range(count):
            made[:, i] = logits.argmax(-1) if temperature == 0 else _drawn(self.xp, logits / temperature, draws[i])
            if i + 1 < count:
                logits = advance(made[:, i])
        return made

    def checked(self, tokens: Any, axes: int) -> Array:
        """Tokens on the device of the weights, of that many axes."""
        tokens = self.xp.asarray(tokens)
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens must be integers, got {tokens.dtype.name}")
        if tokens.ndim != axes or not tokens.size:
            wanted = "(batch, length)" if axes == 2 else "(batch,)"
            raise ValueError(f"tokens must have shape {wanted} and not be empty, got {tuple(tokens.shape)}")
        if self.xp is np and not (tokens.min() >= 0 and tokens.max() < self.config.vocab):
            raise ValueError(f"tokens must be in [0, {self.config.vocab}), got {tokens.min()} to {tokens.max()}")
        return tokens


class CapturedStep:
    """See `Model.capture`."""

    def __init__(self, model: Model, state: State) -> None:
        if model.xp is np:
            raise TypeError("a CUDA graph needs CuPy arrays, got NumPy's")
        rows = len(state.scan[0])
        if rows > ops.MOST_ROWS:
            raise ValueError(f"a captured step takes at most {ops.MOST_ROWS} rows, got {rows}; Model.step takes more")
        cupy = model.xp
        self.tokens = cupy.zeros(rows, np.int64)
        self._held = model, state  # whose addresses are in the graph
        model.step(self.tokens, state.copy())  # compiles what has not run yet
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with cuscan.Workspace() as self._workspace, stream:
            stream.begin_capture()
            try:
                self._rows = model.embed(self.tokens)
                self.logits = model.advance(self._rows, state)
            finally:
                self._graph = stream.end_capture()
        stream.synchronize()

    def __call__(self, tokens: Array) -> Array:
        """Run on the current stream."""
        self.tokens[...] = tokens
        self._graph.launch()
        return self.logits


def _few_rows(x: Array, weight: Array, bias: Array = None, *, dtype: Any = None) -> Array:
    """`linear` by a kernel of our own: CuPy refuses cuBLAS while a stream captures."""
    return ops.matrix_vector(weight, x, bias=bias, out_dtype=dtype)


def _rows(x: Array, index: Any) -> Array:
    """x[index], by bits: they are the same for every type."""
    return x.view(f"u{x.itemsize}")[index].view(x.dtype)


def _drawn(xp: Any, logits: Array, draw: Array) -> Array:
    """A token of each row, by where draw in [0, 1) falls among the sums of their probabilities."""
    weight = xp.exp(logits - logits.max(-1, keepdims=True))
    sums = cuscan.linear_scan(1.0, weight, axis=1)
    return (sums[:, :-1] <= draw * sums[:, -1:]).sum(-1)
