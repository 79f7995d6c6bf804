# SPDX-License-Identifier: Apache-2.0
"""A known mistake: its name, its sentence, and the outputs that it gives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Axis
from lossgate.counterfactuals.seams import RIGHT, Outputs, Seams, run, spelled_out, values_alone
from lossgate.counterfactuals.setting import Fields, Setting

REFUSED = (UsageError, ValueError, ArithmeticError, LookupError, RuntimeError)
"""Errors that a reference raises if a mistake gives it bad input, such as a weight above 1."""


def always(setting: Setting) -> bool:
    """Returns True: the mistake applies to every problem."""
    return True


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """A mistake that kernels make, and what a kernel with this mistake returns.

    Args:
        name: a short name, unique for the spec and the head.
        sentence: what the kernel does, for people, as in "the loss is divided by n + 1".
            "{outputs}" in it stands for the outputs that are wrong.
        seams: the stages of the reference, with the wrong ones replaced.
        applies: whether the mistake can be made on a problem and its layout.
        computed: a function that returns the outputs, for a mistake that no stage expresses. It
            returns None for a problem on which the mistake can't be made.
        padding: whether the mistake is made in the batch with its padding. The outputs have none.
        made_of: the parts of a mistake that is made of several. If the effect is that of one part
            alone, the whole is not named, as it would say too much.
        todo: what the author of the kernel should do; "" if the sentence says it.
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
        """Returns the outputs of a kernel with the mistake.

        It returns None if the mistake can't be made on the problem, or if the reference refuses its
        input, such as a weight above 1.
        """
        return self._run(setting, self.computed or partial(run, seams=self.seams))

    def run_forward(self, setting: Setting) -> Outputs | None:
        """Returns the values and metrics of ``run``, in less time; None if forward alone does not
        give them.
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
        return {output: x[real] if "token" in output.dims else x for output, x in found.items()}

    def fields(self, setting: Setting) -> Fields:
        """Returns the fields that the mistake changes, without padding."""
        if not self.padding:
            return self.seams.fields(setting)
        padded, real = setting.with_padding, setting.partition.real_tokens
        dims = {**setting.spec.fields, **dict.fromkeys(("mask", "labels", "sequence"), ("token",))}
        found = self.seams.fields(padded)
        return {name: x[real] if "token" in dims.get(name, ()) else x for name, x in found.items()}

    def words(self, outputs: str) -> str:
        """Returns the sentence. If it has a place for outputs, these are filled in."""
        return self.sentence.format(outputs=outputs) if self.of_any_output else self.sentence

    @property
    def of_any_output(self) -> bool:
        """Whether the mistake may be made in any output alone. The sentence then has a place for
        the outputs.
        """
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
    """Returns a counterfactual that replaces some stages, or has a function for its outputs.

    Args:
        name, sentence, todo, padding, computed: as in ``Counterfactual``.
        when: ``Counterfactual.applies``.
        seams: the wrong stages, by their name in ``Seams``.
    """
    made = Seams(**seams)
    assert (made == RIGHT) == (computed is not None), f"{name}: give stages or computed, and not both"
    return Counterfactual(
        name=name, sentence=sentence, seams=made, applies=when, todo=todo, padding=padding, computed=computed
    )


def split(*axes: Axis) -> Callable[[Setting], bool]:
    """Returns a function that says of a setting whether each of these axes has several ranks."""
    return lambda setting: all(setting.size(axis) > 1 for axis in axes)


def split_any(*axes: Axis) -> Callable[[Setting], bool]:
    """Returns a function that says of a setting whether one of these axes has several ranks."""
    return lambda setting: any(setting.size(axis) > 1 for axis in axes)


def tempered(setting: Setting) -> bool:
    """Returns whether the temperature is not 1."""
    return setting.head.has_logits and setting.temperature != 1.0
