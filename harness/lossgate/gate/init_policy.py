# SPDX-License-Identifier: Apache-2.0
"""Writes a first policy from evidence. It asks for exactly the cells of the evidence."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from msgspec.structs import astuple

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellKey, KnownFailureRecord
from lossgate.evidence.records import RunRecord
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import Committed
from lossgate.gate.policy_patterns import escape
from lossgate.gate.rules import EvidenceRules
from lossgate.gate.runs import all_committed
from lossgate.judge.pooling import LARGEST_MDE

_Tuples = frozenset[tuple[str, ...]]
_Box = tuple[tuple[str, ...], ...]
"""A list of names for each part of a cell's key. It stands for every combination of them."""

_WIDTH = 80
"""Longer lists take a line for each name."""
_NAMED = 5
"""How many cells a comment names."""
_LISTS = ("candidates", "properties", "layouts", "dtypes", "worlds", "devices")
_USUAL = {"worlds": ("simulated",), "devices": ("cpu",)}

_TOP = """\
# What a release needs. The gate is closed unless evidence shows all of it:
#   lossgate gate EVIDENCE --policy THIS_FILE
schema = 1

[evidence]
# Older evidence is refused.
max_age = "3 days"
# All evidence must be of one commit.{commits}
same_commit = true
# true refuses evidence of files that differ from their commit, or are not in it.{committed}
unmodified = {unmodified}
# These versions must be the same in all evidence.{versions}
same_versions = {same}

# Each [[require]] asks for every combination of its lists. Shell patterns stand for what evidence
# has: "nll_*" for all candidates with such a name, of which there must be at least one. A name
# without *, ? or [ must be there, so that no cell can vanish unseen.
"""
_LEAST = """\
# The least problems of each of these cells, and the greatest error that could have stayed hidden.
min_problems = {problems}
max_mde = {mde}
"""
_KNOWN = """
# A known failure excuses its cell until it expires, as long as its frozen example still disagrees.
[[known_failure]]
{key}
# The heading under which a document describes it.
name = {name}
# The failure file that its candidate declares, relative to this file.
{example}
# Fill these in, and remove the "#": where it is followed up, who mends it, and until when.
# issue = "https://example.com/issues/12"
# owner = "a name"
# expires = 2027-01-31
"""


def first_policy(
    summaries: Iterable[CellSummary], runs: Iterable[RunRecord], examples: Mapping[str, Path] | None = None
) -> str:
    """Returns the text of a policy that asks for each cell of the evidence, and for no other.

    Fields of a known failure that only its owner knows are left as comments. The policy can't be
    loaded until they are filled in.

    Args:
        summaries: the results of cells, the newest of a cell last. The policy also asks for cells
            that did not pass.
        runs: the runs of the evidence.
        examples: the failure files at hand, by their SHA-256. The policy names their paths.

    Raises:
        UsageError: if there is no cell.
    """
    results = list(summaries)
    by_key = {result.key: result for result in results}
    if not by_key:
        raise UsageError(
            "no first policy: the evidence has no cell. Verify first: lossgate verify FILE --evidence out.jsonl"
        )
    known = {key: summary.known_failure for key, summary in sorted(by_key.items()) if summary.known_failure}
    by_name = {run.run: run for run in runs}
    parts = [_top(list(by_name.values()), all_committed(by_name.values(), results))]
    for some in (by_key.keys() - known.keys(), known.keys()):
        for box in boxes([astuple(key) for key in some]):
            parts.append(_rule(box, [by_key[CellKey(*names)] for names in product(*box)], by_name))
    parts += [_known_failure(key, record, examples or {}) for key, record in known.items()]
    return "".join(parts)


_OF_FILES = {
    Committed.YES: "",
    Committed.UNKNOWN: "\n# For the evidence at hand, git could not say.",
    Committed.NO: "\n# The evidence at hand is of such files: commit them, verify again, and write true.",
}


