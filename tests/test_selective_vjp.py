"""selective_scan_vjp on NumPy arrays and by its kernels, within its bounds and by the properties it promises.

Most tests are `SelectiveGradientProblem`s: they know their gradients, and hide NaN where nothing may depend on it.
"""

import itertools
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import H200, OFTEN_BACKWARD, QUICK_BACKWARD

import cuscan
from cuscan import STATE_INTERVAL, SelectiveGradients, _source
from cuscan._plan import Schedule, backward_kind, backward_tile, forced, plan_backward, selective_kinds
from cuscan._plan import SelectiveProblem as SelectiveSizes
from cuscan.testing import Host, Layout, Plan, SelectiveGradientProblem, SelectiveProblem, _bounds, oracle

F32, F64, BF16 = np.float32, np.float64, ml_dtypes.bfloat16
NAMES = SelectiveGradients._fields
PER_STEP = ("u", "delta", "B", "C", "z")
LAID = Layout()
OPTIONS = {
    "D": {"D": LAID}, "z": {"z": LAID}, "delta_bias": {"delta_bias": LAID}, "h0": {"h0": LAID},
    "reverse": {"reverse": True}, "delta_softplus": {"softplus": True}, "delta_limit": {"limit": (0.05, 1.5)},
}  # fmt: skip
EVERYTHING = {name: x for fields in OPTIONS.values() for name, x in fields.items()}
# Softplus, the gate and other limits leave nothing exact.
EXACT = {"values": "exact", "D": LAID, "delta_bias": LAID, "h0": LAID, "limit": (0.0, 1.0)}
MARKED = {"mask": LAID, "reset": LAID}
PACKED = {"cu_seqlens": LAID, "lengths": (9, 0, 23, 1, 32, 18), "head": 3}  # 86 steps and what is around them
CHUNKS = (Plan(), Plan(chunk=32), Plan(chunk=64, parts=1, pieces=2))
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])

# Fields that make a kind of kernel run, by the name of its module.
KINDS = {
    "float32": {},
    "bfloat16 segmented": {"dtype": "bfloat16", **MARKED},
    "float32 segmented": MARKED,
    "float32 time": {"layout": "bdl"},
    "float32 time segmented": {"layout": "bdl", **MARKED},
    "bfloat16 time": {"dtype": "bfloat16", "layout": "bdl"},
    "float16 time segmented": {"dtype": "float16", "layout": "bdl", **MARKED},
    "float64 segmented": {"dtype": "float64", "layout": "bdl", **MARKED},
    "float32 complex segmented": {"complex": True},
    "float32 complex constant B constant C segmented": {"complex": True, "constant": "BC", **MARKED},
    "bfloat16 complex segmented": {"complex": True, "dtype": "bfloat16", "layout": "bdl"},
    "float32 constant B segmented": {"constant": "B"},
    "float32 constant C segmented": {"constant": "C", "layout": "bdl"},
    "float32 constant B constant C segmented": {"constant": "BC", **MARKED},
}


full_on_host = pytest.mark.full_on_host


def kinds(*names):
    """The fields of these kinds; the quick tier has those that it compiles for the CPU."""
    return pytest.mark.parametrize(
        "kind",
        [pytest.param(KINDS[name], id=name, marks=[pytest.mark.full] * (name not in QUICK_BACKWARD)) for name in names],
    )


ALL = kinds(*KINDS)
SEGMENTED = kinds(*(name for name in KINDS if "segmented" in name))
SOME = kinds(*QUICK_BACKWARD, "float32 time", "bfloat16 time", "float64 segmented", "float32 complex segmented",
             "float32 constant B segmented", "float32 constant C segmented")  # fmt: skip
FEW = kinds(*QUICK_BACKWARD, "float32 time segmented", "bfloat16 complex segmented")


def problem(batch=2, length=33, channels=5, state=3, *, plans=CHUNKS[:1], grad=LAID, grad_last=LAID, saved=LAID,
            wide_grad=False, grad_dtype=None, seed=0, values="real", **fields):  # fmt: skip
    if "cu_seqlens" in fields:
        batch = 1
    of = SelectiveProblem(seed, batch, length, channels, state, values=values, plans=plans, **fields)
    return SelectiveGradientProblem(of, grad, grad_last, saved, ("grad",) * wide_grad, grad_dtype)


def check(executor, one):
    """The gradients under every plan, which there are, their types, and that no input is changed."""
    before = one.arguments()

    def checked(function, arguments):
        gradients = executor(function, **arguments)
        assert_types(dict(zip(NAMES, gradients, strict=True)), arguments)
        for name in (name for name, x in arguments.items() if isinstance(x, np.ndarray)):
            np.testing.assert_array_equal(bits(arguments[name]), bits(before[name]), name)
        return gradients

    one.check(checked)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


def assert_types(gradients, arguments):
    for name, x in gradients.items():
        given = arguments[name]
        assert (x is None) == (given is None), name
        if x is not None:
            dtype = None if given.dtype.kind == "c" else arguments.get("grad_dtype")
            assert (x.shape, x.dtype) == (given.shape, np.dtype(dtype or given.dtype)), name
            assert x.flags.c_contiguous


def run(executor, arguments, plan=None, **more):
    with forced(**(plan or {})):
        return dict(zip(NAMES, executor(cuscan.selective_scan_vjp, **{**arguments, **more}), strict=True))


