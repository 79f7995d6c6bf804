# SPDX-License-Identifier: Apache-2.0
"""Properties beside agreement in all that people and programs read, line by line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lossgate.engine.cell_record import CellRecord, PropertyRecord
from lossgate.evidence.redo import redo
from property_tests.meta.command_line import Done, Lossgate
from property_tests.meta.evidence_lines import cells_in
from property_tests.meta.made_evidence import cell

HELD = """
import os, torch, lossgate

def kernel(inputs):
    return -inputs.logprobs[inputs.mask].sum() / inputs.valid_tokens.clamp(min=1)

def declare(name, **declared):
    return lossgate.candidate("nll", head="logprobs", dtypes=("float32",), name=name, **declared)

@declare("product")
def product(inputs, options, mesh):
    return -(inputs.logprobs * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)

@declare("excused", exempt={"masked-nan": "it multiplies by the mask"})
def excused(inputs, options, mesh):
    return -(inputs.logprobs * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)

@declare("two")
def two(inputs, options, mesh):
    return kernel(inputs) * (1 if torch.is_grad_enabled() else 2) * (1 if inputs.mask.is_contiguous() else 2)

SEEN = set()

@declare("late")
def late(inputs, options, mesh):
    # Wrong from a number of problems that is met before the properties are, and not in a replay,
    # which makes the last earlier calls alone.
    SEEN.add(inputs.logprobs.sum().item())
    return kernel(inputs) * (1 if torch.is_grad_enabled() or len(SEEN) < 24 else 2)

@declare("aborts")
def aborts(inputs, options, mesh):
    if not torch.is_grad_enabled():
        os.abort()
    return kernel(inputs)
