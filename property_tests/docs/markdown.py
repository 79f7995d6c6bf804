# SPDX-License-Identifier: Apache-2.0
"""Runs the code blocks and checks the commands of a Markdown page.

A page runs in a folder of its own that holds a link to everything at the top of the repository. So
it finds ``ci/candidates/pytorch.py``, and what it writes stays out of the repository. Its blocks
run in order:

- ``python``: executed, in a namespace of its own. It can import files that the page has saved.
- ``text``: the output of the ``python`` block directly before it.
- ``console``: commands, each after ``$ ``, and the output of each below it.
- ``sh``: commands without output, one on each line.
- ``diff``: a change of the file that ``<!-- file: NAME -->`` names, without line numbers. What it
  takes away must be there once.
- ``yaml``: parsed. ``test_ci_recipes.py`` has the workflows.
- ``toml``: parsed. The settings loader reads ``[tool.lossgate]``, profile by profile.
- indented: a formula. It must not look like a command.

Any other block is an error. A command continues on the next line after ``\\``. Standard output and
standard error are compared together. In output, ``...`` stands for any text in a line, and a line
of ``...`` for any number of lines.

HTML comments directly before a block, which readers do not see, change how it runs:

- ``<!-- continues -->``: the ``python`` block runs in the namespace of the one before it.
- ``<!-- setup: CODE -->``: CODE is executed in the block's namespace first.
- ``<!-- file: NAME -->``: the block's text is also saved as NAME, for later commands.
- ``<!-- exits: CODE -->``: the last command of the block exits with CODE. Otherwise every command
  must exit with 0.

Some commands take minutes or need the network, and are not run: ``ci/verify``, ``ci/test``,
``ci/gate``, ``ci/wrappers``, ``ci/build``, ``python benchmarks/*.py`` and ``pip``. They must name a
file that exists and flags that ``--help`` lists, and their output must not be shown. The same holds
for commands in code spans in the text, none of which is run. Other code spans that name a path in
the repository must name one that exists.
"""

import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lossgate.base.errors import UsageError
from lossgate.cli import app
from lossgate.engine.settings import load_settings
from property_tests.warm_python import warm_commands

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "lossgate",
    "python",
    "pip",
    "pytest",
    "torchrun",
    "ci/verify",
    "ci/test",
    "ci/gate",
    "ci/wrappers",
    "ci/build",
)
"""What a code span or an indented block starts with if it is a command."""
_NOT_RUN_HELP = {
    "ci/verify": "lossgate verify --help",
    "ci/test": "pytest --help",
    "ci/gate": "lossgate gate --help",
    "ci/wrappers": "python -m distributed_tests.wrappers --help",
    "ci/build": "python -m pip install --help",
    "pip": "python -m pip install --help",
}
"""Commands that are not run, and the command that lists the flags they accept."""
_DIRECTIVE = re.compile(r"<!--\s*(continues|setup|file|exits)\b:?(.*?)-->", re.DOTALL)
_TIMEOUT_SECONDS = 300


class PageError(Exception):
    """A block or command of a page does not do what the page says."""


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        kind: first word after the fence; ``"indented"`` for an indented block.
        text: the code.
        line: number of its first line in the page, from 1.
        directives: the HTML comments directly before it, by name.
    """

    kind: str
    text: str
    line: int
    directives: dict[str, str]


@dataclass(frozen=True)
class Command:
    """A command of a block, its expected output, and the number of its line in the page."""

    text: str
    output: str
    line: int


def pages(root: Path = ROOT) -> list[Path]:
    """Returns the pages at the top of the repository and every page of docs, but for those that
    ``docs/reference/write.py`` writes from the code.
    """
    return [
        page for page in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))) if not _is_written(page)
    ]


def _is_written(page: Path) -> bool:
    return "<!-- Written by" in page.read_text()


def blocks_of(page: Path) -> Iterator[Block]:
    """Yields the code blocks of a page in order.

    Raises:
        PageError: a directive does not stand directly before a block.
    """
    directives: dict[str, str] = {}
    for token in _tokens(page):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            directives |= {name: textwrap.dedent(value).strip() for name, value in _DIRECTIVE.findall(token.content)}
        elif token.type in ("fence", "code_block"):
            kind = (token.info.split() or [""])[0] if token.type == "fence" else "indented"
            yield Block(kind, token.content, line + (token.type == "fence"), directives)
            directives = {}
        elif directives:
            raise PageError(
                f"{page.name}:{line}: the comment <!-- {next(iter(directives))} --> stands before no code block"
            )


def code_spans_of(page: Path) -> Iterator[tuple[str, int]]:
    """Yields the text of each code span, and the line on which its paragraph starts."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content, (token.map or [0])[0] + 1


