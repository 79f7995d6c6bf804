# SPDX-License-Identifier: Apache-2.0
"""Tables of the specs, of the properties, and of the candidates of a file."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from lossgate.declaration.any_value import ANY
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.losses import all_specs
from lossgate.properties import PROPERTIES
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import COMMON_OPTIONS, Spec


def spec_tables() -> Iterator[Table]:
    """Yields a table for each spec, of lossgate and of installed packages."""
    for spec in all_specs().values():
        title = f"{spec.name}: {spec.summary}  (source: {spec.source})"
        table = Table("", "name", "values", "default", "meaning", title=title, title_justify="left", box=SIMPLE)
        for row in (*_heads(spec), *_options(spec), *_inputs(spec), *_goals(spec)):
            table.add_row(*map(escape, row))
        yield table


Row = tuple[str, str, str, str, str]


def _heads(spec: Spec) -> Iterator[Row]:
    for name in spec.inputs:
        leaves = "; ".join(f"{leaf}[{', '.join(dims)}]" for leaf, dims in HEADS[name].leaves.items())
        yield "head", name, leaves, "", HEADS[name].meaning


def _options(spec: Spec) -> Iterator[Row]:
    for option in spec.options:
        yield "option", option.name, option.domain, str(option.default), option.meaning
    for option in COMMON_OPTIONS.values():
        yield "common option", option.name, option.domain, str(option.default), option.meaning


def _inputs(spec: Spec) -> Iterator[Row]:
    for name, own in spec.added.items():
        yield "input", name, own.shape, "", own.meaning
    for name, metric in spec.metrics.items():
        yield "metric", name, "", "", f"{metric.meaning} (ranks: {metric.reduction})"


def _goals(spec: Spec) -> Iterator[Row]:
    for choice in spec.scenarios:
        yield "scenario", choice.name, choice.domain, str(choice.default), choice.meaning
    for name, goal in spec.all_goals.items():
        yield "coverage goal", name, "", "", goal.meaning


def properties_table() -> Table:
    """Returns a table of the properties that candidates are held to."""
    table = Table("property", "what it asks", "runs per problem", title="properties", title_justify="left", box=SIMPLE)
    for held_to in PROPERTIES.values():
        table.add_row(held_to.name, escape(held_to.summary), str(held_to.runs))
    return table


def candidates_table(target: str) -> Table:
    """Returns a table of the candidates of a file or module."""
    table = Table(title=target, title_justify="left")
    for heading in ("candidate", "spec", "head", "tokens", "axes", "dtypes", "supports", "good for"):
        table.add_column(heading)
    for candidate in load_candidates(target):
        supports = ", ".join(_supported(candidate))
        axes, dtypes = ", ".join(candidate.axes) or "none", ", ".join(candidate.dtypes)
        table.add_row(
            candidate.name,
            candidate.spec.name,
            candidate.head,
            candidate.tokens,
            axes,
            dtypes,
            escape(supports),
            escape(candidate.good_for),
        )
    return table


def _supported(candidate: Candidate) -> Iterator[str]:
    for name in candidate.supports:
        values = candidate.supported(name)
        yield f"{name} {'any' if values is ANY else '/'.join(map(str, values))}"