"""


SELECT = "select before computing: torch.where(mask, x, 0.0), because 0 * NaN is NaN"
DECLARE = "declare conventions=lossgate.Conventions(under_mask='finite'): numbers at masked tokens are finite"
SMALLEST = "1 token in 1 sequence [1], masks all, vocab 1, layout single, float32, logit_std 1, seed 0"
Verify = Callable[..., Done]


@pytest.fixture
def verify(folder: Path, lossgate: Lossgate) -> Verify:
    """Returns ``verify(name, *arguments)``, which verifies a kernel on one rank."""
    (folder / "held.py").write_text(HELD)

    def run(name: str, *arguments: str) -> Done:
        return lossgate("verify", f"held.py:{name}", "--evidence", f"{name}.jsonl", *arguments)

    return run


def story(done: Done) -> list[str]:
    """Returns what is said of a cell, without the table and the name of the file."""
    lines = done.stdout.splitlines()[1:]
    said = lines[: lines.index("")]
    return [line.partition(" replay .lossgate/")[0] if "replay:" in line else line for line in said]


def test_a_broken_property_is_told_with_what_to_do(verify: Verify, folder: Path, lossgate: Lossgate) -> None:
    done = verify("product")
    assert done.returncode == 1
    assert story(done) == [
        "PROMISE BROKEN  product  float32  single: numbers agree, 1 promise broken: masked-nan",
        "  property masked-nan: loss, with NaN at masked tokens: NaN; the reference is finite",
        f"  to do: {SELECT}; or, if its callers keep to it, {DECLARE}",
        f"  on: {SMALLEST}",
        "  replay: lossgate",
    ]
    (file,) = (folder / ".lossgate").glob("failure-product-masked-nan-float32-single-*.json")
    again = lossgate("replay", str(file))
    assert again.returncode == 1
    assert again.stdout.splitlines() == [
        "PROMISE BROKEN  product  masked-nan  float32  single",
        "  loss, with NaN at masked tokens: NaN; the reference is finite",
        f"  to do: {SELECT}; or, if its callers keep to it, {DECLARE}",
        f"  on: {SMALLEST}",
        "  it fails exactly as when the file was written",
    ]


@pytest.mark.slow
def test_the_second_property_that_is_broken_is_told_too(verify: Verify) -> None:
    lines = story(verify("two"))
    broken = [line.split(":")[0] for line in lines if line.startswith("  property")]
    assert list(dict.fromkeys(broken)) == ["  property no-grad", "  property strided-inputs"]
    assert "  broken for this reason alone: property checkpointing" in lines
    assert sum("to do:" in line for line in lines) == 2
    assert sum("  on:" in line for line in lines) == 1


def test_a_property_alone_has_cells_of_its_own(verify: Verify) -> None:
    done = verify("product", "--property", "masked-nan", "--property", "no-grad")
    said = [line for line in done.stdout.splitlines() if line.startswith(("PROMISE BROKEN", "AGREE", "  to do"))]
    assert [line.split(":")[0] for line in said] == [
        "PROMISE BROKEN  product  masked-nan  float32  single",
        "  to do",
        "AGREE  product  no-grad  float32  single",
    ]
    assert "product masked-nan" in done.stdout
    assert "2 cells: 1 AGREE, 1 PROMISE BROKEN (1 promise broken: masked-nan)" in done.stdout


def test_a_misspelt_property_is_a_line(verify: Verify) -> None:
    done = verify("product", "--property", "masked-nans")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lossgate: unknown property 'masked-nans'; did you mean 'masked-nan'? (expected one of"
    )


def test_what_a_candidate_is_exempt_from_stands_below_the_table(verify: Verify) -> None:
    done = verify("excused")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-4:-1] == [
        "Not held to these properties, as the candidates declare:",
        "  masked-nan: it multiplies by the mask: 1 cell of excused",
        "",
    ]


@pytest.mark.slow
def test_a_property_that_a_fresh_process_keeps_is_told_as_that(verify: Verify) -> None:
    first, remedy, second = story(verify("late"))[1:4]
    assert first.startswith("  property no-grad: loss: got ")
    assert second == (
        "  property no-grad: wrong only after other calls in the same process: in a fresh process this problem "
        "agreed in 20 of 20 calls, and so it will in a replay"
    )
    assert remedy.startswith("  to do: compute gradients only in backward")


def test_a_crash_names_the_property_that_met_it(verify: Verify, folder: Path) -> None:
    done = verify("aborts")
    assert done.returncode == 1
    crash = "CRASH: the process that ran the candidate was ended by SIGABRT on this problem"
    assert story(done)[1] == f"  property checkpointing: {crash}"
    (file,) = (folder / ".lossgate").glob("failure-aborts-checkpointing-float32-single-*.json")
    assert json.loads(file.read_text())["property"] == "checkpointing"


@pytest.mark.slow
def test_evidence_has_each_property_and_its_numbers(verify: Verify, folder: Path, lossgate: Lossgate) -> None:
    verify("product")
    verify("excused")
    (product,), (excused,) = (cells_in(folder / f"{name}.jsonl") for name in ("product", "excused"))
    broken = {one.name: one for one in product.properties if one.findings}
    assert list(broken) == ["masked-nan"]
    assert broken["masked-nan"].remedy.startswith("select before computing")
    # On a single rank, and in float32. The child of device may not answer in a busy process.
    silent = {one.name for one in product.properties if not one.problems}
    assert silent - {"device"} == {"reduction-order", "autocast"}
    assert all(one.seconds > 0 for one in product.properties if one.problems)
    assert {one.name: one.exempt for one in excused.properties if one.exempt} == {
        "masked-nan": "it multiplies by the mask"
    }
    shown = lossgate("report", "excused.jsonl", "--cell", "excused").stdout.splitlines()
    assert "  property masked-nan: exempt, it multiplies by the mask" in shown
    assert any(line.startswith("  property no-grad: kept on 2 problems, ") for line in shown)
    shown = lossgate("report", "product.jsonl", "--cell", "product").stdout.splitlines()
    assert any(line.startswith("  property masked-nan: broken on 1 problem, ") for line in shown)


@pytest.mark.parametrize(
    ("properties", "contradiction"),
    [
        ((PropertyRecord(name="a", problems=1), PropertyRecord(name="a", problems=1)), "it has a property twice"),
        ((PropertyRecord(name="agreement", problems=1),), "it has a property twice"),
        (
            (PropertyRecord(name="a", problems=1, exempt="why not"),),
            "it is exempt from property a, but was held to it",
        ),
        (
            (PropertyRecord(name="a", problems=0, comparisons=1),),
            "property a was checked on no problem, but found something",
        ),
        ((PropertyRecord(name="a", problems=1, margin=1.2),), "property a has a margin of 1.2, but no finding"),
        ((PropertyRecord(name="a", problems=1, margin=None),), "property a has a margin of None, but no finding"),
        (
            (PropertyRecord(name="a", problems=1, findings=("wrong",)),),
            "its verdict is AGREE, but its numbers give DISAGREE",
        ),
        ((PropertyRecord(name="a", problems=1, margin=0.9),), ""),
        ((PropertyRecord(name="a", problems=0, exempt="why not"),), ""),
    ],
)
def test_a_record_that_contradicts_its_properties_is_found(
    properties: tuple[PropertyRecord, ...], contradiction: str
) -> None:
    record: CellRecord = cell(properties=properties)
    assert redo([record])[0].contradiction == contradiction
