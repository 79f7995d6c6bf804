# SPDX-License-Identifier: Apache-2.0
"""Tests of ``lossgate replay --script``: it shows the failure until the kernel is right."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lossgate
from kernel_bank.as_upstream import AS_UPSTREAM
from lossgate import Candidate, Excluded, Layout, UsageError, dense_candidates
from lossgate.adequacy.deck import deck_of
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.cases.placement import sample_problems, splits_of
from lossgate.cases.rank_call import local_inputs
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.failure_files import read_failure, write_failure
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.reports.reproducer import body, write_script
from lossgate.reports.reproducer.script import _written, calls_of, outputs_of
from lossgate.specs.outputs import LOSS
from lossgate.worlds import SimulatedWorld

KERNEL = """
import torch
import lossgate

CALLS = []

@lossgate.candidate("nll", head="logits", axes=("cp",), name="named otherwise")
def kernel(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    CALLS.append(1)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1) * FACTOR
"""


def verified(folder: Path, factor: str, layout: str, examples: int = 5) -> CellResult:
    file = folder / "kernels.py"
    file.write_text(KERNEL.replace("FACTOR", factor))
    (kernel,) = load_candidates(str(file))
    return run_cell(Cell(kernel, Layout.parse(layout), "float32"), Settings(examples=examples))


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "cp=2"])
def test_a_script_shows_what_is_wrong_until_it_is_mended(tmp_path: Path, layout: str) -> None:
    result = verified(tmp_path, "2", layout)
    script = tmp_path / "reproducer.py"
    found = read_failure(write_failure(result, tmp_path))
    write_script(replace(found, causes=("cause: it doubles", "to do: halve")), None, script)
    assert "named otherwise" in script.read_text()
    assert result.reasons[0] in script.read_text()
    assert "\n#     cause: it doubles\n#     to do: halve\n" in script.read_text()
    shown = run_script(script)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "loss: off by at most " in shown.stdout
    assert "  [0, 0] got " in shown.stdout
    (tmp_path / "kernels.py").write_text(KERNEL.replace("FACTOR", "1"))
    mended = run_script(script)
    assert (mended.returncode, mended.stderr) == (0, "")
    assert "wrong" not in mended.stdout


@pytest.mark.slow
def test_a_script_makes_the_calls_that_come_before(tmp_path: Path) -> None:
    """Every call but the first is wrong."""
    result = verified(tmp_path, "min(len(CALLS), 2)", "single")
    assert result.failure is not None
    problem = result.cases[0].problem
    found = read_failure(write_failure(result, tmp_path))
    found = replace(found, earlier=(problem,))
    write_script(found, None, tmp_path / "after.py")
    assert run_script(tmp_path / "after.py").returncode == 1
    found = replace(found, earlier=())
    write_script(found, None, tmp_path / "alone.py")
    assert run_script(tmp_path / "alone.py").returncode == 0


def candidate_of(source: str) -> Candidate:
    return load_candidates(source)[0] if ":" in source else getattr(dense_candidates, source)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("layout", ["dp=2,cp=2,tp=2", "dp=3", "cp=3", "tp=3"])
@pytest.mark.parametrize(
    "source",
    [
        "dense_clipped_pg_hidden",
        "dense_distill_logits",
        "dense_dpo_logprobs",
        "dense_preference_rewards",
        "dense_value_values",
        "ci/candidates/frameworks.py:fused_linear_logprobs_of_rows",
    ],
)
def test_a_script_puts_parts_together_as_lossgate_does(source: str, layout: str) -> None:
    """The script's own code is called with what the ranks returned."""
    candidate, world = candidate_of(source), SimulatedWorld(Layout.parse(layout))
    deck = deck_of(candidate, "float32", 0)
    placed = deck.on(world.layout, splits_of(candidate), [e for e in deck.entries if not is_large(e.bound.problem)])
    try:
        for one in placed[:4]:
            case = Case(candidate, one.problem, world, one.entry.bound)
            names = [str(output) for output in case.result.outputs]
            assert len(calls_of(candidate, [one.problem])[0]) == world.layout.ranks
            for output in outputs_of(candidate, one.problem, names):
                (own,) = (o for o in case.result.outputs if str(o) == output["name"])
                parts = [local[own] for local in case.ranks]
                assert None not in parts
                put = body.whole_of([part for part in parts if part is not None], output)
                torch.testing.assert_close(put, case.result.outputs[own], rtol=1e-12, atol=1e-12, equal_nan=True)
                assert body.show(put, output)
    finally:
        world.close()


