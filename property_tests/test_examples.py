# SPDX-License-Identifier: Apache-2.0
"""Tests of the example: training on fused losses follows training on dense ones.

With a defect in the fused losses it does not.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.xdist_group("examples")  # one worker makes what its tests share

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = (4, 3, 3)


@pytest.fixture(scope="module")
def tiny() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("tiny_training")
    torch.set_num_threads(threads)


class Run:
    """The baseline, and the comparisons of other runs with it, each made once."""

    def __init__(self, tiny: Any) -> None:
        self._tiny = tiny
        self._start, self._course = tiny.prepare(STEPS, seed=0)
        self.baseline = tiny.Baseline.measure(self._start, self._course)
        self._compared: dict[str | None, list[Any]] = {}

    def comparisons(self, fault: str | None = None) -> list[Any]:
        if fault not in self._compared:
            losses = self._tiny.FAULTS[fault] if fault else self._tiny.FusedLosses
            self._compared[fault] = self._tiny.compare(losses, self._start, self._course, self.baseline)
        return self._compared[fault]


@pytest.fixture(scope="module")
def run(tiny: Any) -> Run:
    return Run(tiny)


@pytest.mark.slow
def test_training_on_fused_losses_follows_training_on_dense_ones(run: Run) -> None:
    comparisons = run.comparisons()
    assert [comparison.layout for comparison in comparisons] == ["single", "dp=2,tp=2", "cp=2,tp=2"]
    assert all(comparison.curve.shape == (sum(STEPS), 2) for comparison in comparisons)
    assert [comparison.first_out for comparison in comparisons] == [None] * 3


def test_noise_is_that_of_float32(run: Run) -> None:
    """The allowed distance is neither 0 nor large; else an agreement would mean nothing."""
    assert 0 < run.baseline.noise.amax() < 1e-5
    assert run.baseline.allowed.amax() < 3e-5


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("fault", "first_out"),
    [
        ("boundary", [None, "SFT step 0", "SFT step 0"]),
        ("temperature", ["GRPO step 0"] * 3),
        ("cp-gradient", [None, None, "DPO step 0"]),
    ],
)
def test_a_defect_is_found_on_its_layouts_and_in_its_phase(run: Run, fault: str, first_out: list[str | None]) -> None:
    """Only layouts with the defect disagree, from the first step of the phase with the defect."""
    assert [comparison.first_out for comparison in run.comparisons(fault)] == first_out


def test_the_loss_alone_does_not_reveal_the_scale_of_a_gradient(run: Run) -> None:
    """Adam undoes the factor, so the gradient norm must be compared too."""
    split_over_cp = run.comparisons("cp-gradient")[-1]
    assert split_over_cp.share[:, 0].amax() <= 1 < split_over_cp.share[:, 1].amax()


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("temperature", 1)])
def test_the_command_prints_a_table_and_returns_whether_runs_agree(
    tiny: Any,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str | None,
    code: int,
) -> None:
    comparisons = run.comparisons(fault)
    monkeypatch.setattr(tiny.Baseline, "measure", lambda *_: run.baseline)
    monkeypatch.setattr(tiny, "compare", lambda *_: comparisons)
    assert tiny.main(["--steps", *map(str, STEPS), *(["--fault", fault] if fault else [])]) == code
    shown = capsys.readouterr().out
    assert shown.count("agrees") == (0 if fault else 3)
    assert shown.count("OUT from GRPO step 0") == (3 if fault else 0)