def by_time(arguments, gradient):
    """(rows, length, ...) of an array that varies in time."""
    return gradient if arguments["layout"] == "bld" else np.moveaxis(gradient, -1, 1)


def varying(arguments):
    return [name for name in PER_STEP if arguments[name] is not None and arguments[name].ndim > 2]


def assert_same_bits(gradients, others, names=NAMES):
    for name in names:
        x, y = gradients[name], others[name]
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(bits(x), bits(y), name)


MODULES = [name for name in _source.all_sources() if name.startswith("selective_scan_backward")]


def test_kinds_are_modules_that_are_run_often():
    assert set(KINDS) == set(OFTEN_BACKWARD)
    assert {f"selective_scan_backward {name}" for name in KINDS} < set(MODULES)


@pytest.mark.full
@pytest.mark.parametrize("name", MODULES)
def test_every_kernel(host_executor, monkeypatch, name):
    words = name.split()[1:]
    constant = "".join(following for word, following in itertools.pairwise(words) if word == "constant")
    layout = "bdl" if "time" in words else "bld"
    fields = {"dtype": words[0], "complex": "complex" in words, "constant": constant, "layout": layout}
    run, get = set(), host_executor.modules.get_function
    monkeypatch.setattr(host_executor.modules, "get_function", lambda text, name: run.add(name) or get(text, name))
    check(
        host_executor,
        problem(1, 70, 5, 5, plans=CHUNKS[:2], **EXACT, **fields, **(MARKED if "segmented" in words else {})),
    )
    assert run >= set(_source.all_sources()[name].names)


# values


@ALL
def test_lengths_around_the_edges_of_intervals(executor, kind):
    for number, length in enumerate((1, 2, 7, 8, 9, 31, 32, 33, 40, 64, 65, 97)):
        check(
            executor, problem(1, length, 3, 2, plans=CHUNKS[:2], seed=number, reverse=number % 2 == 1, **EXACT, **kind)
        )


@pytest.mark.full
@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_every_length(executor, layout):
    for length in range(1, 101):
        fields = {**EXACT, "layout": layout, "reverse": length % 3 == 0}
        check(executor, problem(1, length, 2, 2, plans=CHUNKS, seed=length, **fields))


@pytest.mark.full
@ALL
@pytest.mark.parametrize("state", [1, 3, 4, 8, 16, 17, 64, 65])
def test_numbers_of_states(executor, kind, state):
    # A slice has 16 states, or 8.
    check(executor, problem(1, 34, 3, state, plans=CHUNKS[:2], **EVERYTHING, **kind))


@SOME
@pytest.mark.parametrize("channels", [pytest.param(1, marks=full_on_host), 4, 31, 32, 33, 65])
def test_channels_that_fill_no_tile(executor, kind, channels):
    check(executor, problem(1, 34, channels, 4, **EVERYTHING, **kind))


@SOME
@pytest.mark.parametrize(("groups", "channels"), [(1, 6), (2, 6), (3, 102), (6, 6)])
def test_groups(executor, kind, groups, channels):
    check(executor, problem(2, 18, channels, 4, groups=groups, **EVERYTHING, **kind))


@ALL
def test_whole_tiles(executor, kind):
    # Intervals of which all channels, states and steps are there are worked on by code of their own.
    several = {"softplus": True, "D": LAID}
    for number, (state, fields) in enumerate(((16, {}), (32, several), (32, {**several, "z": LAID}))):
        check(executor, problem(1, 96, 64, state, seed=number, plans=CHUNKS[:2], **fields, **kind))


@SOME
def test_every_option_alone_and_absent(executor, kind):
    for number, name in enumerate(OPTIONS):
        rest = {field: x for other, fields in OPTIONS.items() if other != name for field, x in fields.items()}
        check(executor, problem(2, 34, 4, 3, seed=number, **OPTIONS[name], **kind))
        check(executor, problem(2, 34, 4, 3, seed=number, **rest, **kind))


@SOME
def test_one_gradient_alone(executor, kind):
    check(executor, problem(plans=CHUNKS, grad_last=None, **EVERYTHING, **kind))
    check(executor, problem(plans=CHUNKS, grad=None, **EVERYTHING, **kind))


@ALL
def test_types(executor, kind):
    wide = () if kind.get("dtype") == "float64" else ("delta",) if kind.get("complex") else ("delta", "B")
    for parameters, dtype in (
        ("float32", None),
        ("bfloat16", "float32"),
        ("float16", "float64"),
        ("float64", "bfloat16"),
    ):
        fields = {"parameters": parameters, "grad_dtype": dtype, **EVERYTHING, **kind}
        check(executor, problem(2, 35, 4, 3, wide=wide, **fields))
        check(executor, problem(2, 35, 4, 3, wide_grad=True, **fields))


@SEGMENTED
def test_packed_sequences(executor, kind):
    for number, length in enumerate((86, 90)):
        for options in (EXACT, {**EXACT, "h0": None, "reverse": True}):
            check(executor, problem(1, length, 3, 2, plans=CHUNKS, seed=number, **options, **PACKED, **kind))
        check(executor, problem(1, length, 3, 20, saved=None, **EVERYTHING, **PACKED, **kind))


@kinds("bfloat16 segmented", "float32 time segmented", "float64 segmented")
def test_masks_and_resets_of_every_kind(executor, kind):
    for seed in range(12 if executor.every_type else 6):  # draws the patterns, and whether what is hidden is NaN
        fields = {**EXACT, **kind, **(PACKED if seed % 2 else {})}
        check(executor, problem(2, 70, 3, 2, plans=CHUNKS[:2], seed=seed, reverse=seed % 4 > 1, **fields))


