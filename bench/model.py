"""`python -m bench.model [--quick] [--out FILE]`: cuscan.mamba in bfloat16 with random weights, on the GPU.

Prefill of 2048 tokens and decoding in the shape of mamba-130m, decoding in that of mamba-2.8b, and training. A decode
step reads every weight once: the time of that at the chip's copy bandwidth, measured in the same run, is its limit.
--quick leaves out the large shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuscan
from cuscan import _source, mamba
from cuscan.mamba.checkpoint import bfloat16, convert
from cuscan.tune import milliseconds

from .limits import host_microseconds, measure

SMALL = mamba.Config(vocab=50280, width=768, layers=24)
LARGE = mamba.Config(vocab=50280, width=2560, layers=64)
PROMPT = 2048


def random_parameters(config: mamba.Config, cupy: Any) -> dict[str, Any]:
    """Of the usual sizes: matrices and convolutions in bfloat16, the others in float32."""
    rng = cupy.random.default_rng(0)
    small = mamba.initial_parameters(mamba.Config(vocab=1, width=16, layers=1), 0)
    found = {}
    for name, shape in config.shapes().items():
        short = name.partition("layers.")[2].partition(".")[2]
        if short.endswith(("A_log", ".D", "dt_proj.bias", "conv1d.bias")) or len(shape) == 1:
            like = small.get(f"backbone.layers.0.{short}", np.ones(1, np.float32))
            found[name] = cupy.asarray(np.resize(like, shape))
        else:
            found[name] = (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(bfloat16())
    return found


def prefill(cupy: Any, model: mamba.Model) -> dict[str, Any]:
    """Logits after the last of 2048 tokens, and the state."""
    tokens = cupy.random.randint(0, model.config.vocab, (1, PROMPT))

    def call() -> Any:
        return model(tokens, last_only=True, return_state=True)

    call()
    with cuscan.trace() as t:
        call()
    scans = [x.milliseconds for x in t.launches if "selective" in x.kernel]
    taken = milliseconds(cupy, call)
    return {
        "ms": statistics.median(taken),
        "scans_ms": sum(scans),
        "host_ms": host_microseconds(cupy, call, 21) / 1e3,
        "launches": len(t.launches) + 4 * model.config.layers + 1,
        "tokens_per_s": PROMPT / statistics.median(taken) * 1e3,
    }


def decode(cupy: Any, model: mamba.Model, batch: int, bandwidth: float) -> dict[str, Any]:
    """One step after another, each with the likeliest token of the one before."""
    tokens = cupy.random.randint(0, model.config.vocab, (batch, 16))
    logits, state = model(tokens, last_only=True, return_state=True)
    how = {"steps": lambda chosen: model.step(chosen, state)}
    if batch <= mamba.ops.MOST_ROWS:
        how["graph"] = model.capture(state)
    weights = sum(x.nbytes for x in model.parameters.values())
    if not model.config.tied:
        weights -= model.parameters["backbone.embeddings.weight"].nbytes
    row: dict[str, Any] = {"batch": batch, "weights_bytes": weights, "limit_ms": weights / bandwidth * 1e3}
    for name, step in how.items():
        seconds = _each(cupy, step, logits.argmax(-1))
        row[name] = {
            "ms": seconds * 1e3,
            "tokens_per_s": batch / seconds,
            "share_of_limit": weights / bandwidth / seconds,
        }
    return row


def _each(cupy: Any, step: Callable[[Any], Any], tokens: Any, count: int = 64) -> float:
    """Seconds a step, by the clock, of many without a wait between."""
    times = []
    for _ in range(4):  # the first warms up
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            tokens = step(tokens).argmax(-1)
        cupy.cuda.Device().synchronize()
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times[1:])


def train(cupy: Any, config: mamba.Config, batch: int = 4, length: int = PROMPT) -> dict[str, Any]:
    """Steps of AdamW on float32 parameters, with gradients from bfloat16 copies."""
    optimizer = mamba.AdamW(random_parameters(config, cupy))
    tokens = cupy.random.randint(0, config.vocab, (batch, length + 1))

    def step() -> None:
        copies = {name: convert(name, x, bfloat16()) for name, x in optimizer.parameters.items()}
        _, gradients = mamba.loss_and_gradients(mamba.Model(config, copies), tokens)
        optimizer.update(gradients, 1e-4)

    step()
    with cuscan.trace() as t:
        step()
    taken = []
    for _ in range(5):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        step()
        cupy.cuda.Device().synchronize()
        taken.append(time.perf_counter() - begin)
    seconds = statistics.median(taken)
    scans = sum(x.milliseconds or 0 for x in t.launches if "selective" in x.kernel)
    return {
        "batch": batch,
        "length": length,
        "ms": seconds * 1e3,
        "tokens_per_s": batch * length / seconds,
        "scans_ms": scans,
        "peak_bytes": cupy.get_default_memory_pool().total_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the shape of mamba-2.8b")
    parser.add_argument("--out", type=Path, help="where to write the record")
    chosen = parser.parse_args()
    import cupy

    pool = cupy.get_default_memory_pool()
    bandwidth = measure(cupy).copy
    pool.free_all_blocks()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    record: dict[str, Any] = {"digest": _source.digest(), "device": name, "copy_bytes_per_s": bandwidth}

    def add(key: str, row: dict[str, Any]) -> None:
        record[key] = row
        print(key, json.dumps(row), flush=True)
        pool.free_all_blocks()
        if chosen.out:
            chosen.out.write_text(json.dumps(record, indent=1) + "\n")

    model = mamba.Model(SMALL, random_parameters(SMALL, cupy))
    add("prefill mamba-130m", prefill(cupy, model))
    for batch in (1, 64):
        add(f"decode mamba-130m, batch {batch}", decode(cupy, model, batch, bandwidth))
    add("training mamba-130m", train(cupy, SMALL))
    if not chosen.quick:
        add(
            "decode mamba-2.8b, batch 1", decode(cupy, mamba.Model(LARGE, random_parameters(LARGE, cupy)), 1, bandwidth)
        )


if __name__ == "__main__":
    main()
