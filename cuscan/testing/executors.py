"""Where a problem runs: an executor is called with a function and its NumPy arguments and gives NumPy results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from cuscan import _arrays
from cuscan._plan import DeviceLimits
from cuscan._source import KernelSource

Array = NDArray[Any]
Function = Callable[..., Any]
Shape = tuple[int, ...]
Executor = Callable[[Function, dict[str, Any]], Any]

H200 = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=227 * 1024)


@dataclass(frozen=True)
class Numpy:
    """NumPy arrays as they are."""

    def __call__(self, function: Function, arguments: dict[str, Any]) -> Any:
        """function(**arguments)."""
        return function(**arguments)


@dataclass(frozen=True)
class Host:
    """The CUDA kernels, compiled for the CPU by `cuscan.testing.host`.

    Attributes
    ----------
    mode, order, seed
        As in `cuscan.testing.host.HostModules`.
    limits : DeviceLimits
        The chip that plans are made for.
    """

    mode: str = "checked"
    order: str = "forward"
    seed: int = 0
    limits: DeviceLimits = field(default=H200, repr=False)

    @cached_property
    def modules(self) -> Any:
        """Compiles and runs the kernels."""
        from .host import HostModules

        return HostModules(self.mode, order=self.order, seed=self.seed)

    def __call__(self, function: Function, arguments: dict[str, Any]) -> Any:
        """function(**arguments), with its kernels on the CPU."""
        from .host import HostPlace

        place: Any = HostPlace(self.modules, self.limits)
        out = arguments.get("out")
        if out is not None:
            place.update(*(x for x in arguments.values() if x is out))
        token = _arrays.host_place.set(lambda: place)
        try:
            return function(**arguments)
        finally:
            _arrays.host_place.reset(token)
            self.modules.memory.clear()

    def launch(self, source: KernelSource, name: str, grid: Shape, block: Shape, args: Sequence[Any]) -> list[Any]:
        """Run the kernel `name` of a text, and give its arguments as it left them."""
        self.modules.get_function(source, name)(grid, block, args)
        return list(args)


@dataclass(frozen=True)
class Gpu:
    """Copies of the arrays on CuPy's current device, with the same strides and alignment."""

    def __call__(self, function: Function, arguments: dict[str, Any]) -> Any:
        """function(**arguments) on the GPU, and the results brought back."""
        import cupy

        moved: dict[int, Any] = {}
        for x in arguments.values():
            if isinstance(x, np.ndarray) and id(x) not in moved:
                moved[id(x)] = _copy(cupy, x)
        result = function(**{name: moved.get(id(x), x) for name, x in arguments.items()})
        if isinstance(result, tuple):
            return tuple(None if x is None else cupy.asnumpy(x) for x in result)
        return cupy.asnumpy(result)

    def launch(self, source: KernelSource, name: str, grid: Shape, block: Shape, args: Sequence[Any]) -> list[Any]:
        """Run the kernel `name` of a text, and give its arguments as it left them."""
        import cupy

        from cuscan._compile import cupy_modules

        moved = [_copy(cupy, x) if isinstance(x, np.ndarray) else x for x in args]
        cupy_modules(cupy.cuda.Device().id).get_function(source, name)(grid, block, tuple(moved))
        return [cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x for x in moved]


def _copy(cupy: Any, x: Array) -> Any:
    """`x` with all that lies between its items."""
    if x.size == 0:
        return cupy.empty(x.shape, x.dtype)
    low, high = byte_bounds(x)
    skew = low % 256  # CuPy's memory is aligned to 512
    memory = cupy.cuda.alloc(skew + high - low)
    (memory + skew).copy_from_host(low, high - low)
    return cupy.ndarray(x.shape, x.dtype, memory + (skew + x.ctypes.data - low), x.strides)
