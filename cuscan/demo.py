"""The demo: sequences worked by hand, a layer over real text against float64, its time, and a language model.

`python -m cuscan demo` prints its tables, with their checks, on the GPU if there is one and else on the CPU.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cuscan
from cuscan import _compile, _selftest, _source, mamba, ssm
from cuscan.mamba import checkpoint, training
from cuscan.testing import oracle

Array = NDArray[np.float32]

CHIPS = (80, 90, 100, 120)  # architectures whose registers are shown
STATE = 16
WEIGHTS = Path(mamba.__file__).parent / "weights"
PROMPT = b"The "
FOLLOWED = 2  # channels whose values are compared: the oracle takes some microseconds for each step and state

# h[t] = a[t] h[t-1] + b[t], worked by hand: (title, a, b, h forward, h in reverse).
# Maps that are all equal commute, so the first sequence cannot show a combine whose order is swapped.
HAND_WORKED = (
    (
        "a = 1/2, b = 1: h[t] = 2 - 2^-t, in reverse 2 - 2^(t-7)",
        (0.5,) * 8,
        (1.0,) * 8,
        tuple(2 - 2.0**-t for t in range(8)),
        tuple(2 - 2.0 ** (t - 7) for t in range(8)),
    ),
    (
        "changing gates: h[t] = sum over s <= t of b[s] a[s+1] ... a[t]",
        (0.5, 2.0, -1.0, 0.0, 0.5, 2.0, -1.0, 1.0),
        (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        (1.0, 4.0, -1.0, 4.0, 7.0, 20.0, -13.0, -5.0),
        (1.0, 0.0, -1.0, 4.0, 7.0, 4.0, -1.0, 8.0),
    ),
)
# The second one again and again: the state that enters a repetition is -5 forward and 1 in reverse, never 0.
REPETITIONS = 512
REPEATED = (-1.5, -1.0, 4.0, 4.0, 7.0, 20.0, -13.0, -5.0)
REPEATED_REVERSE = (1.0, 0.0, -1.0, 4.0, 6.0, 2.0, -2.0, 9.0)


class Layer(NamedTuple):
    """The arguments of a selective_scan with softplus, of one batch entry and one group."""

    u: Any
    delta: Any
    A: Any
    B: Any
    C: Any
    D: Any
    delta_bias: Any

    def on(self, xp: Any) -> Layer:
        """Move the arrays to NumPy's or CuPy's side."""
        return Layer(*map(xp.asarray, self))

    def scan(self) -> Any:
        """Run the scan that is being shown."""
        return cuscan.selective_scan(**self._asdict(), delta_softplus=True)

    def channels(self, chosen: NDArray[np.intp]) -> Layer:
        """Keep some of the channels."""
        return self._replace(
            u=self.u[..., chosen],
            delta=self.delta[..., chosen],
            A=self.A[chosen],
            D=self.D[chosen],
            delta_bias=self.delta_bias[chosen],
        )


def text_layer(channels: int, length: int) -> Layer:
    """Embed the first bytes of real text by a fixed seed: each byte value has its own u, delta, B and C.

    Parameters
    ----------
    channels, length : int
        Of u, whose batch is 1.

    Returns
    -------
    Layer
        float32 NumPy arrays; A is S4D-real, delta_bias gives the usual range of delta.
    """
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = np.frombuffer(text, np.uint8, length)[np.newaxis]
    rng = np.random.default_rng(20)

    def table(columns: int) -> Array:
        return rng.standard_normal((256, columns), np.float32)

    return Layer(
        u=table(channels)[tokens],
        delta=table(channels)[tokens],
        A=ssm.A_from_A_log(ssm.s4d_real_A_log(channels, STATE)),
        B=table(STATE)[tokens],
        C=table(STATE)[tokens],
        D=np.ones(channels, np.float32),
        delta_bias=ssm.delta_bias(channels, seed=20),
    )


def step_by_step(layer: Layer, xp: Any, keep: Callable[[Any], Any] = lambda h: h) -> Any:
    """Run the recurrence as it is written, one step of all channels and states after the other.

    Parameters
    ----------
    layer : Layer
        Arrays of `xp`, which is numpy or cupy.
    xp : module
        numpy or cupy.
    keep : callable
        What becomes of the state between two steps.

    Returns
    -------
    array
        y, of u's shape and type.
    """
    u, B, C = layer.u, layer.B, layer.C
    delta = xp.logaddexp(layer.delta + layer.delta_bias, np.float32(0))
    h = xp.zeros((1, *layer.A.shape), np.float32)
    y = xp.empty_like(u)
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = keep(xp.exp(step * layer.A) * h + step * B[:, t, None, :] * u[:, t, :, None])
        y[:, t] = (C[:, t, None, :] * h).sum(-1) + layer.D * u[:, t]
    return y


def bfloat16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even, by integer arithmetic."""
    bits = x.view(np.uint32)
    rounded: Array = ((bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000).view(np.float32)
    return rounded


def run(*, quick: bool = False) -> bool:
    """Print the five parts.

    Parameters
    ----------
    quick : bool
        Stop at length 1024, and compile nothing.

    Returns
    -------
    bool
        Whether every check passed.
    """
    xp, where = device()
    print(f"cuscan {cuscan.__version__} on {where}")
    lengths = [2**k for k in range(8, 11 if quick else 14)]
    passed = [hand_worked(xp), accuracy(xp, lengths)]
    speed(xp, lengths)
    passed.append(language_model(xp, 2048 if quick else 8192))
    if not quick:
        passed.append(kernels())
    print("\nEvery check passed." if all(passed) else "\nA CHECK FAILED: see above.")
    return all(passed)


def device() -> tuple[Any, str]:
    """Choose where the demo runs.

    Returns
    -------
    tuple
        The array module, CuPy if there is a device and else NumPy, and a sentence's end that says which.
    """
    cpu = f"the CPU, by NumPy {np.__version__}"
    try:
        import cupy
    except ImportError:
        return np, f"{cpu} (CuPy is not installed)"
    try:
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return np, f"{cpu} (CuPy: {str(error).partition(':')[0]})"
    return cupy, f"{name}, by CuPy {cupy.__version__}"


def hand_worked(xp: Any) -> bool:
    """Print the scans of short sequences beside their values worked by hand; True if they are equal."""
    print("\n1. Sequences worked by hand: h[t] = a[t] h[t-1] + b[t]")

    def scan(a: Sequence[float], b: Sequence[float], *, reverse: bool = False) -> list[float]:
        gates, inputs = (xp.asarray(np.array(x, np.float32)) for x in (a, b))
        values: list[float] = _host(cuscan.linear_scan(gates, inputs, reverse=reverse)).tolist()
        return values

    passed = True
    for title, a, b, forward, backward in HAND_WORKED:
        found, found_reverse = scan(a, b), scan(a, b, reverse=True)
        right = found == list(forward) and found_reverse == list(backward)
        print(f"\n   {title}")
        _table(
            ("t", "a", "b", "forward", "by hand", "reverse", "by hand"),
            zip(range(8), a, b, found, forward, found_reverse, backward, strict=True),
        )
        print(f"   {_verdict(right)}")
        passed &= right
    _, a, b, forward, backward = HAND_WORKED[1]
    long = a * REPETITIONS, b * REPETITIONS
    right = scan(*long) == list(forward + REPEATED * (REPETITIONS - 1))
    right &= scan(*long, reverse=True) == list(REPEATED_REVERSE * (REPETITIONS - 1) + backward)
    print(f"   these 8 steps {REPETITIONS} times over, both directions: {_verdict(right)}")
    return passed and right


def accuracy(xp: Any, lengths: Sequence[int]) -> bool:
    """Print a layer's errors over text against float64; True if each value is within its derived bound."""
    channels = _channels(xp)
    print(f"\n2. A state-space layer of {channels} channels and {STATE} states reads the topics of help():")
    print("   errors against float64, relative to the output's root mean square (RMS);")
    print("   a state kept in bfloat16 has to miss the bound")
    followed = np.linspace(0, channels - 1, FOLLOWED).astype(int)
    progress, rows, passed = _Progress(sum(lengths)), [], True
    for length in lengths:
        layer = text_layer(channels, length)
        part = layer.channels(followed)
        truth = oracle.selective_scan(**part._asdict(), delta_softplus=True)
        size = _rms(truth.value)
        y = _host(layer.on(xp).scan())[..., followed]
        coarse = step_by_step(part, np, keep=bfloat16)
        # A bound that a bfloat16 state keeps too would show nothing.
        right = _within(y, truth) and not _within(coarse, truth)
        passed &= right
        error, coarse_error = y - truth.value, coarse - truth.value
        figures = (abs(error).max(), truth.bound.max(), _rms(error), _rms(coarse_error))
        rows.append((length, *(f"{x / size:.1e}" for x in figures), _verdict(right)))
        progress.advance(length)
    _table(("length", "largest", "bound", "RMS", "RMS, state in bf16", "check"), rows)
    return passed


def speed(xp: Any, lengths: Sequence[int]) -> None:
    """Print the time of the recurrence step by step and of the scan."""
    channels = _channels(xp)
    print("\n3. Time in ms of the same layer, step by step and by the scan")
    progress, rows = _Progress(sum(lengths)), []
    for length in lengths:
        layer = text_layer(channels, length).on(xp)
        layer.scan()  # compiles
        slow = _milliseconds(xp, partial(step_by_step, layer, xp), 2)
        fast = _milliseconds(xp, layer.scan, 5)
        rows.append((length, f"{slow:.1f}", f"{fast:.2f}", f"{slow / fast:.1f}"))
        progress.advance(length)
    _table(("length", "step by step", "scan", "ratio"), rows)


def language_model(xp: Any, length: int) -> bool:
    """Print how well the model that comes with the package tells text, and a sample; True if its checks pass."""
    print("\n4. A small Mamba, trained on other topics of help(), reads those held out")
    if xp is not np and not mamba.has_cublas():
        print("   (on the CPU: cuBLAS is not installed)")
        xp = np
    config, parameters = mamba.load(WEIGHTS, xp=xp, dtype="float32")
    model = mamba.Model(config, parameters)
    text = training.corpus()[1][:length]
    bits, frequencies = training.bits_per_byte(model, text), _entropy(text)
    right = bits < 0.75 * frequencies
    count = sum(x.size for x in parameters.values())
    made_by = f"made by {checkpoint.metadata(WEIGHTS / 'model.safetensors')['command']}"
    print(textwrap.fill(made_by, 79, initial_indent="   (", subsequent_indent="    ") + ")")
    print(f"   {count} parameters, {bits:.2f} bits a byte over {len(text)} bytes: {_verdict(right)}")
    print(f"   ({frequencies:.2f} by the bytes' frequencies alone)")
    prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[np.newaxis]
    made = _host(model.generate(prompt, 64))
    whole = _host(model(np.concatenate([prompt, made], 1))[:, len(PROMPT) - 1 : -1].argmax(-1))
    same = bool((made == whole).all())
    print(f"   64 bytes made step by step are those of the whole sequence at once: {_verdict(same)}")
    sample = bytes(_host(model.generate(prompt, 240, temperature=0.6, seed=1))[0].tolist())
    print("   a sample:")
    for line in (PROMPT + sample).decode(errors="replace").splitlines():
        for part in textwrap.wrap(line, 74) or [""]:
            print(f"   | {part}")
    return right and same


def kernels() -> bool:
    """Run the kernels of one module, and print what they take on four chips; True if they are right."""
    print("\n5. The kernels of linear_scan in float32")
    told: list[str] = []
    passed = _selftest.run(told.append, only="linear_scan")
    for line in told[:-1]:  # the last says what this function returns
        print(textwrap.fill(line, 79, initial_indent="   ", subsequent_indent="           "))
    source = _source.linear_source("float32")
    libraries = list(_compile.nvrtc_libraries())
    if not libraries:
        print("   (NVRTC is not installed, so what they take on a chip is not shown)")
        return passed
    progress, taken = _Progress(len(CHIPS)), []
    for chip in CHIPS:
        taken.append(_compile.Nvrtc(libraries[0]).compile(source, chip))
        progress.advance(1)
    print("   registers and frame in bytes, by chip:")
    rows = [(name, *(f"{on[name].registers}, {on[name].frame}" for on in taken)) for name in source.names]
    _table(("kernel", *(f"sm_{chip}" for chip in CHIPS)), rows)
    return passed


def _channels(xp: Any) -> int:
    return 16 if xp is np else 1024


def _milliseconds(xp: Any, function: Callable[[], Any], repetitions: int) -> float:
    wait = (lambda: None) if xp is np else xp.cuda.Device().synchronize
    times = []
    for _ in range(repetitions):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def _within(y: NDArray[Any], truth: oracle.Scan) -> bool:
    try:
        oracle.assert_scan_close(y, truth.value, truth.bound)
    except AssertionError:
        return False
    return True


def _entropy(text: NDArray[np.uint8]) -> float:
    share = np.bincount(text) / len(text)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def _rms(x: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _host(x: Any) -> NDArray[Any]:
    array: NDArray[Any] = x if isinstance(x, np.ndarray) else x.get()
    return array


def _verdict(right: bool) -> str:
    return "ok" if right else "WRONG"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    cells = [header, *([f"{x:g}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("   " + "   ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)))


class _Progress:
    """A bar on a terminal's standard error, from the second second on, gone when all is done."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()

    def advance(self, amount: int) -> None:
        self.done += amount
        if sys.stderr.isatty() and time.monotonic() - self.start > 2:
            filled = 40 * self.done // self.total
            bar = f"\r   [{'#' * filled:<40}] {100 * self.done // self.total:3d} %"
            print(bar if self.done < self.total else "\r\033[K", end="", file=sys.stderr, flush=True)
