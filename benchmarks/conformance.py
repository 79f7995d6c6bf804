# SPDX-License-Identifier: Apache-2.0
"""Writes docs/conformance.md: what public losses do under lossgate, from evidence, and what was
found in them.

    lossgate verify lossgate.adapters.liger lossgate.adapters.trl --quick --evidence new.jsonl
    python benchmarks/conformance.py new.jsonl            the page, with these verdicts
    python benchmarks/conformance.py new.jsonl --check    exit code 1 if the page is another

Of each cell the newest verdict counts.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from textwrap import wrap

from lossgate.adapters import LIBRARIES, Library
from lossgate.engine.cell_record import CellRecord, Outcome
from lossgate.evidence.gather import gather
from lossgate.findings import FINDINGS, Finding, Severity
from lossgate.reports.shown_verdict import percent

PAGE = Path(__file__).parents[1] / "docs/conformance.md"
_ADAPTERS = Path(__file__).parents[1] / "harness/lossgate/adapters"
_MARK = "<!-- Below: written by python benchmarks/conformance.py -->\n"
_IN_WORDS = {
    Outcome.AGREE: "agrees",
    Outcome.PROMISE_BROKEN: "numbers agree",
    Outcome.DISAGREE: "**numbers disagree**",
    Outcome.INCONCLUSIVE: "not enough was seen",
}
_PLACE = re.compile(r"\s*\[/[^\]]*\]")
"""Where an error was raised: a path of the machine that judged."""
_DOTTED = re.compile(r"[\w.]+")
_WORST_FIRST = (Outcome.DISAGREE, Outcome.INCONCLUSIVE, Outcome.PROMISE_BROKEN, Outcome.AGREE)


def page_of(files: Sequence[Path]) -> str:
    """Returns the page: what people wrote above the mark, and the tables below it."""
    above = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    gathered, cells = gather(files), defaultdict[str, list[CellRecord]](list)
    for key, cell in gathered.newest.items():
        cells[key.candidate].append(cell)
    made_with = dict.fromkeys(_versions(run.versions) for run in gathered.runs.values())
    return above + _MARK + "\n" + "\n".join([*_findings(), "", *_verdicts(cells, " and ".join(made_with))]) + "\n"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "python") if name in versions)


def _findings() -> Iterator[str]:
    yield "## Findings"
    yield ""
    yield "| `lossgate findings ...` | what is wrong | kind | found in | line | shown by | upstream |"
    yield "|---|---|---|---|---|---|---|"
    for severity in Severity:
        for finding in FINDINGS.values():
            if finding.severity is severity:
                version = f"{finding.of.package} {', '.join(finding.versions)}"
                version += f", mended in {finding.mended_in}" if finding.mended_in else ""
                number = finding.upstream.rpartition("/")[2]
                known = f"[#{number}]({finding.upstream})" if finding.upstream else ""
                name = f"`{finding.name}`"
                where = finding.cause.partition(": ")[0] if finding.of.is_release else finding.cause
                row = name, finding.sentence, severity, version, f"`{where}`", finding.shown_by, known
                yield f"| {' | '.join(row)} |"


def _verdicts(cells: dict[str, list[CellRecord]], made_with: str) -> Iterator[str]:
    yield "## Verdicts"
    yield ""
    yield f"With {made_with}."
    for library in LIBRARIES.values():
        own = {entry: cells[entry] for entry in library.entry_points if entry in cells}
        if not own:
            continue
        newest = max(cell.time for of_entry in own.values() for cell in of_entry)
        yield ""
        yield f"### {library.package}"
        yield ""
        version = library.installed if library.is_release else f"at {library.known[-1]}"
        adapter = f"[adapter](../harness/lossgate/adapters/{library.name}.py)"
        yield f"{library.package} {version}, judged on {newest[:10]}, as its"
        yield f"{adapter} calls it."
        yield ""
        yield "| entry point | calls | loss | split | verdict | what else | detects | s |"
        yield "|---|---|---|---|---|---|---|---|"
        calls = calls_of(library)
        for entry, of_entry in own.items():
            yield _row(entry, calls[entry], of_entry)
        yield from _not_given(own)
        yield ""
        yield from wrap(not_judged(library), 100, break_on_hyphens=False, break_long_words=False)


def not_judged(library: Library) -> str:
    """Returns which losses of a library no entry point calls, and why, as its adapter says it."""
    text = (_ADAPTERS / f"{library.name}.py").read_text(encoding="utf-8")
    *_, last = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")
    return last.replace("\n", " ")


def calls_of(library: Library) -> dict[str, list[str]]:
    """Returns what each entry point calls of its library, by its id: dotted names, as the text of
    the adapter has them.
    """
    tree = ast.parse((_ADAPTERS / f"{library.name}.py").read_text(encoding="utf-8"))
    loaded, functions = dict[str, str](), dict[str, ast.FunctionDef]()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name):
                functions[name] = node
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("load"), [_, ast.Constant(module)])):
                loaded[name] = module
            case ast.Assign([target], ast.Call(ast.Name("load"), [_, ast.Constant(module), *wanted])):
                names = [target] if isinstance(target, ast.Name) else ast.iter_child_nodes(target)
                pairs = zip(names, wanted, strict=False)
                loaded |= {ast.unparse(name): f"{module}.{ast.literal_eval(thing)}" for name, thing in pairs}
            case ast.Import([ast.alias(module, str(name))]) if module.startswith(f"{library.module}."):
                loaded[name] = module
            case _:
                pass

    def found_in(function: ast.FunctionDef) -> Iterator[str]:
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _DOTTED.fullmatch(ast.unparse(call.func)):
                first, dot, rest = ast.unparse(call.func).partition(".")
                if first in loaded:
                    yield f"{loaded[first]}{dot}{rest}"
                elif first in functions and not dot:
                    yield from found_in(functions[first])

    return {entry: [*dict.fromkeys(found_in(functions[entry.partition(".")[2]]))] for entry in library.entry_points}


def _row(entry: str, calls: Iterable[str], cells: Sequence[CellRecord]) -> str:
    worst = min(cells, key=_badness)
    row = (
        f"`{entry}`",
        ", ".join(f"`{call}`" for call in calls),
        f"{worst.spec} from {worst.head}",
        _places(cells),
        _verdicts_of(entry, cells),
        _beside(entry, cells),
        _detects(cells),
        f"{sum(cell.seconds for cell in cells):.0f}",
    )
    return f"| {' | '.join(row)} |"


def _detects(cells: Iterable[CellRecord]) -> str:
    """Returns the smallest error in scale that would have been found on every layout, by dtype."""
    effects = dict.fromkeys((cell.dtype for cell in cells), 0.0)
    for cell in cells:
        told = cell.mde is not None and cell.outcome is not Outcome.DISAGREE
        effects[cell.dtype] = max(effects[cell.dtype], cell.mde or 0.0) if told else inf
    return " / ".join("-" if effect == inf else percent(effect) for effect in effects.values())


def _badness(cell: CellRecord) -> int:
    return _WORST_FIRST.index(cell.outcome)


def _axes(cell: CellRecord) -> str:
    """Returns the axes that are split, such as "dp+tp"."""
    return "+".join(part.partition("=")[0] for part in cell.layout.split(",")).replace("single", "one rank")


def _places(cells: Iterable[CellRecord], others: Iterable[CellRecord] = ()) -> str:
    """Returns the axes and dtypes of cells, without dtypes if they are those of the others, too."""
    axes = defaultdict[str, dict[str, None]](dict)
    for cell in cells:
        axes[cell.dtype][_axes(cell)] = None
    first = next(iter(axes.values()))
    if any(own.keys() != first.keys() for own in axes.values()):
        return "; ".join(f"{dtype}: {', '.join(own)}" for dtype, own in axes.items())
    return ", ".join(first) + ("" if {*axes} == {cell.dtype for cell in others} else f"; {', '.join(axes)}")


def _verdicts_of(entry: str, cells: Sequence[CellRecord]) -> str:
    """Returns the verdict in words. If it is not one everywhere: each with its places, the worst
    first. Of layouts that split the same axes the worst one counts.
    """
    worst = dict[tuple[str, str], CellRecord]()
    for cell in sorted(cells, key=_badness):
        worst.setdefault((_axes(cell), cell.dtype), cell)
    said = defaultdict[str, list[CellRecord]](list)
    for cell in worst.values():
        said[_verdict(entry, cell)].append(cell)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{words} ({_places(own, cells)})" for words, own in said.items())


def _findings_of(entry: str) -> list[Finding]:
    return [finding for finding in FINDINGS.values() if entry in finding.entry_points]


def _verdict(entry: str, cell: CellRecord) -> str:
    """Returns the verdict in words; if it is DISAGREE, what the worst finding says that it is."""
    split = {*_axes(cell).split("+")}
    found = [one.severity for one in _findings_of(entry) if not one.axes or split.intersection(one.axes)]
    if cell.outcome is Outcome.DISAGREE and found:
        return f"**{min(found, key=list(Severity).index)}**"
    return _IN_WORDS[cell.outcome]


def _beside(entry: str, cells: Sequence[CellRecord]) -> str:
    """Returns what a reader should know beside the verdict: why it is not AGREE, the findings that
    explain it, and the conventions that callers must keep to.
    """
    said, found, worst = list[str](), _findings_of(entry), min(cells, key=_badness)
    if worst.outcome is Outcome.DISAGREE and not found:
        said.append(_PLACE.sub("", worst.cause or next(iter(worst.reasons), "")))
    elif broken := dict.fromkeys(name for cell in cells for name in cell.broken):
        said.append(f"not kept: {', '.join(broken)}")
    if found:
        said.append(f"see {', '.join(f'`{finding.name}`' for finding in found)}")
    if conventions := dict.fromkeys(name for cell in cells for name in cell.conventions):
        said.append(", ".join(f"`{name}`" for name in conventions))
    return "; ".join(said).replace("|", "\\|").replace("\n", " ")


def _not_given(own: Mapping[str, Sequence[CellRecord]]) -> Iterator[str]:
    """Yields what the entry points of a library are never given, each with the reason."""
    entries = defaultdict[tuple[str, str], list[str]](list)
    for entry, cells in own.items():
        for what in dict.fromkeys(item for cell in cells for item in cell.excluded.items()):
            entries[what].append(f"`{entry.partition('.')[2]}`")
    alike = defaultdict[tuple[str, str], list[str]](list)
    for (scenario, reason), names in entries.items():
        alike[reason, ", ".join(names)].append(f"`{scenario}`")
    if alike:
        yield ""
        yield "| its problems never have | why | entry points |"
        yield "|---|---|---|"
    for (reason, names), scenarios in alike.items():
        yield f"| {', '.join(scenarios)} | {reason} | {names} |"


def main() -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("evidence", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is another")
    given = parser.parse_args()
    text = page_of(given.evidence)
    if given.check:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
