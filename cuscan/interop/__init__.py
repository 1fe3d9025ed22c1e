"""cuscan for those who live in another framework. Nothing here is imported unless the caller has the framework."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from cuscan._arrays import ForeignError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def routed(function: _Function) -> _Function:
    """Run calls with another framework's arrays as the function of the same name in `cuscan.interop`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch.compile follows this, and what is below it does not. While torch is being imported it has no Tensor yet.
        tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)
        for x in (*args, *kwargs.values()) if tensor is not None else ():
            if isinstance(x, tensor):
                from . import torch

                return getattr(torch, function.__name__)(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except ForeignError as foreign:
            framework = foreign.framework
        # Outside, so that an error there has no context.
        return getattr(importlib.import_module(f"{__name__}.{framework}"), function.__name__)(*args, **kwargs)

    return call  # type: ignore[return-value]


class Stream:
    """A stream as CuPy adopts it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
