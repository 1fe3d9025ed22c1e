"""What tuning leaves for later plans: orders in a file that the user names, fits in the cache folder.

An order fixes the bits, so it is taken only from the file that CUSCAN_PLANS names, whose every entry is checked when
the first plan is made. A fit does not, so what `python -m cuscan tune` found on this chip is simply used. Entries hold
for exactly the problem they were measured on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from dataclasses import asdict, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from . import _plan
from ._plan import DeviceLimits, forced

# What is planned, by the name of the function that plans it.
FUNCTIONS = {
    "plan_linear": ("linear_scan", _plan.LinearProblem),
    "plan_selective": ("selective_scan", _plan.SelectiveProblem),
    "plan_backward": ("selective_scan_vjp", _plan.SelectiveProblem),
}
WARPS = (1, 2, 4, 8)  # of a row, and of a block
_PLANNERS = {function: name for name, (function, _) in FUNCTIONS.items()}
# A chip on which every plan can be made, for checking entries.
_LARGE = DeviceLimits(architecture=90, multiprocessors=132, shared_memory=1 << 30)

Choices = Mapping[str, Any]


def cache_folder() -> Path:
    """CUSCAN_CACHE_DIR, else cuscan in the user's cache folder."""
    if folder := os.environ.get("CUSCAN_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuscan"


def fits_file() -> Path:
    """Where the fits are kept."""
    return cache_folder() / "fits.json"


def as_json(value: Any) -> Any:
    """A problem, an order or a fit, as JSON has it."""
    return json.loads(json.dumps(asdict(value), default=lambda x: x.value))


def order_choices(problem: Any, order: Any) -> dict[str, Any]:
    """What to force for this order."""
    if isinstance(order, _plan.BackwardOrder):
        return {"chunk": order.chunk, "parts": -(-problem.batch // order.part)}
    choices = {"schedule": order.schedule, "chunk": order.chunk}
    if isinstance(order, _plan.LinearOrder):
        choices["one_pass"] = order.one_pass
        if order.one_pass:  # in which a chunk is a tile
            del choices["chunk"]
        allowed = (*WARPS, *[_plan.PASS_WARPS] * order.one_pass)
        if order.row_warps not in allowed:
            raise ValueError(f"order.row_warps must be one of {allowed}, got {order.row_warps}")
        return choices | {"lanes": order.lanes, "row_warps": order.row_warps}
    tiles = [t for t in _plan.selective_tiles(problem.kind) if (t.states, t.groups) == (order.states, order.groups)]
    if not tiles:
        raise ValueError(f"no kernel has {order.states} states a thread and {order.groups} groups")
    return choices | {"tile": tiles[0]}


def order(planner: str, problem: Any) -> Choices:
    """What CUSCAN_PLANS says of this problem, to be forced."""
    orders = user_orders()
    return orders.get((planner, problem), {}) if orders else {}


def fit(planner: str, problem: Any, limits: DeviceLimits, order: Any) -> Choices:
    """What was found to be this chip's fit of this problem in this order, to be forced."""
    fits = known_fits()
    return fits.get((planner, _chip(limits), problem, order), {}) if fits else {}


def _chip(limits: DeviceLimits) -> tuple[int, int]:
    return limits.architecture, limits.multiprocessors


@cache
def user_orders() -> dict[Hashable, Choices]:
    """The entries of the file that CUSCAN_PLANS names, read once."""
    name = os.environ.get("CUSCAN_PLANS")
    if not name:
        return {}
    try:
        entries = json.loads(Path(name).read_text(encoding="utf-8"))["plans"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'CUSCAN_PLANS names {name}, which must be JSON like {{"plans": [...]}}: {error!r}') from error
    orders: dict[Hashable, Choices] = {}
    for i, entry in enumerate(entries):
        try:
            _add_order(orders, entry)
        except (ValueError, TypeError) as error:
            raise ValueError(f"CUSCAN_PLANS names {name}, whose plans[{i}] is wrong: {error}") from error
    return orders


def _add_order(orders: dict[Hashable, Choices], entry: Any) -> None:
    if not isinstance(entry, dict) or set(entry) != {"function", "problem", "order"}:
        raise ValueError(f"it must be an object with function, problem and order, got {entry!r}")
    planner, problem = _problem(entry)
    if (planner, problem) in orders:
        raise ValueError("an earlier entry is of the same problem")
    orders[planner, problem] = _checked_order(planner, problem, entry["order"])


@cache
def known_fits() -> dict[Hashable, Choices]:
    """The entries of the file of fits, read once; what cannot be read is not there: it is a cache."""
    fits: dict[Hashable, Choices] = {}
    for entry in read_fits():
        try:
            planner, problem = _problem(entry)
            choices = order_choices(problem, _value(_order_type(planner), entry["order"], "order"))
            with forced(**choices):
                made = _planned(planner, problem)
            for each in fits_of(problem, made.order):
                with forced(**{**choices, **each}):
                    if as_json(_planned(planner, problem).fit) == entry["fit"]:
                        fits[planner, tuple(entry["chip"]), problem, made.order] = each
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return fits


def fits_of(problem: Any, order: Any) -> list[dict[str, Any]]:
    """What to force for each fit that this order can have."""
    if isinstance(order, _plan.LinearOrder):
        return [{"warps": warps} for warps in WARPS if warps % order.row_warps == 0]
    if isinstance(order, _plan.SelectiveOrder):
        shape = order.states, order.groups
        return [{"tile": tile} for tile in _plan.selective_tiles(problem.kind) if (tile.states, tile.groups) == shape]
    return []


def read_fits() -> list[Any]:
    """The entries of the file of fits as they stand there."""
    try:
        entries = json.loads(fits_file().read_text(encoding="utf-8"))["fits"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return entries if isinstance(entries, list) else []


def keep_fits(chip: list[int], found: list[dict[str, Any]]) -> Path:
    """Write these fits of a chip to the cache folder, beside those of other chips, problems and orders."""
    path = fits_file()

    def key(entry: Any) -> str:
        return json.dumps([entry.get(name) for name in ("function", "chip", "problem", "order")], sort_keys=True)

    kept = {key(entry): entry for entry in read_fits() if isinstance(entry, dict)}
    kept |= {key(entry): entry for entry in ({"chip": chip, **each} for each in found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps({"fits": list(kept.values())}, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)  # at once, for processes that read it meanwhile
    known_fits.cache_clear()
    return path


def _planned(planner: str, problem: Any) -> Any:
    return getattr(_plan, planner).__wrapped__(problem, _LARGE)


# --- entries -------------------------------------------------------------------------------------------------------


def _problem(entry: Any) -> tuple[str, Any]:
    function = entry.get("function")
    if function not in _PLANNERS:
        raise ValueError(f"function must be one of {', '.join(_PLANNERS)}, got {function!r}")
    planner = _PLANNERS[function]
    return planner, _value(FUNCTIONS[planner][1], entry.get("problem"), "problem")


def _order_type(planner: str) -> Any:
    types = {
        "plan_linear": _plan.LinearOrder,
        "plan_selective": _plan.SelectiveOrder,
        "plan_backward": _plan.BackwardOrder,
    }
    return types[planner]


def _checked_order(planner: str, problem: Any, given: Any) -> Choices:
    """What to force for an order that the kernels have."""
    wanted = _value(_order_type(planner), given, "order")
    choices = order_choices(problem, wanted)
    with forced(**choices):
        plan = _planned(planner, problem)
    if plan.order != wanted:
        raise ValueError(f"no plan has this order; the nearest is {as_json(plan.order)}")
    split = getattr(wanted, "schedule", None) is _plan.Schedule.SPLIT
    if split and plan.chunks == 1:
        raise ValueError(f"a split has more than one chunk; order.chunk is {wanted.chunk} of {problem.length} steps")
    if split and planner == "plan_selective" and wanted.chunk % _plan.TILE_STEPS:
        raise ValueError(f"order.chunk must be a multiple of {_plan.TILE_STEPS}, got {wanted.chunk}")
    return choices


def _value(kind: Any, given: Any, where: str) -> Any:
    """A value of this type from its JSON; errors say where it is."""
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        names = tuple(field.name for field in fields(kind))
        if not isinstance(given, dict):
            raise TypeError(f"{where} must be an object with {', '.join(names)}, got {given!r}")
        if set(given) != set(names):
            raise ValueError(f"{where} must have {', '.join(names)}, and has {', '.join(given) or 'nothing'}")
        parts = {name: _value(hints[name], given[name], f"{where}.{name}") for name in names}
        return kind(**parts)
    if issubclass(kind, Enum):
        values = [x.value for x in kind]
        if given not in values:
            raise ValueError(f"{where} must be one of {', '.join(values)}, got {given!r}")
        return kind(given)
    if type(given) is not kind:
        raise TypeError(f"{where} must be {kind.__name__}, got {given!r}")
    if kind is int and given < (least := 0 if where.startswith("problem") else 1):
        raise ValueError(f"{where} must be at least {least}, got {given}")
    return given
