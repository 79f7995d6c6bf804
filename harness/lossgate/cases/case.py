# SPDX-License-Identifier: Apache-2.0
"""A case: one problem bound to a candidate and a world."""

import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.cases.assemble import Assembled, assemble, equal
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.current_case import in_call
from lossgate.cases.fit import check_fits
from lossgate.cases.large import is_large
from lossgate.cases.oracle import Oracle
from lossgate.cases.own_counts import Weights, weights_of_calls
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.random_numbers import seed_of
from lossgate.cases.rank_call import How, RankOutputs, RankTask, T, plainly
from lossgate.declaration.candidate import Candidate
from lossgate.judge.comparison import Comparison
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.specs.outputs import Output
from lossgate.worlds.base import RankFailure, RankRaised, World


@contextmanager
def all_cores() -> Generator[None]:
    """Lets torch use a thread on each core that the process may use.

    This is only for the judge's float64 arithmetic, because the last digits of a kernel's own
    numbers may depend on the number of threads.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(threads, cores or 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_ROUNDING = 1e-9
"""The largest difference, by rounding in float64, of two references that are equal on paper."""
_MISSING = "it is missing, although a plain call returns it"
"""The fault of an output that no rank returns."""
_PATIENCE = 10.0
"""The factor of the time after which a rank counts as hanging, for large problems."""


class Case:
    """A problem bound to a candidate and a world.

    Each part is made at most once, when asked for. The ranks' results are kept, so a second look
    does not run the kernel again.

    Raises:
        UsageError: if the candidate, or the world, does not suit the problem; see ``cases.fit``.
    """

    def __init__(
        self,
        candidate: Candidate,
        problem: Problem,
        world: World,
        bound: BoundProblem | None = None,
        *,
        also_over: Collection[Axis] = (),
    ) -> None:
        """Binds a problem.

        Args:
            candidate: the kernel.
            problem: the problem with its layout.
            world: the world in which the ranks run.
            bound: the problem without its layout, if it is already bound.
            also_over: axes that the candidate does not declare, but over which the world may split
                the problem, because its ranks do the work of several.
        """
        check_fits(candidate, problem, world, {*candidate.axes, *also_over})
        self.candidate, self.problem, self.world = candidate, problem, world
        self.bound = bound or BoundProblem(candidate.spec, problem)
        self.placed = PlacedProblem(self.bound, problem)

    @cached_property
    def _outcome(self) -> Sequence[RankOutputs] | RankFailure:
        try:
            return self.on_ranks()
        except RankFailure as failure:
            return failure

    def on_ranks(
        self,
        how: How[T] = plainly,
        *,
        batch: GlobalBatch | None = None,
        options: Mapping[str, Any] | None = None,
        order: ReductionOrder | None = None,
    ) -> Sequence[T]:
        """Runs the candidate on every rank, anew in each call.

        Args:
            how: how the kernel is called.
            batch: the batch as the ranks hold it; by default that of the problem.
            options: the options that are not at their default; by default those of the problem.
            order: the order in which a simulated world adds up; by default that of the problem.

        Returns:
            The result of ``how`` on each rank.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        given_options = self.problem.options if options is None else options
        given_batch = self.placed.batch if batch is None else batch
        task = RankTask(self.candidate, given_options, given_batch, how, seed_of(self.problem))
        patience = _PATIENCE if is_large(self.problem) else 1.0
        with in_call():
            return self.world.run(
                task, order=order or self.problem.reduction_order, seed=self.problem.seed, patience=patience
            )

    def varied(self, name: str, change: Callable[[GlobalBatch], GlobalBatch]) -> "Case":
        """Returns a case of the same problem with a changed batch, and with a reference of its own.

        Args:
            name: the name of the change. The changed batch is kept with the problem, for other
                layouts.
            change: gets the whole batch without padding, and returns another.
        """
        return Case(self.candidate, self.problem, self.world, self.bound.varied(name, change))

    def kept(self, reference: Mapping[Output, Tensor]) -> list[Output]:
        """Returns the outputs that are equal in another reference and in the problem's own. These
        are the outputs that a change to the batch leaves as they are. Masked tokens are not
        compared.
        """
        own, mask = self.bound.reference(self.result.outputs), self.bound.batch.fields["mask"]

        def same(output: Output) -> bool:
            one, other = own[output], reference[output]
            if output.kind == "token value":
                one, other = one[mask], other[mask]
            return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)

        return [output for output in own if same(output)]

    @property
    def ranks(self) -> Sequence[RankOutputs]:
        """The outputs and gradients of the candidate on each rank.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        if isinstance(self._outcome, RankFailure):
            raise self._outcome
        return self._outcome

    @property
    def raises(self) -> bool:
        """Whether a call raises an error on some rank. A call that gives nothing counts as one."""
        try:
            return not self.ranks
        except RankRaised:
            return True

    @cached_property
    def result(self) -> Assembled:
        """The whole outputs. Raises what ``ranks`` raises."""
        return self.whole(self.ranks)

    def whole(self, ranks: Sequence[RankOutputs], batch: GlobalBatch | None = None) -> Assembled:
        """Puts the ranks' outputs of a call together.

        Args:
            ranks: the outputs of each rank.
            batch: the batch of the call, if it was split otherwise than that of the problem.
        """
        given = batch or self.placed.batch
        weights: Weights = {}
        if self.candidate.conventions.counts == "own":
            returned = list(dict.fromkeys(output for local in ranks for output in local))
            weights = weights_of_calls(self.candidate, self.bound, given, returned)
        return assemble(ranks, self.candidate, given.partition, self.problem.hidden, weights)

    @cached_property
    def oracle(self) -> Oracle:
        """The reference and the noise that results are compared with."""
        return Oracle(self.candidate, self.placed, self.result.outputs)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons of every returned output and every required gradient."""
        result = self.result
        with all_cores() if is_large(self.problem) else nullcontext():
            return tuple(self.compare(result, self.oracle.gradients))

    def compare(
        self, result: Assembled, required: Collection[Output], oracle: Oracle | None = None
    ) -> Iterator[Comparison]:
        """Compares whole outputs with the reference.

        Args:
            result: the outputs.
            required: the outputs that are compared even if they are missing, which is a fault. The
                comparison of a missing output holds nothing but its faults.
            oracle: the judge of the outputs; by default that of the declared precision.
        """
        oracle = oracle or self.oracle
        for output in dict.fromkeys([*result.outputs, *result.faults, *required]):
            faults = result.faults.get(output, ())
            if output in result.outputs:
                yield oracle.compare(output, result.outputs[output], result.dtypes[output], faults)
            else:
                manner = "missing" if output.kind == "gradient" else "wrong"
                yield Comparison(output=output, faults=faults or (_MISSING,), manner=manner)

    def unequal(self, ranks: Sequence[RankOutputs]) -> tuple[Output, ...]:
        """Returns the outputs of another call that differ from the plain call on some rank."""
        pairs = zip(ranks, self.ranks, strict=True)
        return tuple(dict.fromkeys(output for own, plain in pairs for output in differing(own, plain)))

    def judged(
        self,
        called: Sequence[RankOutputs] | Assembled,
        required: Collection[Output] | None = None,
        among: Collection[Output] | None = None,
    ) -> tuple[Comparison, ...]:
        """Compares the outputs of another call of the same problem with the reference.

        Outputs that are equal to those of the plain call say nothing new, and are left out.

        Args:
            called: the outputs of each rank in that call; or the whole outputs, if the call had
                other inputs and its outputs had to be changed back.
            required: the gradients that the call must give; by default all.
            among: the outputs that are compared; by default all.
        """
        result = called if isinstance(called, Assembled) else self.whole(called)
        plain = self.result

        def is_new(output: Output) -> bool:
            if not same_bits(result.outputs[output], plain.outputs.get(output)):
                return True
            return result.faults.get(output, ()) != plain.faults.get(output, ())

        new = {o for o in result.outputs if (among is None or o in among) and is_new(o)}
        changed = Assembled(
            {o: whole for o, whole in result.outputs.items() if o in new},
            result.dtypes,
            {o: faults for o, faults in result.faults.items() if o in new or o not in result.outputs},
        )
        expected = list(self.oracle.gradients if required is None else required)
        expected += [o for o in (*plain.outputs, *plain.faults) if o.kind != "gradient"]
        missing = [o for o in expected if o not in result.outputs]
        found = self.compare(changed, missing)
        return tuple(one for one in found if among is None or one.output in among)


def differing(one: RankOutputs, other: RankOutputs) -> Iterator[Output]:
    """Yields the outputs of a rank that differ between two calls."""
    for output in dict.fromkeys((*one, *other)):
        a, b = one.get(output), other.get(output)
        alike = b is None if a is None else same_bits(a, b)
        if not alike:
            yield output


def same_bits(one: Tensor, other: Tensor | None) -> bool:
    """Returns whether two tensors are equal. NaN equals NaN."""
    return other is not None and one.shape == other.shape and equal(one, other)
