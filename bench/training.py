"""`python -m bench.training`: a small language model trained with `cuscan.selective_scan` and with a plain recurrence.

python -m bench.training [--device cuda] [--steps 100] [--out FILE] [--figure FILE]     train; FILE gets losses, figure
python -m bench.training --from FILE --figure FILE                                      draw what was recorded

Two layers after Mamba, without its convolution, learn to tell the next byte of Python's manual. Both runs have the
same seed, initial weights and batches; the scan is all they differ in. A figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import cuscan
from cuscan import _source, ssm


def recurrence(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor) -> Tensor:
    """The selective scan step by step, differentiated by autograd."""
    delta = functional.softplus(delta + bias)
    h = u.new_zeros(len(u), *A.shape)
    y = []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = torch.exp(step * A) * h + step * u[:, t, :, None] * B[:, t, None]
        y.append((h * C[:, t, None]).sum(-1))
    return (torch.stack(y, 1) + D * u) * functional.silu(z)


Scan = Callable[..., Tensor]
SCANS: dict[str, Scan] = {
    "cuscan": functools.partial(cuscan.selective_scan, delta_softplus=True),
    "recurrence": recurrence,
}


class Layer(nn.Module):
    def __init__(self, width: int, state: int, seed: int) -> None:
        super().__init__()
        channels = 2 * width
        self.sizes = channels, channels, channels, state, state
        self.norm = nn.RMSNorm(width)
        self.enter = nn.Linear(width, sum(self.sizes), bias=False)
        # u, B, C and delta are large enough that the state matters from the first step on.
        nn.init.normal_(self.enter.weight, std=width**-0.5)
        self.leave = nn.Linear(channels, width, bias=False)
        self.A_log = nn.Parameter(torch.from_numpy(ssm.s4d_real_A_log(channels, state)))
        self.D = nn.Parameter(torch.ones(channels))
        self.delta_bias = nn.Parameter(torch.from_numpy(ssm.delta_bias(channels, 0.1, 1, seed=seed)))

    def forward(self, x: Tensor, scan: Scan) -> Tensor:
        u, z, delta, B, C = self.enter(self.norm(x)).split(self.sizes, -1)
        return x + self.leave(scan(u, delta, -torch.exp(self.A_log), B, C, self.D, z, self.delta_bias))


class Network(nn.Module):
    """Logits of each next byte."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(256, width))
        self.layers = nn.ModuleList(Layer(width, state, seed) for seed in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, scan: Scan) -> Tensor:
        # A product, not nn.Embedding: its gradient is the same bits every time.
        x = functional.one_hot(tokens, 256).to(self.embed.dtype) @ self.embed
        for layer in self.layers:
            x = layer(x, scan)
        return self.head(self.norm(x))


def train(
    scan: Scan, device: str, steps: int, *, width: int = 64, state: int = 16, batch: int = 8, length: int = 128
) -> tuple[list[float], Network]:
    """The loss before each step, and the network after them."""
    pages = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = torch.frombuffer(bytearray(pages, "utf-8"), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(width, state).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        tokens = text[starts + torch.arange(length + 1)].long().to(device)
        logits = network(tokens[:, :-1], scan)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), network


def differences(losses: dict[str, list[float]]) -> list[float]:
    """The relative difference of the two losses at each step."""
    return [abs(ours - plain) / plain for ours, plain in zip(losses["cuscan"], losses["recurrence"], strict=True)]


def measure(device: str, steps: int) -> dict[str, Any]:
    """The record of both runs."""
    torch.set_float32_matmul_precision("highest")
    losses = {name: train(scan, device, steps)[0] for name, scan in SCANS.items()}
    return {
        "digest": _source.digest(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "difference": max(differences(losses)),
        "losses": losses,
    }


def draw(
    record: dict[str, Any],
    path: Path,
    *,
    title: str = "Two layers trained on text, float32",
    labels: tuple[str, str] = ("plain recurrence in torch", "cuscan.selective_scan"),
) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    losses = record["losses"]
    # The same record gives the same file, with text as text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cuscan", "font.size": 9}):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        above.plot(losses["recurrence"], color="#8fb8de", linewidth=5, label=labels[0])
        above.plot(losses["cuscan"], color="#33475b", linewidth=1.2, label=labels[1])
        above.set(ylabel="loss (nats a byte)", title=f"{title}, {record['device']}")
        above.legend(frameon=False)
        below.semilogy(differences(losses), ".", color="#33475b", markersize=3)
        below.axhline(1e-3, color="#b04a4a", linewidth=1)
        below.set(ylabel="relative difference", xlabel="training step (no dot: the same loss)")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--from", dest="record", type=Path, help="a record to draw; nothing is trained")
    parser.add_argument("--figure", type=Path, help="where to draw the losses")
    chosen = parser.parse_args()
    record = json.loads(chosen.record.read_text()) if chosen.record else measure(chosen.device, chosen.steps)
    print("step  cuscan    recurrence  relative difference")
    losses = record["losses"]
    for step, (ours, plain, apart) in enumerate(zip(*losses.values(), differences(losses), strict=True)):
        print(f"{step:4}  {ours:.6f}  {plain:.6f}    {apart:.1e}")
    print(f"{record['device']}, torch {record['torch']}: largest relative difference {record['difference']:.1e}")
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    if chosen.figure:
        draw(record, chosen.figure)


if __name__ == "__main__":
    main()
