# SPDX-License-Identifier: Apache-2.0
"""Mistakes of pairs of chosen and rejected sequences: their order is wrong, or one is left out."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues

_SIDES = {0: "chosen", 1: "rejected"}


def pairs(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of pairs, if a loss has groups of two sequences."""
    if spec.reference is None or spec.group_size != 2:
        return
    of_sequences = head == "rewards"
    halves: dict[str, Any] = {"values": _values_in_halves} if of_sequences else {"fields": _fields_in_halves}
    yield mistake(
        "pairs as two halves",
        "the first half of each rank's sequences is taken for the chosen ones, and the second for the rejected",
        todo="take every second sequence: chosen and rejected sequences alternate",
        **halves,
    )
    for side, name in _SIDES.items():
        other = _SIDES[1 - side]
        yield mistake(
            f"{name} detached",
            f"{name} sequences have no gradient: only {other} ones are trained",
            values=partial(_detached, side, of_sequences),
        )
        if of_sequences:
            yield mistake(
                f"{name} as {other}",
                f"{name} sequences are taken in place of {other} ones, too",
                values=partial(_both, side),
            )
        if head == "hidden":
            yield mistake(
                f"weight of {name} alone",
                f"the gradient of the lm-head comes from {name} sequences alone",
                todo=f"add the gradient that comes from {other} sequences",
                project=partial(_projected, side),
            )


def _halves(setting: Setting) -> Tensor:
    """Returns the numbers of the sequences in the order that makes pairs of a rank's halves."""
    found: list[int] = []
    for dp in range(setting.size("dp")):
        own = list(setting.partition.sequences(dp))
        half = len(own) // 2
        found += [sequence for pair in zip(own[:half], own[half:], strict=True) for sequence in pair]
    return torch.tensor(found, dtype=torch.long)


def _values_in_halves(setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(logprobs=values.logprobs[_halves(setting)])


def _fields_in_halves(setting: Setting) -> Fields:
    return with_sequences_in(_halves(setting), setting)


def with_sequences_in(order: Tensor, setting: Setting) -> Fields:
    """Returns the fields of sequences, and the sequence of each token, in another order.

    Args:
        order: the number of the sequence at each place, ``[sequences]``.
        setting: the problem.
    """
    of_sequences = [name for name, dims in setting.batch.field_dims.items() if dims == ("sequence",)]
    ordered = {name: setting.fields[name][order] for name in of_sequences}
    return {**ordered, "sequence": order.argsort()[setting.fields["sequence"]]}


def _side(setting: Setting, side: int, of_sequences: bool) -> Tensor:
    """Returns whether each sequence, or each token, is on a side of its pair."""
    sequence = torch.arange(len(setting.lengths)) if of_sequences else setting.fields["sequence"]
    return sequence % 2 == side


def _detached(side: int, of_sequences: bool, setting: Setting, values: TokenValues) -> TokenValues:
    own = _side(setting, side, of_sequences)
    return values.replace(logprobs=torch.where(own, values.logprobs.detach(), values.logprobs))


def _both(side: int, setting: Setting, values: TokenValues) -> TokenValues:
    same_side = torch.arange(len(values.logprobs)) // 2 * 2 + side
    return values.replace(logprobs=values.logprobs[same_side])


def _projected(side: int, setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    detached = {name: leaf if name == "hidden" else leaf.detach() for name, leaf in leaves.items()}
    own = _side(setting, side, of_sequences=False)[:, None]
    whole = setting.head.logits(leaves)
    return with_gradient_of(whole, torch.where(own, whole, setting.head.logits(detached)))
