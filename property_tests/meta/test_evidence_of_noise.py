# SPDX-License-Identifier: Apache-2.0
"""Evidence holds what the verdict on pooled noise needs, and is held to it."""

from typing import Any

import pytest

from lossgate.engine.cell_record import CellRecord
from lossgate.engine.output_record import OutputRecord, PooledNoiseRecord, PooledRecord
from lossgate.evidence.redo import redo
from lossgate.judge.pooling import pool_scales, smallest_bias
from property_tests.meta import made_evidence as made


def output(noise: tuple[float | None, ...], pooled: PooledNoiseRecord | None, **changes: Any) -> OutputRecord:
    """Returns the loss of a cell with nine problems: how noisy it is, and what is said of it."""
    of_each: dict[str, Any] = {"scale": (1e-8,) * 9, "limit": (1e-6,) * 9, "sd": (1e-7,) * 9, "mean": (0.0,) * 9}
    scale = _pooled_scale(of_each)
    record = PooledRecord(problems=9, scale=scale[0], limit=scale[1], noise=pooled)
    return made.output(
        cases=tuple(range(9)), without_numbers=(), shares={}, noise=noise, pooled=record, **of_each, **changes
    )


def _pooled_scale(of_each: dict[str, Any]) -> tuple[float, float]:
    pooled = pool_scales(
        scales=of_each["scale"],
        sds=of_each["sd"],
        means=of_each["mean"],
        limits=of_each["limit"],
        floors=[float(smallest_bias(2**-24, 1))],
        sizes=[9],
    )
    return float(pooled.scale[0]), float(pooled.limit[0])


def said(noise: float, problems: int = 9) -> PooledNoiseRecord:
    return PooledNoiseRecord(problems=problems, noise=noise, limit=1.1 + 2 / problems)


def cell(noise: tuple[float | None, ...], pooled: PooledNoiseRecord | None, **changes: Any) -> CellRecord:
    return made.cell(problems=9, comparisons=9, outputs=(output(noise, pooled),), **changes)


NOISY = (0.5,) * 6 + (3.0,) * 3
QUIET = (0.5,) * 7 + (3.0,) * 2
LIES = {
    "another noise": (
        cell(QUIET, said(0.6)),
        "loss has a pooled noise of 0.6 and a limit of 1.32222, but its numbers give 0.5 and 1.32222",
    ),
    "noisier than allowed": (cell(NOISY, said(3.0)), "its verdict is AGREE, but its numbers give DISAGREE"),
    "not pooled": (cell(QUIET, None), "the noise of loss is not pooled, but its numbers are enough"),
    "fewer problems": (
        cell((*QUIET[:8], None), said(0.5)),
        "the noise of loss is pooled over 9 problems, but its numbers are of 8",
    ),
    "too short": (cell(QUIET[:8], said(0.5)), "the lists of loss do not have one entry for each comparison"),
    "noise from nowhere": (
        cell((None,) * 9, said(0.5)),
        "the noise of loss is pooled, but too few problems say something about it",
    ),
}


@pytest.mark.parametrize(("record", "message"), LIES.values(), ids=[*LIES])
def test_a_record_that_contradicts_its_noise_is_found(record: CellRecord, message: str) -> None:
    (redone,) = redo([record])
    assert redone.contradiction == message


def test_honest_records_contradict_nothing() -> None:
    noisy = cell(NOISY, said(3.0), verdict="DISAGREE", reasons=("loss: pooled over 9 problems ...",))
    records = [cell(QUIET, said(0.5)), noisy, cell((None,) * 9, None)]
    assert [redone.contradiction for redone in redo(records)] == ["", "", ""]
    assert [record.symptoms for record in records] == [(), ("loss",), ()]
