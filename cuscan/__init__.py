"""First-order recurrences h[t] = a[t] * h[t-1] + b[t] on GPU arrays, at the speed of the hardware.

`linear_scan` runs the recurrence itself, `selective_scan` the state-space layer of Mamba, with everything between
the inputs and y fused, and `selective_state_update` one step of it. All take CuPy, NumPy and DLPack arrays. Importing
this package imports NumPy alone.
"""

from typing import TYPE_CHECKING, Any

from . import ssm
from ._arrays import Workspace
from ._plan import STATE_INTERVAL
from .linear import linear_scan
from .linear_vjp import LinearGradients, linear_scan_vjp
from .selective import selective_scan
from .selective_vjp import SelectiveGradients, selective_scan_vjp
from .state_update import selective_state_update

if TYPE_CHECKING:
    from ._trace import trace
    from .diagnostics import diagnose

__version__ = "0.1.0"
__all__ = [
    "STATE_INTERVAL", "LinearGradients", "SelectiveGradients", "Workspace", "diagnose", "linear_scan",
    "linear_scan_vjp", "selective_scan", "selective_scan_vjp", "selective_state_update", "ssm", "trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What takes long to import, when it is first used."""
    if name == "diagnose":
        from .diagnostics import diagnose

        return diagnose
    if name == "trace":
        from ._trace import trace

        return trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
