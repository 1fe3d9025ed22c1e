"""cuscan.trace: what calls launch, copy and allocate while it is open."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _calls
from ._findings import Finding, listed, table

LITTLE = 0.5  # a busy share below which the stream mostly waits
_open: list[Trace] = []
_lock = threading.Lock()


@dataclass
class Launched:
    """One launch of a kernel."""

    kernel: str
    blocks: int
    threads: int
    shared: int  # bytes of dynamic shared memory
    function: Any = field(repr=False)
    events: tuple[Any, Any] | None = field(repr=False)  # before and after
    milliseconds: float | None = None  # up to some microseconds more than the kernel took


@dataclass(frozen=True)
class Copied:
    """Items copied, or set to a number, between launches."""

    what: str  # such as "u": an argument that kernels cannot read as it is
    nbytes: int


@dataclass
class TracedCall:
    """One call of a public function.

    Attributes
    ----------
    launches : list of Launched
        In order.
    copies : list of Copied
        What was made to normalise a layout or an alignment, and what was filled with a number.
    plans : tuple
        That of the call first.
    scratch_bytes, result_bytes : int
        Allocated for the call alone, and for what it returns.
    stream : int
        Address of the stream, 0 for the default one and on the CPU executor.
    """

    launches: list[Launched]
    copies: list[Copied]
    plans: tuple[Any, ...]
    scratch_bytes: int
    result_bytes: int
    stream: int
    reads: dict[str, tuple[int, int]] = field(repr=False)
    writes: list[tuple[int, int]] = field(repr=False)


class Trace:
    """What `cuscan.trace` collects; it prints as a table.

    Attributes
    ----------
    calls : list of TracedCall
        In the order in which they were made, of all threads.
    new_signatures : int
        Calls that had to be checked, planned and packed anew.
    busy : dict of int to float
        On each stream, the time of cuscan's kernels over the span from the first to the last of them; the rest are gaps
        and other libraries' work. Each launch counts some microseconds too much. Empty while a graph was captured.
    """

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self.busy: dict[int, float] = {}
        self.new_signatures = 0

    def __enter__(self) -> Trace:  # noqa: PYI034 Self is not in Python 3.10
        with _lock:
            _open.append(self)
            _calls.watcher = _watch
        self.new_signatures -= _calls.Told.ready
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                _calls.watcher = None
        self.new_signatures += _calls.Told.ready
        for stream in dict.fromkeys(call.stream for call in self.calls):
            made = [x for call in self.calls if call.stream == stream for x in call.launches if x.events]
            if made:
                _finish(made[-1].events)
                for x in made:
                    x.milliseconds = _elapsed(*x.events)  # type: ignore[misc]
                span = _elapsed(made[0].events[0], made[-1].events[1])  # type: ignore[index]
                self.busy[stream] = min(1.0, sum(x.milliseconds or 0 for x in made) / max(span, 1e-9))

    @property
    def launches(self) -> list[Launched]:
        """Of all calls."""
        return [x for call in self.calls for x in call.launches]

    @property
    def copies(self) -> list[Copied]:
        """Of all calls."""
        return [x for call in self.calls for x in call.copies]

    @property
    def scratch_bytes(self) -> int:
        """Of all calls."""
        return sum(call.scratch_bytes for call in self.calls)

    @property
    def result_bytes(self) -> int:
        """Of all calls."""
        return sum(call.result_bytes for call in self.calls)

    @property
    def findings(self) -> list[Finding]:
        """What costs time, or may go wrong."""
        return [*self._copies(), *self._gaps(), *self._signatures(), *self._streams()]

    def _copies(self) -> Iterable[Finding]:
        made: Counter[str] = Counter()
        for x in self.copies:
            made[x.what] += x.nbytes
        times = Counter(x.what for x in self.copies)
        for what, nbytes in made.items():
            if not what.startswith("fill"):
                yield Finding(
                    "warning", f"a copy of {what} in {times[what]} of {len(self.calls)} calls", f"{nbytes} bytes",
                    "its items do not lie at multiples of their size, or its axes cannot be merged to six",
                    f"take {what}.copy() once, where it is made, and not in every call",
                )  # fmt: skip

    def _gaps(self) -> Iterable[Finding]:
        for stream, busy in self.busy.items():
            if busy < LITTLE and len(self.calls) > 1:
                yield Finding(
                    "warning", "the stream waits between kernels",
                    f"cuscan's kernels fill {busy:.0%} of stream {stream}",
                    "other work lies between the calls, or the host is slower than the device: small calls, "
                    "synchronisation (.get(), .item(), printing) or Python in between",
                    "profile what lies between the calls; batch small calls, capture a CUDA graph, take out "
                    "synchronisation",
                )  # fmt: skip

    def _signatures(self) -> Iterable[Finding]:
        if self.new_signatures >= 4 and 2 * self.new_signatures > len(self.calls):
            yield Finding(
                "warning", "most calls are of a new signature", f"{self.new_signatures} of {len(self.calls)} calls",
                "shapes, strides, types or options change from call to call, so each is checked and planned anew, "
                "which takes milliseconds",
                "pad lengths to a few sizes and say which steps count by mask, or pack sequences by cu_seqlens",
            )  # fmt: skip

    def _streams(self) -> Iterable[Finding]:
        for i, later in enumerate(self.calls):
            for earlier in self.calls[:i]:
                if earlier.stream != later.stream:
                    for name, (low, high) in later.reads.items():
                        if any(low < above and below < high for below, above in earlier.writes):
                            yield Finding(
                                "warning", f"{name} is read on another stream than it was written on",
                                f"call {self.calls.index(earlier)} wrote it on stream {earlier.stream}, "
                                f"call {i} reads it on stream {later.stream}",
                                "nothing orders two streams by itself: the kernel may read what is not there yet",
                                "record an event after the first call and let the second stream wait for it",
                            )  # fmt: skip

    def __str__(self) -> str:
        kernels = Counter(x.kernel for x in self.launches)
        busy = [f"{share:.0%} (stream {stream})" for stream, share in self.busy.items()]
        copies = [f"{x.what} ({x.nbytes} bytes)" for x in self.copies]
        facts = table([
            ("calls", f"{len(self.calls)}, {self.new_signatures} of a new signature"),
            ("launches", "; ".join(f"{count} x {name}" for name, count in kernels.items()) or "none"),
            ("copies", "; ".join(f"{count} x {what}" for what, count in Counter(copies).items()) or "none"),
            ("scratch", f"{self.scratch_bytes} bytes"),
            ("results", f"{self.result_bytes} bytes"),
            ("kernels fill", ", ".join(busy) or None),
        ])  # fmt: skip
        if not self.calls:
            facts += "\n  NumPy arrays run in NumPy's own code: nothing is launched."
        return f"{facts}\n{listed(self.findings)}"


def trace() -> Trace:
    """Record what cuscan's calls do on the device::

        with cuscan.trace() as t:
            y = model(x)
        print(t)            # launches, copies, bytes, how busy the stream was, and what to do about it

    It sees the calls of all threads, and on a GPU puts two events around each launch; its end waits for the last of
    them. When none is open it costs nothing.

    Returns
    -------
    Trace
        A context manager; what it gathered is in its attributes: `calls`, `launches`, `copies`, `scratch_bytes`,
        `result_bytes`, `new_signatures`, `busy` and `findings`.

    Examples
    --------
    >>> import numpy as np
    >>> import cuscan
    >>> with cuscan.trace() as t:
    ...     h = cuscan.linear_scan(0.5, np.ones(4))
    >>> t.launches
    []
    """
    return Trace()


def _mark(given: _calls.Given) -> Any:
    """Now, on the stream, or on the host's clock; None while a graph is captured."""
    if given.device is None:
        return time.perf_counter()
    cuda = sys.modules["cupy"].cuda
    if cuda.get_current_stream().is_capturing():
        return None
    event = cuda.Event()
    event.record()
    return event


