"""The sizes of a Mamba language model, and the names and shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuscan import ssm

KINDS = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}

# Names in config.json of the fields below.
_JSON = {
    "vocab": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "state": "state_size",
    "channels": "intermediate_size", "conv": "conv_kernel", "rank": "time_step_rank", "eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings", "use_bias": "use_bias", "use_conv_bias": "use_conv_bias",
    "residual_in_fp32": "residual_in_fp32", "mixer_eps": "mixer_rms_eps",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Sizes and options of a model, as Hugging Face's MambaConfig and FalconMambaConfig have them.

    Parameters
    ----------
    vocab, width, layers : int
        Tokens, channels of the residual stream, blocks.
    state : int
        States of a channel.
    channels : int, optional
        Channels of the scan. Default: 2 * width.
    conv : int
        Taps of the causal convolution.
    rank : int, optional
        Numbers that the step sizes of all channels are made of. Default: ceil(width / 16).
    eps : float
        Added to the mean square in the norms.
    tied : bool
        The head has the embedding's weights.
    use_bias, use_conv_bias : bool
        Biases of the in- and out-projection, and of the convolution.
    residual_in_fp32 : bool
        Keep the residual stream in float32 whatever the weights are.
    mixer_eps : float, optional
        With it, dt, B and C are divided by their root mean square, as in FalconMamba, and this is the norms' eps.
    """

    vocab: int
    width: int
    layers: int
    state: int = 16
    channels: int = 0
    conv: int = 4
    rank: int = 0
    eps: float = 1e-5
    tied: bool = True
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    mixer_eps: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", self.channels or 2 * self.width)
        object.__setattr__(self, "rank", self.rank or math.ceil(self.width / 16))
        for name in ("vocab", "width", "layers", "state", "channels", "conv", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Config:
        """Read what Hugging Face's config.json says.

        Raises
        ------
        ValueError
            A model of another kind, an activation that is not silu, or a size that is missing.
        """
        kind = found.get("model_type")
        if kind not in KINDS:
            raise ValueError(f"config.json is of model_type {kind!r}, expected {' or '.join(map(repr, KINDS))}")
        if found.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json has hidden_act {found['hidden_act']!r}, expected 'silu'")
        if missing := [_JSON[name] for name in ("vocab", "width", "layers") if _JSON[name] not in found]:
            raise ValueError(f"config.json has no {', '.join(missing)}")
        given = {name: found[key] for name, key in _JSON.items() if key in found}
        given.setdefault("channels", int(found.get("expand", 2) * given["width"]))
        if given.get("rank") == "auto":
            del given["rank"]
        given["mixer_eps"] = given.get("mixer_eps", 1e-6) if kind == "falcon_mamba" else None
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """What config.json says of this model."""
        kind = "mamba" if self.mixer_eps is None else "falcon_mamba"
        sizes = {key: getattr(self, name) for name, key in _JSON.items()}
        if self.mixer_eps is None:
            del sizes["mixer_rms_eps"]
        expand = self.channels / self.width  # transformers computes intermediate_size from it
        expand = int(expand) if expand.is_integer() else expand
        return {"architectures": [KINDS[kind]], "model_type": kind, "hidden_act": "silu", **sizes, "expand": expand}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by its name in a checkpoint of Hugging Face's."""
        return dict(self._shapes())

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "backbone.embeddings.weight", (self.vocab, self.width)
        for i in range(self.layers):
            layer, mixer = f"backbone.layers.{i}.", f"backbone.layers.{i}.mixer."
            yield layer + "norm.weight", (self.width,)
            yield mixer + "A_log", (self.channels, self.state)
            yield mixer + "D", (self.channels,)
            yield mixer + "conv1d.weight", (self.channels, 1, self.conv)
            yield mixer + "in_proj.weight", (2 * self.channels, self.width)
            yield mixer + "x_proj.weight", (self.rank + 2 * self.state, self.channels)
            yield mixer + "dt_proj.weight", (self.channels, self.rank)
            yield mixer + "dt_proj.bias", (self.channels,)
            yield mixer + "out_proj.weight", (self.width, self.channels)
            if self.use_conv_bias:
                yield mixer + "conv1d.bias", (self.channels,)
            if self.use_bias:
                yield mixer + "in_proj.bias", (2 * self.channels,)
                yield mixer + "out_proj.bias", (self.width,)
        yield "backbone.norm_f.weight", (self.width,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.width)


def initial_parameters(config: Config, seed: int) -> dict[str, Any]:
    """Parameters to begin training with (Gu and Dao, "Mamba", 2023, section 3.6 and appendix E.2).

    A is S4D-real, softplus(dt_proj.bias) log-uniform in [0.001, 0.1], a matrix normal with variance 1 / (its columns),
    those that write to the residual stream less by the number of layers.

    Parameters
    ----------
    config : Config
        The sizes.
    seed : int
        The same one gives the same parameters.

    Returns
    -------
    dict of str to numpy.ndarray
        float32, by the names of `Config.shapes`.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    x: Any
    for name, shape in config.shapes().items():
        if name.endswith("A_log"):
            x = ssm.s4d_real_A_log(*shape)
        elif name.endswith("dt_proj.bias"):
            x = ssm.delta_bias(shape[0], seed=rng)
        elif len(shape) == 1:
            x = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
        else:
            scale = 0.02 if name.endswith("embeddings.weight") else shape[-1] ** -0.5
            if name.endswith("out_proj.weight"):
                scale /= config.layers**0.5
            x = rng.standard_normal(shape) * scale
        found[name] = x.astype(np.float32)
    return found
