"""Figures from the records: rooflines, time against length, the ladder. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

Row = dict[str, Any]
# The same record gives the same file, with text as text.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cuscan", "font.size": 9, "lines.markersize": 4}
COLOURS = ("#33475b", "#b04a4a", "#4a8a6a", "#c08a2a", "#6a5a9a", "#8fb8de")


def draw(kind: str, record: dict[str, Any], folder: Path, suffix: str = ".svg") -> Iterator[Path]:
    """Draw a record of this kind; the files' names."""
    figures = {"bench": {"roofline": roofline, "lengths": lengths}, "ladder": {"ladder": ladder}}
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in figures.get(kind, {}).items():
        with mpl.rc_context(STYLE):
            path = folder / f"{name}{suffix}"
            make(record).savefig(path, metadata={"Date": None} if suffix == ".svg" else None, dpi=100)
        yield path


def roofline(record: dict[str, Any]) -> Figure:
    """Rate against work a byte, under what the chip can do; one panel for each kind of work."""
    limits = record["limits"]
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    kinds = {"exponentials": limits["exponentials"], "operations": limits["multiply_adds"]}
    for axes, (work, peak) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        rows = [row for row in record["rows"] if work in row]
        at = [row[work] / row["bytes"] for row in rows]
        intensity = np.geomspace(min(at, default=0.1) / 2, max(at, default=10) * 2, 200)
        axes.loglog(intensity, np.minimum(peak, limits["copy"] * intensity), color="#888888", linewidth=1)
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row, x in zip(rows, at, strict=True):
            name = row["op"].removeprefix("selective_") + " backward" * (row["direction"] == "backward")
            groups[name].append((x, row[work] / row["ms"] * 1e3))
        for colour, (name, points) in zip(COLOURS, groups.items(), strict=False):
            axes.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.7, label=name)
        unit = "exponentials" if work == "exponentials" else "FP32 operations"
        axes.set(xlabel=f"{unit} a byte", ylabel=f"{unit} a second")
        axes.legend(frameon=False, loc="lower right")
    figure.suptitle(f"{record['device']}: measured, and what its rates allow")
    return figure


def lengths(record: dict[str, Any]) -> Figure:
    """Time against length: selective_scan and linear_scan, forward and backward, other libraries dashed."""
    options = ("z", "h0", "last", "mask", "states", "sequences", "scalar")
    plain = [row for row in record["rows"] if not any(row.get(name) for name in options)]
    series: dict[str, dict[str, list[Row]]] = {"selective_scan": defaultdict(list), "linear_scan": defaultdict(list)}
    for row in plain:
        sizes = (row["batch"], row["channels"], row["state"], row["dtype"])
        if row["op"] == "selective_scan" and sizes == (8, 1024, 16, "bfloat16") and row["layout"] == "bld":
            series[row["op"]][row["direction"]].append(row)
        if row["op"] == "linear_scan" and sizes == (8, 1536, 1, "float32"):
            series[row["op"]][f"{row['direction']}, axis {row['axis']}"].append(row)
    titles = {
        "selective_scan": "selective_scan (8, length, 1024, 16), bfloat16",
        "linear_scan": "linear_scan (8, length, 1536), (8, 1536, length), float32",
    }
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (op, groups) in zip(figure.subplots(1, 2), series.items(), strict=True):
        for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
            ordered = sorted(rows, key=lambda row: row["length"])
            _line(axes, [(row["length"], row["ms"]) for row in ordered], "o-", colour, name)
            _line(axes, [(row["length"], row["limit_ms"]) for row in ordered], ":", colour, f"{name}, limit")
            others: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for row in ordered:
                for peer in row.get("peers", ()):
                    if "ms" in peer:
                        others[peer["name"]].append((row["length"], peer["ms"]))
            for marker, (peer_name, points) in zip("x+v^s", others.items(), strict=False):
                _line(axes, points, f"{marker}--", colour, f"{name}, {peer_name}")
        axes.set(xlabel="length", ylabel="ms", xscale="log", yscale="log")
        axes.set_title(titles[op], fontsize=8)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def ladder(record: dict[str, Any]) -> Figure:
    """A panel for each figure of the ladder: time of each rung."""
    titles = {
        "length": "selective scan (1, length, 1024, 16)",
        "batch": "selective scan (batch, 1024, 1024, 16)",
        "state": "selective scan (8, 1024, 1024, state)",
        "block: length": "within a block: 1056 rows of a length",
        "block: batch": "within a block: rows of 4096 steps",
        "row": "one row of a length",
    }
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 3).flat, titles.items(), strict=True):
        rungs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in record["rows"]:
            if row["figure"] == name:
                rungs[row["rung"]].append((row["x"], row["ms"]))
        for colour, (rung, points) in zip(COLOURS, rungs.items(), strict=False):
            _line(axes, sorted(points), "o-", colour, rung)
        what = "rows" if name == "block: batch" else name.rpartition(": ")[2].replace("row", "length")
        axes.set(xlabel=what, ylabel="ms", xscale="log", yscale="log")
        axes.set_title(title, fontsize=9)
        if rungs:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high * (high / low) ** (0.13 * len(rungs)))  # room for the names
            axes.legend(frameon=False, fontsize=7, loc="upper left")
        if name == "state":
            axes.set_xticks([4, 16, 64], labels=["4", "16", "64"])
        axes.minorticks_off()
    figure.suptitle(f"{record['device']}, float32")
    return figure


def _line(axes: Any, points: list[tuple[float, float]], style: str, colour: str, label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), style, color=colour, linewidth=1, label=label)
