# SPDX-License-Identifier: Apache-2.0
"""What ``lossgate list`` shows, at any width, and the files that are written from the specs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import lossgate
from lossgate.declaration.loading import load_all_candidates
from lossgate.inputs import __dir__ as names_of_inputs
from lossgate.losses import SPECS
from lossgate.options import __dir__ as names_of_options
from lossgate.properties import PROPERTIES
from lossgate.reports import spec_files
from lossgate.reports.listing import described, overview
from lossgate.reports.spec_sections import sections
from lossgate.specs.heads import HEADS
from lossgate.specs.record import DTYPES, fields_of
from lossgate.specs.spec import Spec
from property_tests.meta.command_line import Lossgate

WIDTHS = (40, 80, 120, 200)


def shown(lines: list[str], width: int) -> str:
    """Returns the lines as a console of some width prints them, with all white space alike."""
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    return " ".join(capture.get().split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SPECS)
def test_nothing_of_a_spec_is_cut(name: str, width: int) -> None:
    spec = SPECS[name]
    text = shown(list(described(spec, width)), width)
    for head in spec.inputs:
        assert f'inputs at head "{head}"' in text
        assert f"lossgate.inputs.{spec.inputs[head].__name__}" in text
        for field, own in fields_of(spec.inputs[head]).items():
            assert f"{field} {own.shape}; {DTYPES[own.dtype]} {own.meaning}" in text
    for option in spec.options:
        assert f"{option.name} default: {option.default!r}; problems draw: " in text
        assert f" {' '.join(option.meaning.split())}" in text
    for metric, own in spec.metrics.items():
        assert f"{metric} ranks: {own.reduction} {own.meaning}" in text
    for goal in spec.all_goals.values():
        if not goal.heads or set(goal.heads) & set(spec.inputs):
            assert goal.meaning in text or goal.meaning.startswith("a problem with ")
    assert "…" not in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["nll", "grpo"])
def test_lines_are_no_wider_than_the_terminal(name: str, width: int) -> None:
    for line in (*described(SPECS[name], width), *overview(width)):
        plain = Text.from_markup(line).plain
        assert len(plain) <= width or len(plain.split()) == 1, plain


def test_a_spec_is_a_line() -> None:
    lines = [Text.from_markup(line).plain for line in overview(180)]
    for spec in SPECS.values():
        (line,) = (line for line in lines if line.startswith(f"  {spec.name} "))
        assert spec.summary in line
        assert all(head in line for head in spec.inputs)
    assert len(lines) < len(SPECS) + len(PROPERTIES) + 24


def test_a_property_is_a_line() -> None:
    lines = [Text.from_markup(line).plain for line in overview(180)]
    for held_to in PROPERTIES.values():
        (line,) = (line for line in lines if line.startswith(f"  {held_to.name} "))
        assert held_to.summary in line


def test_layouts_and_candidates_that_come_along_are_listed_and_there() -> None:
    lines = [Text.from_markup(line).plain for line in overview(180)]
    layouts = lines[lines.index("layouts") + 1 :]
    for line in layouts[: layouts.index("")]:
        lossgate.Layout.parse(line.split()[0])
    banks = lines[lines.index("candidates that come along") + 1 :]
    for line in banks[: banks.index("")]:
        assert load_all_candidates([line.split()[0]])


@pytest.mark.parametrize(
    ("spec", "output", "facts"),
    [
        ("nll", "loss", ("sum", "sum", "replicate")),
        ("nll", "logprobs", ("split", "split", "replicate")),
        ("nll", "grad of hidden", ("split", "split", "replicate")),
        ("nll", "grad of weight", ("sum", "sum", "split")),
        ("nll", "grad of logits", ("split", "split", "split")),
        ("preference", "grad of rewards", ("split", "sum", "replicate")),
    ],
)
def test_a_spec_says_what_ranks_make_together(spec: str, output: str, facts: tuple[str, ...]) -> None:
    """As docs/how-to/candidate.md has it."""
    (section,) = (one for one in sections(SPECS[spec]) if one.title == "what ranks make together")
    (entry,) = (one for one in section.entries if one.name == output)
    assert entry.facts == facts


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_says_what_a_rank_has_of_each_dim(name: str) -> None:
    spec = SPECS[name]
    (section,) = (one for one in sections(spec) if one.title == "dims")
    named = {entry.name for entry in section.entries}
    for head in spec.inputs:
        for field in fields_of(spec.inputs[head]).values():
            for dim in re.findall(r"[\w+]+", field.shape.partition("[")[2]):
                assert dim in named or dim in ("topk", "reference_width"), dim


FILE = """
import lossgate

class MarginBatch(lossgate.Batch):
    floor: object = lossgate.field("sequence", "the log-probability to reach")

@lossgate.spec("margin", batch=MarginBatch)
def margin(values, batch, options):
    '''Penalises tokens that are below a floor.'''

@lossgate.candidate(margin, head="logits", good_for="[brackets] that are no markup")
def kernel(inputs, options, mesh): ...

