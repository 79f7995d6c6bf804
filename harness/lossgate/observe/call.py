# SPDX-License-Identifier: Apache-2.0
"""Observes a call of a kernel on every rank."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall
from lossgate.observe.memory import MadeTensor, MemoryWatch, Phase
from lossgate.observe.traffic import Collective, axes_of, logged
from lossgate.problems.batch import GlobalBatch
from lossgate.worlds.simulated.simulated_world import SimulatedWorld


@dataclass(frozen=True)
class Use:
    """What a call uses on one rank, or the most that it uses on any of several ranks."""

    largest: Mapping[Phase, MadeTensor | None]
    """The tensor with the most elements that each phase makes."""
    peak: Mapping[Phase, int]
    """The most bytes that are alive at a time in each phase, without inputs."""
    saved: int
    """Bytes that are alive between forward and backward, without inputs and outputs."""
    collectives: Sequence[Collective]
    """The collectives and sends, in order."""
    host_waits: Sequence[str]
    """The operations that need a value on the host, in order."""
    largest_input: int
    """Elements of the largest input."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that the rank brings to collectives."""
        return sum(collective.bytes for collective in self.collectives)

    @property
    def largest_of_all(self) -> MadeTensor | None:
        return max((made for made in self.largest.values() if made), key=lambda made: made.elements, default=None)

    @property
    def largest_peak(self) -> int:
        return max(self.peak.values())

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Returns the number and the bytes of the collectives, by kind and group."""
        calls, sizes = Counter[str](), Counter[str]()
        for collective in self.collectives:
            calls[str(collective)] += 1
            sizes[str(collective)] += collective.bytes
        return {name: (calls[name], sizes[name]) for name in calls}


def observe(case: Case, batch: GlobalBatch) -> Use:
    """Runs a case once on every rank and returns the most that it used on any rank.

    Args:
        case: the candidate, the problem and the world.
        batch: the batch in the layout of the problem, with padding.

    Raises:
        RankFailure: if a rank failed.
        CandidateError: if the candidate broke its declared interface.
    """
    ranks = case.on_ranks(observe_rank, batch=batch)
    if isinstance(case.world, SimulatedWorld):
        log = case.world.log
        ranks = [replace(use, collectives=logged(log, rank)) for rank, use in enumerate(ranks)]
    return _most(ranks)


def observe_rank(call: RankCall) -> Use:
    """Calls a kernel once, forward and backward, and returns what this rank used."""
    inputs = [*call.tensors.values()]
    watch = MemoryWatch(inputs, axes_of(call.context.mesh))
    with watch.during("forward"):
        outputs = call.forward()
    returned = [tensor for tensor in (*vars(outputs).values(), *outputs.metrics.values()) if torch.is_tensor(tensor)]
    saved = watch.alive_without(returned)
    roots = call.roots(outputs)
    upstream = [call.upstream(name, root) for name, root in roots.items()]
    with watch.during("backward"):
        torch.autograd.backward([*roots.values()], upstream)
    largest_input = max((tensor.numel() for tensor in inputs), default=0)
    return Use(watch.largest, watch.peak, saved, tuple(watch.collectives), tuple(watch.host_waits), largest_input)


def _most(ranks: Sequence[Use]) -> Use:
    """Returns the most that any rank uses, for each resource by itself."""
    return Use(
        largest={phase: _largest(use.largest[phase] for use in ranks) for phase in ranks[0].largest},
        peak={phase: max(use.peak[phase] for use in ranks) for phase in ranks[0].peak},
        saved=max(use.saved for use in ranks),
        collectives=max(ranks, key=lambda use: (len(use.collectives), use.bytes)).collectives,
        host_waits=max((use.host_waits for use in ranks), key=len),
        largest_input=max(use.largest_input for use in ranks),
    )


def _largest(made: Iterable[MadeTensor | None]) -> MadeTensor | None:
    return max((one for one in made if one is not None), key=lambda one: one.elements, default=None)
