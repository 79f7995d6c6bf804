# SPDX-License-Identifier: Apache-2.0
"""What a kernel returned on one problem, and whether a counterfactual explains it."""

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lossgate.cases.case import Case
from lossgate.cases.kernel_noise import KernelNoise
from lossgate.counterfactuals.counterfactual import REFUSED, Counterfactual
from lossgate.counterfactuals.seams import RIGHT, Loss, Outputs, Seams, same
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.declaration.candidate import Candidate
from lossgate.judge.ensemble import stages_of
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import Output
from lossgate.specs.token_values import TokenValues

_NEAR = 1e-2
"""Relative difference below which it is worth to run kernels with a mistake for their noise."""
_EXPLAINED = 1e-4
"""The share of a disagreement that a mistake may leave unexplained, whatever the noise."""
_MOSTLY = 0.2
"""The same that it may leave if its own noise explains it."""
_NOISE = 0.25
"""The most noise that a mistake's own runs may have, relative to what it changes."""


@dataclass(frozen=True, kw_only=True)
class _Mistaken(BoundSpec):
    """A spec whose loss has a mistake. It is written in one way, since a mistake is one of that."""

    right: BoundSpec
    mistake: Loss

    @property
    def ways(self) -> tuple[str, ...]:
        return self.right.ways[:1]

    def loss(self, values: TokenValues, fields: Fields, way: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        return self.mistake(self.right, values, fields)


class Observed:
    """A case that has run.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if the candidate broke its declared interface.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.wrong = frozenset(c.output for c in case.comparisons if not c.agrees)
        """The outputs that disagree."""
        self.setting = Setting(case.placed, case.result.outputs, case.candidate.tokens, case.candidate.tiles)
        self._predicted: dict[str, Outputs | None] = {}
        self._runs: dict[str, Mapping[Output, Tensor]] = {}

    @cached_property
    def got(self) -> Mapping[Output, Tensor]:
        """What the kernel returned. A gradient that never came is 0."""
        reference, outputs = self.case.oracle.reference, dict(self.case.result.outputs)
        for output in self.case.oracle.gradients:
            if output not in outputs:
                outputs[output] = torch.zeros_like(reference[output])
        return outputs

    @cached_property
    def traits(self) -> frozenset[str]:
        """What the problem has, in words: options, and the goals that it reaches."""
        bound = self.setting.bound_spec
        options = {f"{option.name}={getattr(bound.options, option.name)!r}" for option in bound.spec.options}
        changed = {f"{o.name} other than {o.default!r}" for o in bound.spec.options if o.name in bound.values}
        return frozenset(options | changed | self.case.placed.coverage)

    def predicted(self, counterfactual: Counterfactual) -> Outputs:
        """Returns what a kernel with a mistake gives: the reference, where that says nothing."""
        name = counterfactual.name
        if name not in self._predicted:
            self._predicted[name] = counterfactual.run(self.setting)
        return self._predicted[name] or dict(self.case.oracle.reference)

    @property
    def known(self) -> int:
        """The number of mistakes whose effect on the problem is known already."""
        return len(self._predicted)

    def says_something(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake can be made on this problem."""
        self.predicted(counterfactual)
        return self._predicted[counterfactual.name] is not None

    def may_fit(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake may explain the wrong outputs: not, if forward alone shows that
        it gives other numbers. That takes half the time of all that a mistake gives.
        """
        asked = [output for output in self.wrong if output.kind != "gradient" and output in self.got]
        if not asked or counterfactual.name in self._predicted:
            return True
        found = counterfactual.run_forward(self.setting)
        return found is None or all(output in found and self._may_be(output, found[output]) for output in asked)

    def _may_be(self, output: Output, other: Tensor) -> bool:
        dtype = self.case.result.dtypes.get(output, torch.float32)
        other, got = _within(dtype, other), self.got[output]
        return same(got, other, _NEAR) or self.case.oracle.would_agree(output, got, dtype, other)

    def fits(self, counterfactual: Counterfactual, outputs: Collection[Output]) -> bool:
        """Returns whether a mistake explains some outputs, as far as they were returned."""
        predicted = self.predicted(counterfactual)
        # Small outputs come first: they tell soonest that it does not.
        asked = sorted((output for output in outputs if output in self.got), key=lambda o: self.got[o].numel())
        return all(o in predicted and self._fits(o, predicted[o], counterfactual) for o in asked)

    def _fits(self, output: Output, other: Tensor, counterfactual: Counterfactual) -> bool:
        oracle, result = self.case.oracle, self.got[output]
        if output not in self.wrong and same(other, oracle.reference[output]):
            return True
        dtype = self.case.result.dtypes.get(output, torch.float32)
        other = _within(dtype, other)
        if oracle.would_agree(output, result, dtype, other):
            return True
        if not same(result, other, _NEAR):
            return False
        if output in self.wrong:
            left = _unexplained(other, result, oracle.reference[output])
            if not _EXPLAINED < left <= _MOSTLY:
                return left <= _EXPLAINED
        runs = self._own_runs(counterfactual)  # of another batch or option, whose noise may be larger
        return output in runs and oracle.would_agree(output, result, dtype, other, runs[output])

    def _own_runs(self, one: Counterfactual) -> Mapping[Output, Tensor]:
        """Returns the noise of kernels with a mistake in what they are given, or in the loss, less
        what it gives; nothing for other mistakes.
        """
        seams = one.seams
        if one.computed is not None or seams != Seams(fields=seams.fields, options=seams.options, loss=seams.loss):
            return {}
        if one.name not in self._runs:
            setting, bound = self.setting, self.case.bound
            changed = {name: x for name, x in one.fields(setting).items() if name in bound.batch.fields}
            batch = replace(bound.batch, fields={**bound.batch.fields, **changed})
            spec = seams.options(setting)
            if seams.loss is not RIGHT.loss:
                spec = _Mistaken(**vars(spec), right=spec, mistake=seams.loss)
            noise = KernelNoise(bound.problem, batch, spec)
            stages = stages_of(self.case.candidate, bound.problem.dtype)
            predicted = self.predicted(one)
            returned = setting.returned & predicted.keys()  # another option may have other metrics
            try:
                found = noise.deviations(setting.partition, stages, returned, predicted)
            except REFUSED:
                found = {}
            known = self.case.oracle.reference.keys() & predicted.keys()
            sure = seams.loss is RIGHT.loss  # an operation may be out of reach where many runs are made at once
            self._runs[one.name] = {
                o: runs for o, runs in found.items() if o in known and (sure or self._is_noise(runs, predicted[o], o))
            }
        return self._runs[one.name]

    def _is_noise(self, runs: Tensor, predicted: Tensor, output: Output) -> bool:
        """Returns whether runs differ less than a mistake and what is right, or they would let any
        number between the two pass.
        """
        apart = (predicted - self.case.oracle.reference[output]).nan_to_num(0.0, 0.0, 0.0).abs()
        return float(runs.nan_to_num(0.0, 0.0, 0.0).abs().max()) <= _NOISE * float(apart.max())

    def only(self, outputs: Collection[Output]) -> "Observed":
        """Returns the same with some outputs alone, and with all that is known already."""
        part = copy(self)
        part.wrong = self.wrong.intersection(outputs)
        part.__dict__["got"] = {output: self.got[output] for output in outputs if output in self.got}
        return part

    def as_if_declared(self, candidate: Candidate) -> "Observed":
        """Returns the same, judged by what another candidate declares of the same kernel."""
        case = copy(self.case)
        case.candidate = candidate
        for judged_by_it in ("oracle", "comparisons"):
            case.__dict__.pop(judged_by_it, None)
        judged = Observed(case)
        judged._predicted = self._predicted
        return judged

    def explained_by(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake gives what is wrong, and says something of it; or, if nothing
        is, leaves right what is right.
        """
        if not self.wrong:
            return self.fits(counterfactual, self.got)
        asked = self.may_fit(counterfactual) and self.says_something(counterfactual)
        return asked and self.fits(counterfactual, self.wrong)

    def changes(self, counterfactual: Counterfactual) -> frozenset[Output]:
        """Returns the returned outputs in which a mistake differs from the reference."""
        reference, predicted = self.case.oracle.reference, self.predicted(counterfactual)
        return frozenset(o for o in self.got if o not in predicted or not same(predicted[o], reference[o]))

    def alike(self, one: Counterfactual, other: Counterfactual) -> bool:
        """Returns whether two mistakes have one effect on what was returned."""
        a, b = self.predicted(one), self.predicted(other)
        return all(same(a[o], b[o]) for o in self.got if o in a and o in b)


def _within(dtype: torch.dtype, exact: Tensor) -> Tensor:
    """Returns numbers as a dtype can hold them: those that are too large for it are infinite."""
    return torch.where(exact.abs() > torch.finfo(dtype).max, exact.sign() * torch.inf, exact)


def _unexplained(other: Tensor, result: Tensor, reference: Tensor) -> float:
    """Returns the share of a disagreement that a mistake leaves unexplained, at most 1."""
    finite = other.isfinite() & result.isfinite() & reference.isfinite()
    if not torch.equal(finite, result.isfinite()):
        return 1.0
    left, whole = (float(torch.where(finite, result - x, 0.0).abs().max()) for x in (other, reference))
    return left / whole if whole else 1.0


def scope_of(failing: Iterable[Observed]) -> frozenset[Output]:
    """Returns the outputs that are wrong on some problem."""
    return frozenset[Output]().union(*(one.wrong for one in failing))


def layouts_of(seen: Iterable[Observed]) -> tuple[str, ...]:
    """Returns the layouts of some problems, in their order."""
    return tuple(dict.fromkeys(str(one.case.problem.layout) for one in seen))


def plainness(observed: Observed) -> tuple[int, int]:
    """Sorts problems with few options first, as a mistake may not be made with some: then small
    ones.
    """
    return len(observed.setting.bound_spec.values), observed.setting.tokens
