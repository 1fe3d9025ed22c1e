"""`python -m bench.model_training`: cuscan.mamba and the model of transformers, trained alike.

python -m bench.model_training [--steps 50] [--out FILE] [--figure FILE]        train; FILE gets losses, figure
python -m bench.model_training --from FILE --figure FILE                        draw what was recorded

Both begin with the same weights, read the same bytes of Python's manual, and take AdamW's steps at the same rates:
torch's autograd and optimizer on one side, on the other cuscan alone, on the GPU if there is one. In float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.training import differences, draw
from cuscan import _source, mamba
from cuscan.mamba import training

Array = Any
RATE = 3e-3


def theirs(folder: Path, batches: Iterable[Array], steps: int) -> list[float]:
    """The loss before each step of transformers' model, differentiated by torch."""
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    matrices = [p for name, p in network.named_parameters() if p.ndim > 1 and not name.endswith("A_log")]
    others = [p for name, p in network.named_parameters() if p.ndim < 2 or name.endswith("A_log")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step, tokens in enumerate(batches):
        rows = torch.from_numpy(tokens)
        logits = network(rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step, steps, RATE, warmup=10)
        optimizer.step()
        losses.append(loss.item())
    return losses


def ours(folder: Path, batches: Iterable[Array], steps: int, xp: Any) -> list[float]:
    """The same of cuscan.mamba on NumPy or CuPy arrays."""
    config, parameters = mamba.load(folder, xp=xp)
    optimizer = mamba.AdamW(parameters)
    losses = []
    for step, tokens in enumerate(batches):
        loss, gradients = mamba.loss_and_gradients(mamba.Model(config, optimizer.parameters), xp.asarray(tokens))
        optimizer.update(gradients, training.rate_at(step, steps, RATE, warmup=10))
        losses.append(float(loss))
    return losses


def compare(
    xp: Any, steps: int, *, width: int = 32, layers: int = 2, batch: int = 4, length: int = 64
) -> dict[str, list[float]]:
    """Losses of both."""
    config = mamba.Config(vocab=256, width=width, layers=layers)
    batches = list(itertools.islice(training.batches(training.corpus()[0], batch, length, seed=0), steps))
    with tempfile.TemporaryDirectory() as folder:
        mamba.save(folder, config, mamba.initial_parameters(config, seed=0))
        return {
            "cuscan": ours(Path(folder), batches, steps, xp),
            "recurrence": theirs(Path(folder), batches, steps),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model_training", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--from", dest="record", type=Path, help="a record to draw; nothing is trained")
    parser.add_argument("--figure", type=Path, help="where to draw the losses")
    chosen = parser.parse_args()
    if chosen.record:
        record = json.loads(chosen.record.read_text())
    else:
        import transformers

        xp, where = training.place()
        losses = compare(xp, chosen.steps)
        record = {
            "digest": _source.digest(),
            "device": "CPU" if xp is np else where,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "difference": max(differences(losses)),
            "losses": losses,
        }
    steps = len(record["losses"]["cuscan"])
    print(f"{record['device']}: largest relative difference {record['difference']:.1e} in {steps} steps")
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    if chosen.figure:
        title = "Two layers of Mamba trained on text, float32"
        draw(record, chosen.figure, title=title, labels=("transformers, torch's gradients and AdamW", "cuscan.mamba"))


if __name__ == "__main__":
    main()