other = lossgate.candidate("nll", head="logits", name="other")(kernel.kernel)
"""


def test_a_file_and_one_spec_of_it(folder: Path, lossgate: Lossgate) -> None:
    (folder / "margins.py").write_text(FILE)
    both = lossgate("list", "margins.py").stdout
    assert "candidates of margins.py\n  kernel  spec margin; head logits; tokens shard; axes none;" in both
    assert "good for [brackets] that are no markup" in both
    assert "  other  spec nll;" in both
    assert "specs of margins.py\n  margin  Penalises tokens that are below a floor (from hidden, logits" in both
    assert "nll  negative" not in both
    one = lossgate("list", "margins.py:margin").stdout
    assert "Annotate inputs with a class that joins lossgate.inputs.Logits and MarginBatch." in one
    assert "  floor  [sequence]; float32\n      the log-probability to reach\n" in one
    assert "lossgate.inputs.MarginLogits" not in one
    assert "spec margin" in lossgate("list", "margins.py:kernel").stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nlll", "unknown spec 'nlll'; did you mean 'nll'?"),
        ("gone.py", "gone.py: no such file"),
        ("kernels.py:rigth", "kernels.py: no candidate or spec named 'rigth'; did you mean 'right'?"),
        ("empty.py", "empty.py: no candidate or spec in it; decorate a kernel with @lossgate.candidate(...)"),
        ("os.path", "os.path: no candidate or spec in it"),
    ],
)
def test_what_is_not_there(target: str, said: str, folder: Path, lossgate: Lossgate) -> None:
    (folder / "empty.py").write_text("")
    done = lossgate("list", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossgate: {said}")


def meanings(spec: Spec) -> dict[str, str]:
    return {f"{section.title}: {entry.name}": entry.meaning for section in sections(spec) for entry in section.entries}


@pytest.mark.parametrize("name", SPECS)
def test_meanings_have_one_form(name: str) -> None:
    """They start with a small letter, or an acronym, and end without a full stop."""
    wrong = {
        what: meaning
        for what, meaning in meanings(SPECS[name]).items()
        if re.match(r"[A-Z][a-z ]", meaning) or meaning.endswith(".") or not meaning
    }
    assert wrong == {}


def test_files_written_from_the_specs_are_up_to_date() -> None:
    assert spec_files.stale() == [], "run python -m lossgate.reports.spec_files"


def test_a_stale_file_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = spec_files.files()
    path = next(iter(wanted))
    monkeypatch.setattr(spec_files, "files", lambda: {**wanted, path: "something else"})
    assert spec_files.main(["--check"]) == 1
    assert capsys.readouterr().out == (
        "docs/reference/specs/README.md is not as python -m lossgate.reports.spec_files writes it\n"
    )


def test_stubs_name_every_class() -> None:
    stub = (Path(lossgate.__file__).parent / "inputs.pyi").read_text()
    for name in names_of_inputs():
        assert re.search(rf"^class {name}\(|import {name} as {name}$", stub, re.MULTILINE), name
    stub = (Path(lossgate.__file__).parent / "options.pyi").read_text()
    assert {line.split()[-1] for line in stub.splitlines() if line.startswith("from ")} == set(names_of_options())
    assert set(HEADS) == {head for spec in SPECS.values() for head in spec.inputs}


@pytest.mark.parametrize("name", SPECS)
def test_classes_are_named_as_their_spec(name: str) -> None:
    spec, title = SPECS[name], "".join(word.capitalize() for word in name.split("_"))
    assert spec.options_type.__name__ == f"{title}Options"
    assert {kind.__name__ for kind in spec.inputs.values()} == {f"{title}{head.capitalize()}" for head in spec.inputs}


def test_stubs_say_once_what_each_input_means() -> None:
    stub = ast.parse((Path(lossgate.__file__).parent / "inputs.pyi").read_text())
    for written in (node for node in stub.body if isinstance(node, ast.ClassDef)):
        docs = [node.value for node in written.body[1:] if isinstance(node, ast.Expr)]
        said = [" ".join(str(doc.value).split()) for doc in docs if isinstance(doc, ast.Constant)]
        own = fields_of(getattr(lossgate.inputs, written.name)).values()
        assert said == [f"{field.shape}, {DTYPES[field.dtype]}: {field.meaning}." for field in own], written.name


TYPED = """
import lossgate.inputs
import lossgate.options
from torch import Tensor

def kernel(inputs: lossgate.inputs.NllHidden, options: lossgate.options.NllOptions) -> float:
    weights: Tensor = inputs.weight
    first: int = inputs.vocab_start
    inputs.labls
    options.temprature
    inputs.bias + 1
    batch: lossgate.Batch = inputs
    return options.temperature
"""


def test_a_type_checker_knows_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "kernel.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.findall(r'"severity": "error",\s*"message": "([^"]*?)[\\"]', done.stdout)
    assert len(errors) == 3, done.stdout
    assert "labls" in done.stdout
    assert "temprature" in done.stdout
    assert 'Operator \\"+\\" not supported for \\"None\\"' in done.stdout
