"""Hypothesis is needed by whoever draws with it, and not to import cuscan.testing."""

from __future__ import annotations

import importlib
from types import ModuleType


def hypothesis() -> ModuleType:
    """The module."""
    try:
        importlib.import_module("hypothesis.strategies")
        return importlib.import_module("hypothesis")
    except ImportError as error:
        raise ImportError("strategies and laws need Hypothesis: pip install hypothesis") from error
