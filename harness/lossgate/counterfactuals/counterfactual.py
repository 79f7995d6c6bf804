# SPDX-License-Identifier: Apache-2.0
"""A named wrong computation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Axis
from lossgate.counterfactuals.seams import RIGHT, Outputs, Seams, run, spelled_out, values_alone
from lossgate.counterfactuals.setting import Fields, Setting

REFUSED = (UsageError, ValueError, ArithmeticError, LookupError, RuntimeError)
"""What a reference raises that does not take what a mistake gives it: a weight above 1, a shape."""


def always(setting: Setting) -> bool:
    """Returns that a mistake says something about every problem."""
    return True


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """A mistake that kernels make, and what a kernel with it returns.

    Args:
        name: short; no other of the same spec and head has it.
        sentence: what the kernel does, for people, as in "the loss is divided by n + 1".
            "{outputs}" in it stands for the outputs that are wrong.
        seams: the stages of the reference that it gets wrong.
        applies: whether it says anything about a problem on a layout.
        computed: what gives its outputs, if no stage does; None where it says nothing.
        padding: whether it sees the batch with its padding; outputs are returned without.
        made_of: the mistakes that it makes at once, if there are several. If it has the effect of
            one of them, the others do not show, and it says too much.
        todo: what its author should do, in words; "" if the sentence says it.
        kind: the family of the mistake, which the bank fills in.
    """

    name: str
    sentence: str
    seams: Seams = RIGHT
    applies: Callable[[Setting], bool] = always
    todo: str = ""
    computed: Callable[[Setting], Outputs | None] | None = None
    padding: bool = False
    made_of: tuple["Counterfactual", ...] = ()
    kind: str = ""

    def run(self, setting: Setting) -> Outputs | None:
        """Returns what a kernel with the mistake gives; None where it says nothing.

        The reference may refuse what it is given, such as a weight above 1. Then it says nothing.
        """
        return self._run(setting, partial(run, seams=self.seams) if self.computed is None else self.computed)

    def run_forward(self, setting: Setting) -> Outputs | None:
        """Returns what ``run`` returns, without gradients and in less time; None also where that
        can't be had.
        """
        if self.computed is not None or self.seams.outputs is not RIGHT.outputs:
            return None
        return self._run(setting, partial(values_alone, seams=self.seams))

    def _run(self, setting: Setting, compute: Callable[[Setting], Outputs | None]) -> Outputs | None:
        if self.padding:
            setting = setting.with_padding
        if (self.seams.opens_token_stage and not spelled_out(setting)) or not self.applies(setting):
            return None
        try:
            found = compute(setting)
        except REFUSED:
            return None
        if not self.padding or found is None:
            return found
        real = setting.partition.real_tokens
        return {o: x[real] if "token" in o.dims else x for o, x in found.items()}

    def fields(self, setting: Setting) -> Fields:
        """Returns the fields that it changes, without padding."""
        if not self.padding:
            return self.seams.fields(setting)
        padded, real = setting.with_padding, setting.partition.real_tokens
        dims = {**setting.spec.fields, **dict.fromkeys(("mask", "labels", "sequence"), ("token",))}
        found = self.seams.fields(padded)
        return {name: x[real] if "token" in dims.get(name, ()) else x for name, x in found.items()}

    def words(self, outputs: str) -> str:
        """Returns the sentence, said of some outputs if it is one about any output."""
        return self.sentence.format(outputs=outputs) if self.of_any_output else self.sentence

    @property
    def of_any_output(self) -> bool:
        """Whether the mistake may be in any output alone: the sentence then has a place for it."""
        return "{outputs}" in self.sentence


def mistake(
    name: str,
    sentence: str,
    when: Callable[[Setting], bool] = always,
    todo: str = "",
    *,
    padding: bool = False,
    computed: Callable[[Setting], Outputs | None] | None = None,
    **seams: Any,
) -> Counterfactual:
    """Returns a counterfactual that replaces some seams, or whose outputs are computed otherwise.

    Args:
        name, sentence, todo, padding, computed: as in ``Counterfactual``.
        when: whether it says anything about a problem.
        seams: the stages, by their name in ``Seams``.
    """
    made = Seams(**seams)
    assert (made == RIGHT) == (computed is not None), f"{name} replaces nothing, or twice"
    return Counterfactual(
        name=name, sentence=sentence, seams=made, applies=when, todo=todo, padding=padding, computed=computed
    )


def split(*axes: Axis) -> Callable[[Setting], bool]:
    """Returns what asks whether several ranks are on each of some axes."""
    return lambda setting: all(setting.size(axis) > 1 for axis in axes)


def split_any(*axes: Axis) -> Callable[[Setting], bool]:
    """Returns what asks whether several ranks are on any of some axes."""
    return lambda setting: any(setting.size(axis) > 1 for axis in axes)


def tempered(setting: Setting) -> bool:
    """Returns whether the temperature is not 1."""
    return setting.head.has_logits and setting.temperature != 1.0
