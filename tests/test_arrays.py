"""What is refused, in which words; what may overlap; whose arrays are taken."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest

import cuscan
from cuscan import _arrays
from cuscan.testing import oracle

F32, F64, BF16 = np.float32, np.float64, ml_dtypes.bfloat16


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


def linear(a, b, h0=None, **options):
    return "linear_scan", (a, b, h0), options


def selective(**changes):
    """A right call with some arguments changed: batch 2, length 5, 4 channels, 3 states."""
    right = {"u": ones(2, 5, 4), "delta": ones(2, 5, 4), "A": ones(4, 3), "B": ones(2, 5, 3), "C": ones(2, 5, 3)}
    return "selective_scan", (), {**right, **changes}


def bdl(**changes):
    turned = {"u": ones(2, 4, 5), "delta": ones(2, 4, 5), "B": ones(2, 3, 5), "C": ones(2, 3, 5), "layout": "bdl"}
    return selective(**{**turned, **changes})


B = ones(3, 5)
GROUPED = {"B": ones(2, 5, 2, 3), "C": ones(2, 5, 2, 3)}
# What is wrong, the exception, and what the message must say: the argument, what came, what was expected.
WRONG = [
    # kinds
    (linear(None, B, axis=1), TypeError, ["a must be an array or a scalar", "None"]),
    (linear(0.5, None), TypeError, ["b must be an array", "None"]),
    (linear(0.5, 1.0), TypeError, ["b must be an array", "float"]),
    (linear(0.5, F32(1)), TypeError, ["b must be an array", "float32"]),
    (linear(0.5, [1.0, 2.0]), TypeError, ["b must be", "CuPy or NumPy", "list"]),
    (linear([0.5], B, axis=1), TypeError, ["a must be", "list"]),
    (linear("0.5", B, axis=1), TypeError, ["a must be", "str"]),
    (linear(np.True_, B, axis=1), TypeError, ["a must be", "bool"]),
    (linear(0.5, B, (0.0,) * 3, axis=1), TypeError, ["h0 must be", "tuple"]),
    (linear(0.5, B, axis=1, out=[0.0]), TypeError, ["out must be", "list"]),
    (linear(0.5, B, axis=1, reverse=1), TypeError, ["reverse must be True or False", "int"]),
    (linear(0.5, B, axis=1, reverse=B), TypeError, ["reverse must be True or False", "ndarray"]),
    (
        linear(0.5, B, axis=1, return_last_state=None),
        TypeError,
        ["return_last_state must be True or False", "NoneType"],
    ),
    # dtypes
    (linear(0.5, ones(3, dtype=int)), TypeError, ["b must be", "float32", "int64"]),
    (linear(0.5, ones(3, dtype=bool)), TypeError, ["b must be", "bool"]),
    (linear(0.5, np.array(["x"])), TypeError, ["b must be", "str"]),
    (linear(ones(3, 5, dtype=F64), B, axis=1), TypeError, ["a must be b's float32", "float64"]),
    (linear(ones(3, 5, dtype=BF16), B, axis=1), TypeError, ["a must be b's float32", "bfloat16"]),
    (linear(ones(5), ones(5, dtype=BF16)), TypeError, ["a must be b's bfloat16", "float32"]),
    (linear(1j, B, axis=1), TypeError, ["a is complex", "b is float32"]),
    (linear(0.5, B, ones(3, dtype=F64), axis=1), TypeError, ["h0 must be float32", "float64"]),
    (
        linear(0.5, ones(5, dtype=BF16), ones(dtype=BF16)),
        TypeError,
        ["h0 must be float32", "accumulation type of bfloat16", "bfloat16"],
    ),
    (linear(0.5, B, axis=1, out_dtype=np.int32), TypeError, ["out_dtype must be", "int32"]),
    (linear(0.5, B, axis=1, out_dtype="complex64"), TypeError, ["out_dtype must be", "float32", "complex64"]),
    (linear(0.5, ones(5, dtype="complex64"), out_dtype=F32), TypeError, ["out_dtype must be", "complex64", "float32"]),
    (
        linear(0.5, B, axis=1, out=ones(3, 5), out_dtype=F64),
        TypeError,
        ["out must have out_dtype's float64", "float32"],
    ),
    (linear(0.5, B, axis=1, out=ones(3, 5, dtype=int)), TypeError, ["out must be", "int64"]),
    (linear(0.5, B, axis=1, out=ones(3, 5, dtype="complex64")), TypeError, ["out must be", "complex64"]),
    # axes and shapes
    (linear(0.5, B), ValueError, ["axis must be given", "2 dimensions"]),
    (linear(0.5, ones()), ValueError, ["axis", "0 dimensions"]),
    (linear(0.5, B, axis=2), ValueError, ["axis must be in [-2, 2)", "(3, 5)", "got 2"]),
    (linear(0.5, B, axis=-3), ValueError, ["axis must be in [-2, 2)", "got -3"]),
    (linear(0.5, B, axis=1.0), TypeError, ["axis must be an int", "float"]),
    (linear(0.5, B, axis=True), TypeError, ["axis must be an int", "bool"]),
    (linear(0.5, B, axis=(0, 1)), TypeError, ["axis must be an int", "tuple"]),
    (linear(ones(4), B, axis=1), ValueError, ["a must broadcast to b's shape (3, 5)", "(4,)"]),
    (linear(ones(1, 3, 5), B, axis=1), ValueError, ["a must broadcast to b's shape (3, 5)", "(1, 3, 5)"]),
    (linear(0.5, B, ones(5), axis=1), ValueError, ["h0 must have shape", "(3,)", "(5,)"]),
    (linear(0.5, B, ones(3, 1), axis=1), ValueError, ["h0 must have shape", "(3,)", "(3, 1)"]),
    (linear(0.5, B, axis=1, out=ones(5, 3)), ValueError, ["out must have the result's shape (3, 5)", "(5, 3)"]),
    (linear(0.5, B, axis=1, out=read_only(ones(3, 5))), ValueError, ["out must be writable"]),
    (
        linear(0.5, B, axis=1, out=np.lib.stride_tricks.as_strided(ones(5), (3, 5), (0, 4))),
        ValueError,
        ["out must have a place for each item"],
    ),
    # selective_scan: kinds
    *(
        (selective(**{name: None}), TypeError, [f"{name} must be an array", "None"])
        for name in ("u", "delta", "A", "B", "C")
    ),
    *(
        (selective(**{name: 1.0}), TypeError, [f"{name} must be an array", "float"])
        for name in ("u", "delta", "A", "D", "z", "delta_bias", "h0")
    ),
    (selective(D=[1.0] * 4), TypeError, ["D must be", "list"]),
    (selective(delta_softplus=ones(4)), TypeError, ["delta_softplus must be True or False", "ndarray"]),
    (selective(delta_softplus=1), TypeError, ["delta_softplus must be True or False", "int"]),
    (selective(reverse=0), TypeError, ["reverse must be True or False", "int"]),
    (selective(return_last_state="yes"), TypeError, ["return_last_state must be True or False", "str"]),
    (selective(delta_limit=1.0), TypeError, ["delta_limit must be a pair of numbers", "1.0"]),
    (selective(delta_limit=(1.0,)), TypeError, ["delta_limit must be a pair of numbers", "(1.0,)"]),
    (selective(delta_limit=("a", "b")), TypeError, ["delta_limit must be a pair of numbers", "'a'"]),
    # selective_scan: dtypes
    (selective(u=ones(2, 5, 4, dtype=int)), TypeError, ["u must be", "float32", "int64"]),
    (selective(u=ones(2, 5, 4, dtype="complex64")), TypeError, ["u must be", "complex64"]),
    (selective(delta=ones(2, 5, 4, dtype=F64)), TypeError, ["delta must be u's float32", "float64"]),
    (
        selective(u=ones(2, 5, 4, dtype=BF16), delta=ones(2, 5, 4, dtype=np.float16)),
        TypeError,
        ["delta must be u's bfloat16 or float32", "float16"],
    ),
    (selective(z=ones(2, 5, 4, dtype=BF16)), TypeError, ["z must be u's float32", "bfloat16"]),
    (selective(u=ones(2, 5, 4, dtype=BF16), z=ones(2, 5, 4)), TypeError, ["z must be u's bfloat16", "float32"]),
    (selective(B=ones(2, 5, 3, dtype=F64)), TypeError, ["B must be u's float32", "float64"]),
    (selective(C=ones(2, 5, 3, dtype=BF16)), TypeError, ["C must be u's float32", "bfloat16"]),
    (selective(C=ones(2, 5, 3, dtype="complex64")), TypeError, ["C must be A's float32", "complex64"]),
    (selective(A=ones(4, 3, dtype="complex64")), TypeError, ["B must be A's complex64", "float32"]),
    (selective(A=ones(4, 3, dtype="complex128")), TypeError, ["A must be", "complex128"]),
    (selective(A=ones(4, 3, dtype=int)), TypeError, ["A must be", "int64"]),
    (selective(D=ones(4, dtype=int)), TypeError, ["D must be", "int64"]),
    (selective(delta_bias=ones(4, dtype="complex64")), TypeError, ["delta_bias must be", "complex64"]),
    (selective(h0=ones(2, 4, 3, dtype=F64)), TypeError, ["h0 must be float32", "float64"]),
    (selective(u=ones(2, 5, 4, dtype=F64)), TypeError, ["delta must be u's float64", "float32"]),
    (
        selective(**{n: ones(2, 5, 4, dtype=F64) for n in ("u", "delta")}, A=ones(4, 3, dtype="complex64")),
        TypeError,
        ["A is complex64", "u is float64"],
    ),
    (selective(out_dtype=int), TypeError, ["out_dtype must be", "int64"]),
    (selective(out=ones(2, 5, 4), out_dtype=F64), TypeError, ["out must have out_dtype's float64", "float32"]),
    # selective_scan: shapes and values
    (selective(u=ones(2, 5)), ValueError, ["u must have three axes (batch, length, channels)", "(2, 5)"]),
    (selective(A=ones(4)), ValueError, ["A must have two axes (channels, state)", "(4,)"]),
    (selective(A=ones(3, 4)), ValueError, ["A must have shape (channels, state) = (4, 4)", "(3, 4)"]),
    (selective(A=ones(5, 3)), ValueError, ["A must have shape", "(5, 3)", "layout='bdl'"]),
    (
        selective(delta=ones(2, 5, 1)),
        ValueError,
        ["delta must have shape u's (batch, length, channels)", "(2, 5, 4)", "(2, 5, 1)"],
    ),
    (selective(delta=ones(2, 4, 5)), ValueError, ["delta must have shape", "(2, 4, 5)", "other layout"]),
    (selective(z=ones(2, 4, 5)), ValueError, ["z must have shape", "(2, 4, 5)", "other layout"]),
    (selective(D=ones(5)), ValueError, ["D must have shape (channels,) = (4,)", "(5,)"]),
    (selective(D=ones(4, 1)), ValueError, ["D must have shape (channels,) = (4,)", "(4, 1)"]),
    (selective(delta_bias=ones(3)), ValueError, ["delta_bias must have shape (channels,) = (4,)", "(3,)"]),
    (selective(h0=ones(2, 3, 4)), ValueError, ["h0 must have shape (batch, channels, state) = (2, 4, 3)", "(2, 3, 4)"]),
    (selective(B=ones(5)), ValueError, ["B must have shape (batch, length, state)", "(channels, state)", "(5,)"]),
    (selective(B=ones(2, 5, 4)), ValueError, ["B must have shape (batch, length, state) = (2, 5, 3)", "(2, 5, 4)"]),
    (selective(C=ones(2, 3, 5)), ValueError, ["C must have shape", "(2, 3, 5)", "layout='bdl'"]),
    (selective(B=ones(3, 4)), ValueError, ["B must have shape (channels, state) = (4, 3)", "(3, 4)"]),
    (selective(B=ones(2, 5, 3, 3), C=ones(2, 5, 3, 3)), ValueError, ["B has 3 groups", "4 channels"]),
    (selective(B=ones(2, 5, 0, 3)), ValueError, ["B has 0 groups", "4 channels"]),
    (selective(B=ones(2, 5, 2, 3)), ValueError, ["B and C must have the same number of groups", "2 and 1"]),
    (
        selective(**{**GROUPED, "C": ones(2, 2, 5, 3)}),
        ValueError,
        ["C must have shape (batch, length, groups, state)", "(2, 2, 5, 3)"],
    ),
    (bdl(A=ones(5, 3)), ValueError, ["A must have shape", "(5, 3)", "layout='bld'"]),
    (
        bdl(B=ones(2, 5, 3)),
        ValueError,
        ["B must have shape (batch, state, length) = (2, 3, 5)", "(2, 5, 3)", "layout='bld'"],
    ),
    (bdl(B=ones(2, 2, 5, 3)), ValueError, ["B must have shape (batch, groups, state, length)", "(2, 2, 5, 3)"]),
    (selective(layout="bdh"), ValueError, ["layout must be 'bld' or 'bdl'", "'bdh'"]),
    (selective(layout=None), ValueError, ["layout must be 'bld' or 'bdl'", "None"]),
    (selective(delta_limit=(2.0, 1.0)), ValueError, ["delta_limit must be (lowest, highest)", "(2.0, 1.0)"]),
    (selective(delta_limit=(float("nan"), 1.0)), ValueError, ["delta_limit must be (lowest, highest)", "nan"]),
    (selective(out=ones(2, 4, 5)), ValueError, ["out must have the result's shape (2, 5, 4)", "(2, 4, 5)"]),
    (selective(out=read_only(ones(2, 5, 4))), ValueError, ["out must be writable"]),
]


def test_the_table_is_long():
    assert len(WRONG) >= 60


def identify(wrong):
    (function, _, _), _, words = wrong
    return f"{function}: {' '.join(words)}"[:80]


@pytest.mark.parametrize("wrong", WRONG, ids=identify)
def test_a_wrong_call_is_refused_in_words_and_writes_nothing(wrong):
    (function, args, options), kind, words = wrong
    out = options.get("out")
    if out is None and "out_dtype" not in options:
        out = np.ones((2, 5, 4) if function == "selective_scan" else (3, 5), F32)
        options = {**options, "out": out}
    with pytest.raises(kind) as caught:
        getattr(cuscan, function)(*args, **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert type(caught.value) is kind
    if isinstance(out, np.ndarray):
        assert (out == 1).all()


# overlap


def strided_rows(buffer, start, step, shape=(3, 5)):
    itemsize = buffer.itemsize
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, (10 * step * itemsize, step * itemsize))


def test_out_may_be_exactly_b_or_a():
    a, b = np.full((3, 5), 0.5, F32), ones(3, 5)
    expected = cuscan.linear_scan(a, b, axis=1)
    for index in range(2):
        inputs = [a.copy(), b.copy()]
        h = cuscan.linear_scan(*inputs, axis=1, out=inputs[index])
        assert h is inputs[index]
        np.testing.assert_array_equal(h, expected)
        inputs = [a.copy(), b.copy()]
        same = inputs[index][:]  # another object for the same memory
        assert cuscan.linear_scan(*inputs, axis=1, out=same) is same
        np.testing.assert_array_equal(inputs[index], expected)


OVERLAPS = {
    "shifted by an item": lambda m: (m[:15].reshape(3, 5), m[1:16].reshape(3, 5)),
    "reversed": lambda m: (m[:15].reshape(3, 5), m[:15].reshape(3, 5)[:, ::-1]),
    "transposed": lambda m: (m[:9].reshape(3, 3), m[:9].reshape(3, 3).T),
    "one row in common": lambda m: (m[:15].reshape(3, 5), m[10:25].reshape(3, 5)),
    "one item in common": lambda m: (m[:15].reshape(3, 5), m[14:29].reshape(3, 5)),
    "every second item": lambda m: (strided_rows(m, 0, 2), strided_rows(m, 2, 2)),
}


@pytest.mark.parametrize("how", OVERLAPS)
def test_another_overlap_is_refused(how):
    memory = np.arange(100, dtype=F32)
    x, out = OVERLAPS[how](memory)
    before = memory.copy()
    other, rest = np.full(x.shape, 0.5, F32), np.zeros(3, F32)
    with pytest.raises(ValueError, match=r"out overlaps b in memory; it may only be exactly b or a"):
        cuscan.linear_scan(other, x, axis=1, out=out)
    with pytest.raises(ValueError, match=r"out overlaps a in memory"):
        cuscan.linear_scan(x, other, rest, axis=1, out=out)
    u = x[None]
    couple = np.ones((1, x.shape[0], 2), F32)
    for name in ("u", "delta", "z"):
        arrays = {"u": other[None], "delta": other[None], "z": other[None], name: u}
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            cuscan.selective_scan(**arrays, A=np.ones((x.shape[1], 2), F32), B=couple, C=couple, out=out[None])
    np.testing.assert_array_equal(memory, before)


def test_h0_and_a_broadcast_gate_must_not_be_in_out():
    memory = np.arange(40, dtype=F32)
    b = ones(3, 5)
    with pytest.raises(ValueError, match="out overlaps h0"):
        cuscan.linear_scan(0.5, b, memory[3:6], axis=1, out=memory[:15].reshape(3, 5))
    with pytest.raises(ValueError, match="out overlaps a"):
        cuscan.linear_scan(memory[:5], b, axis=1, out=memory[:15].reshape(3, 5))
    with pytest.raises(ValueError, match="out overlaps b"):  # the same items in another type
        cuscan.linear_scan(0.5, memory[:15].reshape(3, 5), axis=1, out=memory.view(np.float16)[:15].reshape(3, 5))


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "delta_bias", "h0"])
def test_selective_out_overlaps_no_input(name):
    memory = np.ones(200, F32)
    out = memory[:40].reshape(2, 5, 4)
    shape = {"A": (4, 3), "B": (2, 5, 3), "C": (2, 5, 3), "D": (4,), "delta_bias": (4,), "h0": (2, 4, 3)}[name]
    inside = memory[39 : 39 + np.prod(shape)].reshape(shape)
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
        cuscan.selective_scan(**{**selective()[2], name: inside, "out": out})
    with pytest.raises(ValueError, match="out overlaps u in memory"):
        cuscan.selective_scan(**{**selective()[2], "u": out, "out": out})


def test_interleaved_views_do_not_overlap():
    memory = np.zeros(100, F32)
    b, out = strided_rows(memory, 0, 2), strided_rows(memory, 1, 2)
    b[...] = np.arange(15).reshape(3, 5)
    expected = cuscan.linear_scan(0.5, b.copy(), axis=1)
    kept = b.copy()
    np.testing.assert_array_equal(cuscan.linear_scan(0.5, b, axis=1, out=out), expected)
    np.testing.assert_array_equal(b, kept)


def test_overlap_of_byte_patterns_is_exact():
    memory = np.zeros(64, np.uint8)
    x = np.ndarray((4,), F32, memory, 0, (16,))
    for offset, expected in ((4, False), (3, True), (8, False), (12, False), (13, True), (1, True)):
        y = np.ndarray((3,), F32, memory, offset, (16,))
        assert _arrays._overlap(x, y) is expected, offset


# whose arrays


class Exporter:
    """Has __dlpack__ and nothing else of an array."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