def _top(runs: Sequence[RunRecord], committed: Committed) -> str:
    commits = {run.commit for run in runs}
    none = " The evidence at hand names none." if None in commits else ""
    several = f" The evidence at hand is of {len(commits)} commits." if len(commits) > 1 else ""
    same = EvidenceRules().same_versions
    mixed = [name for name in same if len({run.versions.get(name) for run in runs}) > 1]
    return _TOP.format(
        committed=_OF_FILES[committed],
        unmodified=str(committed is Committed.YES).lower(),
        commits=several or none,
        versions=f" The evidence at hand has several of {' and '.join(mixed)}." if mixed else "",
        same=_list(same),
    )


def _rule(box: _Box, cells: Sequence[CellSummary], runs: Mapping[str, RunRecord]) -> str:
    lists = [
        f"{name} = {_list(map(escape, names))}\n"
        for name, names in zip(_LISTS, box, strict=True)
        if names != _USUAL.get(name)
    ]
    passed = [cell for cell in cells if cell.verdict == "AGREE"] or cells  # cells that fail stop early
    least = _LEAST.format(problems=max(1, min(_tried(cell, runs) for cell in passed)), mde=LARGEST_MDE)
    return "".join(("\n", *_comments(cells), "[[require]]\n", *lists, least))


def _tried(cell: CellSummary, runs: Mapping[str, RunRecord]) -> int:
    """Returns how many problems every run with the same settings tries in a cell.

    A search adds problems, but how many it adds depends on the seed.
    """
    examples = runs[cell.run].settings.get("examples") if cell.run in runs else None
    return min(cell.problems, examples) if isinstance(examples, int) else cell.problems


def _comments(cells: Sequence[CellSummary]) -> Iterator[str]:
    """Yields comments on the cells that do not pass."""
    known = [cell for cell in cells if cell.known_failure]
    if known:
        yield "# These have known failures; see below.\n"
        return
    failing = [cell for cell in cells if cell.verdict != "AGREE"]
    if failing:
        yield f"# {len(failing)} of these {len(cells)} cells did not pass, and keep the gate closed:\n"
        yield from (f"#   {_on_one_line(cell.key)} {cell.outcome}\n" for cell in failing[:_NAMED])
        if len(failing) > _NAMED:
            yield f"#   and {len(failing) - _NAMED} more\n"


def _known_failure(key: CellKey, record: KnownFailureRecord, examples: Mapping[str, Path]) -> str:
    named = zip(("candidate", "property", "layout", "dtype", "world", "device"), astuple(key), strict=True)
    found = examples.get(record.example)
    if found is None:
        example = f"# No file at hand has the SHA-256 {record.example}.\n"
        example += '# example = "failures/failure.json"'
    else:
        example = f"example = {_quoted(found.as_posix())}"
    return _KNOWN.format(
        key="\n".join(f"{part} = {_quoted(name)}" for part, name in named), name=_quoted(record.name), example=example
    )


def _on_one_line(key: CellKey) -> str:
    """Returns a key as text that can't end a comment."""
    return _quoted(str(key))[1:-1]


def _list(names: Iterable[str]) -> str:
    """Returns a TOML list, on one line if it fits."""
    items = [_quoted(name) for name in names]
    line = f"[{', '.join(items)}]"
    if len(line) <= _WIDTH:
        return line
    return "".join(("[\n", *(f"    {item},\n" for item in items), "]"))


def _quoted(text: str) -> str:
    """Returns a text as a TOML string on one line."""
    return "".join(map(_printable, json.dumps(text, ensure_ascii=False)))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def boxes(cells: Collection[tuple[str, ...]]) -> list[_Box]:
    """Returns boxes that together hold exactly the given cells, each cell in one box.

    Names of the first part share a box if they come with the same combinations of the other parts.
    These combinations are divided into boxes likewise. A full product is one box. All names are
    sorted.
    """
    return sorted(_boxes(frozenset(cells)))


def _boxes(cells: _Tuples) -> Iterator[_Box]:
    if () in cells:  # no part is left
        yield ()
        return
    by_first: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for first, *rest in cells:
        by_first[first].add(tuple(rest))
    by_rests: defaultdict[_Tuples, list[str]] = defaultdict(list)
    for first, rests in by_first.items():
        by_rests[frozenset(rests)].append(first)
    for rests, names in by_rests.items():
        for box in _boxes(rests):
            yield tuple(sorted(names)), *box