@FEW
def test_parts_of_the_batch(executor, kind):
    plans = tuple(Plan(parts=parts) for parts in (None, 1, 2, 4))
    check(executor, problem(5, 9, 3, 2, plans=plans, **EXACT, **kind))
    check(executor, problem(3, 34, 3, 2, plans=plans, **EVERYTHING, **kind))


@kinds("float32", "float32 time")
def test_many_channels_and_a_long_row(executor, kind):
    check(executor, problem(1, 9, 300, 3, **EVERYTHING, **kind))
    check(executor, problem(1, 700, 2, 2, plans=(Plan(), Plan(chunk=160)), **EXACT, **kind))


@full_on_host
def test_by_hand(executor):
    # A = 0 and delta = 1: h is the running sum of B u.
    u, C = np.array([[[1], [2], [3]]], F32), np.array([[[1], [10], [100]]], F32)
    ones = np.ones((1, 3, 1), F32)
    given = {"u": u, "delta": ones, "A": np.zeros((1, 1), F32), "B": 2 * ones, "C": C, "D": np.array([7], F32)}
    g = run(executor, given, h0=np.array([[[5]]], F32), grad_out=ones, grad_last_state=np.full((1, 1, 1), 1000, F32))
    h, before, received = np.array([7, 11, 17]), np.array([5, 7, 11]), np.array([1111, 1110, 1100])
    np.testing.assert_array_equal(g["u"].ravel(), 2 * received + 7)
    np.testing.assert_array_equal(g["delta"].ravel(), 2 * received * u.ravel())
    np.testing.assert_array_equal(g["A"].ravel(), [received @ before])
    np.testing.assert_array_equal(g["B"].ravel(), received * u.ravel())
    np.testing.assert_array_equal(g["C"].ravel(), h)
    np.testing.assert_array_equal(g["D"], [6])
    np.testing.assert_array_equal(g["h0"].ravel(), [1111])
    assert g["z"] is g["delta_bias"] is None


