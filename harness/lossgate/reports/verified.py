# SPDX-License-Identifier: Apache-2.0
"""``lossgate.verify`` judges kernels from Python, such as in a notebook."""

from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from lossgate.base.errors import UsageError
from lossgate.declaration.candidate import Candidate
from lossgate.engine.cell import CellResult
from lossgate.engine.cell_record import Verdict
from lossgate.engine.events import Event, RunFinished, RunStarted
from lossgate.engine.run import run
from lossgate.engine.settings import load_settings
from lossgate.reports.failures import FailureFiles
from lossgate.reports.terminal import Terminal

_WIDTH = 120


@dataclass(frozen=True, repr=False)
class Verified:
    """The result of ``lossgate.verify``. In a notebook it shows the verdict table."""

    results: tuple[CellResult, ...]
    events: tuple[Event, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the worst cell. A known failure counts as AGREE, and broken promises do
        not count if the setting ``numbers_only`` says so.
        """
        numbers_only = any(isinstance(one, RunStarted) and one.settings.numbers_only for one in self.events)
        verdicts = {result.record.counts_as(numbers_only=numbers_only) for result in self.results}
        for worst in (Verdict.DISAGREE, Verdict.INCONCLUSIVE):
            if worst in verdicts:
                return worst
        return Verdict.AGREE

    @property
    def agrees(self) -> bool:
        """Whether every cell agrees or is a known failure. INCONCLUSIVE does not agree."""
        return self.verdict is Verdict.AGREE

    def check(self) -> None:
        """Raises ``AssertionError`` with the reasons unless all cells agree."""
        if not self.agrees:
            raise AssertionError(f"\n{self}")

    def __repr__(self) -> str:
        text = StringIO()
        self._show(Console(file=text, width=_WIDTH, highlight=False, emoji=False))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        console = Console(file=StringIO(), width=_WIDTH, highlight=False, emoji=False, record=True)
        self._show(console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _show(self, console: Console) -> None:
        with TemporaryDirectory() as folder:
            terminal = Terminal(_NoFiles(Path(folder)), console)
            for event in self.events:
                terminal(event)


class _NoFiles(FailureFiles):
    """Stands for failure files where none are written."""

    def replay(self, result: CellResult) -> None:
        return None


def verify(
    *candidates: Candidate,
    layouts: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    properties: Iterable[str] | None = None,
    profile: str = "dev",
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    seed: int | None = None,
) -> Verified:
    """Judges candidates against the references of their specs, as ``lossgate verify`` does.

    For example::

        lossgate.verify(my_kernel, layouts=["single", "cp=2"])

    Candidates run in this process, as a notebook needs. A candidate that crashes ends the process;
    ``lossgate verify`` goes on after a crash. No failure files are written.

    Args:
        *candidates: the candidates to verify.
        layouts: the layouts, such as ``["single", "tp=2,cp=2"]``. By default those of ``matrix``.
        dtypes: the dtypes of inputs, such as ``["bfloat16"]``. By default all that each candidate
            takes.
        properties: the properties, such as ``["agreement"]``; ``lossgate list`` shows them. By
            default all that apply.
        profile: how much to try: "dev", "quick", "ci", "nightly", "release", or one of
            ``[tool.lossgate.profiles]`` in pyproject.toml.
        examples: the least problems for each layout and dtype. By default those of the profile.
        ranks: the ranks of the largest layout. By default those of the profile.
        matrix: which layouts are verified if none are given: "covering" for few that cover all
            differences, or "full" for all with at most ``ranks`` ranks, in every dtype. By default
            that of the profile.
        seed: the seed from which problems are drawn. Another seed draws other problems.

    Returns:
        The results. Printed, they show the verdicts and their reasons. ``verdict`` and ``agrees``
        are about all cells together, and ``check()`` raises unless all agree.

    Raises:
        UsageError: if there is no candidate, or a setting is wrong.
    """
    if not candidates:
        raise UsageError("verify(): no candidate; expected one or more, such as lossgate.verify(my_kernel)")
    for one in candidates:
        if not isinstance(one, Candidate):  # pyright: ignore[reportUnnecessaryIsInstance]  an undecorated kernel is a likely slip
            raise UsageError(
                f"verify({one!r}): expected a candidate; decorate the kernel with @lossgate.candidate(...)"
            )
    named: dict[str, Any] = {"layouts": layouts, "dtypes": dtypes, "properties": properties}
    lists: dict[str, Any] = {name: None if given is None else tuple(given) for name, given in named.items()}
    settings = load_settings(profile, examples=examples, ranks=ranks, matrix=matrix, seed=seed, **lists)
    events = tuple(run(candidates, settings, here=True))
    (results,) = (event.results for event in events if isinstance(event, RunFinished))
    return Verified(results, events)
