"""Tools to test scans with: cuscan's own tests use them, and so can yours. docs/testing.md is the guide.

Problems are whole calls as values; Hypothesis strategies and ``python -m cuscan fuzz`` draw them, executors run them,
`oracle` knows what is right and how far off a result may be. `check_monoid` checks the laws that every scan rests on.
`cuscan.testing.host` runs CUDA kernels on the CPU. NumPy is all that importing this needs; strategies and laws
need Hypothesis.
"""

from . import oracle
from .executors import Gpu, Host, Numpy
from .laws import Monoid, affine_monoid, check_monoid, cuda_monoid, segmented_monoid
from .oracle import assert_scan_close
from .problems import Layout, LinearGradientProblem, LinearProblem, Plan, SelectiveGradientProblem, SelectiveProblem
from .strategies import gradient_problems, linear_problems, selective_problems

__all__ = [
    "Gpu", "Host", "Layout", "LinearGradientProblem", "LinearProblem", "Monoid", "Numpy", "Plan",
    "SelectiveGradientProblem", "SelectiveProblem", "affine_monoid", "assert_scan_close", "check_monoid",
    "cuda_monoid", "gradient_problems", "linear_problems", "oracle", "segmented_monoid", "selective_problems",
]  # fmt: skip
