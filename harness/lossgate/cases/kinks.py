# SPDX-License-Identifier: Apache-2.0
"""Masks tokens near a kink, such as the edge of a clip, where rounding decides the gradient.

The loss is run under a dispatch mode that records the outcome of every clamp, minimum, maximum and
comparison. Exact ties, such as a ratio of exactly 1 in on-policy training, are no kink: both sides
give the same value there.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import BoundSpec
from lossgate.specs.token_values import TokenValues

_SIGMAS = 6
"""Standard deviations of rounding that comparisons stay clear of."""

_PROBES = 4
"""Moves of all log-probabilities: up, down, and two at random."""

_ROUNDS = 5
"""Masking a token moves the means over its sequence, and with them other comparisons. So masking is
repeated up to this often."""

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "maximum", "minimum"])


def mask_near_kinks(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> GlobalBatch:
    """Masks the tokens at which rounding could change the outcome of a comparison.

    At a kink either one-sided gradient is right, and no noise tells which of them a kernel finds.
    So the loss is run with log-probabilities moved by as much as rounding in the problem's dtype
    may move them. Where a clip or a comparison then comes out otherwise, its token, or its whole
    sequence, is masked.

    Returns:
        The batch with a smaller mask; the batch itself for a loss without kinks and for scenarios
        that are ties.
    """
    spec = bound.spec
    scenario = {choice.name: choice.default for choice in spec.scenarios} | problem.scenario
    if not spec.kinks or any(scenario[name] == choice for name, choice in spec.tie_scenarios.items()):
        return batch
    streams, gap = RandomStreams(problem.to_json()), _SIGMAS * _rounding_error(batch, problem, bound)
    values = bound.token_values(problem.head, batch.leaves, batch.fields)
    for round_ in range(_ROUNDS):
        moves = {
            name: gap * _signs(streams, round_, name, value.shape) for name, value in values.differentiable.items()
        }
        tokens, sequences = _near_kinks(batch, bound, values, moves)
        near = tokens | sequences[batch.fields["sequence"]]
        if not bool((near & batch.fields["mask"]).any()):
            break
        masked = replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~near})
        batch = spec.counted(masked)
    return batch


def has_comparisons(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> bool:
    """Returns whether a comparison of the loss comes out otherwise on one trained token, or
    sequence, than on another.
    """
    values, trained = bound.token_values(problem.head, batch.leaves, batch.fields), bound.spec.trained_of(batch.known)
    nowhere = {name: torch.zeros(2, *value.shape) for name, value in values.differentiable.items()}
    for outcome in (outcome[0] for outcome in _outcomes(batch, bound, values, nowhere)):
        of_trained = outcome[trained] if len(outcome) == len(trained) else outcome
        if bool((of_trained > 0).any() and (of_trained < 0).any()):
            return True
    return False


def _signs(streams: RandomStreams, round_: int, name: str, shape: torch.Size) -> Tensor:
    """Returns ``[1 + probes, *shape]``: no move, up, down, and others at random.

    Log-probabilities with and without a filter move together.
    """
    stream = f"probe {round_} " + {"logprobs": "", "unfiltered": ""}.get(name, f"{name} ")
    drawn = [streams.normal(f"{stream}{i}", *shape).sign() for i in range(_PROBES - 2)]
    return torch.stack([torch.zeros(shape), torch.ones(shape), -torch.ones(shape), *drawn])


def _rounding_error(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> Tensor:
    """Returns the standard deviation that rounding gives a log-probability.

    It assumes that everything is rounded to the problem's dtype.
    """
    head = HEADS[problem.head]
    largest = head.logits(batch.leaves).abs().max().clamp(min=1)
    return head.rounding_unit(TORCH_DTYPES[batch.dtype]) * largest / bound.temperature / sqrt(3)


def _near_kinks(
    batch: GlobalBatch, bound: BoundSpec, values: TokenValues, moves: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the tokens and the sequences with a comparison that some move decides otherwise."""
    tokens = torch.zeros(batch.partition.tokens, dtype=torch.bool)
    sequences = torch.zeros(len(batch.partition.lengths), dtype=torch.bool)
    group_size = batch.partition.group_size
    for outcome in _outcomes(batch, bound, values, moves):
        changed = ((outcome != outcome[0]) & (outcome[0] != 0)).any(0)
        if changed.dim() > 1:  # of logits, or of several ids of a token
            changed = changed.flatten(1).any(1)
        if changed.shape == tokens.shape:
            tokens |= changed
        elif changed.shape == sequences.shape:
            sequences |= changed
        elif len(changed) * group_size == len(sequences):
            sequences |= changed.repeat_interleave(group_size)
    return tokens, sequences


def _outcomes(batch: GlobalBatch, bound: BoundSpec, values: TokenValues, moves: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns, for each comparison that depends on values per token, ``[moves, tokens or sequences
    or groups, ...]``.
    """

    def moved(by: dict[str, Tensor]) -> Tensor:
        given = values.replace(**{name: values.given[name] + move for name, move in by.items()})
        return bound.returning(()).loss(given, batch.known)[0]

    with torch.no_grad(), _RecordComparisons() as record:
        torch.vmap(moved)(dict(moves))
    count = len(next(iter(moves.values())))
    return [outcome for outcome in record.outcomes if outcome.dim() >= 2 and len(outcome) == count]


class _RecordComparisons(TorchDispatchMode):
    """Records, for each comparison in turn, the sign of the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler; see ``RoundEveryOperation``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _COMPARISONS and args[0].is_floating_point():
            self._record(args[0] - args[1])
        elif name in ("clamp", "clamp_min", "clamp_max"):
            names = ("max",) if name == "clamp_max" else ("min", "max")
            bounds = dict(zip(names, args[1:], strict=False)) | dict(kwargs or {})
            for bound in bounds.values():
                if bound is not None:
                    self._record(args[0] - bound)
        return result

    def _record(self, difference: Tensor) -> None:
        self.outcomes.append(difference.sign().nan_to_num_(0.0))
