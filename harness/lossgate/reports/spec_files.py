# SPDX-License-Identifier: Apache-2.0
"""Writes files about the built-in specs: their pages in the docs, and the classes of their inputs
and options for editors and type checkers.

    python -m lossgate.reports.spec_files          # writes them
    python -m lossgate.reports.spec_files --check  # exits with 1 if a file is out of date
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap

from lossgate.losses import SPECS
from lossgate.reports.spec_sections import Section, SpecEntry, sections
from lossgate.reports.spec_stubs import inputs_stub, options_stub
from lossgate.specs.spec import Spec

_HARNESS = Path(__file__).parents[1]
_ROOT = _HARNESS.parents[1]
_PAGES = _ROOT / "docs/reference/specs"


def files() -> dict[Path, str]:
    """Returns the text of each file."""
    pages = {_PAGES / f"{spec.name}.md": "\n".join(page(spec)) for spec in SPECS.values()}
    index = {_PAGES / "README.md": "\n".join(_index())}
    stubs = {_HARNESS / "inputs.pyi": "\n".join(inputs_stub()), _HARNESS / "options.pyi": "\n".join(options_stub())}
    return {**index, **pages, **stubs}


def stale() -> list[str]:
    """Returns the files that are out of date, and the pages that belong to no spec."""
    wanted = files()
    wrong = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    left = [path for path in _PAGES.glob("*") if path not in wanted]
    return [str(path.relative_to(_ROOT)) for path in (*wrong, *left)]


# Pages


def _index() -> Iterator[str]:
    yield "# Specs"
    yield ""
    yield from wrap(
        "These pages say, for each loss, what a kernel is given, what it may return, and what problems must show. They "
        "are written from the code. [The formulas](../losses.md) are on another page. `lossgate list` shows the same.",
        100,
        break_on_hyphens=False,
    )
    yield ""
    yield from _table(("spec", "heads", "what it is"), (_of_index(spec) for spec in SPECS.values()))
    yield ""


def _of_index(spec: Spec) -> tuple[str, ...]:
    return f"[{spec.name}]({spec.name}.md)", ", ".join(spec.inputs), spec.summary


def page(spec: Spec) -> Iterator[str]:
    """Yields the lines of a spec's page."""
    yield f"# Spec {spec.name}"
    yield ""
    said = f"{spec.summary[:1].upper()}{spec.summary[1:]}."
    if spec.source:
        said += f" Source: {spec.source}."
    said += " [Losses](../losses.md) has the formula."
    if spec.group_size > 1 and len(spec.inputs) > 1:
        said += (
            " [Losses of sequences and pairs](../../how-to/own-loss.md#losses-of-sequences-and-pairs) shows a kernel "
            "of pairs, and how cp ranks add up their parts of a sequence."
        )
    yield from wrap(said, 100, break_on_hyphens=False)
    yield ""
    for section in sections(spec):
        yield f"## {section.title[:1].upper()}{section.title[1:]}"
        yield ""
        if section.about:
            yield from wrap(section.about, 100, break_on_hyphens=False)
            yield ""
        yield from _table(("name", *section.columns, "meaning"), (_row(section, entry) for entry in section.entries))
        yield ""


def _row(section: Section, entry: SpecEntry) -> tuple[str, ...]:
    name = f"`{entry.name}`" if section.is_code else entry.name
    return name, *entry.facts, entry.meaning


def _table(heading: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        escaped = (cell.replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(escaped)} |"


def main(arguments: list[str]) -> int:
    """Writes the files of a checkout, or checks them."""
    if not (_ROOT / "pyproject.toml").is_file():
        print("only a checkout of lossgate has these files; install it with pip install --editable", file=sys.stderr)
        return 2
    wrong = stale()
    if "--check" in arguments:
        for path in wrong:
            print(f"{path} is not as python -m lossgate.reports.spec_files writes it")
        return 1 if wrong else 0
    _write(files())
    print(f"wrote {len(wrong)} files" if wrong else "every file is as it should be")
    return 0


def _write(texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for path in _PAGES.glob("*.md"):
        if path not in texts:
            path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
