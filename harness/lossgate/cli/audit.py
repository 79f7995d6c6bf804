# SPDX-License-Identifier: Apache-2.0
"""``lossgate audit``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.base.spelling import counted
from lossgate.cli.app import Exit, Whole, app, load_for

if TYPE_CHECKING:  # the command line starts without the engine
    from lossgate.engine.dry_run import Audit


@app.command
def audit(
    *targets: str,
    layout: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: Annotated[list[str] | None, Parameter(negative=())] = None,
    profile: str = "dev",
    examples: Whole = None,
    ranks: Whole = None,
    matrix: str | None = None,
    seed: Whole = None,
    metrics: Annotated[bool, Parameter(negative=())] = False,
    every: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Tell which known mistakes a configuration would have seen. No kernel is run.

    The reference with each mistake takes the place of the kernel, on the problems that verify
    would try.

    Args:
        targets: Files (file.py), modules (package.module), or one candidate of either
            (file.py:name). The declarations of candidates say which problems there are.
        layout: A layout, such as tp=2,cp=2 or single; may be repeated. By default a few layouts
            of at most --ranks ranks that cover what differs; see --matrix.
        dtype: float32, bfloat16 or float16; may be repeated. By default all that a candidate takes.
        profile: dev, quick, ci, nightly, release, or one of [tool.lossgate.profiles] in
            pyproject.toml.
        examples: Problems for each cell. A cell is one candidate, layout and dtype.
        ranks: Ranks of the largest layout.
        matrix: covering (the default of dev and ci), or full for every layout of at most --ranks
            ranks in every dtype.
        seed: Another seed draws other problems.
        metrics: Also ask about metrics, as if the kernels returned all metrics of their spec.
        every: List every mistake, and not only those that would have passed.
    """
    load_for(targets)
    from rich.markup import escape

    from lossgate.base.errors import UsageError
    from lossgate.declaration.loading import load_all_candidates
    from lossgate.engine.dry_run import audit as audited
    from lossgate.engine.settings import load_settings
    from lossgate.reports.console import make_console
    from lossgate.reports.describe import print_detail

    if not targets:
        raise UsageError("audit: nothing named; expected files or modules with candidates, such as my_kernels.py")
    layouts = tuple(layout) if layout else None
    dtypes = tuple(dtype) if dtype else None
    settings = load_settings(
        profile, examples=examples, ranks=ranks, matrix=matrix, seed=seed, layouts=layouts, dtypes=dtypes
    )
    console = make_console()
    for found in audited(load_all_candidates(targets), settings, metrics=metrics):
        for line in audit_lines(found, listed=every):
            print_detail(console, escape(line))
    return Exit.AGREE


def audit_lines(found: Audit, *, listed: bool = False) -> Iterator[str]:
    """Yields lines about the known mistakes of one candidate.

    Args:
        found: the mistakes that its cells would have seen.
        listed: whether all mistakes are listed, instead of only those that would have passed.
    """
    possible = len(found.seen) + len(found.unseen)
    share = f" ({len(found.seen) / possible:.1%})" if possible else ""
    yield (
        f"{found.candidate.name}: {len(found.seen)} of {possible} known mistakes would have been seen{share}, "
        f"in {counted(found.cells, 'cell')} with {counted(found.problems, 'problem')}  ({found.seconds:.1f} CPU s)"
    )
    if found.unseen or found.of_properties:
        yield "  would have passed:"
    for one in found.unseen.values():
        yield f"    {one.sentence}  ({', '.join(map(str, one.layouts))})"
    for sentence, layouts in found.of_properties.items():
        yield f"    {sentence}  ({', '.join(map(str, layouts))})"
    if listed:
        yield from _listed("would have been seen:", found.seen)
    for what, mistakes in (
        ("change nothing on these problems", found.unchanged),
        ("can't be made here: they need other layouts, options or tiles", found.impossible),
    ):
        if listed:
            yield from _listed(f"{what}:", mistakes)
        elif mistakes:
            yield f"  {len(mistakes)} more {what}"


def _listed(heading: str, mistakes: Mapping[str, str]) -> Iterator[str]:
    if mistakes:
        yield f"  {heading}"
    yield from (f"    {sentence}" for sentence in mistakes.values())