def _finish(events: Any) -> None:
    if not isinstance(events[1], float):
        events[1].synchronize()


def _elapsed(begin: Any, end: Any) -> float:
    """Milliseconds."""
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    return float(sys.modules["cupy"].cuda.get_elapsed_time(begin, end))


def _watch(
    launches: _calls.Launches, given: _calls.Given, place: Any, arrays: Sequence[Any], addresses: Sequence[int]
) -> None:
    """Run the steps of a call and note them down in all that is open."""
    count, made, copies = len(given.arrays), [], []
    for step in launches.steps:
        if isinstance(step, _calls.Copy):
            step.run(place, arrays, addresses)
            copies.append(Copied(_what(step, launches, given), _nbytes(step.to, arrays)))
            continue
        if isinstance(step, _calls.Do):
            step.run(place, arrays, addresses)
            copies.append(Copied(step.function.__name__, sum(_nbytes(each, arrays) for each in step.writes)))
            continue
        function = place.modules.get_function(step.source, step.name)  # compiled before the clock runs
        begin = _mark(given)
        step.run(place, arrays, addresses)
        end = _mark(given)
        events = None if begin is None or end is None else (begin, end)
        made.append(Launched(step.name, math.prod(step.grid), step.block[0], step.shared, function, events))
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in launches.fresh]
    result = sum(sizes[i - count] for i in launches.results if i >= count)
    written = {*launches.changed, *launches.written, *launches.results}
    spans = [
        *((address + low, address + high) for address, (low, high) in zip(addresses, launches.spans, strict=False)),
        *((address, address + size) for address, size in zip(addresses[count:], sizes, strict=True)),
    ]
    reads = {
        name: spans[i]
        for i, name in enumerate(given.names)
        if given.arrays[i] is not None and i not in launches.written
    }
    if given.device is None:
        stream = int(getattr(place, "stream", 0))
    else:
        stream = int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    call = TracedCall(
        made, copies, launches.plans, sum(sizes) - result, result, stream, reads, [spans[i] for i in written]
    )
    for each in tuple(_open):
        each.calls.append(call)


def _what(copy: _calls.Copy, launches: _calls.Launches, given: _calls.Given) -> str:
    if not isinstance(copy.value, _calls.View):
        return f"fill with {copy.value}"
    if copy.value.array < len(given.names):
        return given.names[copy.value.array]
    return given.names[copy.to.array] if copy.to.array in launches.written else "a work array"


def _nbytes(view: _calls.View, arrays: Sequence[Any]) -> int:
    return math.prod(view.shape) * int(arrays[view.array].dtype.itemsize)
