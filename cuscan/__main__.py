"""`python -m cuscan`: demo, info, selftest, kernels and fuzz."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import cuscan

PACKAGES = (
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "ml_dtypes",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status is 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m cuscan", description=cuscan.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run a layer over real text: values, errors and time")
    demo.add_argument("--quick", action="store_true", help="stop at length 1024")
    commands.add_parser("info", help="print versions, device, limits and cache folder")
    commands.add_parser("selftest", help="check every kernel family numerically on the device that is there")
    commands.add_parser("kernels", help="list the kernels with registers, shared memory and frame")
    fuzz = commands.add_parser("fuzz", help="draw whole problems, compare with the oracle and between schedules")
    fuzz.add_argument("--minutes", type=float, help="stop after this time (default 1, without --problems)")
    fuzz.add_argument("--problems", type=int, dest="count", help="stop after this many problems")
    fuzz.add_argument("--seed", type=int, help="problem i depends on it and i alone (default: drawn and told)")
    fuzz.add_argument("--on", choices=("gpu", "host", "numpy"), help="a GPU, the CPU executor of kernels, or NumPy")
    fuzz.add_argument("--jobs", type=int, help="processes, 1 for none beside this (default: one a core, 16 for a GPU)")
    fuzz.add_argument("--record", type=Path, help="write what was run and found to this JSON file")
    chosen = parser.parse_args(arguments)
    if chosen.command == "fuzz":
        from cuscan.testing.fuzz import run as run_fuzz

        options = {name: x for name, x in vars(chosen).items() if name != "command"}
        return not run_fuzz(lambda line: print(line, flush=True), **options)
    if chosen.command == "demo":
        from cuscan.demo import run

        return not run(quick=chosen.quick)
    if chosen.command == "info":
        info()
        return 0
    if chosen.command == "selftest":
        from cuscan import _selftest

        return not _selftest.run(print)
    from cuscan import _compile

    _compile.report(lambda line: print(line, flush=True))
    return 0


def info() -> None:
    """Print what a bug report needs."""
    facts = {"cuscan": cuscan.__version__, "Python": f"{platform.python_version()} on {platform.platform()}"}
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts |= _device_facts()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _device_facts() -> dict[str, str]:
    try:
        import cupy
        from cupy.cuda import nvrtc, runtime
    except ImportError:
        return {"device": "none: CuPy is not installed"}
    try:
        device = cupy.cuda.Device()
        limits = runtime.getDeviceProperties(device.id)
    except runtime.CUDARuntimeError as error:
        return {"device": f"none: {error}"}
    cache = os.environ.get("CUPY_CACHE_DIR", Path.home() / ".cupy" / "kernel_cache")
    return {
        "CUDA": f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}",
        "NVRTC": "{}.{}".format(*nvrtc.getVersion()),
        "device": f"{limits['name'].decode()}, compute capability {device.compute_capability}",
        "memory": f"{limits['totalGlobalMem'] / 2**30:.0f} GiB",
        "L2 cache": f"{limits['l2CacheSize'] / 2**20:.0f} MiB",
        "multiprocessors": str(limits["multiProcessorCount"]),
        "shared memory": f"{limits['sharedMemPerBlockOptin'] / 2**10:.0f} KiB a block",
        "kernel cache": str(cache),
    }


if __name__ == "__main__":
    sys.exit(main())