class GpuExporter(Exporter):
    def __dlpack_device__(self):
        return 2, 0


class CudaInterface:
    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (512, False), "version": 3}  # noqa: RUF012


def test_dlpack_of_the_cpu_is_numpy():
    b = np.arange(6, dtype=F32)
    h = cuscan.linear_scan(Exporter(np.full(6, 0.5, F32)), Exporter(b))
    assert type(h) is np.ndarray
    np.testing.assert_array_equal(h, oracle.linear_scan(0.5, b).value)
    _, _, arrays = selective()
    expected = cuscan.selective_scan(**arrays)
    y = cuscan.selective_scan(**{name: Exporter(x) for name, x in arrays.items()})
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("make", [CudaInterface, lambda: GpuExporter(ones(3))], ids=["interface", "dlpack"])
def test_an_array_of_a_gpu_needs_cupy(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"b is on a GPU, which needs CuPy: .*cuda12 or cuda13"):
        cuscan.linear_scan(0.5, make())


def fake(module, name):
    """An instance of a class that says it is another module's."""
    one = type(name, (Exporter,), {"__module__": module})
    return one(ones(3))


@pytest.mark.parametrize("module", ["torch", "jax", "jaxlib._jax"])
def test_arrays_of_frameworks_go_to_their_adapter_rather_than_be_detached(monkeypatch, module):
    def taken(*args, **kwargs):
        return args, kwargs

    adapter = types.SimpleNamespace(linear_scan=taken, selective_scan=taken)
    monkeypatch.setitem(sys.modules, f"cuscan.interop.{'torch' if module == 'torch' else 'jax'}", adapter)
    array = fake(module, "Tensor")
    for arguments in ((array, ones(3)), (ones(3), array), (0.5, ones(3), array)):
        args, kwargs = cuscan.linear_scan(*arguments, reverse=True)
        assert all(x is y for x, y in zip(args, arguments, strict=True))
        assert kwargs == {"reverse": True}
    assert cuscan.selective_scan(**{**selective()[2], "delta": array})[1]["delta"] is array


