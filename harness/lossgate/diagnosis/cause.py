# SPDX-License-Identifier: Apache-2.0
"""The result of a diagnosis, and its words."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A mistake that explains what a kernel returned."""

    name: str
    """The name of the counterfactual."""
    words: str
    """What the kernel does, in words."""
    todo: str = ""
    """What the author should do, in words."""
    same_as_before: bool = False
    """Whether this cause has the same effect as the one before it on every problem seen."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The causes that explain a disagreement, or the places where outputs are wrong."""

    causes: tuple[Cause, ...] = ()
    """At most three mistakes, the plainest first."""
    scope: str = ""
    """The outputs to which the mistake is limited, in words; "" if it explains all outputs."""
    condition: str = ""
    """The trait that all problems with the mistake have and no other, in words. After "except with"
    it is the trait of the problems that the mistake does not explain."""
    partly: bool = False
    """Whether the mistake explains only some rows of an output, or only some problems."""
    where: tuple[str, ...] = ()
    """The places where outputs are wrong, in words, if there is no cause."""
    problems: int = 0
    """The number of failing problems that the mistake explains."""
    failing: int = 0
    """The number of failing problems, if the mistake does not explain all of them; else 0."""
    layouts: tuple[str, ...] = ()
    """The layouts of the explained problems."""
    tried: int = 0
    """The number of problems that were run, if too few of them failed to name a cause; else 0."""
    asked: int = 0
    """The number of known mistakes that were compared."""
    convention: str = ""
    """What to declare if callers keep to conventions under which the failing problems agree; "" if
    there are none."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The diagnosis in words, the cause first."""
        if self.causes:
            part = f", in {self.problems} of {self.failing} failing problems" if self.failing else ""
            cause = f"cause: {self.named}{part}"
            todo = next((cause.todo for cause in self.causes if cause.todo), "")
            ways = [todo] if todo and not self._unsure else []
            if self.convention:
                ways.append(f"or, if its callers keep to it, {self.convention}" if ways else self.convention)
            return (cause, f"to do: {'; '.join(ways)}") if ways else (cause,)
        if self.convention:
            return (f"cause: {self.named}", f"to do: if its callers keep to it, {self.convention}")
        places = tuple(f"where: {sentence}" for sentence in self.where)
        if self.asked:
            return (f"cause: none of {self.asked} known mistakes explains it", *places)
        if self.tried:
            few = f"cause: not named, since only {self.problems} of {self.tried} further problems disagree"
            return (few, *places)
        return ()

    @property
    def _unsure(self) -> bool:
        """Whether causes have different effects, so that it is not known which one is right."""
        return any(not cause.same_as_before for cause in self.causes[1:])

    @property
    def named(self) -> str:
        """The causes and their limits in words; "" if there is no cause."""
        if not self.causes:
            return "the kernel follows a convention that it does not declare" if self.convention else ""
        words = self.causes[0].words
        for cause in self.causes[1:]:
            same = ", with the same effect on these problems" if cause.same_as_before else ""
            words += f"; or{same}: {cause.words}"
        one_of = "one of these, which the problems do not tell apart: " if self._unsure else ""
        return f"{one_of}{words}{self.scope}{self.condition}"

    @property
    def explains(self) -> str:
        """The problems that the causes explain, in words; "" if there is no cause."""
        return f"this explains {self._explained}" if self.causes else ""

    @property
    def _explained(self) -> str:
        explained = f"{self.problems} of {self.failing}" if self.failing else f"all {self.problems}"
        others = f"none of the {self.asked - len(self.causes)} other known mistakes does"
        return f"{explained} failing problems ({', '.join(self.layouts)}), and {others}"
