# SPDX-License-Identifier: Apache-2.0
"""What ``lossgate list`` shows, at any width, and the files that are written from the specs."""

import ast
import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from rich.console import Console
from rich.text import Text
from torch import Tensor

import lossgate
from lossgate import Budgets, Contract, KnownFailure, Outputs, Precision
from lossgate.declaration.loading import load_all_candidates
from lossgate.inputs import __dir__ as names_of_inputs
from lossgate.losses import SPECS
from lossgate.options import __dir__ as names_of_options
from lossgate.properties import PROPERTIES
from lossgate.reports import spec_files
from lossgate.reports.listing import described, overview
from lossgate.reports.spec_sections import sections
from lossgate.specs.heads import HEADS
from lossgate.specs.record import INPUT_DTYPES, fields_of
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
            assert f"{field} {own.shape}; {INPUT_DTYPES[own.dtype]} {own.meaning}" in text
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
                assert dim in named, dim


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
        ("ppo", "unknown spec 'ppo'; see clipped_pg: lossgate list clipped_pg (expected one of clipped_pg, distill, d"),
        ("SFT", "unknown spec 'SFT'; see dpo and nll: lossgate list dpo nll (expected one of clipped_pg, distill, "),
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
    assert {*names_of_inputs()} <= {*Stub("inputs").classes} | {*Stub("inputs").imported}
    assert {*Stub("options").classes} == {*names_of_options()}
    assert set(HEADS) == {head for spec in SPECS.values() for head in spec.inputs}


@pytest.mark.parametrize("name", SPECS)
def test_classes_are_named_as_their_spec(name: str) -> None:
    spec, title = SPECS[name], "".join(word.capitalize() for word in name.split("_"))
    assert spec.options_type.__name__ == f"{title}Options"
    assert {kind.__name__ for kind in spec.inputs.values()} == {f"{title}{head.capitalize()}" for head in spec.inputs}


class Stub:
    """What an editor shows of the classes of a stub and of their fields."""

    def __init__(self, name: str) -> None:
        self.body = ast.parse((Path(lossgate.__file__).parent / f"{name}.pyi").read_text()).body
        self.classes = {node.name: node for node in self.body if isinstance(node, ast.ClassDef)}
        imports = (node for node in self.body if isinstance(node, ast.ImportFrom))
        self.imported = {alias.asname for node in imports for alias in node.names}

    def fields(self, name: str) -> dict[str, str]:
        """Returns the docs of a class's fields, those of its bases among them, in one line each."""
        if name not in self.classes:
            return {}
        found: dict[str, str] = {}
        for base in self.classes[name].bases:
            found = {**self.fields(ast.unparse(base)), **found}
        for field, doc in pairwise(self.classes[name].body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
        return found


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_editor_shows_what_each_input_is(spec: Spec) -> None:
    stub = Stub("inputs")
    for head, kind in spec.inputs.items():
        shown, own = stub.fields(kind.__name__), fields_of(kind)
        assert shown.keys() == own.keys()
        for name, field in own.items():
            assert shown[name].startswith(f"{field.shape}, {INPUT_DTYPES[field.dtype]}: {field.meaning}.")
            assert all(f"{dim}, on a rank: " in shown[name] for dim in field.dims), name
            assert ("Its gradients: " in shown[name]) is (name in HEADS[head].leaves), name


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_editor_shows_what_a_kernel_returns_and_what_is_added_up(spec: Spec) -> None:
    for kind in spec.inputs.values():
        doc = ast.get_docstring(Stub("inputs").classes[kind.__name__]) or ""
        returned = dict(re.findall(r"^- ``(\w+)``: (.*?)\.$", doc, re.MULTILINE | re.DOTALL))
        assert returned.keys() == {*spec.outputs}
        for name, said in returned.items():
            assert said.startswith(
                "a scalar; lossgate adds up the results of dp and cp ranks" if name == "loss" else "[token]; "
            )
        assert spec.summary in " ".join(doc.split())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_editor_shows_what_each_option_does(spec: Spec) -> None:
    shown = Stub("options").fields(spec.options_type.__name__)
    assert shown.keys() == {option.name for option in spec.options}
    for option in spec.options:
        assert shown[option.name].startswith(f"{' '.join(option.meaning.split())}. Default: {option.default!r}. ")


def test_a_notebook_shows_the_inputs_of_specs_of_ones_own_too() -> None:
    """What Python itself knows: notebooks show it, and ``help``."""

    class MineBatch(lossgate.Batch):
        floor: Tensor = lossgate.field("sequence", "the log-probability to reach")

    spec = lossgate.spec("mine", batch=MineBatch)(lambda values, batch, options: values.logprobs.sum())
    doc = (inspect.getdoc(spec.inputs["hidden"]) or "").splitlines()
    assert "floor: [sequence], float32: the log-probability to reach." in doc
    assert "hidden: [token, hidden], one of the candidate's dtypes: the last hidden states; requires grad." in doc


PUBLIC = {name: getattr(lossgate, name) for name in lossgate.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_are_marked_as_code(name: str) -> None:
    """Editors run them together else."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    blocks = re.findall(r"^(\S.*)\n\n {4}\S", doc, re.MULTILINE)
    assert all(line.endswith("::") for line in blocks), blocks
    assert doc.strip()


@pytest.mark.parametrize("kind", [Outputs, Contract, Precision, Budgets, KnownFailure], ids=lambda kind: kind.__name__)
def test_parts_of_a_declaration_say_what_each_field_is(kind: type) -> None:
    (node,) = (one for one in ast.parse(dedent(inspect.getsource(kind))).body if isinstance(one, ast.ClassDef))
    fields = [i for i, one in enumerate(node.body) if isinstance(one, ast.AnnAssign)]
    assert fields
    for i in fields:
        assert isinstance(node.body[i + 1], ast.Expr), ast.unparse(node.body[i])


@pytest.mark.parametrize("name", ["candidate", "verify", "suite", "compare", "example", "field", "option", "spec"])
def test_docstrings_of_functions_name_every_argument(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    for argument, parameter in inspect.signature(PUBLIC[name]).parameters.items():
        stars = r"\*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        assert re.search(rf"^    {stars}{argument}: ", doc, re.MULTILINE), argument


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


@pytest.mark.slow
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