def links_of(page: Path) -> Iterator[str]:
    """Yields the target of each link."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "link_open":
                yield str(child.attrs["href"])


def run_page(page: Path, folder: Path, root: Path = ROOT) -> None:
    """Runs every block of a page.

    Args:
        page: the Markdown file.
        folder: an empty folder in which it runs.
        root: the repository to which its commands refer.

    Raises:
        PageError: a block fails, prints something else than the page shows, or is of a kind that
            no rule covers.
    """
    for entry in root.iterdir():
        if entry.name == "ci":  # lossgate replay runs the code of the working folder alone
            shutil.copytree(entry, folder / "ci", ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith(".") and entry.name not in ("pyproject.toml", "conftest.py"):
            (folder / entry.name).symlink_to(entry)
    namespace: dict[str, Any] = {}
    printed: str | None = None
    with chdir(folder), _importable(folder):
        for block in blocks_of(page):
            where = f"{page.name}:{block.line}"
            _save(block, folder, where)
            if block.kind == "text":
                if printed is None:
                    raise PageError(
                        f"{where}: a text block shows the output of the python block before it; there is none"
                    )
                _compare(printed, block.text, f"{where}: the python block before")
                printed = None
                continue
            printed = None
            if block.kind == "python":
                if "continues" not in block.directives:
                    namespace = {"__name__": "page"}
                printed = _run_python(block, namespace, page)
            elif block.kind in ("console", "sh"):
                _run_commands(block, where, root)
            elif block.kind == "diff":
                _change(block, folder, where)
            elif block.kind == "yaml":
                yaml.safe_load(block.text)
            elif block.kind == "toml":
                _check_toml(block.text, where)
            elif block.kind == "indented":
                if commands := [
                    line for line in block.text.splitlines() if is_command(line.strip().removeprefix("$ "))
                ]:
                    raise PageError(f"{where}: {commands[0].strip()!r} is a command; show it in a console or sh block")
            else:
                raise PageError(f"{where}: no rule covers a code block of kind {block.kind!r}; see markdown.py")


def check_code_spans(page: Path, root: Path = ROOT) -> None:
    """Checks code spans of a page: paths must exist, and the flags of commands must be known.

    A path is what starts with the name of a folder at the top of the repository.

    Raises:
        PageError: a path or a flag does not exist.
    """
    folders = {entry.name for entry in root.iterdir() if entry.is_dir()}
    for text, line in code_spans_of(page):
        if is_command(text) and " " in text:
            check_without_running(text, f"{page.name}:{line}", root)
        elif text.partition("/")[0] in folders and not any(root.glob(text)):
            raise PageError(f"{page.name}:{line}: {text!r} does not exist")


def is_command(text: str) -> bool:
    """Whether a line of text starts like a command rather than like a formula or a sentence."""
    return (text.split() or [""])[0] in COMMANDS or text.startswith("$ ")


def commands_of(block: Block, where: str) -> list[Command]:
    """Splits a ``console`` or ``sh`` block into commands.

    Raises:
        PageError: a ``console`` block starts with output.
    """
    commands: list[Command] = []
    continued = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        starts = line.startswith("$ ") if block.kind == "console" else bool(line.strip()) and line[0] != "#"
        if continued:
            commands[-1] = Command(f"{commands[-1].text}\n{line}", "", commands[-1].line)
        elif starts:
            commands.append(Command(line.removeprefix("$ "), "", number))
        elif block.kind == "console":
            if not commands:
                raise PageError(f"{where}: a console block starts with a command after '$ ', not with {line!r}")
            commands[-1] = Command(commands[-1].text, f"{commands[-1].output}{line}\n", commands[-1].line)
        continued = (continued or starts) and line.endswith("\\")
    return commands


def check_without_running(command: str, where: str, root: Path = ROOT) -> None:
    """Checks that the files a command names exist and that its flags are known.

    Raises:
        PageError: one of them is not.
    """
    words = shlex.split(command, comments=True)
    for word in words:
        path = re.sub(r":\w+$", "", word)  # file.py:name
        if "/" in path and not path.startswith("-") and not (root / path).exists():
            raise PageError(f"{where}: {command!r} names {path}, which does not exist")
    if words[0] == "lossgate" and len(words) > 1 and words[1].isalpha() and words[1] not in app:
        raise PageError(f"{where}: {command!r}: there is no command {words[1]!r}")
    if flags := [word.partition("=")[0] for word in words if word.startswith("--")]:
        asked = _help_command(words)
        known = _help(asked, root)
        if known.returncode:
            raise PageError(f"{where}: {asked!r} exits with {known.returncode}:\n{known.stdout}")
        for flag in flags:
            if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known.stdout):
                raise PageError(f"{where}: {command!r} has the flag {flag}, which {asked!r} does not list")


def matches(expected: str, found: str) -> bool:
    """Whether output is what a page shows, with ``...`` for any text."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else r".*?".join(map(re.escape, line.split("..."))) + r"\n"
        for line in _lines(expected)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(found))) is not None


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _compare(found: str, expected: str, what: str) -> None:
    if not matches(expected, found):
        raise PageError(f"{what} prints\n{found.rstrip()}\nand the page shows\n{expected.rstrip()}")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets code import the modules of a folder, and forgets them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]


