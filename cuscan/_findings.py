"""What `cuscan.diagnose` and `cuscan.trace` say: findings, and facts and findings as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 100
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something worth knowing about a call.

    Attributes
    ----------
    level : {"error", "warning", "note"}
        The result is wrong; it is probably not what you want; it is as it should be, and good to know.
    name : str
        What was found, in a few words.
    figure : str
        How large or how many.
    cause, action : str
        The likely cause, and what to do.
    where : dict
        Batch, time, channel and state, as far as they are known.
    """

    level: str
    name: str
    figure: str
    cause: str
    action: str
    where: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.level.upper()}: {self.name}: {self.figure}."]
        lines += [f"At: {place(self.where)}."] * bool(self.where)
        lines += [f"Cause: {self.cause}."]
        lines += [f"Do: {self.action}."] * bool(self.action)
        indents = ("", *["  "] * (len(lines) - 1))
        return "\n".join(
            textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent="    ")
            for line, indent in zip(lines, indents, strict=True)
        )


def place(where: Mapping[str, int]) -> str:
    """Such as "batch 0, time 3"."""
    return ", ".join(f"{name} {index}" for name, index in where.items())


def number(x: Any) -> str:
    """A figure as text: four digits, lists in brackets."""
    if isinstance(x, float):
        return f"{x:.4g}"
    if isinstance(x, (tuple, list)):
        return ", ".join(map(number, x))
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {number(each)}" for name, each in x.items())
    return str(x)


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and figures in two columns."""
    told = [(name, number(x)) for name, x in rows if x is not None]
    wide = max((len(name) for name, _ in told), default=0)
    return "\n".join(
        textwrap.fill(x, WIDTH, initial_indent=f"  {name:<{wide}}  ", subsequent_indent=" " * (wide + 4))
        for name, x in told
    )


def listed(findings: Iterable[Finding]) -> str:
    """The findings, the worst first."""
    ordered = sorted(findings, key=lambda x: LEVELS.index(x.level))
    return "\n".join(map(str, ordered)) or "Nothing to remark."