def test_the_last_state_alone(executor):
    # L = sum(last state): what reaches h[t] is the product of the gates after it.
    given = problem(2, 70, 3, 4, D=LAID, h0=LAID, saved=None).arguments()
    given["A"] = np.linspace(-0.5, 0, 12, dtype=F32).reshape(3, 4)
    scan = {name: x for name, x in given.items() if not name.startswith(("grad_", "states"))}
    states = cuscan.selective_scan(**scan, return_states=True)[1]
    ones = np.ones((2, 3, 4), F32)
    delta, A, u, B = (given[name].astype(F64) for name in ("delta", "A", "u", "B"))
    gates = np.append(np.exp(delta[..., None] * A), np.ones((2, 1, 3, 4)), 1)
    after = np.cumprod(gates[:, ::-1], 1)[:, ::-1]  # gate t and all after it
    for plan in ({}, {"chunk": 32}):
        g = run(executor, given, plan, grad_out=None, grad_last_state=ones, states=states)
        np.testing.assert_allclose(g["u"], delta * np.einsum("btdn,btn->btd", after[:, 1:], B), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(g["B"], np.einsum("btdn,btd->btn", after[:, 1:], delta * u), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(g["h0"], after[:, 0], rtol=2e-5)
        assert not g["C"].any()
        assert not g["D"].any()
    zero = run(executor, given, grad_out=None, grad_last_state=0 * ones, states=states)
    assert not any(x.any() for x in zero.values() if x is not None)


@full_on_host
def test_the_gate_of_a_chunk_is_as_exact_as_those_of_its_steps(executor):
    # The sum of 512 deltas of 0.1 times A is an angle of 15 000, of which a plain sum in float32 loses 0.01.
    delta, one = np.full((1, 2048, 1), 0.1, F32), np.ones((1, 2048, 1), np.complex64)
    given = {"u": 0 * delta, "delta": delta, "A": one[0, :1] * (-1e-3 + 300j), "B": one, "C": one}
    given |= {"h0": one[:, :1], "grad_last_state": one[:, :1]}
    g = run(executor, given, {"chunk": 512})
    oracle.assert_scan_close(g["h0"], *_bounds.selective_scan_vjp(**given)["h0"])


@full_on_host
def test_limits_let_through_what_lies_on_them(executor):
    ones = np.ones((1, 5, 1), F32)
    delta = np.array([0.25, 0.5, 1, 2, 4], F32).reshape(1, 5, 1)
    given = {"u": ones, "delta": delta, "A": np.zeros((1, 1), F32), "B": ones, "C": ones, "grad_out": ones}
    for limit, passes in (((0.5, 2.0), [0, 1, 1, 1, 0]), ((1.0, 1.0), [0, 0, 1, 0, 0]), ((0.0, 0.0), [0] * 5)):
        g = run(executor, given, delta_limit=limit, delta_bias=np.zeros(1, F32))
        # y is the running sum of delta u, so that step t is in 5 - t of the results.
        np.testing.assert_array_equal(g["delta"].ravel(), passes * np.arange(5, 0, -1))
        np.testing.assert_array_equal(g["delta_bias"], [np.dot(passes, np.arange(5, 0, -1))])
    delta[0, 1] = np.nan
    given = problem(1, 5, 1, 1, D=LAID).arguments() | {"delta": delta, "grad_last_state": None}
    g = run(executor, given, delta_limit=(0.0, 1.0))
    assert g["delta"][0, 1] == 0
    assert np.isnan(run(executor, given)["delta"][0, 1])


@pytest.mark.parametrize("seed", range(4))
def test_a_reset_at_the_first_step_hides_h0(executor, seed):
    fields = {"dtype": "bfloat16", **MARKED, "h0": LAID, **(PACKED if seed % 2 else {})}
    given = problem(2, 90, 3, 2, **fields).arguments()
    reset = np.zeros_like(given["reset"])
    offsets = given["cu_seqlens"]
    begins = np.array([0]) if offsets is None else offsets[:-1]
    last = (np.array([90]) if offsets is None else offsets[1:]) - 1
    reverse = seed > 1
    reset[:, (last if reverse else begins)[last >= begins]] = True
    reset[:, 40] = True
    for plan in ({}, {"chunk": 32}):
        g = run(executor, given, plan, states=None, mask=None, reset=reset, reverse=reverse)
        if offsets is None:
            assert not g["h0"].any()
        else:
            empty = last < begins
            np.testing.assert_array_equal(g["h0"][empty], given["grad_last_state"][empty])
            assert not g["h0"][~empty].any()


# what must not be read, or reach


def unmarked(kind):
    return {name: x for name, x in kind.items() if name not in MARKED}


WITH_CUTS = kinds("bfloat16 segmented", "float32 time segmented", "bfloat16 complex segmented")


@WITH_CUTS
@DIRECTIONS
def test_nothing_gets_from_one_sequence_to_another(executor, kind, reverse):
    fields = {**EVERYTHING, **PACKED, **unmarked(kind), "reverse": reverse}
    given = problem(1, 90, 3, 4, saved=None, **fields).arguments()
    begin, end = given["cu_seqlens"][2:4]
    inside = np.zeros((1, 90), bool)
    inside[:, begin:end] = True
    alone = {"grad_out": given["grad_out"].copy(), "grad_last_state": given["grad_last_state"].copy()}
    by_time(given, alone["grad_out"])[~inside] = 0
    alone["grad_last_state"][np.arange(6) != 2] = 0
    for plan in ({}, {"chunk": 32}):
        clean = run(executor, given, plan)
        g = run(executor, given, plan, **alone)
        assert not g["h0"][np.arange(6) != 2].any()
        assert g["h0"][2].any()
        for name in varying(given):
            assert not by_time(given, g[name])[~inside].any()
            assert by_time(given, g[name])[inside].any()
        for name in (*varying(given), "grad_out", "h0", "grad_last_state"):
            poisoned = given[name].copy()
            if name in ("h0", "grad_last_state"):
                poisoned[2, 0] = np.nan
            else:
                by_time(given, poisoned)[0, begin + 5] = np.nan
            g = run(executor, given, plan, **{name: poisoned})
            for other in varying(given):
                x, y = (by_time(given, each[other])[~inside] for each in (g, clean))
                np.testing.assert_array_equal(x, y, err_msg=f"{other}, NaN in {name}")
            np.testing.assert_array_equal(g["h0"][np.arange(6) != 2], clean["h0"][np.arange(6) != 2])


@WITH_CUTS
@DIRECTIONS
def test_what_a_masked_step_holds_changes_no_bit(executor, kind, reverse):
    for seed in range(3):
        fields = {**EVERYTHING, **MARKED, **kind, "reverse": reverse, **(PACKED if seed == 2 else {})}
        given = problem(2, 90, 3, 4, saved=None, seed=seed, **fields).arguments()
        counts = np.random.default_rng(seed).random(given["mask"].shape) < 0.6
        holding = []
        for value in (1.0, np.nan):
            changed = {name: given[name].copy() for name in (*varying(given), "grad_out")}
            for x in changed.values():
                by_time(given, x)[~counts] = value
            holding.append(run(executor, given, {"chunk": 32}, mask=counts, **changed))
        assert_same_bits(*holding)
        for name in varying(given):
            assert not by_time(given, holding[0][name])[~counts].any()


@kinds("bfloat16 segmented", "float32 time")
def test_what_is_not_finite_stays_in_its_row(executor, kind):
    given = problem(2, 34, 4, 3, groups=2, saved=None, **EVERYTHING, **unmarked(kind)).arguments()
    if unmarked(kind) != kind:
        given["mask"] = np.ones((2, 34), bool)
    clean = run(executor, given)
    for name in (*varying(given), "grad_out", "h0", "grad_last_state"):
        for poison in (np.nan, np.inf):
            x = given[name].copy()
            x[1] = poison
            g = run(executor, given, **{name: x})
            for other in (*varying(given), "h0"):
                np.testing.assert_array_equal(g[other][0], clean[other][0], err_msg=f"{other}, {poison} in {name}")


# bits


@FEW
def test_the_same_call_gives_the_same_bits(executor, kind):
    one = problem(2, 40, 5, 20, **EVERYTHING, **kind).arguments()
    other = problem(1, 20, 33, 3, seed=1, **kind).arguments()
    for plan in ({}, {"chunk": 32}, {"parts": 1}):
        first = run(executor, one, plan)
        run(executor, other, plan)
        assert_same_bits(run(executor, one, plan), first)


@kinds("bfloat16 segmented", "float32 time", "float32 time segmented", "bfloat16 complex segmented")
def test_states_given_or_computed_again_give_the_same_bits(executor, kind):
    for number, marks in enumerate(({}, PACKED) if "mask" in kind else ({},)):
        one = problem(2, 70, 5, 20, seed=number, saved=None, **EVERYTHING, **marks, **kind).arguments()
        scan = {name: x for name, x in one.items() if not name.startswith(("grad_", "states"))}
        for plan in ({}, {"schedule": Schedule.SPLIT, "chunk": 32}):
            with forced(**plan):
                states = executor(cuscan.selective_scan, **scan, return_states=True)[-1]
            assert_same_bits(run(executor, one, plan), run(executor, one, plan, states=states))


@kinds(*QUICK_BACKWARD)
def test_the_order_of_threads_changes_no_bit(host_executor, kind):
    one = problem(2, 42, 5, 20, **EVERYTHING, **kind).arguments()
    first = run(host_executor, one, {"chunk": 32})
    for order in ("reverse", "random"):
        executor = Host("checked", order)
        assert_same_bits(run(lambda function, **given: executor(function, given), one, {"chunk": 32}), first)  # noqa: B023


@kinds("float32 time", "float32 time segmented", "bfloat16 time")
def test_the_two_layouts_give_the_same_bits(executor, kind):
    bdl = problem(2, 70, 5, 20, groups=1, **EVERYTHING, **kind).arguments()
    bld = {name: np.moveaxis(bdl[name], -1, 1).copy() for name in (*varying(bdl), "grad_out")}
    for plan in ({}, {"chunk": 32}):
        g, other = run(executor, bdl, plan), run(executor, {**bdl, **bld, "layout": "bld"}, plan)
        g |= {name: np.moveaxis(g[name], -1, 1) for name in varying(bdl)}
        # The order of the sums over batch and time that threads do follows the order of the axes.
        summed = ("D", "delta_bias")
        assert_same_bits(g, other, [name for name in NAMES if name not in summed])
        for name in summed:
            np.testing.assert_allclose(g[name].astype(float), other[name].astype(float), rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "gaps": lambda axes: Layout(steps=(2,) * axes),
    "backwards": lambda axes: Layout(steps=(-1,) * axes),
    "padded": lambda _: Layout(pad=3),
    "not aligned": lambda _: Layout(skew=1),
    "batch inside": lambda axes: Layout(order=(*range(1, axes - 1), 0, axes - 1) if axes > 1 else None),
}


@pytest.mark.parametrize("how", LAYOUTS)
@FEW
def test_where_items_lie_changes_no_bit(executor, kind, how):
    axes = {"u": 3, "delta": 3, "A": 2, "B": 3, "C": 3, "D": 1, "z": 3, "delta_bias": 1, "h0": 3}
    axes |= {name: 2 for name in MARKED if name in kind}
    plain = problem(2, 40, 6, 5, **{**EVERYTHING, **kind, **dict.fromkeys(axes, LAID)})
    lie = LAYOUTS[how]
    other = replace(
        plain,
        of=replace(plain.of, **{name: lie(n) for name, n in axes.items()}),
        grad=lie(3), grad_last=lie(3), saved=lie(4),
    )  # fmt: skip
    assert_same_bits(run(executor, other.arguments()), run(executor, plain.arguments()))


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=full_on_host), 2])
@FEW
def test_broadcast_inputs(executor, kind, axis):
    steps = Layout(steps=tuple(int(d != axis) for d in range(3)))
    fields = {**EVERYTHING, **kind, **dict.fromkeys(("u", "delta", "B", "C", "z", "h0"), steps)}
    check(executor, problem(2, 34, 6, 5, grad=steps, grad_last=steps, **fields))


