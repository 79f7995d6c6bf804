# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/originals.py`` compares things that compute the same, and sees what they hold."""

import sys
from math import isfinite

import originals
import pytest
import torch
from originals import CLAIMS, MIB, Batch, Figures, Sizes
from torch import Tensor

SMALL = Sizes(sequences=6, length=64, hidden=8, vocab=64, dtype=torch.float64)
LOGITS = 6 * 64 * 64 * 8 / MIB


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    return {claim: measure(SMALL, 1) for claim, (measure, _) in CLAIMS.items()}


@pytest.mark.parametrize("claim", CLAIMS)
def test_all_rows_compute_the_same(figures: dict[str, Figures], claim: str) -> None:
    """In float64, dense peers, re-created originals and ours have the same gradient."""
    rows = figures[claim].values()
    assert max(row["error of dW"] for row in rows) < 1e-12
    assert all(isfinite(number) for row in rows for number in row.values())
    assert next(iter(rows))["MiB / first"] == 1


def test_a_row_that_computes_something_else_shows() -> None:
    (name, way), *_ = originals.DPO.items()
    rows = originals.compared({name: way, "twice": lambda batch: 2 * way(batch)}, Batch(SMALL), 1)
    assert rows["twice"]["error of dW"] == pytest.approx(1)


def test_what_a_row_holds_shows() -> None:
    def holds(batch: Batch, tensors: int) -> Tensor:
        held = [torch.zeros(64, 1024) for _ in range(tensors)]
        return batch.head(batch.hidden).sum() + 0 * held[0].sum()

    one, four = (originals.peak_mib(lambda batch, n=n: holds(batch, n), Batch(SMALL)) for n in (1, 4))
    assert four - one == 3 * 64 * 1024 * 4 / MIB


def test_packing_does_not_communicate_for_each_sequence(figures: dict[str, Figures]) -> None:
    assert [row["collectives, tp=2"] for row in figures["packing"].values()] == [2, 6 * 2, 6 * 2, 3, 6 * 3]


def test_dense_logits_are_seen(figures: dict[str, Figures]) -> None:
    """Dense losses hold the logits three times: log-probabilities and two gradients."""
    for claim in ("dpo", "tiled"):
        *others, dense = figures[claim].values()
        assert dense["MiB"] > 3 * LOGITS > max(row["MiB"] for row in others)


def test_what_ranks_make_and_send(figures: dict[str, Figures]) -> None:
    """Ours sends the sums of six sequences; the peers make logits of own tokens, or of all."""
    ours, own, gathered = figures["cp"].values()
    sums = 2 * 6 * 8 / MIB
    assert [row["MiB sent"] for row in (ours, own, gathered)] == [sums, sums, LOGITS / 4]
    assert ours["largest tensor, MiB"] < LOGITS / 4
    assert [row["largest tensor, MiB"] for row in (own, gathered)] == [LOGITS / 4, LOGITS]


def test_the_command_prints_a_table_for_each_claim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--sequences=2", "--length=16", "--hidden=4", "--vocab=8", "--repeats=1", "--dtype=bfloat16"]
    monkeypatch.setattr(sys, "argv", ["originals.py", *sizes])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    originals.main()
    printed = capsys.readouterr().out
    for claim in CLAIMS:
        assert f"{claim}: 2 sequences of 16, H=4, V=8, bfloat16, {originals.DEVICE}" in printed
    for name in (*originals.PACKING, *originals.DPO, *originals.CONTEXT_PARALLEL, *originals.TILED):
        assert f"│ {name} " in printed
