# SPDX-License-Identifier: Apache-2.0
"""Properties of inputs: a kernel does not write to them, and takes other strides and int32 ids."""

from contextlib import suppress

import torch
from torch import Tensor

from lossgate.cases.assemble import equal
from lossgate.cases.case import Case
from lossgate.cases.rank_call import RankCall, RankOutputs, plainly
from lossgate.judge.comparison import Comparison
from lossgate.properties.mended import with_copies
from lossgate.properties.registry import Checked, called, property
from lossgate.worlds.base import RankRaised


@property(
    "inputs-kept",
    remedy="write to no tensor that was given: clone it, or use the operation without the trailing underscore",
    mended=with_copies,
    may_explain=("same-call-twice", "gradients-add-up", "second-backward", "checkpointing"),
)
def inputs_kept(case: Case) -> Checked:
    """The kernel writes to no input and to no upstream gradient."""
    changed = dict.fromkeys(name for names in case.on_ranks(_names_of_changed) for name in names)
    return Checked(faults=tuple(f"the kernel wrote to {name}" for name in changed))


def _names_of_changed(call: RankCall) -> list[str]:
    outputs = call.forward()
    roots = call.roots(outputs)
    upstream = call.upstreams(roots)
    gradients = {f"the upstream gradient of {name}": one for name, one in upstream.items()}
    given = {**call.tensors, **gradients}
    inputs = call.again().tensors  # made anew, because forward may have written to those of the call
    before = {**inputs, **{name: one.clone() for name, one in gradients.items()}}
    torch.autograd.backward([*roots.values()], [*upstream.values()])
    return [name for name, tensor in given.items() if not _same(tensor, before[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and equal(one, other)


@property(
    "strided-inputs",
    runs=2,
    remedy="take strides into account, or call .contiguous() first",
)
def strided_inputs(case: Case) -> Checked:
    """Inputs and upstream gradients in other strides give the same results, or raise an error."""
    ways = {"with strided inputs": _strided}
    if any(upstream.dim() for upstream in case.placed.batch.cotangents.values()):
        ways["with a strided upstream gradient"] = _strided_upstream
    found = list[Comparison]()
    for words, way in ways.items():
        with suppress(RankRaised):  # it is refused
            found += called(words, case.judged(case.on_ranks(way)))
    return Checked(comparisons=tuple(found))


def _strided(call: RankCall) -> RankOutputs:
    call.replace(**{name: _spread(tensor) for name, tensor in call.tensors.items() if tensor.dim()})
    return plainly(call)


def _strided_upstream(call: RankCall) -> RankOutputs:
    outputs = call.forward()
    roots = call.roots(outputs)
    upstream = [_spread(one) if one.dim() else one for one in call.upstreams(roots).values()]
    torch.autograd.backward([*roots.values()], upstream)
    return call.collect(outputs)


def _spread(tensor: Tensor) -> Tensor:
    """Returns the same numbers in other strides.

    A matrix lies in memory by columns, with a gap behind each. Any other tensor is every second
    entry of a larger one.
    """
    values = tensor.detach()
    if tensor.dim() == 2:
        rows, columns = tensor.shape
        laid = values.new_zeros(columns, rows + 1).t()[:rows]
    else:
        laid = values.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
    return laid.copy_(values).requires_grad_(tensor.requires_grad)


@property(
    "int32-ids",
    applies=lambda candidate: candidate.tokens == "shard",
    remedy="call .long() on ids, or refuse other dtypes by an error",
)
def int32_ids(case: Case) -> Checked:
    """Ids in int32 give the same results, or raise an error."""
    try:
        return Checked(comparisons=case.judged(case.on_ranks(_with_int32)))
    except RankRaised:
        return Checked()


def _with_int32(call: RankCall) -> RankOutputs:
    call.replace(**{name: tensor.int() for name, tensor in call.tensors.items() if _holds_ids(name, tensor, call)})
    return plainly(call)


def _holds_ids(name: str, tensor: Tensor, call: RankCall) -> bool:
    ids = ("labels", "input_ids", call.candidate.spec.gathered_ids)
    return name in ids and tensor.dtype is torch.int64
