# SPDX-License-Identifier: Apache-2.0
"""A known failure is set aside, and what lies beside it is judged."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lossgate import Candidate, KnownFailure, Layout
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.failure_files import write_failure
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings

KERNEL = """
import torch
import lossgate


@lossgate.candidate("nll", head="logits", axes=("dp",))
def kernel(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    logits, count = inputs.logits.float(), inputs.valid_tokens.clamp(min=1)
    KNOWN
    logits = BESIDE
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
"""
OWN_COUNT = "count = inputs.mask.sum().clamp(min=1)"
RAISES = "assert inputs.mask.any(), 'no token is trained'"
NAN = "count = torch.where(inputs.mask.any(), count, torch.nan)"
TRIPLED = "logits = logits * 3 - 2 * logits.detach()"
RIGHT = "logits"
HALVED_GRADIENT = "logits * 0.5 + 0.5 * logits.detach()"
SETTINGS = Settings(examples=12, rounds=1, shrink_calls=20)


def kernel(folder: Path, known: str, beside: str = RIGHT) -> Candidate:
    file = folder / f"kernels_{len(list(folder.iterdir()))}.py"  # a file is imported once
    file.write_text(KERNEL.replace("KNOWN", known).replace("BESIDE", beside))
    return load_candidates(str(file))[0]


def verified(candidate: Candidate) -> CellResult:
    return run_cell(Cell(candidate, Layout(dp=2), "float32"), SETTINGS)


def declared(folder: Path, known: str, beside: str = RIGHT) -> Candidate:
    """Returns a kernel with two mistakes, of which it declares the first as known."""
    result = verified(kernel(folder, known))
    assert result.verdict is Verdict.DISAGREE
    file = write_failure(result, folder)
    return replace(kernel(folder, known, beside), known_failure=KnownFailure(name="known-1", example=file))


@pytest.mark.parametrize("known", [OWN_COUNT, RAISES, NAN, TRIPLED])
def test_nothing_lies_beside_it(tmp_path: Path, known: str) -> None:
    found = verified(declared(tmp_path, known)).record
    assert found.expected
    assert found.known_failure is not None
    assert found.known_failure.beside.startswith("without it ")
    assert ("it left out" in found.known_failure.beside) == (known in (RAISES, NAN))


@pytest.mark.parametrize("known", [OWN_COUNT, RAISES, NAN])
def test_what_lies_beside_it_is_found(tmp_path: Path, known: str) -> None:
    candidate = declared(tmp_path, known, HALVED_GRADIENT)
    result = verified(candidate)
    assert result.verdict is Verdict.DISAGREE
    assert not result.record.expected
    assert result.failure is not None
    assert result.failure.symptoms == ("grad of logits",)
    assert not result.is_of_known_failure
    assert result.reasons[-1] == "this is beside known failure known-1, which was set aside"


def test_a_known_mistake_may_be_named_by_hand(tmp_path: Path) -> None:
    candidate = declared(tmp_path, OWN_COUNT)
    assert candidate.known_failure is not None
    file = candidate.known_failure.example
    content = msgspec.json.decode(file.read_bytes())
    named = content["causes"][0]
    file.write_bytes(msgspec.json.encode({**content, "causes": ()}))
    only_the_example = verified(candidate).record
    assert only_the_example.expected
    assert only_the_example.known_failure is not None
    assert not only_the_example.known_failure.beside
    file.write_bytes(msgspec.json.encode({**content, "causes": (named,)}))
    assert "without it" in str(verified(candidate).record.known_failure)


def test_another_mistake_in_the_same_output_is_told(tmp_path: Path) -> None:
    found = verified(declared(tmp_path, TRIPLED, HALVED_GRADIENT)).record
    assert not found.expected
    assert found.reasons[0] == (
        "known failure known-1 has changed: the cause in its file explains it no more; freeze it again"
    )


REPLICATED = """
import torch
import lossgate


@lossgate.candidate("nll", head="logprobs", axes=("tp",))
def kernel(inputs, options, mesh):
    total = -torch.where(inputs.mask, inputs.logprobs.float(), 0.0).sum()
    other = mesh.get_local_rank("tp") == 1 and BESIDE
    return 2 * total / inputs.valid_tokens.clamp(min=1) * (1 + 1e-6 * other)
"""


@pytest.mark.parametrize("beside", [False, True])
def test_a_fault_of_the_same_output_stays(tmp_path: Path, beside: bool) -> None:
    """Each tp rank returns the same, which is checked bit by bit, and not by the judge."""

    def verified(name: str, beside: bool, **declared: KnownFailure) -> CellResult:
        file = tmp_path / name
        file.write_text(REPLICATED.replace("BESIDE", str(beside)))
        candidate = replace(load_candidates(str(file))[0], **declared)  # type: ignore[arg-type]
        return run_cell(Cell(candidate, Layout(tp=2), "float32"), SETTINGS)

    example = write_failure(verified("known.py", beside=False), tmp_path)
    found = verified("now.py", beside, known_failure=KnownFailure(name="known-1", example=example))
    assert found.record.expected != beside
