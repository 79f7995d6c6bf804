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
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_call import How, RankOutputs, RankTask, T, plainly
from lossgate.declaration.candidate import Candidate
from lossgate.judge.comparison import Comparison
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.specs.outputs import Output
from lossgate.worlds.base import RankFailure, World


@contextmanager
def all_cores() -> Generator[None]:
    """Computes with a thread on each core that the process may use.

    Only for float64: the last digits of a kernel's own numbers may hang on the number of threads.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(threads, cores or 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_ROUNDING = 1e-9
"""How far two references in float64 may be apart that are equal on paper."""
_PATIENCE = 10.0
"""How many times as long a rank may take for a large problem before it counts as hanging."""


class Case:
    """A problem bound to a candidate and a world.

    Each part is made at most once, when asked for. What each rank returned is kept, so that a
    second look runs nothing again.

    Raises:
        UsageError: if the problem is for another spec, head, dtype or layout, or has something else
            that was not declared; see ``cases.fit``.
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
            problem: with its layout.
            world: where the ranks run.
            bound: the problem without its layout, if somebody has bound it already.
            also_over: axes over which the world splits the problem although the candidate does not
                declare them, because its ranks do the work of several.
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
        """Runs the candidate on every rank, anew each time; returns what ``how`` does, by rank.

        Args:
            how: how the kernel is called.
            batch: as the ranks hold it; by default that of the problem.
            options: those that are not at their default; by default those of the problem.
            order: in which a simulated world adds up; by default that of the problem.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        given = self.problem.options if options is None else options
        task = RankTask(self.candidate, given, self.placed.batch if batch is None else batch, how)
        patience = _PATIENCE if is_large(self.problem) else 1.0
        with in_call():
            return self.world.run(
                task, order=order or self.problem.reduction_order, seed=self.problem.seed, patience=patience
            )

    def varied(self, name: str, change: Callable[[GlobalBatch], GlobalBatch]) -> "Case":
        """Returns a case of the same problem with a changed batch, and with a reference of its own.

        Args:
            name: of the change. The changed batch is kept with the problem, for other layouts.
            change: gets the whole batch without padding, and returns another.
        """
        return Case(self.candidate, self.problem, self.world, self.bound.varied(name, change))

    def kept(self, reference: Mapping[Output, Tensor]) -> list[Output]:
        """Returns the outputs for which another reference has the numbers of the problem's: what a
        relation leaves as it is. Masked tokens are not compared.
        """
        own, mask = self.bound.reference(self.result.outputs), self.bound.batch.fields["mask"]

        def same(output: Output) -> bool:
            pair = own[output], reference[output]
            one, other = (x[mask] for x in pair) if output.kind == "token value" else pair
            return torch.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)

        return [output for output in own if same(output)]

    @property
    def ranks(self) -> Sequence[RankOutputs]:
        """What the candidate returned on each rank.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        if isinstance(self._outcome, RankFailure):
            raise self._outcome
        return self._outcome

    @cached_property
    def result(self) -> Assembled:
        """The whole outputs. Raises what ``ranks`` raises."""
        return self.whole(self.ranks)

    def whole(self, ranks: Sequence[RankOutputs], partition: Partition | None = None) -> Assembled:
        """Puts together what the ranks gave in a call.

        Args:
            ranks: what each rank returned, by rank.
            partition: how the batch of the call was split; by default as that of the problem.
        """
        return assemble(ranks, self.candidate, partition or self.placed.partition, self.problem.hidden)

    @cached_property
    def oracle(self) -> Oracle:
        """The reference and the noise that results are compared with."""
        return Oracle(self.candidate, self.placed, self.result.outputs)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every output that was returned, and every gradient that must be given, compared with the
        reference.
        """
        result = self.result
        with all_cores() if is_large(self.problem) else nullcontext():
            return tuple(self.compare(result, self.oracle.gradients))

    def compare(
        self, result: Assembled, required: Collection[Output], oracle: Oracle | None = None
    ) -> Iterator[Comparison]:
        """Compares whole outputs with the reference. Those that are required and missing are a
        fault.

        Args:
            result: the outputs.
            required: those that must be there.
            oracle: judges them; by default by the declared precision.
        """
        oracle = oracle or self.oracle
        for output in dict.fromkeys([*result.outputs, *result.faults, *required]):
            faults = result.faults.get(output, ())
            if output in result.outputs:
                yield oracle.compare(output, result.outputs[output], result.dtypes[output], faults)
            else:
                yield Comparison(output=output, faults=faults)

    def unequal(self, ranks: Sequence[RankOutputs]) -> tuple[Output, ...]:
        """Returns the outputs that have other bits on some rank than in a plain call."""
        pairs = zip(ranks, self.ranks, strict=True)
        return tuple(dict.fromkeys(output for own, plain in pairs for output in _differing(own, plain)))

    def judged(
        self,
        called: Sequence[RankOutputs] | Assembled,
        required: Collection[Output] | None = None,
        among: Collection[Output] | None = None,
    ) -> tuple[Comparison, ...]:
        """Compares what another call of the same problem gave with the reference.

        Outputs that have the bits of the plain call say nothing new, and are left out.

        Args:
            called: what the call gave, by rank; or the whole outputs, if the call had other inputs
                and they had to be changed back.
            required: the gradients that it must give; by default all.
            among: the outputs that are compared; by default all.
        """
        result, plain = called if isinstance(called, Assembled) else self.whole(called), self.result
        compared = result.outputs if among is None else {o: result.outputs[o] for o in result.outputs if o in among}
        new = {o for o, whole in compared.items() if not same_bits(whole, plain.outputs.get(o))}
        new |= {o for o in compared if result.faults.get(o, ()) != plain.faults.get(o, ())}
        gradients = self.oracle.gradients if required is None else required
        changed = Assembled(
            {o: whole for o, whole in result.outputs.items() if o in new},
            result.dtypes,
            {o: faults for o, faults in result.faults.items() if o in new or o not in result.outputs},
        )
        missing = [o for o in (*plain.outputs, *plain.faults) if o.kind != "gradient" and o not in result.outputs]
        wanted = [o for o in gradients if o not in result.outputs]
        found = self.compare(changed, [*wanted, *missing])
        return tuple(one for one in found if among is None or one.output in among)


def _differing(one: RankOutputs, other: RankOutputs) -> Iterator[Output]:
    """Yields the outputs of a rank that have other bits in two calls."""
    for output in dict.fromkeys((*one, *other)):
        a, b = one.get(output), other.get(output)
        if (a is None) != (b is None) or (a is not None and not same_bits(a, b)):
            yield output


def same_bits(one: Tensor, other: Tensor | None) -> bool:
    """Returns whether two tensors are equal, NaN included."""
    return other is not None and one.shape == other.shape and equal(one, other)
