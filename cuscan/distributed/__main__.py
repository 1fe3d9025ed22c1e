"""`python -m cuscan.distributed`: a layer reads real text, its steps dealt out to all GPUs that are there.

It makes a process for each GPU, or is one of those that torchrun or mpirun made. The result is compared with that of
one GPU, and the time, too. Without two GPUs the ranks are threads on NumPy arrays, and there is nothing to time.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import cuscan
from cuscan import _plan, demo
from cuscan.testing import oracle

from . import selective_scan, selective_scan_vjp
from ._communicators import _SIZES, Communicator, Nccl, Threads

CHECKED = 8192  # steps that are compared with float64
TIMED = 1 << 18
THREADS = 4
NAMES = ("u", "delta", "B", "C")  # of what has steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every check passed."""
    parser = argparse.ArgumentParser(prog="python -m cuscan.distributed", description=__doc__)
    parser.add_argument("--length", type=int, default=TIMED, help=f"steps that are timed (default {TIMED})")
    parser.add_argument("--channels", type=int, default=1024, help="of the layer (default 1024)")
    chosen = parser.parse_args(arguments)
    if any(int(os.environ.get(name, "1")) > 1 for name in _SIZES):
        communicator = Nccl()
        passed = on_gpus(communicator, chosen.length, chosen.channels)
        communicator.close()
        return 0 if passed else 1
    count = devices()
    if count > 1:
        given = sys.argv[1:] if arguments is None else arguments
        return spawn(["-m", "cuscan.distributed", *given], count)
    print(f"{'one GPU' if count else 'no GPU'}: {THREADS} ranks are threads on NumPy arrays, and nothing is timed")
    return 0 if all(Threads.run(THREADS, partial(check, xp=np, channels=16))) else 1


def devices() -> int:
    """How many GPUs CuPy sees."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 whatever is missing, there is none
        return 0


def spawn(arguments: Sequence[str], count: int) -> int:
    """Run Python in `count` processes that are ranks of one host, and give the first code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(count):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": port}
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        ranks.append(subprocess.Popen([sys.executable, *arguments], env=variables))
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


def shard(layer: demo.Layer, communicator: Communicator) -> dict[str, Any]:
    """Cut out the steps of a rank, as even as they can be."""
    length = layer.u.shape[1]
    begin, end = (length * rank // communicator.size for rank in (communicator.rank, communicator.rank + 1))
    return {name: x[:, begin:end] if name in NAMES else x for name, x in layer._asdict().items()}


def everywhere(communicator: Communicator, *values: float) -> np.ndarray[Any, Any]:
    """The values of all ranks (rank, value)."""
    received = np.empty((communicator.size, 8 * len(values)), np.uint8)
    communicator.all_gather(np.array(values).view(np.uint8), received, 60.0)
    return received.view(np.float64)


def host(x: Any) -> np.ndarray[Any, Any]:
    """Give the NumPy array."""
    array: np.ndarray[Any, Any] = x if isinstance(x, np.ndarray) else x.get()
    return array


def say(communicator: Communicator, text: str) -> None:
    """Print once."""
    if communicator.rank == 0:
        print(text, flush=True)


def check(communicator: Communicator, xp: Any, channels: int) -> bool:
    """Compare each rank's steps with one device's, and with float64; True if all are within the derived bound."""
    layer = demo.text_layer(channels, CHECKED)
    followed = layer.channels(np.linspace(0, channels - 1, demo.FOLLOWED).astype(int))
    truth = oracle.selective_scan(**followed._asdict(), delta_softplus=True)
    whole = host(followed.on(xp).scan())
    mine = selective_scan(communicator, **shard(followed.on(xp), communicator), delta_softplus=True)
    begin = CHECKED * communicator.rank // communicator.size
    steps = slice(begin, begin + mine.shape[1])
    error = abs(host(mine).astype(np.float64) - truth.value[:, steps])
    apart = abs(host(mine) - whole[:, steps])
    size = float(np.sqrt(np.mean(truth.value**2)))
    figures = (
        error.max() / size,
        truth.bound.max() / size,
        apart.max() / size,
        float((error > truth.bound[:, steps]).sum()),
    )
    found = everywhere(communicator, *figures).max(0)
    right = bool(found[3] == 0)
    say(
        communicator,
        f"{communicator.size} ranks, {CHECKED} bytes of text: error {found[0]:.1e}, bound {found[1]:.1e}, apart from "
        f"one device {found[2]:.1e} (of the RMS): {'ok' if right else 'WRONG'}",
    )
    return right


def on_gpus(communicator: Communicator, length: int, channels: int) -> bool:
    """Check, and time the layer and its gradients on all ranks, and on one GPU with the same schedule and the best."""
    import cupy

    from cuscan.tune import milliseconds

    passed = check(communicator, cupy, channels)
    layer = demo.text_layer(channels, length).on(cupy)
    whole = layer._asdict() | {"delta_softplus": True}
    part = {name: cupy.ascontiguousarray(x) for name, x in shard(layer, communicator).items()} | {
        "delta_softplus": True
    }
    team = communicator

    def median(call: Callable[[], Any]) -> float:
        return float(np.median(milliseconds(cupy, call, 11)))

    # The gradients start from ones.
    _, states = cuscan.selective_scan(**whole, return_states=True)
    own, own_states = selective_scan(team, **part, return_states=True)
    ones, own_ones = cupy.ones_like(layer.u), cupy.ones_like(own)
    pairs = {
        "forward": (lambda: cuscan.selective_scan(**whole), lambda: selective_scan(team, **part)),
        "gradients": (
            lambda: cuscan.selective_scan_vjp(**whole, grad_out=ones, states=states),
            lambda: selective_scan_vjp(team, **part, grad_out=own_ones, states=own_states),
        ),
    }
    say(team, f"{length} bytes of text, {channels} channels, {demo.STATE} states, float32, in ms:")
    for name, (one, all_ranks) in pairs.items():
        fastest, together = median(one), median(all_ranks)
        with _plan.forced(schedule=_plan.Schedule.SPLIT):
            same = median(one)
        same, fastest, together = everywhere(team, same, fastest, together).max(0)
        say(
            team,
            f"  {name:9}  {team.size} GPUs {together:.3f}; one GPU, same schedule {same:.3f} "
            f"({same / together:.2f} times), its fastest {fastest:.3f} ({fastest / together:.2f} times)",
        )
    return passed


if __name__ == "__main__":
    sys.exit(main())
