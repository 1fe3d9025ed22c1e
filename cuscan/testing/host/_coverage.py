"""Which lines of a kernel text ran: gcov's counts, added over all instantiations."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class FileCoverage:
    """Lines of one file, by number, as the ``#line`` directives count them."""

    covered: set[int] = field(default_factory=set)
    uncovered: set[int] = field(default_factory=set)


def merge_coverage(reports: list[dict[str, FileCoverage]]) -> dict[str, FileCoverage]:
    """One report; a line is covered if it is in any."""
    merged: dict[str, FileCoverage] = {}
    for report in reports:
        for name, lines in report.items():
            merged.setdefault(name, FileCoverage()).covered |= lines.covered
            merged[name].uncovered |= lines.uncovered
    for lines in merged.values():
        lines.uncovered -= lines.covered
    return dict(sorted(merged.items()))


def module_coverage(library: ctypes.CDLL, path: Path) -> dict[str, FileCoverage]:
    """Write out the counters of a loaded library, and read them.

    Raises
    ------
    FileNotFoundError
        There is no gcov.
    """
    gcov = os.environ.get("GCOV") or shutil.which("gcov")
    if gcov is None:
        raise FileNotFoundError("gcov, which comes with g++, is not there")
    with tempfile.TemporaryDirectory() as folder:
        library.cuscan_write_counters(folder.encode())
        (counts,) = Path(folder).rglob("*.gcda")
        shutil.copy(path.parent / "kernel.gcno", folder)
        counts.rename(Path(folder) / "kernel.gcda")
        subprocess.run([gcov, "--json-format", "kernel.gcda"], cwd=folder, capture_output=True, check=True)
        (result,) = Path(folder).glob("*.json.gz")
        report = json.loads(gzip.decompress(result.read_bytes()))
    return merge_coverage([_file(each) for each in report["files"]])


def _file(entry: dict[str, Any]) -> dict[str, FileCoverage]:
    name = entry["file"]
    if name.endswith("prelude.h") or name.startswith("/usr"):
        return {}
    lines = FileCoverage()
    for line in entry["lines"]:
        (lines.covered if line["count"] else lines.uncovered).add(line["line_number"])
    return {name: lines}
