# SPDX-License-Identifier: Apache-2.0
"""lossgate judges whether an LLM post-training loss kernel computes the loss it claims to.

Declare a kernel with ``candidate``, then run ``lossgate verify FILE`` or, in a pytest file, ``test = lossgate.suite(kernel)``.

Public names are imported when they are used: pytest loads this package's plugin in every project, and torch is heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lossgate.declaration.candidate import ANY, Candidate, Finding, Outputs, candidate
    from lossgate.declaration.contract import Contract
    from lossgate.declaration.precision import Precision
    from lossgate.errors import CandidateError, LossgateError, UsageError
    from lossgate.layout import Layout
    from lossgate.problems.problem import Problem
    from lossgate.pytest_suite import suite

__version__ = "0.1.0"

_HOMES = {
    "ANY": "declaration.candidate",
    "Candidate": "declaration.candidate",
    "CandidateError": "errors",
    "Contract": "declaration.contract",
    "Finding": "declaration.candidate",
    "Layout": "layout",
    "LossgateError": "errors",
    "Outputs": "declaration.candidate",
    "Precision": "declaration.precision",
    "Problem": "problems.problem",
    "UsageError": "errors",
    "candidate": "declaration.candidate",
    "suite": "pytest_suite",
}

__all__ = [
    "ANY",
    "Candidate",
    "CandidateError",
    "Contract",
    "Finding",
    "Layout",
    "LossgateError",
    "Outputs",
    "Precision",
    "Problem",
    "UsageError",
    "candidate",
    "suite",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lossgate.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lossgate' has no attribute {name!r}")
