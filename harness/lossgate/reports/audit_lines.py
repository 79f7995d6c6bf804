# SPDX-License-Identifier: Apache-2.0
"""Shows which known mistakes a configuration would have seen."""

from collections.abc import Iterator, Mapping

from lossgate.audit import Audit
from lossgate.base.spelling import counted


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
    if found.unseen:
        yield "  would have passed:"
    for one in found.unseen.values():
        yield f"    {one.sentence}  ({', '.join(map(str, one.layouts))})"
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
