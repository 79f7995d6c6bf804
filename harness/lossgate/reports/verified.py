# SPDX-License-Identifier: Apache-2.0
"""``lossgate.verify`` judges kernels from Python, such as in a notebook, and
``lossgate.assert_matches`` plain functions in a test.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from rich.console import Console
from rich.text import Text

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.conventions import Conventions
from lossgate.declaration.precision import Precision
from lossgate.engine.cell import CellResult
from lossgate.engine.cell_record import Verdict
from lossgate.engine.events import Event, RunFinished, RunStarted
from lossgate.engine.run import run
from lossgate.engine.settings import Settings, load_settings, names_of
from lossgate.plain_functions.plain_function import PlainKernel, as_candidate
from lossgate.reports.console import printable
from lossgate.reports.describe import describe, heading
from lossgate.reports.failures import FailureFiles
from lossgate.reports.shown_verdict import ShownVerdict
from lossgate.reports.terminal import Terminal
from lossgate.specs.spec import Spec

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
        verdicts = {result.record.counts_as(numbers_only=self.numbers_only) for result in self.results}
        for worst in (Verdict.DISAGREE, Verdict.INCONCLUSIVE):
            if worst in verdicts:
                return worst
        return Verdict.AGREE

    @property
    def numbers_only(self) -> bool:
        """Whether broken promises do not count, as the settings say."""
        return any(isinstance(one, RunStarted) and one.settings.numbers_only for one in self.events)

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


@overload
def verify(
    *candidates: Candidate,
    layouts: Iterable[str] | str | None = None,
    dtypes: Iterable[Any] | Any = None,
    properties: Iterable[str] | None = None,
    profile: str = "dev",
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    seed: int | None = None,
) -> Verified: ...


@overload
def verify(
    fn: Callable[..., Any],
    spec: str | Spec,
    inputs: Mapping[str, Any] | str,
    /,
    *,
    head: str | None = None,
    rows: bool | None = None,
    options: Mapping[str, Any] | None = None,
    conventions: Conventions | None = None,
    precision: Precision | Mapping[str, Precision] | None = None,
    layouts: Iterable[str] | str | None = None,
    dtypes: Iterable[Any] | Any = None,
    properties: Iterable[str] | None = None,
    profile: str = "dev",
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    seed: int | None = None,
) -> Verified: ...


def verify(
    *candidates: Any,
    layouts: Iterable[str] | str | None = None,
    dtypes: Iterable[Any] | Any = None,
    properties: Iterable[str] | None = None,
    profile: str = "dev",
    examples: int | None = None,
    ranks: int | None = None,
    matrix: str | None = None,
    seed: int | None = None,
    head: str | None = None,
    rows: bool | None = None,
    options: Mapping[str, Any] | None = None,
    conventions: Conventions | None = None,
    precision: Precision | Mapping[str, Precision] | None = None,
) -> Verified:
    """Judges candidates against the references of their specs, as ``lossgate verify`` does.

    For example::

        lossgate.verify(my_kernel, layouts=["single", "cp=2"])
        lossgate.verify(F.cross_entropy, "nll", {"input": "logits", "target": "labels"})

    Candidates run in this process, as a notebook needs. A candidate that crashes ends the process;
    ``lossgate verify`` goes on after a crash. No failure files are written.

    Args:
        *candidates: the candidates to verify; or a plain function, its spec, and what its
            parameters are, as for ``lossgate.assert_matches``.
        layouts: the layouts, such as ``["single", "tp=2,cp=2"]``. By default those of ``matrix``,
            which split a plain function over dp alone.
        dtypes: the dtypes of inputs, such as ``["bfloat16"]``. By default all that each candidate
            takes, and float32 for a function.
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
        head: of a plain function, where it starts; see ``lossgate.assert_matches``.
        rows: of a plain function, whether tokens lie in rows; likewise.
        options: of a plain function, what it computes; likewise.
        conventions: of a plain function, what its callers take care of; likewise.
        precision: of a plain function, where it rounds; likewise.

    Returns:
        The results. Printed, they show the verdicts and their reasons. ``verdict`` and ``agrees``
        are about all cells together, and ``check()`` raises unless all agree.

    Raises:
        UsageError: if there is no candidate, or a setting is wrong.
    """
    if not candidates:
        raise UsageError("verify(): no candidate; expected one or more, such as lossgate.verify(my_kernel)")
    layouts, dtypes = names_of("verify(", "layouts", layouts), names_of("verify(", "dtypes", dtypes)
    own: dict[str, Any] = {"head": head, "rows": rows, "options": options}
    own |= {"conventions": conventions, "precision": precision}
    if not isinstance(candidates[0], Candidate) and len(candidates) == 3:
        own |= {"dtypes": dtypes or ("float32",), "layouts": layouts or ()}
        candidates = (as_candidate("verify(", *candidates, **own),)
    elif said := next((name for name, value in own.items() if value is not None), ""):
        raise UsageError(f"verify({said}={shown(own[said])}): that is said of a plain function alone; remove it")
    for one in candidates:
        if not isinstance(one, Candidate):
            raise UsageError(
                f"verify({shown(one)}): expected a candidate; decorate the kernel with @lossgate.candidate(...), or "
                "say of a plain function what its parameters are: lossgate.verify(fn, 'nll', {'logits': 'logits', ...})"
            )
    given: dict[str, Any] = {"layouts": layouts, "dtypes": dtypes}
    given["properties"] = names_of("verify(", "properties", properties)
    settings = load_settings(profile, examples=examples, ranks=ranks, matrix=matrix, seed=seed, **given)
    return _verified(candidates, settings)


def _verified(candidates: Iterable[Candidate], settings: Settings) -> Verified:
    events = tuple(run(candidates, settings, here=True))
    (results,) = (event.results for event in events if isinstance(event, RunFinished))
    return Verified(results, events)


def assert_matches(
    fn: Callable[..., Any],
    spec: str | Spec,
    inputs: Mapping[str, Any] | str,
    *,
    head: str | None = None,
    rows: bool | None = None,
    options: Mapping[str, Any] | None = None,
    conventions: Conventions | None = None,
    precision: Precision | Mapping[str, Precision] | None = None,
    dtypes: Iterable[Any] | Any = "float32",
    layouts: Iterable[str] | str = "single",
    properties: Iterable[str] | str | None = None,
) -> None:
    """Asserts that a plain function of tensors computes a loss of lossgate, and its gradients.

    For example::

        lossgate.assert_matches(F.cross_entropy, "nll", {"input": "logits", "target": "labels"})

    It compares the loss and its gradients with the float64 reference, on the problems that
    ``lossgate verify`` draws, and holds the function to the other properties that apply, such as
    microbatches and strided inputs, on a few of these. The full verdict, ``lossgate.verify`` with
    the same arguments, adds ranks of dp, more problems for each property, and profiles that try
    more.

    Args:
        fn: the function, or a module of torch. Of several results the first is judged: the loss, a
            scalar, or the log-probabilities of the labels if the spec has no loss.
        spec: the loss that it computes, by name or as the object; see ``lossgate list``.
        inputs: by parameter, what it is given: the name of an input or option of the spec, or any
            constant that is no string; strings are bound by ``functools.partial``. Or a preset, the
            signature of a framework's loss, such as "verl.policy_loss".
        head: where it starts. By default it follows from ``inputs``.
        rows: whether what belongs to tokens has the shape ``[batch, sequence, ...]``, padded on the
            right. By default as the preset says, or else not: it is ``[tokens, ...]``.
        options: by option of the spec, the values that it computes: one, a tuple, or
            ``lossgate.ANY``. By default all of options that are among ``inputs``, and the default
            of others. By scenario, the choices that it is never given: ``lossgate.Excluded``.
        conventions: what its callers take care of. By default they give it usual numbers at masked
            tokens, and something that is trained; and it divides by its own counts, unless
            ``inputs`` has a count of the batch.
        precision: where it rounds; by default it computes in float32.
        dtypes: the dtypes of its inputs, such as ``torch.bfloat16``.
        layouts: the ranks among which a batch is split, such as ``["single", "dp=2"]``.
        properties: what it is held to; by default all. "agreement" is the numbers alone.

    Raises:
        AssertionError: if it disagrees, or if nothing wrong was seen but not enough was seen. The
            first line is the cause, and what to do.
        UsageError: if an argument is wrong.
    """
    __tracebackhide__ = True
    named = {"dtypes": dtypes, "layouts": layouts, "properties": properties}
    given: dict[str, Any] = {name: names_of("assert_matches(", name, value) for name, value in named.items()}
    candidate = as_candidate(
        "assert_matches(",
        fn,
        spec,
        inputs,
        head=head,
        rows=rows,
        options=options,
        conventions=conventions,
        precision=precision,
        dtypes=given["dtypes"] or (),
        layouts=given["layouts"] or (),
    )
    found = _verified([candidate], load_settings(**given, property_problems=1))
    counts = [(one.record.counts_as(numbers_only=found.numbers_only), one) for one in found.results]
    for worst in (Verdict.DISAGREE, Verdict.INCONCLUSIVE):
        for verdict, result in counts:
            if verdict is worst:
                raise AssertionError("\n".join(_told(result)))


def _told(result: CellResult) -> Iterator[str]:
    """Yields the lines of a message about a cell that fails. The first, which is all that pytest's
    summary shows, begins with the cause.
    """
    cell = result.record
    lines = [Text.from_markup(line).plain for line in [heading(cell), *describe(cell)]]
    yield printable(f"{cell.first_told.removeprefix('cause: ')} ({ShownVerdict.of(cell)})")
    yield from lines
    kernel = result.cell.candidate.kernel
    if isinstance(kernel, PlainKernel) and (words := kernel.in_own_words(" ".join(lines))):
        yield f"  here {words}"
    if result.failure is not None:
        problem = result.failure.problem.to_json()
        yield f"  to make its tensors: lossgate.strategies.DrawnProblem.from_json({problem!r})"
    yield "  for the full verdict: lossgate.verify(...), with the same arguments"
