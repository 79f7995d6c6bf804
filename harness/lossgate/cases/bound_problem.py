# SPDX-License-Identifier: Apache-2.0
"""A problem bound to its spec: its tensors, references and noise, each made once, when asked for.

Nothing of it depends on a layout. ``PlacedProblem`` adds the parts that do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.fit import check_fits_spec
from lossgate.cases.float_range import mask_out_of_range
from lossgate.cases.kernel_noise import KernelNoise
from lossgate.cases.kinks import mask_near_kinks
from lossgate.cases.materialize import materialize, with_cotangents
from lossgate.cases.reference import DenseRun
from lossgate.judge.tolerance import Tolerance
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.specs.coverage_goals import Reached, covered_token_goals
from lossgate.specs.logit_filter import covered_filter_goals
from lossgate.specs.outputs import LOSS, Output
from lossgate.specs.sharding_goals import Trained
from lossgate.specs.spec import Spec
from lossgate.specs.users_code import told_as


class BoundProblem:
    """A problem of a spec, without its layout. Nothing in it depends on a candidate's code.

    Raises:
        UsageError: if the problem, or one of its options, does not suit the spec; see
            ``cases.fit``.
    """

    def __init__(self, spec: Spec, problem: Problem) -> None:
        check_fits_spec(spec, problem)
        self.spec, self.problem = spec, problem.unsharded
        self.bound_spec = spec.bind(problem.options)
        self._references: dict[frozenset[Output], Mapping[Output, Tensor]] = {}
        self._numbers_of: dict[tuple[str, frozenset[Output]], frozenset[Output]] = {}
        self._mutated: dict[str, Mapping[Output, Tensor]] = {}
        self._derived: dict[str, BoundProblem] = {}
        self.tolerances: dict[Any, Tolerance] = {}
        """Tolerances of outputs that are the same on every layout. ``Oracle`` keeps them here."""

    @cached_property
    def unmasked(self) -> GlobalBatch:
        """The batch before tokens near a kink are masked. It takes far less time to make."""
        return materialize(self.problem, self.bound_spec)

    @cached_property
    def batch(self) -> GlobalBatch:
        """The batch on which a candidate is run and judged."""
        masked = mask_near_kinks(self.unmasked, self.problem, self.bound_spec)
        masked = mask_out_of_range(masked, self.problem, self.bound_spec)
        if masked is self.unmasked:  # its upstream gradients fit already
            return masked
        return with_cotangents(masked, self.problem, self.bound_spec)

    def varied(self, name: str, change: Callable[[GlobalBatch], GlobalBatch]) -> "BoundProblem":
        """Returns the problem with a changed batch. It is made once for each name.

        Args:
            name: the name of the change.
            change: gets the batch, and returns another. The counts and upstream gradients of the
                latter are made anew.
        """

        def make() -> BoundProblem:
            made = BoundProblem(self.spec, self.problem)
            made.unmasked = with_cotangents(self.spec.counted(change(self.batch)), self.problem, self.bound_spec)
            return made

        return self.derived(name, make)

    def redrawn(self, name: str, change: Callable[[GlobalBatch], GlobalBatch]) -> "BoundProblem":
        """Returns the problem with other ids or logits. It is made once for each name.

        The fields that the spec draws from them are drawn anew. So the log-probabilities of other
        policies are as near to the policy's as before.

        Args:
            name: the name of the change.
            change: gets the batch before the spec's own fields are drawn, and returns another.
        """

        def make() -> BoundProblem:
            made = BoundProblem(self.spec, self.problem)
            made.unmasked = materialize(self.problem, self.bound_spec, change)
            return made

        return self.derived(name, make)

    def derived(self, name: str, make: Callable[[], "BoundProblem"]) -> "BoundProblem":
        """Returns a problem made from this one. It is kept by its name, for other layouts too."""
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]

    @cached_property
    def coverage(self) -> frozenset[str]:
        """The coverage goals that the problem reaches on any layout."""
        batch, spec, options = self.batch, self.spec, self.bound_spec.options
        trained = spec.trained_of(batch.known)
        covered = spec.covered_by(batch, options)
        if spec.trained_dim == "token":
            covered |= covered_token_goals(batch, trained) | covered_filter_goals(batch.fields, trained)
        covered |= {name for name, goal in spec.goals.items() if goal.reached and self._reaches(name, goal.reached)}
        if not bool(trained.any()):
            return frozenset(covered)
        chosen = self.problem.scenario
        scenarios = {f"{one.name}: {chosen.get(one.name, one.default)}" for one in spec.scenarios}
        covered |= scenarios & spec.all_goals.keys()
        if spec.trained_dim == "token" and self.problem.head == "hidden":
            covered.add("with a bias" if self.problem.bias else "without a bias")
        return frozenset(covered)

    def _reaches(self, name: str, reached: Reached) -> bool:
        """Returns whether the problem reaches a goal of the spec's author."""
        values, batch = self.dense.token_values(self.bound_spec), self.spec.batch(self.batch.known)
        with torch.no_grad(), told_as(f"spec {self.spec.name!r}: reached= of goal {name!r}"):
            return bool(torch.as_tensor(reached(values, batch, self.bound_spec.options)).any())

    @cached_property
    def trained(self) -> Trained:
        """The tokens or sequences that are trained."""
        fields, spec = self.batch.fields, self.spec
        chosen = spec.trained_of(self.batch.known).nonzero().squeeze(1)
        if spec.trained_dim == "sequence":
            no_ids = chosen.new_zeros(len(chosen), 0)
            return Trained(chosen.numpy(), torch.zeros_like(chosen).numpy(), no_ids.numpy())
        sequence, starts = fields["sequence"][chosen], self.batch.known["cu_seqlens"]
        ids = spec.ids_of(fields)[chosen]
        return Trained(sequence.numpy(), (chosen - starts[sequence]).numpy(), ids.numpy())

    @cached_property
    def dense(self) -> DenseRun:
        """The reference on the batch, with any options."""
        return self.unmasked_dense if self.batch is self.unmasked else DenseRun(self.batch, self.problem.head)

    @cached_property
    def unmasked_dense(self) -> DenseRun:
        """The reference on the batch before tokens near a kink are masked."""
        return DenseRun(self.unmasked, self.problem.head)

    def reference(self, returned: Collection[Output]) -> Mapping[Output, Tensor]:
        """Computes the reference for a candidate that returns these outputs, with gradients."""
        key = frozenset(returned)
        if key not in self._references:
            self._references[key] = self.dense.outputs(self.bound_spec.returning(key))
        return self._references[key]

    def loss_with(
        self, fields: Mapping[str, Tensor], returned: Collection[Output] = ()
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Computes the loss and metrics of the batch with some fields replaced.

        Args:
            fields: the fields that replace those of the batch, by name.
            returned: the outputs that a candidate returns. They tell which metrics are needed.
        """
        values = self.dense.token_values(self.bound_spec)
        with torch.no_grad():
            return self.bound_spec.returning(returned).loss(values, {**self.batch.known, **fields})

    def reads_count(self, name: str, returned: Collection[Output] = ()) -> bool:
        """Returns whether the loss, or a returned metric, depends on a count such as valid_tokens.
        False if the spec has no loss.
        """
        return bool(self.numbers_of(name, returned))

    def numbers_of(self, count: str, returned: Collection[Output] = ()) -> frozenset[Output]:
        """Returns which of the loss and the returned metrics depend on a count. There are none if
        the spec has no loss.
        """
        key = count, frozenset(returned)
        if key not in self._numbers_of:
            self._numbers_of[key] = frozenset(self._depending_on(count, returned))
        return self._numbers_of[key]

    def _depending_on(self, count: str, returned: Collection[Output]) -> Iterator[Output]:
        if self.spec.reference is None:
            return
        given = self.batch.fields[count]
        plain, other = (self.numbers_with({count: given + more}, returned) for more in (0, 7))
        for output, number in plain.items():
            if float((number - other[output]).abs()) > 1e-12 * float(number.abs()):
                yield output

    def numbers_with(self, fields: Mapping[str, Tensor], returned: Collection[Output] = ()) -> dict[Output, Tensor]:
        """Returns the loss and the returned metrics of the batch with some fields replaced."""
        loss, metrics = self.loss_with(fields, returned)
        return {LOSS: loss, **{output: metrics[output.name] for output in returned if output.kind == "metric"}}

    def mutated(self, options: Mapping[str, Any]) -> Mapping[Output, Tensor]:
        """Computes the reference with other options, without metrics."""
        key = repr(sorted(options.items()))
        if key not in self._mutated:
            self._mutated[key] = self.dense.outputs(self.spec.bind(options).returning(()))
        return self._mutated[key]

    @cached_property
    def noise(self) -> KernelNoise:
        """The deviations of right kernels from the reference."""
        return KernelNoise(self.problem, self.batch, self.bound_spec)
