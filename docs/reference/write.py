# SPDX-License-Identifier: Apache-2.0
"""Writes what follows from the code on pages of this folder: the commands, the public names, and
the table of adapters.

    python docs/reference/write.py          # writes them
    python docs/reference/write.py --check  # exits with 1 if one is not as it should be

The pages of specs are written by ``python -m lossgate.reports.spec_files``.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, wrap
from typing import Any

import docstring_parser

import lossgate
from lossgate.adapters import LIBRARIES
from lossgate.cli import app
from lossgate.reports.json_file import JsonCell, JsonFile

_HERE = Path(__file__).parent
_WRITTEN = "<!-- Written by python docs/reference/write.py: change the code, and run that. -->"
_ATTRIBUTE = re.compile(r"^    (\w+): [^\n]+\n    \"\"\"(.*?)\"\"\"", re.MULTILINE | re.DOTALL)
"""A field of a class, and the docstring below it."""
_OTHERS = {
    "ANY": 'In `supports`, every value of an option: `supports={"temperature": lossgate.ANY}`.',
    "inputs": "What a kernel is given: a class for each spec and head, such as `lossgate.inputs.NllHidden`. "
    "[The pages of specs](specs/README.md) have their fields.",
    "options": "The options of each spec, such as `lossgate.options.NllOptions`.",
    "strategies": "Strategies of Hypothesis, for [tests of your own](../how-to/own-tests.md#problems-to-draw).",
}
"""What is said of public names that are no functions and no classes."""
_MADE_BY_OTHERS = ("Batch", "Candidate", "Case", "FieldContext", "Property", "RankContext", "Spec", "TokenValues")
"""Classes that no user calls: lossgate makes the objects, or a decorator does."""


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    names = re.sub(r"\n{3,}", "\n\n", "\n".join(_names()))
    return {_HERE / "commands.md": _commands(), _HERE / "python.md": names, _HERE / "adapters.md": _adapters()}


def _adapters() -> str:
    """Returns the page of adapters, with the table below its mark made anew."""
    page = _HERE / "adapters.md"
    above = page.read_text().partition(_WRITTEN)[0] if page.is_file() else ""
    rows = ["| adapter | library | known versions | entry points |", "|---|---|---|---|"]
    for library in LIBRARIES.values():
        entries = ", ".join(f"`{entry.partition('.')[2]}`" for entry in library.entry_points)
        rows.append(f"| `{library.name}` | {library.package} | {', '.join(library.known)} | {entries} |")
    return "\n".join((f"{above}{_WRITTEN}", "", *rows, ""))


def _commands() -> str:
    text = app.generate_docs(output_format="markdown")
    head, _, rest = text.partition("\n")
    assert head == "# lossgate", head
    of_json = "\n".join(_of_json())
    return f"# Commands\n\n{_WRITTEN}\n{rest.rstrip()}\n\n{of_json}\n"


def _of_json() -> Iterator[str]:
    yield "## The file of --json"
    yield ""
    yield "`lossgate verify --json FILE` writes one JSON object:"
    for kind, heading in ((JsonFile, ""), (JsonCell, "Each of `cells` has:")):
        yield from (("", heading, "") if heading else ("",))
        for field, meaning in _fields(kind):
            yield from _item(field, meaning)


def _names() -> Iterator[str]:
    yield "# Names in Python"
    yield ""
    yield _WRITTEN
    yield ""
    yield from wrap("All are names of `lossgate`. Each is imported where it is first used.", 100)
    for name in sorted(lossgate.__all__, key=str.lower):
        yield ""
        yield f"## {name}"
        yield ""
        yield from wrap(_OTHERS[name], 100) if name in _OTHERS else _described(name, getattr(lossgate, name))
    yield ""


def _described(name: str, named: Any) -> Iterator[str]:
    if name not in _MADE_BY_OTHERS and not (inspect.isclass(named) and issubclass(named, Exception)):
        yield "```python"
        yield _signature(name, named)
        yield "```"
        yield ""
    yield from _prose(inspect.getdoc(named) or "")
    if inspect.isclass(named) and (fields := _fields(named)):
        yield from ("Fields:", "")
        for field, meaning in fields:
            yield from _item(field, meaning)


def _signature(name: str, named: Any) -> str:
    """Returns a signature without types, which the descriptions give. A default that is made anew,
    or a function, is three dots.
    """
    empty, bare = inspect.Parameter.empty, list[inspect.Parameter]()
    for given in inspect.signature(named).parameters.values():
        plain = given.default is empty or repr(given.default)[0] != "<"
        bare.append(given.replace(annotation=empty, default=given.default if plain else ...))
    plain = str(inspect.Signature(bare)).replace("Ellipsis", "...")
    text = f"{name}{plain}"
    if len(text) <= 100:
        return text
    inner = plain.removeprefix("(").removesuffix(")")
    return "\n".join([f"{name}(", *(f"    {line}" for line in wrap(inner, 90)), ")"])


def _prose(docstring: str) -> Iterator[str]:
    """Yields a docstring as Markdown: its sections become lists."""
    parsed = docstring_parser.parse(docstring, docstring_parser.DocstringStyle.GOOGLE)
    said = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
    for paragraph in re.split(r"\n\n+", said):
        if paragraph.startswith("    "):
            yield from ("```python", *dedent(paragraph).splitlines(), "```", "")
        else:
            yield from (*wrap(_code(paragraph), 100, break_on_hyphens=False), "")
    for title, items in (("Arguments", parsed.params), ("Raises", parsed.raises)):
        if items:
            yield f"{title}:"
            yield ""
            for item in items:
                named = item.arg_name if isinstance(item, docstring_parser.DocstringParam) else item.type_name
                yield from _item(named or "", item.description or "")
            yield ""
    if parsed.returns and parsed.returns.description:
        kind = f"{parsed.returns.type_name}: " if parsed.returns.type_name else ""
        yield from (*wrap(_code(f"Returns: {kind}{parsed.returns.description}"), 100, break_on_hyphens=False), "")


def _item(name: str, meaning: str) -> Iterator[str]:
    text = f"- `{name}`: {_code(' '.join(meaning.split()))}"
    yield from wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _code(text: str) -> str:
    """Returns text with the marks of code that Markdown has."""
    return text.replace("``", "`").replace("::", ":")


def _fields(kind: type) -> list[tuple[str, str]]:
    """Returns the fields of a class that have a docstring of their own."""
    return [(name, meaning) for name, meaning in _ATTRIBUTE.findall(inspect.getsource(kind)) if name[0] != "_"]


def stale() -> list[str]:
    """Returns the pages that are not as they should be."""
    return [page.name for page, text in pages().items() if not page.is_file() or page.read_text() != text]


def main(arguments: list[str]) -> int:
    """Writes the pages, or checks them."""
    wrong = stale()
    if "--check" in arguments:
        for page in wrong:
            print(f"docs/reference/{page} is not as python docs/reference/write.py writes it")
        return 1 if wrong else 0
    for page, text in pages().items():
        page.write_text(text)
    print(f"wrote {', '.join(wrong)}" if wrong else "every page is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
