# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis says."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A mistake that explains what a kernel returned."""

    name: str
    """Of the counterfactual."""
    words: str
    """What the kernel does, in words."""
    todo: str = ""
    """What to do about it, in words."""
    same_as_before: bool = False
    """It has the same effect as the cause before it, on every problem seen."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What explains a disagreement."""

    causes: tuple[Cause, ...] = ()
    """At most three mistakes, the plainest first."""
    scope: str = ""
    """The outputs to which it is limited, in words; "" if it explains all that was returned."""
    condition: str = ""
    """What all problems have on which the kernel is wrong, and no other, in words; or "except with"
    what those have that the mistake does not explain."""
    partly: bool = False
    """The mistake explains rows of an output, or some problems, and not all that was returned."""
    where: tuple[str, ...] = ()
    """If there is no cause: where the outputs are wrong, in words."""
    problems: int = 0
    """On how many failing problems it held."""
    failing: int = 0
    """How many problems failed, if it did not hold on all of them."""
    layouts: tuple[str, ...] = ()
    """On which layouts."""
    tried: int = 0
    """How many problems were run, if too few of them failed to name a cause."""
    asked: int = 0
    """How many known mistakes were compared."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The diagnosis in words, the cause first."""
        if not self.causes:
            places = tuple(f"where: {sentence}" for sentence in self.where)
            if not self.asked:
                few = f"cause: not named, since only {self.problems} of {self.tried} further problems disagree"
                return (few, *places) if self.tried else ()
            nothing = f"cause: none of {self.asked} known mistakes explains it"
            return (nothing, *places)
        todo = "" if self._unsure else next((cause.todo for cause in self.causes if cause.todo), "")
        return (f"cause: {self.named}; {self.explains}", *((f"to do: {todo}",) if todo else ()))

    @property
    def _unsure(self) -> bool:
        return any(not cause.same_as_before for cause in self.causes[1:])

    @property
    def named(self) -> str:
        """The causes in words, and to what they are limited; "" if there is none."""
        if not self.causes:
            return ""
        first, *others = self.causes
        also = (f"; or{', with the same effect on these problems' * o.same_as_before}: {o.words}" for o in others)
        one_of = "one of these, which the problems do not tell apart: " if self._unsure else ""
        return f"{one_of}{first.words}{''.join(also)}{self.scope}{self.condition}"

    @property
    def explains(self) -> str:
        """What the causes explain, in words; "" if there is none."""
        return f"this explains {self._held}" if self.causes else ""

    @property
    def _held(self) -> str:
        if not self.asked:
            few = f", and the {self.problems} that disagree of {self.tried} others" if self.problems else ""
            return f"the problem below{few}"
        explained = f"{self.problems} of {self.failing}" if self.failing else f"all {self.problems}"
        others = f"none of the {self.asked - len(self.causes)} other known mistakes does"
        return f"{explained} failing problems ({', '.join(self.layouts)}), and {others}"