def test_kinds_are_not_mixed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    array = type("ndarray", (), {"__module__": "cupy", "data": None})()
    with pytest.raises(TypeError, match=r"of one kind, but a is CuPy, b is NumPy; nothing is moved"):
        cuscan.linear_scan(array, ones(3))


def test_without_a_device_the_error_says_so():
    cupy = pytest.importorskip("cupy", reason="no CUDA device: CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        with pytest.raises(RuntimeError, match="CUDA") as caught:
            cuscan.linear_scan(0.5, CudaInterface())
        assert len(str(caught.value).splitlines()) == 1


# scalars and dtypes


@pytest.mark.parametrize("h0", [2, 2.0, F32(2), np.float64(2), np.int64(2)])
def test_a_scalar_h0_is_every_rows_state(executor, h0):
    a, b = np.full((3, 5), 0.5, F32), np.arange(15, dtype=F32).reshape(3, 5)
    expected = oracle.linear_scan(a, b, np.full(3, 2.0))
    h, last = executor(cuscan.linear_scan, a, b, h0, axis=1, return_last_state=True)
    np.testing.assert_array_equal(h, expected.value)
    np.testing.assert_array_equal(last, expected.last)
    empty, last = executor(cuscan.linear_scan, a[:, :0], b[:, :0], h0, axis=1, return_last_state=True)
    assert empty.shape == (3, 0)
    np.testing.assert_array_equal(last, [2, 2, 2])


def test_a_complex_h0_needs_complex_inputs():
    with pytest.raises(TypeError, match="h0"):
        cuscan.linear_scan(0.5, ones(3), 1j)
    b = ones(3, dtype="complex64")
    np.testing.assert_array_equal(cuscan.linear_scan(1.0, b, 1j), [1 + 1j, 2 + 1j, 3 + 1j])


def test_numpy_scalars_are_weak():
    b = ones(4, dtype=BF16)
    for gate in (0.5, F32(0.5), np.float64(0.5), np.int64(1), 1):
        h = cuscan.linear_scan(gate, b)
        assert h.dtype == BF16
        np.testing.assert_array_equal(h, oracle.linear_scan(float(gate), b).value)


@pytest.mark.parametrize("out_dtype", [F64, "float64", np.dtype("float64"), float])
def test_out_dtype_may_be_said_in_any_way(out_dtype):
    h = cuscan.linear_scan(0.5, ones(3), out_dtype=out_dtype)
    assert h.dtype == F64
    np.testing.assert_array_equal(h, [1, 1.5, 1.75])


def test_bfloat16_may_be_said_by_name():
    assert cuscan.linear_scan(0.5, ones(3), out_dtype="bfloat16").dtype == BF16


def test_big_endian_items_are_not_taken_for_native_ones():
    b = np.arange(5, dtype=">f4")
    try:
        h = cuscan.linear_scan(1.0, b)
    except TypeError:
        return
    np.testing.assert_array_equal(h, np.cumsum(np.arange(5)))


def test_axis_may_be_a_numpy_integer():
    b = np.arange(15, dtype=F32).reshape(3, 5)
    np.testing.assert_array_equal(cuscan.linear_scan(1.0, b, axis=np.int64(-1)), cuscan.linear_scan(1.0, b, axis=1))


# layouts


def test_merge_axes_leaves_as_few_as_there_are():
    merge = _arrays.merge_axes
    assert merge((3, 4, 5), {"b": (80, 20, 4)}, "b") == ((60,), {"b": (4,)})
    assert merge((3, 4, 5), {"b": (4, 12, 48)}, "b") == ((60,), {"b": (4,)})
    assert merge((3, 4, 5), {"b": (80, 20, 4), "a": (0, 0, 0)}, "b") == ((60,), {"b": (4,), "a": (0,)})
    assert merge((3, 4, 5), {"b": (80, 20, 4), "a": (0, 20, 4)}, "b") == ((3, 20), {"b": (80, 4), "a": (0, 4)})
    assert merge((3, 1, 5), {"b": (40, 7, 4)}, "b") == ((3, 5), {"b": (40, 4)})
    assert merge((), {"b": ()}, "b") == ((), {"b": ()})
    assert merge((1, 1), {"b": (8, 4)}, "b") == ((), {"b": ()})
    assert merge((4, 5), {"b": (-20, -4)}, "b") == ((20,), {"b": (-4,)})