# sizes


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 0, 2), (2, 5, 3, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("layout", ["bld", "bdl"])
def test_sizes_0_and_1(executor, layout, sizes):
    for number, options in enumerate(({}, EVERYTHING, EXACT)):
        for marks in ({}, MARKED, PACKED) if 0 in sizes[1:] else ({},):
            for grads in ({"grad": None}, {"grad_last": None}):
                check(executor, problem(*sizes, layout=layout, seed=number, **options, **marks, **grads))


@pytest.mark.parametrize("options", [{}, {"D": LAID}, {"z": LAID}, {"D": LAID, "z": LAID}], ids="-".join)
@pytest.mark.parametrize("grad", [None, LAID], ids=["absent", "given"])
def test_without_states_delta_receives_nothing(executor, options, grad):
    for seed in range(4):
        check(executor, problem(1, 3, 2, 0, values="nan", seed=seed, grad=grad, softplus=True, **options))


def test_without_states_silus_slope_is_exact_where_a_sigmoid_is_nearly_1(executor):
    # Found by the fuzzer: z is 36.7.
    given = SelectiveProblem(seed=803384759, length=2, channels=41, state=0, dtype="float64", values="nan",
                             D=LAID, z=LAID, delta_bias=LAID)  # fmt: skip
    check(executor, SelectiveGradientProblem(of=given))


@full_on_host
def test_nan_is_not_hidden_where_softplus_is_flat(executor):
    # Found by the fuzzer: within its limits a delta of 0 has the slope 0, which is not that of one beyond them.
    given = SelectiveProblem(seed=3765397, length=1, channels=3, values="nan", softplus=True, limit=(0.0, float("inf")))
    check(executor, SelectiveGradientProblem(of=given))


def test_sequences_without_steps_hand_on_what_they_get(executor):
    fields = {"dtype": "bfloat16", "cu_seqlens": LAID, "lengths": (0, 0, 0), "head": 7, **EXACT}
    given = problem(1, 20, 3, 2, **fields).arguments()
    for reverse in (False, True):
        g = run(executor, given, reverse=reverse)
        np.testing.assert_array_equal(g["h0"], given["grad_last_state"])
        assert not any(g[name].any() for name in NAMES if name not in ("h0", "z"))
        assert not run(executor, given, grad_last_state=None)["h0"].any()


def test_a_view_past_element_2_to_31(cuda_executor):
    cupy = cuda_executor.xp
    one = problem(2, 40, 4, 3, grad_last=None)
    given = {name: cuda_executor.asarray(x) if isinstance(x, np.ndarray) else x for name, x in one.arguments().items()}
    big = cupy.zeros(2**31 + 2**12, F32)
    apart = cupy.lib.stride_tricks.as_strided(big, (2, 40, 4), (2**33 + 1024, 16, 4))
    for name in ("u", "grad_out"):
        apart[...] = given[name]
        gradients = cuscan.selective_scan_vjp(**{**given, name: apart})
        for name_, (value, bound) in one.expected().items():
            oracle.assert_scan_close(getattr(gradients, name_).get(), value, bound)


def test_grad_dtype_keeps_what_float16_cannot(executor):
    ones = np.ones((1, 8, 2), BF16)
    given = {"u": ones, "delta": ones, "A": np.zeros((2, 2), F32), "B": ones, "C": ones, "grad_out": 8192 * ones}
    given["mask"] = np.ones((1, 8), bool)
    for dtype, largest in (("float16", np.inf), ("float32", 131_072), ("bfloat16", 131_072), (np.float64, 131_072)):
        g = run(executor, given, grad_dtype=dtype)
        assert g["u"][0, 0, 0] == largest
        assert_types(g, {**dict.fromkeys(NAMES), **given, "grad_dtype": BF16 if dtype == "bfloat16" else dtype})


# plans and memory


@pytest.mark.parametrize("multiprocessors", [1, 46, 132])
def test_plans(multiprocessors):
    limits = replace(H200, multiprocessors=multiprocessors)
    kind = backward_kind(selective_kinds()[0])
    sizes = (1, 3, 40), (1, 31, 33, 4096, 100_000), (32, 1536), (16, 100), (1, 4)
    for batch, length, channels, state, groups in itertools.product(*sizes):
        given = SelectiveSizes(kind, batch, length, channels, state, groups)
        plan = plan_backward(given, limits)
        tiles = groups * -(-channels // groups // backward_tile(kind).channels)
        order = plan.order
        assert order.chunk % STATE_INTERVAL == 0 or (order.chunk, plan.chunks) == (length, 1)
        assert (plan.chunks - 1) * order.chunk < length <= plan.chunks * order.chunk
        assert (plan.parts - 1) * order.part < batch <= plan.parts * order.part
        # What the docstring says of scratch.
        assert plan.parts * plan.chunks * tiles <= max(16 * multiprocessors, tiles)
        assert plan == plan_backward(given, limits)
    with forced(chunk=33, parts=2):
        plan = plan_backward(SelectiveSizes(kind, 3, 100, 32, 16, 1), limits)
    assert (plan.order.chunk, plan.chunks, plan.order.part, plan.parts) == (64, 2, 2, 2)
    with forced(chunk=100, pieces=3):
        order = plan_backward(SelectiveSizes(kind, 1, 1000, 32, 16, 1), limits).order
    assert (order.chunk, order.summary) == (128, 64)


def test_every_kind_fits_a_chip_or_says_that_it_does_not():
    for kind in map(backward_kind, selective_kinds()):
        memory = backward_tile(kind).shared_memory(kind)
        assert memory <= H200.shared_memory
        given = SelectiveSizes(kind, 1, 10, 32, 16, 1)
        with pytest.raises(ValueError, match=rf"needs {memory} bytes of shared memory a block .* has {memory - 1}"):
            plan_backward(given, replace(H200, shared_memory=memory - 1))


@pytest.mark.full
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("state", [16, 40])
def test_memory_is_gradients_and_the_scratch_of_the_plan(host_executor, marked, state):
    batch, length, channels, tiles, chunks, parts = 3, 70, 40, 2, 3, 2
    kind = {"dtype": "bfloat16", "reset": LAID} if marked else {}
    given = problem(batch, length, channels, state, D=LAID, z=LAID, delta_bias=LAID, h0=LAID, **kind).arguments()
    gradients = [given[name].nbytes for name in NAMES]
    couples = [tiles * batch * length * state * 4] * 2
    rows = [parts * chunks * channels * n * 4 for n in (state, 1, 1)]
    kept = [batch * (chunks - 1) * state * channels * 4] * 2
    slices = [3 * parts * chunks * tiles * 32 * n * 4 for n in (48, 32)] * (state > 16)  # 40 states are three of 16
    marks = [batch * 3 * 16, batch * (chunks - 1), batch * 16] * marked
    run(host_executor, given, {"chunk": 32, "parts": parts})
    assert sorted(host_executor.allocated) == sorted(gradients + couples + rows + kept + slices + marks)
    run(host_executor, given, {"chunk": length, "parts": 1})
    rows, slices = ([n // (parts * chunks) for n in each] for each in (rows, slices))
    assert sorted(host_executor.allocated) == sorted(gradients + couples + rows + slices + marks[:1])
    if marked:  # where the tier has the kernels of the scan
        more = sum(host_executor.allocated)
        run(host_executor, given, {"chunk": length, "parts": 1}, states=None)
        # The slices of the scan are larger: 40 states take three.
        partial = [4 * batch * length * channels] * (state > 16)
        assert sum(host_executor.allocated) == more + given["states"].nbytes + sum(partial) + batch * 3 * 16


def test_peak_on_a_gpu(cuda_executor):
    cupy = cuda_executor.xp
    batch, length, channels, state = 2, 4096, 256, 16
    u = cupy.ones((batch, length, channels), F32)
    A, B = -cupy.ones((channels, state), F32), cupy.ones((batch, length, state), F32)
    states = cuscan.selective_scan(u, u, A, B, B, return_states=True)[-1]
    for plan, rows, kept in (({"chunk": length, "parts": 2}, 2, 0), ({"chunk": 512, "parts": 1}, 8, 2 * 14)):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), forced(**plan):
            gradients = cuscan.selective_scan_vjp(u, u, A, B, B, grad_out=u, states=states)
            float(gradients.A[0, 0])
            outputs = sum(x.nbytes for x in gradients if x is not None)
            couples = 2 * channels // 32 * B.nbytes
            scratch = couples + (rows + kept * batch) * channels * (state + 2) * 4
            assert pool.total_bytes() <= outputs + scratch + 16 * 512


def test_the_same_bits_under_load(cuda_executor):
    """In 50 runs, beside kernels of another stream that come and go."""
    cupy = cuda_executor.xp
    r = np.random.default_rng(0)
    u, grad = (cupy.asarray(r.standard_normal((3, 2048, 96)).astype(F32)) for _ in range(2))
    B, C = (cupy.asarray(r.standard_normal((3, 2048, 16)).astype(F32)) for _ in range(2))
    A, delta = -cupy.ones((96, 16), F32), 0.1 * abs(u)
    other, load = cupy.cuda.Stream(non_blocking=True), cupy.ones(1 << 22, F32)
    for plan in ({"parts": 3, "chunk": 2048}, {"parts": 1, "chunk": 512}):
        first = None
        for run in range(50):
            with other:
                for _ in range(run % 7):
                    load += 1
            with forced(**plan):
                y, states = cuscan.selective_scan(u, delta, A, B, C, return_states=True)
                found = (y, *cuscan.selective_scan_vjp(u, delta, A, B, C, grad_out=grad, states=states))
            found = [x.view(np.uint32) for x in found if x is not None]
            first = first or found
            assert all((x == expected).all() for x, expected in zip(found, first, strict=True))
    other.synchronize()


def test_peak_of_numpy_is_far_below_all_states():
    u = np.ones((1, 1 << 11, 64), F32)
    A, B = -np.ones((64, 32), F32), np.ones((1, 1 << 11, 32), F32)
    tracemalloc.start()
    try:
        cuscan.selective_scan_vjp(u, u, A, B, B, grad_out=u)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < u.nbytes * 32 / 3


# wrong calls


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def right(**changes):
    """Batch 2, length 5, 4 channels, 3 states."""
    given = {"u": ones(2, 5, 4), "delta": ones(2, 5, 4), "A": ones(4, 3), "B": ones(2, 5, 3), "C": ones(2, 5, 3)}
    return {**given, "grad_out": ones(2, 5, 4), **changes}


def packed(**changes):
    per_step = {"u": 4, "delta": 4, "B": 3, "C": 3, "grad_out": 4}
    given = {name: ones(1, 5, n) for name, n in per_step.items()}
    return right(**given | {"cu_seqlens": np.array([0, 2, 2, 5])} | changes)


BF16_CALL = {name: ones(2, 5, n, dtype=BF16) for name, n in {"u": 4, "delta": 4, "B": 3, "C": 3}.items()}
WRONG = [
    # kinds
    *((right(**{name: None}), TypeError, [f"{name} must be an array", "None"]) for name in ("u", "delta", *"ABC")),
    *(
        (right(**{name: 1.0}), TypeError, [f"{name} must be an array", "float"])
        for name in (*NAMES, "grad_out", "grad_last_state", "states", "mask", "reset", "cu_seqlens")
    ),
    (right(grad_out=[1.0]), TypeError, ["grad_out must be", "list"]),
    (right(states=[1.0]), TypeError, ["states must be", "list"]),
    (right(delta_softplus=1), TypeError, ["delta_softplus must be True or False", "int"]),
    (right(reverse=None), TypeError, ["reverse must be True or False", "NoneType"]),
    (right(delta_limit=1.0), TypeError, ["delta_limit must be a pair of numbers"]),
    (right(delta_limit=(2, 1)), ValueError, ["delta_limit", "lowest <= highest", "(2, 1)"]),
    (right(layout="dbl"), ValueError, ["layout must be 'bld' or 'bdl'", "'dbl'"]),
    (right(grad_out=None), ValueError, ["grad_out or grad_last_state must be given"]),
    # dtypes
    (right(u=ones(2, 5, 4, dtype=int)), TypeError, ["u must be", "int64"]),
    (right(delta=ones(2, 5, 4, dtype=F64)), TypeError, ["delta must be u's float32", "float64"]),
    (right(z=ones(2, 5, 4, dtype=BF16)), TypeError, ["z must be u's float32", "bfloat16"]),
    (right(A=ones(4, 3, dtype=int)), TypeError, ["A must be", "int64"]),
    (right(A=ones(4, 3, dtype="complex64")), TypeError, ["B must be A's complex64", "float32"]),
    (right(C=ones(2, 5, 3, dtype=F64)), TypeError, ["C must be u's float32", "float64"]),
    (right(D=ones(4, dtype=int)), TypeError, ["D must be", "int64"]),
    (right(delta_bias=ones(4, dtype="complex64")), TypeError, ["delta_bias must be", "complex64"]),
    (right(h0=ones(2, 4, 3, dtype=F64)), TypeError, ["h0 must be float32", "float64"]),
    (right(mask=ones(2, 5)), TypeError, ["mask must be bool", "float32"]),
    (right(reset=ones(2, 5, dtype=int)), TypeError, ["reset must be bool", "int64"]),
    (packed(cu_seqlens=ones(4)), TypeError, ["cu_seqlens must be int32 or int64", "float32"]),
    (right(grad_out=ones(2, 5, 4, dtype=F64)), TypeError, ["grad_out must be u's float32", "float64"]),
    (right(grad_out=ones(2, 5, 4, dtype=BF16)), TypeError, ["grad_out must be u's float32", "bfloat16"]),
    (
        right(**BF16_CALL, grad_out=ones(2, 5, 4, dtype=np.float16)),
        TypeError,
        ["grad_out must be u's bfloat16 or float32", "float16"],
    ),
    (right(grad_out=ones(2, 5, 4, dtype="complex64")), TypeError, ["grad_out must be", "complex64"]),
    (right(grad_last_state=ones(2, 4, 3, dtype=BF16)), TypeError, ["grad_last_state must be float32", "bfloat16"]),
    (right(grad_last_state=ones(2, 4, 3, dtype=F64)), TypeError, ["grad_last_state must be float32", "float64"]),
    (right(states=ones(2, 1, 4, 3, dtype=F64)), TypeError, ["states must be float32", "float64"]),
    (right(grad_dtype=np.int32), TypeError, ["grad_dtype must be", "int32"]),
    (right(grad_dtype="complex64"), TypeError, ["grad_dtype must be", "float32", "complex64"]),
    # shapes
    (right(u=ones(5, 4)), ValueError, ["u must have three axes", "(5, 4)"]),
    (right(delta=ones(2, 4, 5)), ValueError, ["delta must have shape", "(2, 5, 4)", "(2, 4, 5)"]),
    (right(A=ones(3, 4)), ValueError, ["A must have shape (channels, state)", "(3, 4)"]),
    (right(B=ones(2, 5, 2)), ValueError, ["B must have shape", "(2, 5, 3)", "(2, 5, 2)"]),
    (right(C=ones(2, 5, 3, 3)), ValueError, ["C has 3 groups", "4 channels"]),
    (right(D=ones(3)), ValueError, ["D must have shape (channels,) = (4,)", "(3,)"]),
    (right(z=ones(2, 5, 1)), ValueError, ["z must have shape", "(2, 5, 4)", "(2, 5, 1)"]),
    (right(delta_bias=ones(1)), ValueError, ["delta_bias must have shape (channels,) = (4,)", "(1,)"]),
    (right(h0=ones(4, 3)), ValueError, ["h0 must have shape (batch, channels, state) = (2, 4, 3)", "(4, 3)"]),
    (right(mask=ones(5, dtype=bool)), ValueError, ["mask must have shape (batch, length) = (2, 5)", "(5,)"]),
    (right(reset=ones(2, 4, dtype=bool)), ValueError, ["reset must have shape (batch, length) = (2, 5)", "(2, 4)"]),
    (right(cu_seqlens=np.array([0, 5])), ValueError, ["with cu_seqlens the batch must be 1", "(2, 5, 4)"]),
    (packed(cu_seqlens=np.array([0, 6])), ValueError, ["cu_seqlens must lie in [0, 5]"]),
    (packed(cu_seqlens=np.array([0, 3, 2])), ValueError, ["cu_seqlens must not descend"]),
    (right(grad_out=ones(2, 4, 5)), ValueError, ["grad_out must have shape", "(2, 5, 4)", "(2, 4, 5)"]),
    (right(grad_out=ones(2, 5, 1)), ValueError, ["grad_out must have shape", "(2, 5, 4)", "(2, 5, 1)"]),
    (
        right(grad_last_state=ones(4, 3)),
        ValueError,
        ["grad_last_state must have shape (batch, channels, state) = (2, 4, 3)", "(4, 3)"],
    ),
    (
        packed(grad_last_state=ones(1, 4, 3)),
        ValueError,
        ["grad_last_state must have shape (sequences, channels, state) = (3, 4, 3)", "(1, 4, 3)"],
    ),
    (
        right(states=ones(2, 2, 4, 3)),
        ValueError,
        ["states must have shape", "ceil(length / STATE_INTERVAL)", "(2, 1, 4, 3)", "(2, 2, 4, 3)"],
    ),
    (right(states=ones(2, 1, 3, 4)), ValueError, ["states must have shape", "(2, 1, 4, 3)", "(2, 1, 3, 4)"]),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[2][0])
def test_a_wrong_call_is_refused_in_words(wrong):
    given, error, words = wrong
    with pytest.raises(error) as caught:
        cuscan.selective_scan_vjp(**given)
    for word in words:
        assert word in str(caught.value)


def test_a_right_call_is_none_of_them():
    for given in (right(), packed(), right(**BF16_CALL, grad_out=ones(2, 5, 4, dtype=BF16)), right(**BF16_CALL)):
        assert_types(run(lambda function, **x: function(**x), given), {**dict.fromkeys(NAMES), **given})
