# SPDX-License-Identifier: Apache-2.0
"""lossgate judges whether an LLM post-training loss kernel computes the loss it claims to.

Declare a kernel with ``candidate``. Then run ``lossgate verify FILE``, or write ``test_kernel =
lossgate.suite(kernel)`` in a pytest file.

Public names are imported when they are first used. pytest loads the plugin of this package in every
project, and importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lossgate import inputs, options, strategies
    from lossgate.base.errors import CandidateError, LossgateError, UsageError
    from lossgate.base.layout import Layout
    from lossgate.cases.case import Case
    from lossgate.cases.example_inputs import example
    from lossgate.declaration.budgets import Budgets
    from lossgate.declaration.candidate import Candidate, KnownFailure, Outputs, candidate
    from lossgate.declaration.contract import Contract
    from lossgate.declaration.conventions import Conventions
    from lossgate.declaration.precision import Precision
    from lossgate.declaration.supports import ANY, Excluded
    from lossgate.engine.compare import compare
    from lossgate.inputs import Batch
    from lossgate.problems.problem import Problem
    from lossgate.properties.registry import Checked, OwnMistake, Property, property
    from lossgate.pytest_plugin.suite import suite
    from lossgate.reports.verified import assert_matches, verify
    from lossgate.specs.coverage_goals import CoverageGoal
    from lossgate.specs.declare import spec
    from lossgate.specs.field_context import FieldContext
    from lossgate.specs.option import Option
    from lossgate.specs.outputs import Metric
    from lossgate.specs.record import Between, Options, field, option
    from lossgate.specs.spec import Spec
    from lossgate.specs.terms import Term, Terms
    from lossgate.specs.token_values import TokenValues
    from lossgate.worlds.base import RankContext, RankFailure
    from lossgate.worlds.running import all_ranks_assert, current_mesh
    from lossgate.worlds.simulated_ranks import SimulatedRanks

__version__ = "0.2.0"

TESTED_TORCH = "2.11", "2.14"
"""The oldest torch with which lossgate works, and the newest with which it is tested."""

_HOMES = {
    "ANY": "declaration.supports",
    "Batch": "specs.packed_batch",
    "Between": "specs.record",
    "Budgets": "declaration.budgets",
    "Candidate": "declaration.candidate",
    "CandidateError": "base.errors",
    "Case": "cases.case",
    "Checked": "properties.registry",
    "Contract": "declaration.contract",
    "Conventions": "declaration.conventions",
    "CoverageGoal": "specs.coverage_goals",
    "Excluded": "declaration.supports",
    "FieldContext": "specs.field_context",
    "KnownFailure": "declaration.candidate",
    "Layout": "base.layout",
    "LossgateError": "base.errors",
    "Metric": "specs.outputs",
    "Option": "specs.option",
    "Options": "specs.record",
    "Outputs": "declaration.candidate",
    "OwnMistake": "properties.registry",
    "Precision": "declaration.precision",
    "Problem": "problems.problem",
    "Property": "properties.registry",
    "RankContext": "worlds.base",
    "RankFailure": "worlds.base",
    "SimulatedRanks": "worlds.simulated_ranks",
    "Spec": "specs.spec",
    "Term": "specs.terms",
    "Terms": "specs.terms",
    "TokenValues": "specs.token_values",
    "UsageError": "base.errors",
    "all_ranks_assert": "worlds.running",
    "assert_matches": "reports.verified",
    "candidate": "declaration.candidate",
    "compare": "engine.compare",
    "current_mesh": "worlds.running",
    "example": "cases.example_inputs",
    "field": "specs.record",
    "option": "specs.record",
    "property": "properties.registry",
    "spec": "specs.declare",
    "suite": "pytest_plugin.suite",
    "verify": "reports.verified",
}

__all__ = [
    "ANY",
    "Batch",
    "Between",
    "Budgets",
    "Candidate",
    "CandidateError",
    "Case",
    "Checked",
    "Contract",
    "Conventions",
    "CoverageGoal",
    "Excluded",
    "FieldContext",
    "KnownFailure",
    "Layout",
    "LossgateError",
    "Metric",
    "Option",
    "Options",
    "Outputs",
    "OwnMistake",
    "Precision",
    "Problem",
    "Property",
    "RankContext",
    "RankFailure",
    "SimulatedRanks",
    "Spec",
    "Term",
    "Terms",
    "TokenValues",
    "UsageError",
    "all_ranks_assert",
    "assert_matches",
    "candidate",
    "compare",
    "current_mesh",
    "example",
    "field",
    "inputs",
    "option",
    "options",
    "property",
    "spec",
    "strategies",
    "suite",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("inputs", "options", "strategies"):
        return import_module(f"lossgate.{name}")
    if name in _HOMES:
        return getattr(import_module(f"lossgate.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lossgate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