def _change(block: Block, folder: Path, where: str) -> None:
    """Makes the change of a ``diff`` block."""
    lines = block.text.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in kept) for kept in ((" ", "-"), (" ", "+")))
    file = folder / block.directives.get("file", "")
    text = file.read_text() if file.is_file() else ""
    if (times := text.count(before)) != 1:
        raise PageError(
            f"{where}: {file.name} has these lines {times} times, and a diff changes those that are there once"
        )
    file.write_text(text.replace(before, after))


def _save(block: Block, folder: Path, where: str) -> None:
    if block.kind != "diff" and (name := block.directives.get("file")):
        if (folder / name).is_symlink():
            raise PageError(f"{where}: file {name} is the name of something in the repository; choose another")
        (folder / name).write_text(block.text)
        importlib.invalidate_caches()


def _run_python(block: Block, namespace: dict[str, Any], page: Path) -> str:
    """Returns what the block prints."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            if setup := block.directives.get("setup"):
                exec(compile(setup, f"{page} (setup of line {block.line})", "exec"), namespace)
            # Empty lines in front give the numbers of the page to a traceback.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    except Exception as error:
        raise PageError(f"{page.name}:{block.line}: the python block raises {type(error).__name__}: {error}") from error
    return printed.getvalue()


_TRIES_OF_TORCHRUN = 6
"""On busy cores up to one in three aborts in torch when all is done, with "terminate called without
an active exception"."""


def _run_commands(block: Block, where: str, root: Path) -> None:
    commands = commands_of(block, where)
    for command in commands:
        place = f"{where.rpartition(':')[0]}:{command.line}"
        if _is_not_run(command.text):
            check_without_running(command.text, place, root)
            if command.output.strip():
                raise PageError(f"{place}: {command.text!r} is not run by this test, so its output must not be shown")
            continue
        status = int(block.directives.get("exits", 0)) if command is commands[-1] else 0
        for _ in range(_TRIES_OF_TORCHRUN if command.text.startswith("torchrun ") else 1):
            done = _run(command.text, Path.cwd())
            if done.returncode == status:
                break
        if done.returncode != status:
            raise PageError(
                f"{place}: {command.text!r} exits with {done.returncode}, expected {status}:\n{done.stdout}"
            )
        if block.kind == "console":
            _compare(done.stdout, command.output, f"{place}: {command.text!r}")


def _is_not_run(command: str) -> bool:
    words = shlex.split(command, comments=True)
    return words[0] in _NOT_RUN_HELP or (words[0] == "python" and words[1:2] != [] and "benchmarks/" in words[1])


def _help_command(words: list[str]) -> str:
    if words[:2] == ["ci/test", "--torch"]:
        return "python benchmarks/torch_versions.py --help"
    if words[0] in _NOT_RUN_HELP:
        return _NOT_RUN_HELP[words[0]]
    # The subcommand or the script, if there is one, has flags of its own.
    return " ".join([words[0], *[word for word in words[1:2] if not word.startswith("-")], "--help"])


@cache
def _help(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    return _run(command, root, warm="pytest" not in command)  # some of its plugins must be loaded first of all


def _run(command: str, folder: Path, *, warm: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command. If ``warm``, its programs are those that start quickly."""
    bash = shutil.which("bash")
    if bash is None:
        raise PageError("bash is not installed; the commands of the pages need it")
    places = [*([warm_commands()] if warm else []), Path(sys.executable).parent]
    # What a reader sees in a terminal: in CI, pytest cuts no line of its summary.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment |= {
        "PATH": os.pathsep.join([*map(str, places), os.environ.get("PATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "180",  # no line of help is wrapped within a flag
    }
    return subprocess.run(
        [bash, "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )


def _check_toml(text: str, where: str) -> None:
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PageError(f"{where}: {error}") from None
    settings = parsed.get("tool", {}).get("lossgate")
    if settings is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(text)
        for profile in ("dev", *settings.get("profiles", {})):
            try:
                load_settings(profile, start=Path(folder))
            except UsageError as error:
                raise PageError(f"{where}: {error}") from None
