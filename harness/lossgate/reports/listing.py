# SPDX-License-Identifier: Apache-2.0
"""Writes the lines of ``lossgate list``: all specs, one spec, or the candidates of a file."""

from collections.abc import Iterator, Mapping
from textwrap import wrap

from rich.markup import escape

from lossgate.adapters import LIBRARIES
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_declared
from lossgate.declaration.supports import ANY
from lossgate.losses import all_specs
from lossgate.properties import PROPERTIES
from lossgate.reports.spec_sections import sections
from lossgate.specs.spec import Spec


def overview(width: int) -> Iterator[str]:
    """Yields lines of rich markup that list the specs of lossgate and of installed packages, the
    properties, the layouts, and what else there is.
    """
    specs = {
        name: f"{spec.summary} (from {', '.join(spec.inputs)})" if isinstance(spec, Spec) else str(spec)
        for name, spec in all_specs().items()
    }
    yield from _columns("specs", specs, width)
    yield ""
    yield from _columns("properties", {one.name: one.summary for one in PROPERTIES.values()}, width)
    yield ""
    yield from _columns("layouts", _LAYOUTS, width)
    yield ""
    yield from _columns("candidates that come along", _BANKS, width)
    yield ""
    yield from _columns("more", _NEXT, width)


def _columns(title: str, entries: Mapping[str, str], width: int) -> Iterator[str]:
    """Yields a heading, and each name with its meaning."""
    yield f"[bold]{title}[/]"
    longest = max(map(len, entries))
    further = longest + 2 if width - longest >= _READABLE else 4
    for name, meaning in entries.items():
        yield from _hanging(f"{name:{longest}}  ", meaning, width, indent=2, further=further)


_READABLE = 40
"""The least width of a column of meanings. With less, their further lines begin farther left."""


_LAYOUTS = {
    "single": "one rank has everything",
    "dp=2": "each of 2 ranks has some of the sequences",
    "cp=2": "each of 2 ranks has two chunks of every padded sequence, in a zigzag",
    "tp=2": "each of 2 ranks has some rows of the vocabulary",
    "tp=2,cp=2": "both, on 4 ranks; any axes and sizes, up to --ranks in all",
}
_BANKS = {
    "lossgate.tour": "a right kernel and a wrong one, to try lossgate on",
    "lossgate.dense_candidates": "the dense reference of each spec and head as a kernel",
    "lossgate.adapters.torch": "the kernels of PyTorch; lossgate list adapters has those of other libraries",
}
_NEXT = {
    "lossgate init SPEC": "writes a first candidate of a spec",
    "lossgate list SPEC": "describes its inputs, options, outputs and goals",
    "lossgate list FILE": "lists the candidates and specs of a file or module",
    "lossgate list FILE:NAME": "describes one of these specs",
}


def adapters(width: int) -> Iterator[str]:
    """Yields lines of rich markup that list the libraries with adapters, what of them is installed,
    and their entry points.
    """
    for library in LIBRARIES.values():
        known = f"known: {', '.join(library.known)}; here: {library.installed or 'not installed'}"
        yield from _hanging(f"lossgate.adapters.{library.name}  ", f"{library.package}; {known}", width)
        yield from _hanging("", ", ".join(library.entry_points), width, indent=6)


def described(spec: Spec, width: int) -> Iterator[str]:
    """Yields lines of rich markup that describe a spec in full.

    No word is cut, however narrow the lines are. A word that is too wide has its own line.
    """
    yield from _hanging(f"{spec.name}: ", spec.summary, width)
    if spec.source:
        yield from _hanging("source: ", spec.source, width)
    for section in sections(spec):
        yield ""
        yield from (f"[bold]{line}[/]" for line in _hanging("", section.title, width))
        if section.about:
            yield from _hanging("", section.about, width)
        for entry in section.entries:
            columns = zip(section.columns, entry.facts, strict=True)
            facts = (fact if column in _PLAIN else f"{column}: {fact}" for column, fact in columns)
            yield from _hanging(f"{entry.name}  ", "; ".join(facts), width, indent=2, further=8)
            yield from _hanging("", entry.meaning, width, indent=6)


_PLAIN = ("dims", "dtype")
"""The columns whose facts are shown without the heading of the column."""


def _hanging(name: str, text: str, width: int, indent: int = 0, further: int = 4) -> list[str]:
    """Returns a name and a text as lines of rich markup. All lines but the first are indented
    further.
    """
    lines = wrap(
        name + text,
        max(width, indent + 8),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + (further if name else 0)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    bold = escape(name.rstrip())
    lines = [escape(line) for line in lines]
    if bold and lines:
        lines[0] = lines[0].replace(bold, f"[bold]{bold}[/]", 1)
    return lines


def declared(target: str, width: int) -> Iterator[str]:
    """Yields lines of rich markup that list the candidates and specs of a file or module.

    Raises:
        UsageError: if there is neither, or it can't be loaded.
    """
    candidates, specs = load_declared(target)
    if specs and not candidates and ":" in target:
        yield from described(specs[0], width)
        return
    if candidates:
        yield f"[bold]candidates of {escape(target)}[/]"
    for candidate in candidates:
        yield from _hanging(f"{candidate.name}  ", _of_candidate(candidate), width, indent=2)
        if candidate.good_for:
            yield from _hanging("", f"good for {candidate.good_for}", width, indent=6)
    if specs:
        yield f"[bold]specs of {escape(target)}[/]"
    for spec in specs:
        text = f"{spec.summary} (from {', '.join(spec.inputs)}); lossgate list {target}:{spec.name} describes it"
        yield from _hanging(f"{spec.name}  ", text, width, indent=2)


def _of_candidate(candidate: Candidate) -> str:
    facts = [
        f"spec {candidate.spec.name}",
        f"head {candidate.head}",
        f"tokens {candidate.tokens}",
        f"axes {', '.join(candidate.axes) or 'none'}",
        f"dtypes {', '.join(candidate.dtypes)}",
    ]
    if candidate.supports:
        facts.append(f"supports {', '.join(_supported(candidate, name) for name in candidate.supports)}")
    return "; ".join(facts)


def _supported(candidate: Candidate, name: str) -> str:
    values = candidate.supported(name)
    return f"{name} {'any' if values is ANY else '/'.join(map(str, values))}"
