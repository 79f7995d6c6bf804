# SPDX-License-Identifier: Apache-2.0
"""What there is: specs, and the candidates of a file, as tables."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from lossgate.declaration.candidate import ANY, Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.losses import SPECS, find_spec
from lossgate.specs.option import field_meanings
from lossgate.specs.spec import HEADS


def spec_tables() -> Iterator[Table]:
    """One for each spec."""
    for spec in SPECS.values():
        table = Table(title=f"{spec.name}: {spec.summary}  (source: {spec.source})", title_justify="left", box=SIMPLE)
        for heading in ("", "name", "values", "default", "meaning"):
            table.add_column(heading)
        for name in spec.inputs:
            head = HEADS[name]
            leaves = "; ".join(f"{leaf}[{', '.join(dims)}]" for leaf, dims in head.leaves.items())
            table.add_row("head", name, escape(leaves), "", head.meaning)
        for option in spec.options:
            table.add_row("option", option.name, option.domain, str(option.default), escape(option.meaning))
        for name, feature in spec.features.items():
            if feature not in spec.options:
                table.add_row("feature", name, feature.domain, str(feature.default), feature.meaning)
        meanings = dict(field_meanings(next(iter(spec.inputs.values()))))
        for name, dims in spec.fields.items():
            table.add_row("input", name, escape(f"[{', '.join(dims)}]"), "", escape(meanings[name]))
        for name, metric in spec.metrics.items():
            table.add_row("metric", name, "", "", f"{metric.meaning} (ranks: {metric.reduction})")
        for choice in spec.scenario:
            table.add_row("scenario", choice.name, choice.domain, str(choice.default), choice.meaning)
        for name, branch in spec.every_branch.items():
            table.add_row("branch", name, "", "", branch.meaning)
        yield table


def candidates_table(target: str) -> Table:
    """The candidates of a file or module."""
    table = Table(title=target, title_justify="left")
    for heading in ("candidate", "spec", "head", "axes", "dtypes", "supports", "good for"):
        table.add_column(heading)
    for candidate in load_candidates(target):
        supports = ", ".join(_supported(candidate))
        axes, dtypes = ", ".join(candidate.axes) or "none", ", ".join(candidate.dtypes)
        table.add_row(
            candidate.name, candidate.spec, candidate.head, axes, dtypes, escape(supports), escape(candidate.good_for)
        )
    return table


def _supported(candidate: Candidate) -> Iterator[str]:
    spec = find_spec(candidate.spec)
    for name in candidate.supports:
        values = spec.supported(candidate, name)
        yield f"{name} {'any' if values is ANY else '/'.join(map(str, values))}"
