"""Hypothesis is needed by whoever draws with it, and not to import cuscan.testing."""

from __future__ import annotations

from types import ModuleType


def hypothesis() -> ModuleType:
    """The module."""
    try:
        import hypothesis
        import hypothesis.strategies
    except ImportError as error:
        raise ImportError("strategies and laws need Hypothesis: pip install hypothesis") from error
    return hypothesis
