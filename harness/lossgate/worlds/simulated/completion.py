# SPDX-License-Identifier: Apache-2.0
"""The work of each collective, done once all members have called it.

Each function takes the calls of all members by group rank, reads their inputs and writes their
outputs. ``root`` is a group rank. Each reads every input before it writes an output, because a
tensor can be both.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lossgate.worlds.simulated.calls import Call

Reduce = Callable[[Sequence[Tensor]], Tensor]
"""Reduces one tensor from each rank to a new one."""


def all_reduce(calls: Sequence[Call], reduce: Reduce) -> None:
    totals = [reduce(parts) for parts in zip(*(call.inputs for call in calls), strict=True)]
    for call in calls:
        _write(call.outputs, totals)


def reduce_to_root(calls: Sequence[Call], reduce: Reduce, root: int) -> None:
    _write(calls[root].outputs, [reduce([call.inputs[0] for call in calls])])


def broadcast(calls: Sequence[Call], root: int) -> None:
    source = [tensor.clone() for tensor in calls[root].inputs]
    for call in calls:
        _write(call.outputs, source)


def all_gather(calls: Sequence[Call]) -> None:
    sources = [call.inputs[0].clone() for call in calls]
    for call in calls:
        _write(call.outputs, sources)


def all_gather_into_tensor(calls: Sequence[Call]) -> None:
    gathered = torch.cat([call.inputs[0].reshape(-1) for call in calls])
    for call in calls:
        call.outputs[0].detach().copy_(gathered.view(call.outputs[0].shape))


def reduce_scatter(calls: Sequence[Call], reduce: Reduce) -> None:
    totals = [reduce([call.inputs[i] for call in calls]) for i in range(len(calls))]
    for call, total in zip(calls, totals, strict=True):
        _write(call.outputs, [total])


def reduce_scatter_tensor(calls: Sequence[Call], reduce: Reduce) -> None:
    total = reduce([call.inputs[0].reshape(len(calls), -1) for call in calls])
    for call, part in zip(calls, total, strict=True):
        call.outputs[0].detach().copy_(part.view(call.outputs[0].shape))


def all_to_all_single(calls: Sequence[Call]) -> None:
    parts = [call.inputs[0].clone().split(call.splits[0]) for call in calls]
    for i, call in enumerate(calls):
        call.outputs[0].detach().copy_(torch.cat([part[i] for part in parts]))


def all_to_all(calls: Sequence[Call]) -> None:
    sources = [[tensor.clone() for tensor in call.inputs] for call in calls]
    for i, call in enumerate(calls):
        _write(call.outputs, [source[i] for source in sources])


def scatter(calls: Sequence[Call], root: int) -> None:
    parts = [tensor.clone() for tensor in calls[root].inputs]
    for call, part in zip(calls, parts, strict=True):
        _write(call.outputs, [part])


def gather(calls: Sequence[Call], root: int) -> None:
    _write(calls[root].outputs, [call.inputs[0].clone() for call in calls])


def barrier(calls: Sequence[Call]) -> None:
    """Does nothing: the members have met."""


def _write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)
