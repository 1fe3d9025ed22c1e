"""Shards of the time axis on several ranks give what one call on the whole gives: threads, on NumPy and the kernels."""

import contextlib
import socket
import threading
import time
from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuscan
from bench import distributed as benchmark
from cuscan import _arrays, _shards, distributed
from cuscan._plan import STATE_INTERVAL, forced
from cuscan.distributed import CommunicatorError, Threads
from cuscan.distributed import __main__ as command
from cuscan.distributed import _communicators as communicators
from cuscan.testing import gradient_problems, linear_problems, oracle, selective_problems

SUMS = ("A", "D", "delta_bias")


class Sharded:
    """An executor of whole problems: cuts their arrays along time, calls the ranks, and joins what they give."""

    def __init__(self, executor, cuts, whole_intervals=False, levels=()):
        self.executor, self.cuts, self.whole_intervals, self.levels = executor, cuts, whole_intervals, levels

    def lengths(self, total, *, reverse):
        """Steps of each rank: cut at these fractions of the whole."""
        cuts = [round(cut * total) for cut in sorted(self.cuts)]
        if self.whole_intervals:  # counted from where the scan begins, so that saved states are those of the whole
            rest = total % STATE_INTERVAL if reverse else 0
            cuts = [0 if cut < rest else rest + (cut - rest) // STATE_INTERVAL * STATE_INTERVAL for cut in cuts]
        return np.diff([0, *cuts, total])

    def __call__(self, function, arguments):
        sharded, is_linear = getattr(distributed, function.__name__), function.__name__.startswith("linear")
        leading = arguments["b" if "b" in arguments else "h"] if is_linear else arguments["u"]
        axes = linear_axes(arguments, leading) if is_linear else selective_axes(arguments)
        time = (axes["b" if "b" in axes else "h"] if is_linear else axes["u"]) % leading.ndim
        reverse = arguments.get("reverse", False)
        lengths = self.lengths(leading.shape[time], reverse=reverse)
        bounds = np.concatenate([[0], np.cumsum(lengths)])

        def shard(rank):
            steps = slice(bounds[rank], bounds[rank + 1])
            given = dict(arguments)
            for name, axis in axes.items():
                given[name] = np.moveaxis(np.moveaxis(arguments[name], axis, 0)[steps], 0, axis)
            if arguments.get("states") is not None:
                first = bounds[rank] if not reverse else bounds[-1] - bounds[rank + 1]
                count = -(-lengths[rank] // STATE_INTERVAL)
                given["states"] = arguments["states"][:, first // STATE_INTERVAL :][:, :count]
            return given

        results = self.run(len(lengths), lambda c: sharded(c, **shard(c.rank)), arguments.get("out"))
        if hasattr(results[0], "_fields"):
            return type(results[0])(
                *(join_gradients(name, [getattr(each, name) for each in results], axes) for name in results[0]._fields)
            )
        if not isinstance(results[0], tuple):
            return self.joined(results, time, arguments)
        parts = list(zip(*results, strict=True))
        joined = [self.joined(parts[0], time, arguments)]
        if arguments.get("return_last_state"):
            joined.append(sum(parts[1]))
        if arguments.get("return_states"):
            joined.append(np.concatenate(parts[-1][:: -1 if reverse else 1], 1))
        return tuple(joined)

    def joined(self, parts, time, arguments):
        """The result, in `out` if there is one."""
        out = arguments.get("out")
        return np.concatenate(parts, time) if out is None else out

    def run(self, size, function, out=None):
        """Call function(communicator) as `size` ranks, which write to shards of `out`."""
        turns = threading.Lock() if self.executor.name == "host" else None
        if self.levels:
            function = grouped(function, self.levels, turns)
        if self.executor.name == "cuda":

            def on_a_stream(communicator):
                with self.executor.xp.cuda.Stream(non_blocking=True):
                    return self.executor(partial(call, function, communicator))

            return Threads.run(size, on_a_stream)
        if not self.executor.kernels:
            return Threads.run(size, function)
        # The CPU executor's memory is one for all.
        self.executor.modules.memory.clear()
        if out is not None:
            self.executor.modules.memory.register(out, initialised=False)
        token = _arrays.host_place.set(self.executor.place)
        try:
            return Threads.run(size, function, turns=turns)
        finally:
            _arrays.host_place.reset(token)


def grouped(function, levels, turns):
    """The function with ranks in groups of levels[0], groups of levels[1] of these, and so on."""
    sizes = np.cumprod((1, *levels))
    meetings = {
        (level, rank // (size * count) * size + rank % size): communicators._Meeting(count, turns)
        for level, (size, count) in enumerate(zip(sizes, levels, strict=False))
        for rank in range(sizes[-1])
    }

    def among(rank):
        parts = [
            Threads(rank // size % count, meetings[level, rank // (size * count) * size + rank % size])
            for level, (size, count) in enumerate(zip(sizes, levels, strict=False))
        ]
        found = parts.pop()
        while parts:
            found = distributed.Levels(parts.pop(), found)
        return found

    return lambda communicator: function(among(communicator.rank))


def call(function, communicator):
    """For executors that take a function of arrays."""
    return function(communicator)


def linear_axes(arguments, leading):
    """The axis of time of each array that has one, from the right."""
    axis = 0 if arguments.get("axis") is None else arguments["axis"]
    axis = axis % leading.ndim - leading.ndim
    names = ("a", "b", "h", "grad_h", "mask", "reset", "out")
    arrays = {name: x for name in names if isinstance(x := arguments.get(name), np.ndarray) and x.ndim >= -axis}
    return {name: axis for name, x in arrays.items() if x.shape[axis] == leading.shape[axis]}


def selective_axes(arguments):
    """The same of a selective_scan, from the left."""
    last = arguments.get("layout", "bld") == "bdl"
    axes = dict.fromkeys(("u", "delta", "z", "out", "grad_out"), 2 if last else 1) | {"mask": 1, "reset": 1}
    for name in ("B", "C"):
        if arguments[name].ndim > 2:
            axes[name] = arguments[name].ndim - 1 if last else 1
    return {name: axis for name, axis in axes.items() if arguments.get(name) is not None}


def join_gradients(name, parts, axes):
    """One rank's part after the other, the same of every rank, or what only one rank has."""
    if parts[0] is None:
        return None
    if name == "h0":
        return sum(parts)
    axis = axes.get(name, axes.get("h") if name == "b" else None)
    if axis is not None:
        return np.concatenate(parts, axis)
    assert all(part.tobytes() == parts[0].tobytes() for part in parts)
    return parts[0]


# --- whole problems -------------------------------------------------------------------------------------------------

CUTS = st.sampled_from((0, 1, 2, 3, 7)).flatmap(
    lambda count: st.lists(st.floats(0, 1, width=16), min_size=count, max_size=count)
)


LEVELS = st.sampled_from(((2, 2), (3, 2), (2, 2, 2))).flatmap(
    lambda levels: st.tuples(
        st.just(levels), st.lists(st.floats(0, 1, width=16), min_size=prod(levels) - 1, max_size=prod(levels) - 1)
    )
)


def check(executor, cuts, problem, levels=()):
    """The problem's calls as shards; where states are saved, these are those of the whole."""
    arguments = problem.arguments()
    saved = arguments.get("return_states") or arguments.get("states") is not None
    problem.check(Sharded(executor, cuts, saved, levels))


@pytest.mark.parametrize("executor", ["numpy"], indirect=True)
@given(problem=linear_problems(largest=2000, plans=1), cuts=CUTS)
@settings(max_examples=25)
def test_linear(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["numpy"], indirect=True)
@given(problem=gradient_problems(linear_problems(largest=1000, plans=1)), cuts=CUTS)
@settings(max_examples=20)
def test_linear_gradients(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["numpy"], indirect=True)
@given(problem=selective_problems(largest=4000, plans=1), cuts=CUTS)
@settings(max_examples=25)
def test_selective(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["numpy"], indirect=True)
@given(problem=gradient_problems(selective_problems(largest=2000, plans=1)), cuts=CUTS)
@settings(max_examples=12)
def test_selective_gradients(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["host"], indirect=True)
@given(problem=linear_problems(dtype=["float32"], largest=600, plans=1), cuts=CUTS)
@settings(max_examples=6)
def test_linear_kernels(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["host"], indirect=True)
@given(problem=gradient_problems(linear_problems(dtype=["float32"], largest=400, plans=1)), cuts=CUTS)
@settings(max_examples=4)
def test_linear_gradient_kernels(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["host"], indirect=True)
@given(problem=selective_problems(largest=1500, plans=1), cuts=CUTS)
@settings(max_examples=20)
def test_selective_kernels(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["host"], indirect=True)
@given(problem=gradient_problems(selective_problems(largest=800, plans=1)), cuts=CUTS)
@settings(max_examples=15)
def test_selective_gradient_kernels(executor, problem, cuts):
    check(executor, cuts, problem)


SCANS = st.one_of(linear_problems(largest=600, plans=1), selective_problems(largest=1200, plans=1))


@pytest.mark.parametrize("executor", ["numpy"], indirect=True)
@given(problem=st.one_of(SCANS, gradient_problems(SCANS)), levels=LEVELS)
@settings(max_examples=20)
def test_ranks_in_groups(executor, problem, levels):
    check(executor, levels[1], problem, levels[0])


@pytest.mark.full
@pytest.mark.parametrize("executor", ["host"], indirect=True)
@given(
    problem=st.one_of(
        linear_problems(dtype=["float32"], largest=400, plans=1),
        gradient_problems(linear_problems(dtype=["float32"], largest=300, plans=1)),
    ),
    levels=LEVELS,
)
@settings(max_examples=8)
def test_kernels_of_ranks_in_groups(executor, problem, levels):
    check(executor, levels[1], problem, levels[0])


@pytest.mark.parametrize("executor", ["cuda"], indirect=True)
@given(problem=st.one_of(linear_problems(), selective_problems()), cuts=CUTS)
@settings(max_examples=30)
def test_on_a_gpu(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("executor", ["cuda"], indirect=True)
@given(problem=gradient_problems(st.one_of(linear_problems(), selective_problems())), cuts=CUTS)
@settings(max_examples=30)
def test_gradients_on_a_gpu(executor, problem, cuts):
    check(executor, cuts, problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_of_other_ranks_becomes_zero_whatever_it_was(dtype, order):
    to = np.full((2, 3, 4), np.nan, _arrays._dtype(dtype), order)
    _shards.zero_foreign(to, np.array([-3, 2, 16]), length=16, total=16, last_rank=True, at_end=False)
    assert (to[0] == 0).all()
    assert np.isnan(to[1].astype(complex)).all()


# --- what a rank gets ------------------------------------------------------------------------------------------------

LENGTHS = (40, 0, 1, 75)
STEPS = sum(LENGTHS)
GATES = np.where(np.arange(STEPS) % 3, 1, -1).astype(np.float32)  # exact in every order of association
INPUTS = (np.arange(STEPS) % 5 - 2).astype(np.float32)
REAL = np.random.default_rng(0).uniform(-1, 1, (2, STEPS)).astype(np.float32)


def shard(x, rank):
    return np.split(x, np.cumsum(LENGTHS)[:-1])[rank]


def run(executor, function, size=4):
    return Sharded(executor, ()).run(size, function)


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
@pytest.mark.parametrize("reverse", [False, True])
def test_states_of_the_ends_are_where_the_ends_are(executor, reverse):
    first, last = (3, 0) if reverse else (0, 3)
    options = {"reverse": reverse, "h0": np.full((), 7, np.float32)}

    def rank(c):
        a, b = shard(GATES, c.rank), shard(INPUTS, c.rank)
        # Where a sequence does not begin nobody asks for h0, and nobody for the gradient where it does not end.
        given = options | ({} if c.rank == first else {"h0": None})
        h, state = distributed.linear_scan(c, a, b, **given, return_last_state=True)
        above = np.full((), 1 if c.rank == last else 5, np.float32)
        return h, state, distributed.linear_scan_vjp(c, a, h, grad_last_state=above, **options).h0

    results = run(executor, rank)
    h, last_state = cuscan.linear_scan(GATES, INPUTS, **options, return_last_state=True)
    np.testing.assert_array_equal(np.concatenate([x for x, *_ in results]), h)
    assert [x for _, x, _ in results] == [last_state if number == last else 0 for number in range(4)]
    assert [x for *_, x in results] == [np.prod(GATES) if number == first else 0 for number in range(4)]


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_an_empty_sequence_is_where_its_offset_is(executor):
    offsets, h0 = np.array([40, 40, 41, 41, 116, 116]), np.arange(1, 6, dtype=np.float32)

    def rank(c):
        a, b = shard(GATES, c.rank), shard(INPUTS, c.rank)
        return distributed.linear_scan(c, a, b, h0, cu_seqlens=offsets, return_last_state=True)[1]

    expected = cuscan.linear_scan(GATES, INPUTS, h0, cu_seqlens=offsets, return_last_state=True)[1]
    results = run(executor, rank)
    ours = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(results, ours * expected)


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_without_any_step(executor):
    def rank(c):
        none = np.empty((2, 0), np.float32)
        h0 = np.array([1, 2], np.float32)
        h, last = distributed.linear_scan(c, none, none, h0, axis=1, return_last_state=True)
        gradients = distributed.linear_scan_vjp(c, none, none, grad_last_state=h0, axis=1, h0=h0)
        return h.shape, last.tolist(), gradients.h0.tolist()

    assert run(executor, rank, 2) == [((2, 0), [0, 0], [0, 0]), ((2, 0), [1, 2], [1, 2])]


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_one_gate_of_all_steps_has_the_sum_on_every_rank(executor):
    gate = np.full(1, -1, np.float32)

    def rank(c):
        h = distributed.linear_scan(c, gate, shard(INPUTS, c.rank))
        return distributed.linear_scan_vjp(c, gate, h, np.ones_like(h)).a

    h = cuscan.linear_scan(gate, INPUTS)
    assert run(executor, rank) == [cuscan.linear_scan_vjp(gate, h, np.ones_like(h)).a] * 4


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_two_runs_have_the_same_bits(executor):
    def rank(c):
        a, b = (shard(x, c.rank) for x in REAL)
        h = distributed.linear_scan(c, a, b)
        return b"".join(x.tobytes() for x in (h, *distributed.linear_scan_vjp(c, a, h, b)[:2]))

    assert run(executor, rank) == run(executor, rank)


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_the_first_gate_of_a_last_chunk_counts(executor):
    """The maps of last chunks, which no scan on one device asks for, are made apart, from their first step on."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(1)
    u, delta = rng.uniform(0.5, 1, (2, 1, STEPS, 2)).astype(bfloat16)
    B, C = rng.uniform(0.5, 1, (2, 1, STEPS, 4)).astype(bfloat16)
    A, mask = np.full((2, 4), -0.25, np.float32), np.ones((1, STEPS), bool)

    def rank(c):
        steps = shard(np.arange(STEPS), c.rank)
        given = (x[:, steps] for x in (u, delta))
        given = *given, A, *(x[:, steps] for x in (B, C))
        return distributed.selective_scan(c, *given, mask=mask[:, steps], out_dtype="float32")

    with forced(chunk=32):
        y = np.concatenate(run(executor, rank), 1)
    truth = oracle.selective_scan(u, delta, A, B, C)
    oracle.assert_scan_close(y, truth.value, truth.bound)


def test_a_rank_alone_does_what_it_does_without_others():
    a, b = REAL
    (h,) = Threads.run(1, lambda c: distributed.linear_scan(c, a, b))
    assert h.tobytes() == cuscan.linear_scan(a, b).tobytes()


class Counting:
    """A communicator that notes the bytes of its messages."""

    def __init__(self, communicator):
        self.rank, self.size, self.sent, self._inner = communicator.rank, communicator.size, [], communicator

    def all_gather(self, send, receive, timeout):
        self.sent.append(send.nbytes)
        self._inner.all_gather(send, receive, timeout)


@pytest.mark.parametrize("executor", ["numpy", "host"], indirect=True)
def test_one_message_goes_to_all_and_each_shard_is_summarised_once(executor):
    rows = 5
    inputs = np.ones((rows, 64), np.float32)

    def rank(c):
        c = Counting(c)
        h = distributed.linear_scan(c, inputs, inputs, axis=1)
        distributed.linear_scan_vjp(c, inputs, h, inputs, axis=1)
        return c.sent

    with forced(chunk=16), cuscan.trace() as t:
        sent = run(executor, rank, 3)
    if executor.kernels:
        names = [each.kernel for each in t.launches]
        assert names.count("linear_scan_time_summarise_float32") == 3
        # Rows, in parts at multiples of 16 bytes: gates and states; for the gradients the state before the shard, too.
        assert sent == [[32, 2 * 32, 32, 3 * 32]] * 3
    else:
        assert sent == [[32, rows * (4 + 4 + 1), 32, rows * (4 + 4 + 1 + 4)]] * 3


# --- agreement -------------------------------------------------------------------------------------------------------


def differing(name):
    """A rank's call, in which rank 2 differs."""
    x = np.ones((2, 3), np.float32)
    same = {"a": x, "b": x, "axis": 1}
    other = {
        "type": {"a": x.astype(np.float64), "b": x.astype(np.float64), "axis": 1},
        "shape": {"a": x[:1], "b": x[:1], "axis": 1},
        "flag": same | {"reverse": True},
        "mask": same | {"mask": x > 0},
        "gate": same | {"a": 0.5},
        "one gate": same | {"a": x[:, :1]},
        "offsets": same | {"cu_seqlens": np.array([0, 9])},
    }[name]
    if name == "offsets":
        same |= {"cu_seqlens": np.array([0, 12])}
    return lambda c: distributed.linear_scan(c, **(other if c.rank == 2 else same))


SAID = {
    "type": r"rank 0 calls .*b float32\(2, time\).*; rank 2 calls .*b float64\(2, time\)",
    "shape": r"b float32\(2, time\).*; rank 2 .*b float32\(1, time\)",
    "flag": r"reverse False.*; rank 2 .*reverse True",
    "mask": r"rank 2 .*mask bool\(2, time\)",
    "gate": r"a float32.*; rank 2 .*a 0\.5",
    "one gate": r"a is one gate for all steps on rank 2, and one a step on rank 0",
    "offsets": r"the values of cu_seqlens differ",
}


@pytest.mark.parametrize("name", SAID)
def test_every_rank_hears_of_a_disagreement_before_anything_is_exchanged(name):
    def rank(c):
        c = Counting(c)
        with pytest.raises(ValueError, match=f"the ranks disagree, so nothing was exchanged: .*{SAID[name]}"):
            differing(name)(c)
        return c.sent

    sent = Threads.run(4, rank)
    assert sent == [[32]] * 4 if name == "one gate" else [[32, 1024]] * 4


def test_ranks_that_call_different_functions_disagree():
    x = np.ones((1, 3, 2), np.float32)

    def rank(c):
        calls = (partial(distributed.linear_scan, axis=1), partial(distributed.selective_scan, A=x[0, :2], B=x, C=x))
        with pytest.raises(ValueError, match=r"rank 0 calls linear_scan, .*; rank 1 calls selective_scan, "):
            calls[c.rank](c, x, x)

    Threads.run(2, rank)


def test_other_mistakes_are_named_as_without_ranks():
    def rank(c):
        with pytest.raises(TypeError, match="a must be b's float32, got float64"):
            distributed.linear_scan(c, np.ones(3), np.ones(3, np.float32))
        with pytest.raises(ValueError, match="axis must be given"):
            distributed.linear_scan(c, 0.5, np.ones((3, 2)))
        with pytest.raises(ValueError, match="layout must be"):
            distributed.selective_scan(c, *[np.ones((1, 1, 1))] * 5, layout="ldb")
        with pytest.raises(ValueError, match=r"cu_seqlens must lie in \[0, 6\]"):
            distributed.linear_scan(c, 0.5, np.ones(3), cu_seqlens=np.array([0, 7]))

    Threads.run(2, rank)


# --- failure ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_not_waited_for():
    def rank(c):
        if c.rank == 1:
            return 0
        for _ in range(2):
            with pytest.raises(CommunicatorError, match=r"not all of 3 ranks came within 0\.1 s"):
                distributed.linear_scan(c, 0.5, np.ones(3), timeout=0.1)
        return 1

    assert Threads.run(3, rank) == [1, 0, 1]


def test_the_error_of_a_rank_is_raised_and_ends_the_others_waiting():
    def rank(c):
        if c.rank == 1:
            raise KeyError("mine")
        distributed.linear_scan(c, 0.5, np.ones(3))

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        Threads.run(3, rank)
    assert time.monotonic() - start < 30


class Event:
    def __init__(self, done):
        self.done = done

    def record(self, stream):
        pass


class FakeNccl:
    error, aborted, destroyed = None, False, False

    def check_async_error(self):
        if self.error:
            raise RuntimeError(self.error)

    def abort(self):
        self.aborted = True

    def destroy(self):
        self.destroyed = True


class FakeCuda:
    Device = contextlib.nullcontext


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def test_the_watch_lets_pass_what_ends_in_time():
    nccl = FakeNccl()
    watch = communicators._Watch(nccl, FakeCuda, 0)
    late = Event(done=False)
    watch.add(Event(done=True), 0.01)
    watch.add(late, 20)
    time.sleep(0.05)
    watch.check()
    late.done = True
    watch.close()
    assert (nccl.aborted, nccl.destroyed) == (False, True)


@pytest.mark.parametrize("error", [None, "unhandled cuda error"])
def test_the_watch_aborts_what_does_not_end_and_the_next_call_raises(error):
    nccl = FakeNccl()
    nccl.error = error
    watch = communicators._Watch(nccl, FakeCuda, 0)
    watch.add(Event(done=False), 20 if error else 0.02)
    wait_until(lambda: nccl.aborted)
    with pytest.raises(CommunicatorError, match=error or r"within 0\.02 s in an earlier call, which was aborted"):
        watch.check()
    watch.close()
    assert not nccl.destroyed  # an aborted communicator is free already


# --- hosts -----------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def in_threads(*functions):
    found = [None] * len(functions)

    def run_one(number):
        try:
            found[number] = functions[number]()
        except CommunicatorError as error:
            found[number] = error

    threads = [threading.Thread(target=run_one, args=(number,)) for number in range(len(functions))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_hosts_gather_messages_of_any_size():
    address = f"127.0.0.1:{free_port()}"

    def rank(number):
        hosts = communicators.Hosts(number, 3, address, 20)
        found = [hosts.all_gather(bytes([number]) * size, 20) for size in (0, 3, 200_000 * number)]
        hosts.close()
        return found

    expected = [[bytes([number]) * size(number) for number in range(3)]
                for size in (lambda _: 0, lambda _: 3, lambda number: 200_000 * number)]  # fmt: skip
    assert in_threads(*(partial(rank, number) for number in range(3))) == [expected] * 3
    assert communicators.Hosts(0, 1, "nowhere:1", 1).all_gather(b"alone", 1) == [b"alone"]


def test_hosts_that_do_not_come_or_go_are_named():
    address = f"127.0.0.1:{free_port()}"
    missing, lonely = in_threads(
        partial(communicators.Hosts, 0, 4, address, 0.3),
        partial(communicators.Hosts, 2, 4, f"127.0.0.1:{free_port()}", 0.1),
    )
    assert "ranks [1, 2, 3] did not come within 0.3 s" in str(missing)
    assert "rank 0 is not there at 127.0.0.1" in str(lonely)

    def rank(number):
        hosts = communicators.Hosts(number, 3, address, 20)
        if number == 2:
            hosts.close()
            return None
        return hosts.all_gather(b"here", 2)

    first, second, _ = in_threads(*(partial(rank, number) for number in range(3)))
    assert isinstance(first, CommunicatorError)
    assert isinstance(second, CommunicatorError)


def test_the_address_is_the_launcher_s(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "4000")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert communicators._address() == "first:4000"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun listens there itself
    assert communicators._address() == "first:4001"


# --- those of others -------------------------------------------------------------------------------------------------


class FakeMpi:
    """mpi4py's communicator of three ranks of which all but this one send ones."""

    def Get_rank(self):  # noqa: N802 mpi4py's names
        return 1

    def Get_size(self):  # noqa: N802
        return 3

    def Iallgather(self, send, receive):  # noqa: N802
        receive[...] = 1
        receive[1] = send
        return self

    def Test(self):  # noqa: N802
        return True


def test_mpi():
    communicator = distributed.Mpi(FakeMpi())
    received = np.zeros((3, 2), np.uint8)
    communicator.all_gather(np.array([7, 8], np.uint8), received, 1.0)
    assert (communicator.rank, communicator.size, received.tolist()) == (1, 3, [[1, 1], [7, 8], [1, 1]])


TORCH = """
import numpy, torch.distributed as dist
import cuscan.distributed
dist.init_process_group("gloo")
c = cuscan.distributed.Torch()
h = cuscan.distributed.linear_scan(c, 1.0, numpy.ones(3 + c.rank), return_last_state=True)
assert h[1] == (0 if c.rank == 0 else 7), h
dist.destroy_process_group()
"""


@pytest.mark.full
def test_torch():
    pytest.importorskip("torch")
    assert command.spawn(["-c", TORCH], 2) == 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_checks_without_a_gpu_too(monkeypatch, capsys):
    monkeypatch.setattr(command, "devices", lambda: 1)
    monkeypatch.setattr(command, "CHECKED", 600)
    for name in communicators._SIZES:
        monkeypatch.delenv(name, raising=False)
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert "one GPU: 4 ranks are threads on NumPy arrays, and nothing is timed" in said
    assert "4 ranks, 600 bytes of text: error" in said
    assert "(of the RMS): ok" in said
    # Ranks that forget what came before them are found out.
    monkeypatch.setattr(command, "selective_scan", lambda _, **shard: cuscan.selective_scan(**shard))
    assert command.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_more_gpus_get_a_process_each(monkeypatch):
    started = []
    monkeypatch.setattr(command, "devices", lambda: 2)
    monkeypatch.setattr(command, "spawn", lambda arguments, count: started.append((arguments, count)) or 0)
    for name in communicators._SIZES:
        monkeypatch.delenv(name, raising=False)
    assert command.main(["--length", "4096"]) == 0
    assert started == [(["-m", "cuscan.distributed", "--length", "4096"], 2)]


def test_spawned_processes_are_ranks():
    said = "import os; n = int(os.environ['RANK']); assert os.environ['WORLD_SIZE'] == '2'; raise SystemExit(3 * n)"
    assert command.spawn(["-c", said], 2) == 3


def test_the_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "devices", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert benchmark.main([]) == 1
    assert "there is no GPU" in capsys.readouterr().out
