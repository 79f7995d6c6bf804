# SPDX-License-Identifier: Apache-2.0
"""The rule by which a cause is said: the best explanations, if they are few and alike enough."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lossgate.diagnosis.cause import Cause
from lossgate.diagnosis.explanation import Explanation, best_of, by_effect, said
from lossgate.diagnosis.observed import Observed
from lossgate.losses import SPECS

LOSS = SPECS["nll"].output("loss")


def failing(count: int) -> list[Observed]:
    problem = SimpleNamespace(case=SimpleNamespace(problem=SimpleNamespace(layout="single")))
    return [cast("Observed", problem)] * count


SEEN = failing(9)


def explained(name: str, predicts: float, **more: Any) -> Explanation:
    effect = [{LOSS: torch.tensor(predicts, dtype=torch.float64)} for _ in SEEN]
    return Explanation(cause=Cause(name=name, words=name), failing=SEEN, effect=effect, **more)


def names(explanations: list[Explanation]) -> list[str]:
    found = said(explanations, asked=100)
    return [] if found is None else [cause.name for cause in found.causes]


def test_what_leaves_the_least_is_said() -> None:
    found = [explained("half", 1.0, left=(0.0, 1.0)), explained("all", 2.0, left=(0.0, 0.0))]
    assert names(found) == ["all"]
    assert [one.cause.name for one in best_of(found)] == ["all"]
    assert names([]) == []


@pytest.mark.parametrize(("effects", "partly", "count"), [(3, False, 3), (4, False, 0), (1, True, 1), (2, True, 0)])
def test_so_many_effects_are_said_of_all_or_of_a_part(effects: int, partly: bool, count: int) -> None:
    assert len(names([explained(str(number), float(number), partly=partly) for number in range(effects)])) == count


def test_names_of_one_effect_are_said_as_far_as_there_is_room() -> None:
    alike = [explained(str(number), 1.0) for number in range(5)]
    assert len(by_effect(alike)) == 1
    found = said(alike, asked=100)
    assert found is not None
    assert [cause.same_as_before for cause in found.causes] == [False, True, True]
    of_many = [explained(str(number), 1.0, stands_for_others=True) for number in range(5)]
    assert names(of_many) == ["0"]
    assert names([*of_many, explained("plain", 1.0)]) == ["plain"]


def test_what_explains_other_problems_has_another_effect() -> None:
    one = explained("one", 1.0)
    fewer = Explanation(cause=Cause(name="two", words="two"), failing=SEEN[:8], effect=one.effect[:8])
    assert len(by_effect([one, fewer])) == 2


def test_problems_that_are_not_explained_are_counted() -> None:
    found = said([explained("most", 1.0, unexplained=4, partly=True)], asked=100)
    assert found is not None
    assert (found.problems, found.failing, found.layouts) == (9, 13, ("single",))
    whole = said([explained("all", 1.0)], asked=100)
    assert whole is not None
    assert whole.failing == 0
