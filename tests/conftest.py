"""Two tiers: `python -m pytest` runs what is not marked `full`, `python -m pytest --full` everything.

In the full tier nothing may go missing unseen: a skip is a failure there, unless its reason speaks of a CUDA
device, the one thing that cannot be installed.

A test that takes `executor` runs three times: on NumPy arrays (reference.py), on the kernels run by the CPU executor,
and on the kernels run by the GPU. The quick tier compiles few kernels for the CPU; what needs others is marked
`full_on_host`.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
import pytest

from cuscan import _arrays, _source
from cuscan._plan import DeviceLimits, selective_kinds
from cuscan.testing import host

# Kinds of selective_scan_vjp's kernels that the quick tier compiles for the CPU, by the names of their modules, and
# those that the full one runs often.
QUICK_BACKWARD = ("float32", "bfloat16 segmented")
OFTEN_BACKWARD = (
    *QUICK_BACKWARD, "float32 segmented", "float32 time", "float32 time segmented", "bfloat16 time",
    "float16 time segmented", "float64 segmented", "float32 complex segmented", "bfloat16 complex segmented",
    "float32 complex constant B constant C segmented", "float32 constant B segmented", "float32 constant C segmented",
    "float32 constant B constant C segmented",
)  # fmt: skip
H200 = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)

# JAX would take most of a GPU's memory for each process that runs tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked full, and let no skip pass")


def pytest_configure(config):
    config.addinivalue_line("markers", "full_on_host: on the CPU executor, the test runs only with --full")


def _is_full(item):
    on_host = hasattr(item, "callspec") and item.callspec.params.get("executor") == "host"
    return item.get_closest_marker("full") or (on_host and item.get_closest_marker("full_on_host"))


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        full = [item for item in items if _is_full(item)]
        items[:] = [item for item in items if not _is_full(item)]
        config.hook.pytest_deselected(items=full)


def _fail_if_missing(config, report):
    if config.getoption("--full") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2]
        if "CUDA device" not in reason:
            report.outcome = "failed"
            report.longrepr = f"a skip in the full tier: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return _fail_if_missing(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_missing(collector.config, (yield))


# --- executors ---------------------------------------------------------------------------------------------------


class NumpyExecutor:
    """Calls a public function with NumPy arrays; NumPy arrays come back."""

    name = "numpy"
    xp = np
    kernels = False  # whether it is kernels that run
    every_type = True  # whether every instantiation is there

    def asarray(self, x):
        """`x` where this executor works, with its strides and its alignment."""
        return x

    def get(self, x):
        """The NumPy array of an array of this executor."""
        return x

    def __call__(self, function, *args, **kwargs):
        return function(*args, **kwargs)


class HostExecutor(NumpyExecutor):
    """The kernels on the CPU, checked; `allocated` holds the bytes of each allocation of the last call."""

    name = "host"
    kernels = True

    def __init__(self, modules, every_type):
        self.modules, self.every_type = modules, every_type
        self.allocated = []

    def place(self):
        return _CountingPlace(self)

    def __call__(self, function, *args, **kwargs):
        self.allocated.clear()
        self.modules.memory.clear()
        out = kwargs.get("out")
        if isinstance(out, np.ndarray):
            # Before the inputs are made read-only: rights add up, so out may be one of them.
            self.modules.memory.register(out, initialised=False)
        token = _arrays.host_place.set(self.place)
        try:
            return function(*args, **kwargs)
        finally:
            _arrays.host_place.reset(token)


class _CountingPlace(host.HostPlace):
    def __init__(self, executor):
        super().__init__(executor.modules, H200)
        self._allocated = executor.allocated

    def allocate(self, shape, dtype):
        array = super().allocate(shape, dtype)
        self._allocated.append(array.nbytes)
        return array


class _HostModules(host.HostModules):
    """Compiles in the background what the tier may need; what it runs often with optimisation."""

    def __init__(self, sources, often, pool):
        super().__init__("checked")
        make, often = self._make, {source.text for source in often}

        def mode(text):
            return "checked" if text in often else "checked-O0"

        self._make = lambda text: make(text, mode=mode(text))
        self._compiled = {each.text: pool.submit(host.HostModule, each, mode(each.text)) for each in sources}

    def get_function(self, source, name):
        if source.text not in self._compiled:
            pytest.fail(f"this tier does not compile the module of {name}: mark the test full_on_host")
        in_background = self._compiled[source.text]
        if not in_background.cancel():  # what has not begun yet is compiled here and now
            in_background.result()
        return super().get_function(source, name)


class CudaExecutor(NumpyExecutor):
    """The kernels on the GPU, on copies of the NumPy arrays that overlap and are aligned as these."""

    name = "cuda"
    kernels = True

    def __init__(self, cupy):
        self.xp = cupy

    def asarray(self, x):
        return self._mirror([x])(x)

    def get(self, x):
        # By bytes: CuPy's own copies fault on items at odd addresses.
        items = self.xp.ndarray((*x.shape, x.dtype.itemsize), np.uint8, x.data, (*x.strides, 1))
        return self.xp.asnumpy(items).view(x.dtype)[..., 0]

    def _mirror(self, arrays):
        """A function from a NumPy array to its view in a copy of all memory that `arrays` span."""
        runs = []
        for low, high in sorted(np.lib.array_utils.byte_bounds(x) for x in arrays if x.size):
            if runs and low < runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], high)
            else:
                runs.append([low, high])
        copies = []
        for low, high in runs:
            copy = self.xp.empty(high - low + 512, np.uint8)
            start = (low - copy.data.ptr) % 512
            copy[start : start + high - low].set(np.frombuffer(_bytes(low, high), np.uint8))
            copies.append((low, high, copy.data + start))

        def view(x):
            if x.size == 0:
                return self.xp.empty(x.shape, x.dtype)
            low, memory = next((low, memory) for low, high, memory in copies if low <= x.ctypes.data < high)
            return self.xp.ndarray(x.shape, x.dtype, memory + (x.ctypes.data - low), x.strides)

        return view

    def __call__(self, function, *args, **kwargs):
        view = self._mirror([x for x in (*args, *kwargs.values()) if isinstance(x, np.ndarray)])
        given = {name: view(x) if isinstance(x, np.ndarray) else x for name, x in kwargs.items()}
        result = function(*(view(x) if isinstance(x, np.ndarray) else x for x in args), **given)

        def back(x):
            if x is not None and x is given.get("out"):
                kwargs["out"][...] = self.get(x)
                return kwargs["out"]
            return self.get(x) if isinstance(x, self.xp.ndarray) else x

        if not isinstance(result, tuple):
            return back(result)
        make = getattr(type(result), "_make", tuple)  # the gradients' named tuples stay what they are
        return make(map(back, result))


def _bytes(low, high):
    return (ctypes.c_ubyte * (high - low)).from_address(low)


@pytest.fixture(scope="session")
def host_executor(request):
    """The CPU executor in checked mode, with the modules of this tier."""
    try:
        host.compiler()
    except host.CompileError as error:
        pytest.skip(str(error))
    full = request.config.getoption("--full")
    every = _source.all_sources()
    often = [every[f"selective_scan_backward {name}"] for name in (OFTEN_BACKWARD if full else QUICK_BACKWARD)]
    often += [_source.marks_source(), _source.sum_source()]
    for make in (_source.linear_source, _source.linear_backward_source):
        often += [make(item, segmented=s) for item in ("float32", "bfloat16") for s in (False, True)]
    often += [
        _source.selective_source(kind)
        for kind in selective_kinds()
        if kind.item == "bfloat16" and not kind.complex and kind.time_B and kind.time_C
    ]
    sources = list(every.values()) if full else often
    # Processes of pytest-xdist share what is compiled: each begins at another place, and finds the rest done.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    begin = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) * len(sources) // processes
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // processes)) as pool:
        yield HostExecutor(_HostModules(sources[begin:] + sources[:begin], often, pool), every_type=full)
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def cuda_executor():
    cupy = pytest.importorskip("cupy", reason="no CUDA device: CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {str(error).split(':')[0]}")
    return CudaExecutor(cupy)


@pytest.fixture(scope="module", params=["numpy", "host", "cuda"])
def executor(request):
    """Where a test runs public functions: `executor(cuscan.linear_scan, a, b)` with NumPy arrays."""
    return NumpyExecutor() if request.param == "numpy" else request.getfixturevalue(f"{request.param}_executor")
