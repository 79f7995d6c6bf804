# SPDX-License-Identifier: Apache-2.0
"""A case that has run, and whether a counterfactual explains its outputs."""

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
"""The relative difference below which kernels with a mistake are run, to see their noise."""
_EXPLAINED = 1e-4
"""The share of a disagreement that a mistake may leave unexplained, whatever the noise."""
_MOSTLY = 0.2
"""The share that it may leave unexplained if the noise of kernels with the mistake explains it."""
_NOISE = 0.25
"""The largest noise of kernels with a mistake, relative to the change that the mistake makes."""


@dataclass(frozen=True, kw_only=True)
class _Mistaken(BoundSpec):
    """A spec whose loss has a mistake. The loss is written only in its first way, which has the
    mistake.
    """

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
        """The problem as counterfactuals see it."""
        self._predicted: dict[str, Outputs | None] = {}
        self._deviations: dict[str, Mapping[Output, Tensor]] = {}

    @cached_property
    def got(self) -> Mapping[Output, Tensor]:
        """The outputs of the kernel. A missing gradient is 0."""
        reference, outputs = self.case.oracle.reference, dict(self.case.result.outputs)
        for output in self.case.oracle.gradients:
            if output not in outputs:
                outputs[output] = torch.zeros_like(reference[output])
        return outputs

    @cached_property
    def traits(self) -> frozenset[str]:
        """The options of the problem and the coverage goals that it reaches, in words."""
        bound = self.setting.bound_spec
        options = {f"{option.name}={getattr(bound.options, option.name)!r}" for option in bound.spec.options}
        changed = {f"{o.name} other than {o.default!r}" for o in bound.spec.options if o.name in bound.values}
        return frozenset(options | changed | self.case.placed.coverage)

    def predicted(self, counterfactual: Counterfactual) -> Outputs:
        """Returns the outputs of a kernel with a mistake. They are those of the reference if the
        mistake can't be made on the problem.
        """
        name = counterfactual.name
        if name not in self._predicted:
            self._predicted[name] = counterfactual.run(self.setting)
        return self._predicted[name] or dict(self.case.oracle.reference)

    @property
    def known(self) -> int:
        """The number of mistakes that have been computed on the problem."""
        return len(self._predicted)

    def says_something(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake can be made on this problem."""
        self.predicted(counterfactual)
        return self._predicted[counterfactual.name] is not None

    def may_fit(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake may explain the wrong outputs, as far as forward tells.

        Forward alone takes half the time of ``predicted``.
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
        # Small outputs come first, as they are compared the fastest.
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
        deviations = self._own_deviations(counterfactual)  # its fields or options may make more noise
        return output in deviations and oracle.would_agree(output, result, dtype, other, deviations[output])

    def _own_deviations(self, one: Counterfactual) -> Mapping[Output, Tensor]:
        """Returns the noise of kernels with a mistake, as deviations from its exact outputs.

        It is empty unless the mistake is made of stages for fields, options or the loss.
        """
        seams = one.seams
        if one.computed is not None or seams != Seams(fields=seams.fields, options=seams.options, loss=seams.loss):
            return {}
        if one.name not in self._deviations:
            self._deviations[one.name] = self._deviations_of(one)
        return self._deviations[one.name]

    def _deviations_of(self, one: Counterfactual) -> Mapping[Output, Tensor]:
        setting, bound, seams = self.setting, self.case.bound, one.seams
        changed = {name: x for name, x in one.fields(setting).items() if name in bound.batch.fields}
        batch = replace(bound.batch, fields={**bound.batch.fields, **changed})
        spec = seams.options(setting)
        if seams.loss is not RIGHT.loss:
            spec = _Mistaken(**vars(spec), right=spec, mistake=seams.loss)
        noise = KernelNoise(bound.problem, batch, spec)
        stages = stages_of(self.case.candidate, bound.problem.dtype)
        predicted = self.predicted(one)
        returned = setting.returned & predicted.keys()  # other options may return other metrics
        try:
            found = noise.deviations(setting.partition, stages, returned, predicted)
        except REFUSED:
            return {}
        known = self.case.oracle.reference.keys() & predicted.keys()
        found = {output: runs for output, runs in found.items() if output in known}
        if seams.loss is RIGHT.loss:
            return found
        # Many runs are made at once, and the mistake in an operation may not reach all of them.
        return {output: runs for output, runs in found.items() if self._is_noise(runs, predicted[output], output)}

    def _is_noise(self, runs: Tensor, predicted: Tensor, output: Output) -> bool:
        """Returns whether deviations are smaller than the change that a mistake makes. Larger ones
        would let any number between the right and the wrong one pass.
        """
        change = (predicted - self.case.oracle.reference[output]).nan_to_num(0.0, 0.0, 0.0).abs()
        return float(runs.nan_to_num(0.0, 0.0, 0.0).abs().max()) <= _NOISE * float(change.max())

    def only(self, outputs: Collection[Output]) -> "Observed":
        """Returns the same case with some outputs alone. What has been computed is kept."""
        part = copy(self)
        part.wrong = self.wrong.intersection(outputs)
        part.__dict__["got"] = {output: self.got[output] for output in outputs if output in self.got}
        return part

    def as_if_declared(self, candidate: Candidate) -> "Observed":
        """Returns the same case, judged by a candidate that declares the kernel differently."""
        case = copy(self.case)
        case.candidate = candidate
        for judged_by_it in ("oracle", "comparisons"):
            case.__dict__.pop(judged_by_it, None)
        judged = Observed(case)
        judged._predicted = self._predicted
        return judged

    def explained_by(self, counterfactual: Counterfactual) -> bool:
        """Returns whether a mistake explains the case.

        If outputs are wrong, the mistake must be possible on the problem, change each of them, and
        explain them. If none is wrong, it must leave all outputs right.
        """
        if not self.wrong:
            return self.fits(counterfactual, self.got)
        asked = self.may_fit(counterfactual) and self.says_something(counterfactual)
        wrong = self.wrong.intersection(self.got)
        return asked and wrong <= self.changes(counterfactual) and self.fits(counterfactual, wrong)

    def changes(self, counterfactual: Counterfactual) -> frozenset[Output]:
        """Returns the returned outputs in which a mistake differs from the reference."""
        reference, predicted = self.case.oracle.reference, self.predicted(counterfactual)
        return frozenset(o for o in self.got if o not in predicted or not same(predicted[o], reference[o]))

    def alike(self, one: Counterfactual, other: Counterfactual) -> bool:
        """Returns whether two mistakes have the same effect on the returned outputs."""
        a, b = self.predicted(one), self.predicted(other)
        return all(same(a[o], b[o]) for o in self.got if o in a and o in b)


def _within(dtype: torch.dtype, exact: Tensor) -> Tensor:
    """Returns numbers that are infinite where they are too large for a dtype."""
    return torch.where(exact.abs() > torch.finfo(dtype).max, exact.sign() * torch.inf, exact)


def _unexplained(other: Tensor, result: Tensor, reference: Tensor) -> float:
    """Returns the share of a disagreement that a mistake leaves unexplained, at most 1."""
    finite = other.isfinite() & result.isfinite() & reference.isfinite()
    if not torch.equal(finite, result.isfinite()):
        return 1.0
    left, whole = (float(torch.where(finite, result - x, 0.0).abs().max()) for x in (other, reference))
    return left / whole if whole else 1.0


def scope_of(failing: Iterable[Observed]) -> frozenset[Output]:
    """Returns the outputs that are wrong on one of the problems at least."""
    return frozenset[Output]().union(*(one.wrong for one in failing))


def layouts_of(seen: Iterable[Observed]) -> tuple[str, ...]:
    """Returns the layouts of some problems, in their order."""
    return tuple(dict.fromkeys(str(one.case.problem.layout) for one in seen))


def plainness(observed: Observed) -> tuple[int, int]:
    """Returns a key that sorts problems with few options first, and small ones first among these.

    With some options a mistake can't be made.
    """
    return len(observed.setting.bound_spec.values), observed.setting.tokens
