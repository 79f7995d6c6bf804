# SPDX-License-Identifier: Apache-2.0
"""Cuts a batch in two, as two dp ranks would hold it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.record import fields_of
from lossgate.specs.token_values import TokenValues


def halves(bound: BoundProblem) -> list[range]:
    """Returns the sequences of both halves; nothing if there is a single group of them."""
    count, group = len(bound.batch.partition.lengths), bound.spec.group_size
    middle = count // group // 2 * group
    return [range(middle), range(middle, count)] if 0 < middle < count else []


def part_of(bound: BoundProblem, values: TokenValues, own: range) -> tuple[TokenValues, dict[str, Any], Tensor]:
    """Returns the values per token and the fields of some sequences, and which tokens (or
    sequences, where the head gives values of these) they are.

    What counts the whole batch stays that of the whole batch.
    """
    known = bound.batch.known
    sequences = torch.tensor(list(own), dtype=torch.int64)
    tokens = torch.isin(known["sequence"], sequences)
    held = sequences if HEADS[bound.problem.head].gives == "sequence" else tokens.nonzero().squeeze(1)
    taken = TokenValues(**{name: value[held] for name, value in values.given.items()})
    return taken, _fields_of_part(bound, known, own, tokens, sequences), held


def _fields_of_part(
    bound: BoundProblem, known: Mapping[str, Any], own: range, tokens: Tensor, sequences: Tensor
) -> dict[str, Any]:
    part = dict(known)
    for name, field in fields_of(bound.spec.batch_type).items():
        tensor: Any = known.get(name)
        for axis, dim in enumerate(field.dims):
            if dim in ("token", "sequence"):
                index = tokens.nonzero().squeeze(1) if dim == "token" else sequences
                tensor = tensor.index_select(axis, index)
        part[name] = tensor
    starts = known["cu_seqlens"][own.start : own.stop + 1]
    part |= {"sequence": known["sequence"][tokens] - own.start}
    part |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), starts - starts[0])
    if LOGIT_FILTER in known:
        part[LOGIT_FILTER] = known[LOGIT_FILTER][tokens]
    return part
