"""Training: AdamW, and `python -m cuscan train`, a byte-level model of the topics of Python's help()."""

from __future__ import annotations

import cProfile
import hashlib
import math
import platform
import pstats
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cuscan

from ._products import has_cublas, module
from .checkpoint import bfloat16, convert, save
from .config import Config, initial_parameters
from .gradients import loss_and_gradients
from .model import Model

Array = Any
SCANS = {("selective.py", "selective_scan"), ("selective_vjp.py", "selective_scan_vjp")}  # the public functions


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)::

        g = gradient * min(1, clip / norm of all gradients)
        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g g
        x = x - rate (decay x + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

    All parameters lie in one array, so that a step is a handful of launches. Decay acts on matrices and convolutions,
    neither on A_log nor on what has one axis.

    Parameters
    ----------
    parameters : mapping of str to array
        Copied, in float32.
    betas, eps, decay, clip : float
        As above.

    Attributes
    ----------
    parameters : dict of str to array
        Views, which each update changes in place.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
        clip: float = 1.0,
    ) -> None:
        xp = self._xp = module(next(iter(parameters.values())))
        self._flat = xp.concatenate([x.astype(np.float32).ravel() for x in parameters.values()])
        self._first, self._second = xp.zeros_like(self._flat), xp.zeros_like(self._flat)
        self._decay, self.parameters, start = xp.zeros_like(self._flat), {}, 0
        for name, x in parameters.items():
            self.parameters[name] = self._flat[start : start + x.size].reshape(x.shape)
            if x.ndim > 1 and not name.endswith("A_log"):
                self._decay[start : start + x.size] = decay
            start += x.size
        self._betas, self._eps, self._clip, self._steps = betas, eps, clip, 0

    def update(self, gradients: Mapping[str, Array], rate: float) -> None:
        """Change the parameters.

        Parameters
        ----------
        gradients : mapping of str to array
            Of every parameter.
        rate : float
            The learning rate of this step.
        """
        xp, (b1, b2) = self._xp, self._betas
        self._steps += 1
        g = xp.concatenate([gradients[name].ravel() for name in self.parameters])
        g *= xp.minimum(self._clip / (xp.sqrt((g * g).sum()) + 1e-6), 1)
        self._first += (1 - b1) * (g - self._first)
        g *= g
        self._second += (1 - b2) * (g - self._second)
        step = xp.sqrt(self._second / (1 - b2**self._steps)) + self._eps
        self._flat *= 1 - rate * self._decay
        self._flat -= rate / (1 - b1**self._steps) * self._first / step


