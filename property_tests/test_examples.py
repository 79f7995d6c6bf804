# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say: training on fused losses follows training on dense ones, and with a defect in them it does not."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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
    """What all runs start from, the dense one with its noise, and the findings on others."""

    def __init__(self, tiny: Any) -> None:
        self._tiny = tiny
        self._start, self._course = tiny.prepare(STEPS, seed=0)
        self.yardstick = tiny.Yardstick.measure(self._start, self._course)
        self._found: dict[str | None, list[Any]] = {}

    def findings(self, fault: str | None = None) -> list[Any]:
        if fault not in self._found:
            losses = self._tiny.FAULTS[fault] if fault else self._tiny.FusedLosses
            self._found[fault] = self._tiny.compare(losses, self._start, self._course, self.yardstick)
        return self._found[fault]


@pytest.fixture(scope="module")
def run(tiny: Any) -> Run:
    return Run(tiny)


def test_training_on_fused_losses_follows_training_on_dense_ones(run: Run) -> None:
    findings = run.findings()
    assert [finding.layout for finding in findings] == ["single", "dp=2,tp=2", "cp=2,tp=2"]
    assert all(finding.curve.shape == (sum(STEPS), 2) for finding in findings)
    assert [finding.first_out for finding in findings] == [None] * 3


def test_noise_is_that_of_float32(run: Run) -> None:
    """So that a pass means something: the yardstick is neither 0 nor wide."""
    assert 0 < run.yardstick.noise.amax() < 1e-5
    assert run.yardstick.allowed.amax() < 3e-5


@pytest.mark.parametrize(
    ("fault", "first_out"),
    [
        ("boundary", [None, "SFT step 0", "SFT step 0"]),
        ("temperature", ["GRPO step 0"] * 3),
        ("cp-gradient", [None, None, "DPO step 0"]),
    ],
)
def test_a_defect_is_told_where_it_is(run: Run, fault: str, first_out: list[str | None]) -> None:
    """Only on layouts that have it, and from the first step of the phase that has it."""
    assert [finding.first_out for finding in run.findings(fault)] == first_out


def test_the_loss_alone_does_not_tell_the_scale_of_a_gradient(run: Run) -> None:
    """Which is why the norm has a curve: Adam undoes the factor."""
    split_over_cp = run.findings("cp-gradient")[-1]
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
    findings = run.findings(fault)
    monkeypatch.setattr(tiny.Yardstick, "measure", lambda *_: run.yardstick)
    monkeypatch.setattr(tiny, "compare", lambda *_: findings)
    assert tiny.main(["--steps", *map(str, STEPS), *(["--fault", fault] if fault else [])]) == code
    shown = capsys.readouterr().out
    assert shown.count("agrees") == (0 if fault else 3)
    assert shown.count("OUT from GRPO step 0") == (3 if fault else 0)
