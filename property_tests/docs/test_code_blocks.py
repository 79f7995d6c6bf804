# SPDX-License-Identifier: Apache-2.0
"""Every code block of README.md and docs runs. The rules are in markdown.py."""

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .markdown import ROOT as REPOSITORY
from .markdown import Block, PageError, check_code_spans, commands_of, links_of, matches, pages, run_page

NEEDS = {"gpu.md": "triton"}
"""Pages with commands that need a package which not every system has."""

PAGES = pages()


def _name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def test_every_page_is_found() -> None:
    names = {_name(page) for page in pages()}
    assert {
        "README.md",
        "docs/reference/losses.md",
        "docs/reference/specs/nll.md",
        "docs/explanation/judge.md",
    } <= names


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_blocks_run_and_show_their_output(page: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(page.name)
    if needed and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    run_page(page, tmp_path)


def test_commands_in_the_text_exist() -> None:
    wrong: list[str] = []
    for page in PAGES:
        try:
            check_code_spans(page)
        except PageError as error:
            wrong.append(str(error))
    assert wrong == []


def test_lines_are_at_most_100_columns() -> None:
    """Tables and links cannot be wrapped, so their lines may be longer."""
    lines = [(page, n, line) for page in PAGES for n, line in enumerate(page.read_text().splitlines(), 1)]
    assert [f"{_name(page)}:{n}" for page, n, line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_links_to_files_and_headings_resolve() -> None:
    assert [f"{_name(page)}: {link}" for page in PAGES for link in links_of(page) if not _resolves(page, link)] == []


def _resolves(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    return "://" in link or (target.exists() and (not heading or heading in headings_of(target)))


def headings_of(page: Path) -> set[str]:
    """Returns the headings of a page as links name them."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lstrip("# ")).replace(" ", "-").lower() for line in lines}


# The rules themselves. A page is given as its text; ~~~ fences stand for ``` fences.

RIGHT = {
    "diff": (
        "<!-- file: a.py -->\n~~~python\nx = 1\ny = 1\n~~~\n\n<!-- file: a.py -->\n~~~diff\n x = 1\n-y = 1\n"
        "+y = 2\n+z = 3\n~~~\n\n~~~console\n$ cat a.py\nx = 1\ny = 2\nz = 3\n~~~\n"
    ),
    "output": "~~~python\nprint(1 + 1)\n~~~\n\n~~~text\n2\n~~~\n",
    "part of a line": "~~~python\nprint('took 0.31 s')\n~~~\n\n~~~text\ntook ... s\n~~~\n",
    "some lines": "~~~python\nprint('a', 'b', 'c', 'd', sep='\\n')\n~~~\n\n~~~text\na\n...\nd\n~~~\n",
    "no output shown": "~~~python\nprint(1)\n~~~\n",
    "continues": "~~~python\nx = 2\n~~~\n\n<!-- continues -->\n~~~python\nassert x == 2\n~~~\n",
    "setup": "<!-- setup:\nx = 2\n\ny = 3\n-->\n~~~python\nassert x + y == 5\n~~~\n",
    "console": "~~~console\n$ echo a\na\n$ echo b \\\n    c\nb c\n~~~\n",
    "status": "<!-- exits: 3 -->\n~~~console\n$ echo a\na\n$ exit 3\n~~~\n",
    "standard error": "~~~console\n$ echo a >&2\na\n~~~\n",
    "file": "<!-- file: said.py -->\n~~~python\nprint('said')\n~~~\n\n~~~console\n$ python said.py\nsaid\n~~~\n",
    "import": "<!-- file: saved.py -->\n~~~python\nx = 2\n~~~\n\n~~~python\nimport saved\n\nassert saved.x == 2\n~~~\n",
    "sh": "~~~sh\n# a comment\ntest -e ci/verify\n\necho a\n~~~\n",
    "not run": "~~~sh\nci/verify --profile nightly  # takes long\nci/test -k docs\n~~~\n",
    "benchmark": "~~~console\n$ python benchmarks/fused.py --accuracy\n~~~\n",
    "settings": "~~~toml\n[tool.lossgate]\nseed = 1\n\n[tool.lossgate.profiles.mine]\njobs = 2\n~~~\n",
    "other toml": "~~~toml\n[tool.other]\nx = 1\n~~~\n",
    "formula": "A loss:\n\n    L = - sum_t m_t log p_t\n",
    "in a list": "- Text.\n\n  ~~~python\n  print(1)\n  ~~~\n\n  ~~~text\n  1\n  ~~~\n",
    "span": "Run `lossgate verify my_kernels.py --profile ci` or `python benchmarks/fused.py`; `lossgate` is a tool.\n",
    "path": "See `harness/lossgate/judge`, `docs/*.md` and `property_tests/docs/markdown.py`; `x/y` is a fraction.\n",
}

WRONG = {
    "other output": (
        "~~~python\nprint(1 + 1)\n~~~\n\n~~~text\n3\n~~~\n",
        "page.md:6: the python block before prints\n2",
    ),
    "a line less": (
        "~~~python\nprint('a')\nprint('b')\n~~~\n\n~~~text\na\n~~~\n",
        "prints\na\nb\nand the page shows\na",
    ),
    "raises": ("\n\n~~~python\n1 / 0\n~~~\n", "page.md:4: the python block raises ZeroDivisionError"),
    "a namespace of its own": ("~~~python\nx = 2\n~~~\n\n~~~python\nx\n~~~\n", "raises NameError"),
    "output of nothing": ("~~~text\n3\n~~~\n", "there is none"),
    "unknown kind": ("~~~rust\nlet x = 1;\n~~~\n", "no rule covers a code block of kind 'rust'"),
    "no kind": ("~~~\nx\n~~~\n", "no rule covers a code block of kind ''"),
    "lost directive": ("<!-- continues -->\n\nText.\n", "page.md:3: the comment <!-- continues --> stands before no"),
    "command output": ("~~~console\n$ echo a\nb\n~~~\n", "page.md:2: 'echo a' prints\na\nand the page shows\nb"),
    "command status": ("~~~console\n$ exit 3\n~~~\n", "'exit 3' exits with 3, expected 0"),
    "expected status": ("<!-- exits: 3 -->\n~~~sh\ntrue\n~~~\n", "'true' exits with 0, expected 3"),
    "output first": ("~~~console\necho a\n~~~\n", "starts with a command after '$ ', not with 'echo a'"),
    "output that cannot be checked": ("~~~console\n$ ci/verify\n4 cells\n~~~\n", "its output must not be shown"),
    "unknown flag": ("~~~sh\nci/verify --profiles ci\n~~~\n", "has the flag --profiles, which"),
    "unknown flag of a benchmark": ("~~~sh\npython benchmarks/fused.py --speed\n~~~\n", "has the flag --speed"),
    "no such benchmark": ("~~~sh\npython benchmarks/none.py\n~~~\n", "names benchmarks/none.py, which does not exist"),
    "name in use": ("<!-- file: README.md -->\n~~~python\n1\n~~~\n", "file README.md is the name of something in the"),
    "indented command": (
        "Do this:\n\n    lossgate verify my_kernels.py\n",
        "'lossgate verify my_kernels.py' is a command",
    ),
    "indented prompt": ("Do this:\n\n    $ ci/test\n", "is a command; show it in a console or sh block"),
    "unknown setting": ("~~~toml\n[tool.lossgate]\nexample = 3\n~~~\n", "unknown key 'example'"),
    "bad profile": ("~~~toml\n[tool.lossgate.profiles.mine]\njobs = -1\n~~~\n", "jobs=-1"),
    "diff of what is not there": ("<!-- file: a.py -->\n~~~diff\n-a\n+b\n~~~\n", "a.py has these lines 0 times"),
    "bad toml": ("~~~toml\n[tool.lossgate\n~~~\n", "page.md:2: "),
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], None]:
    def run(text: str) -> None:
        page, folder = tmp_path / "page.md", tmp_path / "folder"
        page.write_text(text.replace("~~~", "```"))
        folder.mkdir()
        run_page(page, folder)
        check_code_spans(page)

    return run


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_pages_that_are_right(run: Callable[[str], None], text: str) -> None:
    run(text)


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_pages_that_are_wrong(run: Callable[[str], None], text: str, message: str) -> None:
    with pytest.raises(PageError) as raised:
        run(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ("lossgate show my.py", "there is no command 'show'"),
        ("lossgate verify my.py --profil ci", "--profil, which 'lossgate verify --help' does not list"),
        ("property_tests/docs/none.py", "page.md:1: 'property_tests/docs/none.py' does not exist"),
        ("lossgate replay ci/candidates/none.json", "names ci/candidates/none.json, which does not exist"),
        ("python benchmarks/fused.py --fast", "--fast, which 'python benchmarks/fused.py --help' does not list"),
    ],
)
def test_commands_in_the_text_that_are_wrong(tmp_path: Path, span: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Run `{span}`.\n")
    with pytest.raises(PageError) as raised:
        check_code_spans(page)
    assert message in str(raised.value)


def test_a_page_leaves_its_modules_behind(run: Callable[[str], None]) -> None:
    page = RIGHT["import"]
    run(page)
    assert "saved" not in sys.modules


def test_a_page_leaves_the_repository_alone(run: Callable[[str], None]) -> None:
    before = set(REPOSITORY.iterdir())
    run("<!-- file: made.py -->\n~~~python\n1\n~~~\n\n~~~sh\ntouch also_made\n~~~\n")
    assert set(REPOSITORY.iterdir()) == before


def test_commands_of_a_block() -> None:
    block = Block("console", "$ a \\\n  b\nc\n\nd\n$ e\n", 10, {})
    assert [(c.text, c.output, c.line) for c in commands_of(block, "")] == [
        ("a \\\n  b", "c\n\nd\n", 10),
        ("e", "", 15),
    ]


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("a  \n\n", "a\n", True),
        ("a.c", "abc", False),
        ("...", "", True),
        ("a...", "a\nb", False),
        ("a\n...", "a\nb\nc", True),
        ("a\n...\nc", "a\nc", True),
        ("...\nc", "a\nc\nd", False),
    ],
)
def test_matches(expected: str, found: str, same: bool) -> None:
    assert matches(expected, found) is same