def rate_at(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Learning rate of step 0 to steps - 1: a straight line up to the peak, half a cosine down to a tenth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def corpus() -> tuple[Array, Array]:
    """The topics of help() as bytes: those to train on, and those held out, a twentieth by the hash of their names.

    Topics share whole sections. Each paragraph is in the text once, however it is broken into lines, and what is held
    out is not trained on.
    """
    from pydoc_data.topics import topics

    held_out = [name for name in sorted(topics) if zlib.crc32(name.encode()) % 20 == 0]
    others = [name for name in sorted(topics) if name not in held_out]
    seen: set[str] = set()
    parts = []
    for names in (held_out, others):
        kept = []
        for paragraph in "\n\n".join(topics[name] for name in names).split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                kept.append(paragraph)
                seen.add(words)
        parts.append(np.frombuffer("\n\n".join(kept).encode(), np.uint8))
    return parts[1], parts[0]


def batches(text: Array, batch: int, length: int, seed: int) -> Iterator[Array]:
    """Windows (batch, length + 1) that begin anywhere, as int64, without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - length, size=(batch, 1))
        yield text[starts + np.arange(length + 1)].astype(np.int64)


def bits_per_byte(model: Model, text: Array, piece: int = 2048) -> float:
    """Mean of -log2 p of each byte but the first, given all before it."""
    xp, state, total = model.xp, None, 0.0
    tokens = xp.asarray(text.astype(np.int64))
    for begin in range(0, len(text) - 1, piece):
        targets = tokens[begin + 1 : begin + piece + 1]
        inputs = tokens[begin : begin + len(targets)]
        logits, state = model(inputs[None], state=state, return_state=True)
        logits = logits[0] - logits[0].max(1, keepdims=True)
        nats = xp.log(xp.exp(logits).sum(1)) - logits[xp.arange(len(targets)), targets]
        total += float(nats.sum(dtype=np.float64))
    return total / math.log(2) / (len(text) - 1)


def train(
    say: Callable[[str], object],
    *,
    out: Path,
    seed: int,
    steps: int,
    width: int,
    layers: int,
    batch: int,
    length: int,
    rate: float,
) -> float:
    """Train a byte-level model on the GPU, or in NumPy where there is none, and save it.

    Parameters
    ----------
    say : callable
        Takes each line.
    out : Path
        The checkpoint's folder. Matrices are saved in bfloat16 if ml_dtypes is there.
    seed, steps, width, layers, batch, length, rate
        What makes the model, besides the text: the same ones give the same weights on the same device.

    Returns
    -------
    float
        Bits per byte of the text held out.
    """
    xp, where = place()
    text, held_out = corpus()
    config = Config(vocab=256, width=width, layers=layers)
    optimizer = AdamW({name: xp.asarray(x) for name, x in initial_parameters(config, seed).items()})
    count = sum(x.size for x in optimizer.parameters.values())
    say(f"{count} parameters, {len(text)} bytes to train on, {len(held_out)} held out, on {where}")
    say(f"{'step':>6} {'bits/byte':>10} {'tokens/s':>10} {'scan':>6}")
    losses: list[Array] = []

    def advance(step: int, tokens: Array) -> None:
        loss, gradients = loss_and_gradients(Model(config, optimizer.parameters), xp.asarray(tokens))
        optimizer.update(gradients, rate_at(step, steps, rate))
        losses.append(loss)

    start, every = time.perf_counter(), max(1, steps // 20)
    for step, tokens in zip(range(steps), batches(text, batch, length, seed), strict=False):
        if (step + 1) % every:
            advance(step, tokens)
            continue
        share = _scan_share(xp, partial(advance, step, tokens))
        mean = sum(map(float, losses)) / len(losses) / math.log(2)
        speed = len(losses) * batch * length / (time.perf_counter() - start)
        say(f"{step + 1:6} {mean:10.3f} {speed:10.0f} {share:6.0%}")
        losses.clear()
        start = time.perf_counter()
    kept = {name: convert(name, _host(x), bfloat16()) for name, x in optimizer.parameters.items()}
    bits = bits_per_byte(Model(config, {name: xp.asarray(x.astype(np.float32)) for name, x in kept.items()}), held_out)
    say(f"held out: {bits:.3f} bits a byte")
    sizes = f"--width {width} --layers {layers} --batch {batch} --length {length} --rate {rate}"
    notes = {
        "command": f"python -m cuscan train --seed {seed} --steps {steps} {sizes}",
        "device": where,
        "held_out_bits_per_byte": f"{bits:.4f}",
        "text": f"pydoc_data.topics of Python {platform.python_version()}, sha256 {hashlib.sha256(text).hexdigest()}",
    }
    save(out, config, kept, metadata=notes)
    return bits


def place() -> tuple[Any, str]:
    """Where a model is trained: NumPy or CuPy, and what a sentence calls it."""
    from cuscan import _selftest

    name, missing = _selftest.gpu()
    if name and not has_cublas():
        name, missing = "", "cuBLAS is not installed"
    if not name:
        return np, f"the CPU ({missing})"
    import cupy

    return cupy, name


def _scan_share(xp: Any, function: Callable[[], None]) -> float:
    """Share of the time of a call in which scans and their gradients run: on the GPU, or in NumPy by its profiler."""
    if xp is np:
        profile = cProfile.Profile()
        profile.runcall(function)
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        inside = sum(x[3] for (file, _, name), x in stats.items() if (Path(file).name, name) in SCANS)
        return float(inside / max(x[3] for x in stats.values()))
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    begin.record()
    with cuscan.trace() as t:
        function()
        end.record()
    end.synchronize()
    scans = sum(x.milliseconds or 0 for x in t.launches if "selective" in x.kernel)
    return float(scans / xp.cuda.get_elapsed_time(begin, end))


def _host(x: Array) -> Array:
    return x if isinstance(x, np.ndarray) else x.get()
