# SPDX-License-Identifier: Apache-2.0
"""Candidates that call kernels as frameworks do judge ``Pack``: with a wrong one they disagree."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_losses import Pack
from kernel_bank.bugs import scale_gradient
from lossgate import Candidate, Layout
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings

ROOT = Path(__file__).parents[2]
CANDIDATES = {one.name: one for one in load_candidates(str(ROOT / "ci/candidates/frameworks.py"))}
FEW = {"temperature", "reference_layout"}
"""The options that are tried here; all of them are in ``ci/verify``."""


def few_options(candidate: Candidate) -> Candidate:
    supports = {name: values for name, values in candidate.supports.items() if name in FEW}
    return replace(candidate, supports=supports)


def verdict_on(name: str, layout: str, rounds: int = 4) -> Verdict:
    settings = Settings(examples=12, rounds=rounds, shrink_calls=1)
    result = run_cell(Cell(few_options(CANDIDATES[name]), Layout.parse(layout), "float32"), settings)
    assert not any("raised" in reason for reason in result.reasons), result.reasons
    return result.verdict


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", ["single", "cp=2", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_framework_calls_agree(name: str, layout: str) -> None:
    assert verdict_on(name, layout) is Verdict.AGREE


FromRows = Callable[..., Tensor]


def not_shifted(right: FromRows) -> FromRows:
    return lambda pack, rows, *, shift, fill=0: right(pack, rows, shift=0, fill=fill)


def masks_not_shifted(right: FromRows) -> FromRows:
    return lambda pack, rows, *, shift, fill=0: right(
        pack, rows, shift=0 if rows.dtype is torch.bool else shift, fill=fill
    )


def rolled(right: FromRows) -> FromRows:
    """At the end of a row stands its first entry."""

    def wrong(pack: Pack, rows: Tensor, *, shift: int, fill: float = 0) -> Tensor:
        at_end = (pack.position == pack.cu_seqlens.diff()[pack.sequence] - 1) & (shift == 1)
        found, first = right(pack, rows, shift=shift, fill=fill), rows[:, :1].expand(-1, rows.shape[1])
        return torch.where(at_end, right(pack, first, shift=0, fill=fill), found)

    return wrong


def shifted_after_the_split(right: FromRows) -> FromRows:
    return lambda pack, rows, *, shift, fill=0: right(pack, rows, shift=0, fill=fill).roll(-shift, 0)


def pieces_swapped(right: FromRows) -> FromRows:
    """The two pieces of a rank stand in the wrong order."""

    def wrong(pack: Pack, rows: Tensor, *, shift: int, fill: float = 0) -> Tensor:
        found = right(pack, rows, shift=shift, fill=fill)
        own = (pack.cu_seqlens_padded.diff() // pack.cp).tolist() if pack.cp > 1 else [len(found)]
        return torch.cat([part.roll(len(part) // 2, 0) if pack.cp > 1 else part for part in found.split(own)])

    return wrong


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("bug", [not_shifted, masks_not_shifted, rolled, shifted_after_the_split, pieces_swapped])
@pytest.mark.parametrize(
    "name", ["fused_vocab_parallel_clipped_pg", "fused_vocab_parallel_grpo", "fused_linear_dpo_of_rows"]
)
def test_a_wrong_pack_disagrees(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable[[FromRows], FromRows]
) -> None:
    monkeypatch.setattr(Pack, "from_rows", bug(Pack.from_rows))
    assert verdict_on(name, "cp=2", rounds=1) is Verdict.DISAGREE


ToRows = Callable[..., Tensor]


def own_tokens_alone(right: ToRows) -> ToRows:
    def wrong(pack: Pack, local: Tensor, width: int, cp_group: Any, **given: Any) -> Tensor:
        rows = local.new_zeros(pack.sequences, width + 1)
        return rows.index_put((pack.sequence, pack.position.clamp(max=width)), local)[:, :width]

    return wrong


def position_too_late(right: ToRows) -> ToRows:
    return lambda pack, local, width, cp_group, **given: right(pack, local, width, cp_group, **given).roll(1, 1)


def sequences_in_reverse(right: ToRows) -> ToRows:
    return lambda pack, local, width, cp_group, **given: right(pack, local, width, cp_group, **given).flip(0)


def gradient_of_all_ranks(right: ToRows) -> ToRows:
    return lambda pack, local, width, cp_group, **given: scale_gradient(
        right(pack, local, width, cp_group, **given), pack.cp
    )


def gradient_cut(right: ToRows) -> ToRows:
    """Half of the gradient is lost."""
    return lambda pack, local, width, cp_group, **given: right(
        pack, 0.5 * local + 0.5 * local.detach(), width, cp_group, **given
    )


@pytest.mark.parametrize(
    "bug", [own_tokens_alone, position_too_late, sequences_in_reverse, gradient_of_all_ranks, gradient_cut]
)
def test_wrong_rows_disagree(monkeypatch: pytest.MonkeyPatch, bug: Callable[[ToRows], ToRows]) -> None:
    monkeypatch.setattr(Pack, "to_rows", bug(Pack.to_rows))
    assert verdict_on("fused_linear_logprobs_of_rows", "cp=2", rounds=1) is Verdict.DISAGREE
