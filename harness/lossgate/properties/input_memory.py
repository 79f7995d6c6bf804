# SPDX-License-Identifier: Apache-2.0
"""Properties of inputs: a kernel does not write to them, and takes other strides and int32 ids."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.cases.assemble import equal
from lossgate.cases.case import Case, differing
from lossgate.cases.rank_call import How, RankCall, RankOutputs, plainly
from lossgate.judge.comparison import Comparison
from lossgate.properties.mended import with_copies
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import all_of, has_tokens, needing, trained_tokens
from lossgate.worlds.base import RankRaised


def _has_masked_label(case: Case) -> bool:
    fields = case.placed.batch.fields
    return bool(fields["labels"][~fields["mask"]].any())


def _is_tempered(case: Case) -> bool:
    return case.bound.bound_spec.temperature != 1


def _may_be_tempered(case: Case) -> bool:
    name = case.candidate.spec.temperature
    return name is not None and case.candidate.supported(name) not in ((), (1.0,))


def _trains_two_on_a_rank(case: Case) -> bool:
    layout = case.problem.layout
    return int(trained_tokens(case).sum()) > layout.dp * layout.cp


def _trains_other_ids(case: Case) -> bool:
    return bool(case.candidate.spec.ids_of(case.bound.batch.fields)[trained_tokens(case)].any())


@property(
    "inputs-kept",
    applies=lambda candidate: candidate.conventions.inputs == "kept",
    relaxed_by={"inputs": ("written",)},
    mistakes=all_of(
        needing("labels of masked tokens are set to 0 in place", _has_masked_label, has_tokens),
        needing("logits are divided by the temperature in place", _is_tempered, _may_be_tempered),
    ),
    remedy="write to no tensor that was given: clone it, or use the operation without the trailing underscore",
    mended=with_copies,
    may_explain=("same-call-twice", "gradients-add-up", "second-backward", "checkpointing"),
)
def inputs_kept(case: Case) -> Checked:
    """The kernel writes to no input and to no upstream gradient."""
    changed = dict.fromkeys(name for names in case.on_ranks(_names_of_changed) for name in names)
    return Checked(faults=tuple(f"the kernel wrote to {name}" for name in changed))


def _names_of_changed(call: RankCall) -> list[str]:
    before = {name: one.detach().clone() for name, one in call.tensors.items()}
    outputs = call.forward()
    changed = _changed(call.tensors, before)  # backward may put back what forward changed
    roots = call.roots(outputs)
    upstream = call.upstreams(roots)
    gradients = {f"the upstream gradient of {name}": one for name, one in upstream.items()}
    before |= {name: one.clone() for name, one in gradients.items()}
    torch.autograd.backward([*roots.values()], [*upstream.values()])
    return [*dict.fromkeys((*changed, *_changed({**call.tensors, **gradients}, before)))]


def _changed(given: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in given.items() if not _same(tensor, before[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and equal(one, other)


_WRONG = 97.0


@property(
    "strided-inputs",
    # The gradients of one row are 0, and a product of numbers that lie otherwise rounds otherwise.
    fits=lambda case: case.problem.vocab > 1 or not case.candidate.starts_at.has_logits,
    mistakes=needing("strides are ignored", _trains_two_on_a_rank, has_tokens),
    runs=6,
    remedy="take strides into account, or call .contiguous() first",
)
def strided_inputs(case: Case) -> Checked:
    """Tensors that lie otherwise in memory give the same results, or raise an error."""
    ways: dict[str, How[RankOutputs]] = {
        "with strided inputs": _Laid(_spread),
        "with inputs whose rows have gaps, as logits[:, :-1]": _Laid(_with_gaps),
        "with inputs that begin within a larger tensor, as base[1:]": _Laid(_from_the_middle),
    }
    if any(upstream.dim() for upstream in case.placed.batch.cotangents.values()):
        ways["with a strided upstream gradient"] = _strided_upstream
    found, faults = list[Comparison](), dict[str, None]()
    for words, way in ways.items():
        with suppress(RankRaised):  # it is refused
            found += called(words, case.judged(case.on_ranks(way)))
    if case.world.repeatable and case.problem.reduction_order != "permuted":
        with suppress(RankRaised):
            faults |= dict.fromkeys(name for names in case.on_ranks(_differing_if_expanded) for name in names)
    return Checked(
        comparisons=tuple(found),
        faults=tuple(f"{name} has other bits if equal numbers are one that is expanded" for name in faults),
    )


@dataclass(frozen=True)
class _Laid:
    """Calls a kernel with inputs that lie otherwise in memory."""

    lay: Callable[[Tensor], Tensor]
    """Returns the same numbers in other memory."""

    def __call__(self, call: RankCall) -> RankOutputs:
        call.replace(**{name: _put(tensor, self.lay) for name, tensor in call.tensors.items() if tensor.dim()})
        return plainly(call)


def _strided_upstream(call: RankCall) -> RankOutputs:
    outputs = call.forward()
    roots = call.roots(outputs)
    upstream = [_put(one, _spread) if one.dim() else one for one in call.upstreams(roots).values()]
    torch.autograd.backward([*roots.values()], upstream)
    return call.collect(outputs)


def _differing_if_expanded(call: RankCall) -> list[str]:
    """Returns the names of the outputs that differ between two calls with the same numbers, which
    are equal at all tokens. In the second call they are one number that is expanded, with a stride
    of 0, as ``loss.sum().backward()`` gives to the losses of tokens.
    """
    floats = {name: one for name, one in call.tensors.items() if one.dim() == 1 and one.is_floating_point()}
    equal_numbers = {name: one.detach()[:1] for name, one in floats.items() if name not in call.leaves and len(one)}

    def called_with(lay: Callable[[Tensor], Tensor]) -> RankOutputs:
        own = call.again()
        own.replace(**{name: lay(one.expand(len(floats[name]))) for name, one in equal_numbers.items()})
        outputs = own.forward()
        roots = own.roots(outputs)
        torch.autograd.backward(
            [*roots.values()], [lay(root.new_ones(()).expand(root.shape)) for root in roots.values()]
        )
        return own.collect(outputs)

    return [str(output) for output in differing(called_with(Tensor.contiguous), called_with(lambda one: one))]


def _put(tensor: Tensor, lay: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the same numbers in the memory that ``lay`` makes for a tensor."""
    values = tensor.detach()
    return lay(values).copy_(values).requires_grad_(tensor.requires_grad)


def _spread(like: Tensor) -> Tensor:
    """Returns a matrix that lies in memory by columns, with a gap behind each. Any other tensor is
    every third entry of a larger one.
    """
    if like.dim() == 2:
        rows, columns = like.shape
        return _filled(like, columns, rows + 1).t()[:rows]
    return _filled(like, *like.shape[:-1], 3 * like.shape[-1])[..., ::3]


def _with_gaps(like: Tensor) -> Tensor:
    """Returns a tensor whose last dim is contiguous, with a gap behind each row."""
    return _filled(like, *like.shape[:-1], like.shape[-1] + 1)[..., :-1]


def _from_the_middle(like: Tensor) -> Tensor:
    """Returns a contiguous tensor that does not begin where its memory begins."""
    return _filled(like, like.shape[0] + 1, *like.shape[1:])[1:]


def _filled(like: Tensor, *shape: int) -> Tensor:
    """Returns a tensor of numbers that are wrong wherever they are read."""
    return like.new_full(shape, _WRONG if like.is_floating_point() else 1)


@property(
    "int32-ids",
    mistakes=needing("ids in int32 are taken for 0", _trains_other_ids, has_tokens),
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
