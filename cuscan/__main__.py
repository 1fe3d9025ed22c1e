"""`python -m cuscan`: demo, train, info, selftest, kernels, tune, fuzz and diagnose."""

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
    demo = commands.add_parser("demo", help="run a layer and a model over real text: values, errors and time")
    demo.add_argument("--quick", action="store_true", help="stop at length 1024")
    train = commands.add_parser("train", help="train a small Mamba on the topics of help(), byte by byte")
    train.add_argument("--out", type=Path, default=Path("model"), metavar="DIR", help="the checkpoint (default: model)")
    for option, default, meaning in (
        ("seed", 0, "of the first weights and the batches"), ("steps", 400, "of the optimizer"),
        ("width", 128, "of the residual stream"), ("layers", 4, "blocks"),
        ("batch", 16, "rows of a step"), ("length", 512, "bytes of a row"),
    ):  # fmt: skip
        train.add_argument(f"--{option}", type=int, default=default, help=f"{meaning} (default: {default})")
    train.add_argument("--rate", type=float, default=3e-3, help="highest learning rate (default: 0.003)")
    commands.add_parser("info", help="print versions, device, limits and cache folder")
    selftest = commands.add_parser("selftest", help="check every kernel family numerically on the device that is there")
    selftest.add_argument("--all", action="store_true", help="every type as well, which takes minutes")
    selftest.add_argument(
        "--streams", action="store_true", help="several calls at once instead, and other orders of threads on the CPU"
    )
    diagnose = commands.add_parser("diagnose", help="say what is unusual about a call's arguments")
    diagnose.add_argument(
        "file", type=Path, metavar="FILE", help="an .npz of the arguments by name, result, grad_u, ..."
    )
    diagnose.add_argument("--gpu", action="store_true", help="on the GPU, with measured times")
    diagnose.add_argument("--plot", type=Path, metavar="PNG", help="write the pictures there (needs the extra plot)")
    commands.add_parser("kernels", help="list the kernels with registers, shared memory and frame")
    tune = commands.add_parser("tune", help="time every order and fit of the plans on the GPU that is there")
    tune.add_argument("--selective", action="append", default=[], metavar="B,L,D,N", help="instead of the usual shapes")
    tune.add_argument("--linear", action="append", default=[], metavar="SHAPE@AXIS", help="such as 8,4096,1536@1")
    tune.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint's scan, by the time of its prefill")
    tune.add_argument("--prompt", default="1,2048", metavar="B,L", help="of --model (default: 1,2048)")
    tune.add_argument("--dtype", help="of these (default: bfloat16, float32 for --linear, as saved for --model)")
    tune.add_argument("--layout", choices=("bld", "bdl"), default="bld", help="of --selective")
    tune.add_argument("--minutes", type=float, help="begin no further shape after this time")
    tune.add_argument("--record", type=Path, help="write what was timed to this JSON file")
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
    if chosen.command == "tune":
        from cuscan import _selftest, mamba
        from cuscan import tune as tuning

        name, missing = _selftest.gpu()
        if not name:
            print(f"tune needs a GPU: {missing}", file=sys.stderr)
            return 1
        if chosen.model and not mamba.has_cublas():
            print("tune --model needs cuBLAS: install cuscan with the extra cublas12 or cublas13", file=sys.stderr)
            return 1
        options = {name: x for name, x in vars(chosen).items() if name != "command"}
        tuning.run(lambda line: print(line, flush=True), **options)
        return 0
    if chosen.command == "demo":
        from cuscan.demo import run

        return not run(quick=chosen.quick)
    if chosen.command == "train":
        from cuscan.mamba import training

        options = {name: x for name, x in vars(chosen).items() if name != "command"}
        training.train(lambda line: print(line, flush=True), **options)
        return 0
    if chosen.command == "info":
        info()
        return 0
    if chosen.command == "selftest":
        from cuscan import _selftest

        if chosen.streams:
            return not _selftest.run_streams(print)
        return not _selftest.run(print, every=chosen.all)
    if chosen.command == "diagnose":
        return diagnose_file(chosen.file, gpu=chosen.gpu, plot=chosen.plot)
    from cuscan import _compile

    _compile.report(lambda line: print(line, flush=True))
    return 0


def diagnose_file(file: Path, *, gpu: bool = False, plot: Path | None = None) -> int:
    """Print the report of a call saved in an .npz; 1 if it has an error."""
    from cuscan import diagnostics

    try:
        arguments = diagnostics.read(file)
    except (OSError, ValueError) as error:
        print(f"cannot read {file}: {error}", file=sys.stderr)
        return 1
    if gpu:
        arguments = diagnostics.on_gpu(arguments)
    report = diagnostics.diagnose(**arguments)
    print(report)
    if plot:
        report.plot().savefig(plot)
    return any(x.level == "error" for x in report.findings)


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
