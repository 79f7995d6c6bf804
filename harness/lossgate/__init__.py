# SPDX-License-Identifier: Apache-2.0
"""lossgate judges whether an LLM post-training loss kernel computes the loss it claims to.

Declare a kernel with ``candidate``, then run ``lossgate verify FILE`` or, in a pytest file, ``test
= lossgate.suite(kernel)``.

Public names are imported when they are used, because pytest loads this package's plugin in every
project, and importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lossgate import strategies
    from lossgate.cases.case import Case
    from lossgate.declaration.any_value import ANY
    from lossgate.declaration.candidate import Candidate, Outputs, candidate
    from lossgate.declaration.contract import Contract
    from lossgate.declaration.known_failure import KnownFailure
    from lossgate.declaration.precision import Precision
    from lossgate.engine.compare import compare
    from lossgate.errors import CandidateError, LossgateError, UsageError
    from lossgate.layout import Layout
    from lossgate.problems.problem import Problem
    from lossgate.properties.registry import Checked, Property, property
    from lossgate.pytest_plugin.suite import suite
    from lossgate.worlds.assertions import all_ranks_assert
    from lossgate.worlds.base import RankContext, RankFailure
    from lossgate.worlds.simulated_ranks import SimulatedRanks

__version__ = "0.1.0"

_HOMES = {
    "ANY": "declaration.any_value",
    "Candidate": "declaration.candidate",
    "CandidateError": "errors",
    "Case": "cases.case",
    "Checked": "properties.registry",
    "Contract": "declaration.contract",
    "KnownFailure": "declaration.known_failure",
    "Layout": "layout",
    "LossgateError": "errors",
    "Outputs": "declaration.candidate",
    "Precision": "declaration.precision",
    "Problem": "problems.problem",
    "Property": "properties.registry",
    "RankContext": "worlds.base",
    "RankFailure": "worlds.base",
    "SimulatedRanks": "worlds.simulated_ranks",
    "UsageError": "errors",
    "all_ranks_assert": "worlds.assertions",
    "candidate": "declaration.candidate",
    "compare": "engine.compare",
    "property": "properties.registry",
    "suite": "pytest_plugin.suite",
}

__all__ = [
    "ANY",
    "Candidate",
    "CandidateError",
    "Case",
    "Checked",
    "Contract",
    "KnownFailure",
    "Layout",
    "LossgateError",
    "Outputs",
    "Precision",
    "Problem",
    "Property",
    "RankContext",
    "RankFailure",
    "SimulatedRanks",
    "UsageError",
    "all_ranks_assert",
    "candidate",
    "compare",
    "property",
    "strategies",
    "suite",
]


def __getattr__(name: str) -> Any:
    if name == "strategies":
        return import_module("lossgate.strategies")
    if name in _HOMES:
        return getattr(import_module(f"lossgate.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lossgate' has no attribute {name!r}")