def test_a_script_holds_any_words_and_numbers(tmp_path: Path) -> None:
    """Reasons hold what kernels raise, and options may be infinite."""
    result = verified(tmp_path, "2", "single")
    found = read_failure(write_failure(result, tmp_path))
    words = ('raised """ \\N{x}', "two\nlines")
    write_script(replace(found, reasons=words, causes=words), None, tmp_path / "words.py")
    compile((tmp_path / "words.py").read_text(), "words.py", "exec")
    values = {"bound": math.inf, "x": torch.tensor([1.5, -math.inf, math.nan]), "name": "infinite", "none": None}
    read = eval(_written(values), {"numbers": body.numbers})
    torch.testing.assert_close(read.pop("x"), values.pop("x"), equal_nan=True)
    assert read == values


def test_what_a_script_can_not_show_is_refused(tmp_path: Path) -> None:
    result = verified(tmp_path, "2", "single")
    found = read_failure(write_failure(result, tmp_path))
    script = tmp_path / "there.py"
    script.write_text("mine")
    with pytest.raises(UsageError, match=r"there\.py is there already; choose another name with --script"):
        write_script(found, None, script)
    assert script.read_text() == "mine"
    for change, message in (
        ({"pooled": True}, "this failure shows only over many problems together"),
        ({"property": "same-call-twice"}, "this failure is of property 'same-call-twice'"),
    ):
        with pytest.raises(UsageError, match=message):
            write_script(replace(found, **change), None, tmp_path / "new.py")
    assert not (tmp_path / "new.py").exists()


def test_a_script_has_what_kernels_call_on_their_inputs() -> None:
    one_each = {"advantages_per": Excluded("token", because="it takes one for each sequence")}
    dense = dense_candidates.dense_candidate(SPECS["grpo"], "logprobs")
    candidate = lossgate.candidate("grpo", head="logprobs", axes=("dp",), supports=one_each)(dense.kernel)
    problems = sample_problems(candidate, Layout.parse("dp=2"), "float32", 10, 0)
    for problem in problems:
        batch = Case(candidate, problem, SimulatedWorld(problem.layout)).placed.batch
        inputs = local_inputs(candidate.spec, candidate.head, batch, 0, None, candidate.tokens)
        given = body._object(
            {name: getattr(inputs, name) for name in ("mask", "cu_seqlens", "cu_seqlens_padded")}, body.Batch
        )
        rows = inputs.to_rows(inputs.logprobs, -1)
        assert torch.equal(given.to_rows(inputs.logprobs, -1), rows)
        assert torch.equal(given.from_rows(rows), inputs.from_rows(rows))
        assert torch.equal(given.per_sequence(inputs.advantages), inputs.per_sequence(inputs.advantages))


def test_a_script_weighs_what_ranks_return_as_their_caller_does() -> None:
    torchtune = AS_UPSTREAM["torchtune_cross_entropy"]
    world = SimulatedWorld(Layout.parse("dp=2"))
    problems = sample_problems(torchtune, world.layout, "float32", 40, 0)
    problem = next(one for one in problems if one.tokens > 20 and one.vocab > 2 and "none" not in one.masks)
    case = Case(torchtune, problem, world)
    (loss, *_) = outputs_of(torchtune, problem, ["loss"])
    assert loss["factors"] != [1.0, 1.0]
    parts = [ranks[LOSS] for ranks in case.ranks]
    assert body.show(body.whole_of([part for part in parts if part is not None], loss), loss)
