# SPDX-License-Identifier: Apache-2.0
"""Known bugs by the property that shows them. Most of these kernels agree with the reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import one_hot

from kernel_bank.bugs import Bug, Wrap, on_inputs, on_loss, on_options, scale_gradient
from lossgate.declaration.budgets import Budgets
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY


@dataclass(frozen=True)
class PropertyBug:
    """A bug that a property shows."""

    bug: Bug
    head: str = "logits"
    """Of the cross-entropy kernel that has it."""
    layout: str = "single"
    """Where it shows."""
    dtype: str = "float32"
    """In which it shows."""
    also: tuple[str, ...] = ()
    """The other properties that it breaks where it agrees; "agreement" if it agrees nowhere."""

    @property
    def candidate(self) -> Candidate:
        """A kernel with the bug, declared as the right one."""
        return self.bug.put_into(right(self.head))


_COARSE = Precision(
    logits="bfloat16",
    logsumexp="bfloat16",
    logprobs="bfloat16",
    dlogits="bfloat16",
    accumulate="bfloat16",
    loss="bfloat16",
)


def right(head: str) -> Candidate:
    """Returns a right cross-entropy kernel, in plain torch."""
    has_logits = head != "logprobs"
    supports: dict[str, Any] = {"temperature": ANY} if has_logits else {}
    supports |= {"bias": ANY} if head == "hidden" else {}
    budgets = Budgets(largest_tensor="2*tokens*vocab" if has_logits else "tokens")
    declare = candidate(
        "nll",
        head=head,
        axes=("dp",),
        dtypes=("float32", "bfloat16"),
        precision={"float32": Precision(), "bfloat16": _COARSE},
        supports=supports,
        budgets=budgets,
        refuses=("labels", "shapes") if head == "hidden" else (),
        name=f"nll of {head}",
    )
    return declare({"logits": _of_logits, "hidden": _of_hidden, "logprobs": _of_logprobs}[head])


def _of_hidden(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    if inputs.labels.shape != inputs.mask.shape:
        raise ValueError(f"labels have shape {list(inputs.labels.shape)}; expected {list(inputs.mask.shape)}")
    labels = inputs.labels[inputs.mask]
    if bool(((labels < 0) | (labels >= inputs.vocab_size)).any()):
        raise ValueError(f"labels of trained tokens must be below {inputs.vocab_size}, and not negative")
    return _of_logits(inputs, options, mesh)


def _of_logits(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    logits = inputs.logits if hasattr(inputs, "logits") else inputs.hidden @ inputs.weight.T
    logits = logits if getattr(inputs, "bias", None) is None else logits + inputs.bias
    labels = inputs.labels.long().clamp(0, inputs.vocab_size - 1)
    logprobs = (logits / options.temperature).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return _mean(logprobs, inputs)


def _of_logprobs(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    return _mean(inputs.logprobs, inputs)


def _mean(logprobs: Tensor, inputs: Any) -> Tensor:
    return -torch.where(inputs.mask, logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


# Building blocks


class _Backward(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(gradient), None


def _on_upstream(change: Callable[[Tensor], Tensor]) -> Wrap:
    """Returns a wrapper that changes the upstream gradient of the loss."""
    return on_loss(lambda loss, mesh: _Backward.apply(loss, change))


def _instead(loss: Callable[[Any, Tensor], Tensor]) -> Wrap:
    """Returns a wrapper that computes the loss otherwise, from the inputs and the right one."""
    return lambda kernel: lambda inputs, options, mesh: loss(inputs, kernel(inputs, options, mesh))  # pyright: ignore[reportArgumentType]


def _multiplied_in_place(loss: Tensor, mesh: Any) -> Tensor:
    saved = torch.ones_like(loss)
    return _Backward.apply(loss, lambda gradient: saved.mul_(gradient).clone())  # type: ignore[return-value]


def _assigned(inputs: Any, mesh: Any) -> Any:
    leaf, last = inputs.logits, list[Tensor]()
    if leaf.requires_grad and leaf.is_leaf:
        leaf.register_hook(lambda gradient: last.append(gradient.clone()))
        leaf.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", last[-1]))
    return inputs


class _Workspace:
    """Keeps what backward needs of a call in a buffer that calls share."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key, self._kept = key, dict[Any, Tensor]()

    def __call__(self, inputs: Any, loss: Tensor) -> Tensor:
        key, own = self._key(inputs), 1 + loss.detach().abs()
        self._kept[key] = own
        return _Backward.apply(loss, lambda gradient: gradient * (self._kept[key] / own))  # type: ignore[return-value]


class _RunningTotal:
    """Adds up the losses of all calls, with their graphs."""

    def __init__(self) -> None:
        self._total: Any = 0.0

    def __call__(self, inputs: Any, loss: Tensor) -> Tensor:
        self._total = self._total + loss
        return loss


class _LastSize:
    """Lets a call be a little off if the one before it had twice as many tokens."""

    def __init__(self) -> None:
        self._tokens = 0

    def __call__(self, inputs: Any, loss: Tensor) -> Tensor:
        twice = self._tokens == 2 * len(inputs.labels)
        self._tokens = len(inputs.labels)
        return loss + 1e-7 * loss.detach() if twice else loss


def _when_recomputed(inputs: Any, mesh: Any) -> Any:
    if not torch.is_grad_enabled():
        inputs.mask.seen = True
    elif getattr(inputs.mask, "seen", False):
        return replace(inputs, mask=torch.ones_like(inputs.mask))
    return inputs


def _only_with_weight(inputs: Any, mesh: Any) -> Any:
    trained = inputs.weight.requires_grad
    return inputs if trained else replace(inputs, hidden=scale_gradient(inputs.hidden, 0.0))


def _contiguous_mask(inputs: Any, mesh: Any) -> Any:
    return replace(inputs, mask=inputs.mask.as_strided(inputs.mask.shape, (1,)))


def _counted_labels(inputs: Any, loss: Tensor) -> Tensor:
    there = int((inputs.labels >= 0).sum())
    return loss * (len(inputs.labels) / there) if there else loss


def _own_count(inputs: Any, mesh: Any) -> Any:
    return replace(inputs, valid_tokens=inputs.mask.sum())


def _unless_idle(kernel: Any) -> Any:
    def wrong(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        loss = kernel(inputs, options, mesh)
        if bool(inputs.mask.any()):
            dist.all_reduce(torch.zeros(()), group=mesh.get_group("dp"))
        return loss

    return wrong


def _reduced_in_bfloat16(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    orders = [*permutations((1024.0, 1.0, -1024.0))]  # the sum is 1 if 1 is added last, and otherwise 0
    own = torch.tensor(orders, dtype=torch.bfloat16)[:, mesh["dp"].get_local_rank()].clone()
    dist.all_reduce(own, group=mesh.get_group("dp"))
    in_order_of_ranks = torch.tensor([float(order[-1] == 1) for order in orders])
    return loss + (own.float() - in_order_of_ranks).abs().sum()


def _by_position(inputs: Any, mesh: Any) -> Any:
    first = torch.arange(len(inputs.mask)) > 0
    return replace(inputs, mask=inputs.mask & first)


def _without_maximum(kernel: Any) -> Any:
    def wrong(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        scaled = inputs.logits / options.temperature
        logprobs = scaled - scaled.clamp(max=90.0).exp().sum(-1, keepdim=True).log()
        return _mean(logprobs.gather(1, inputs.labels[:, None]).squeeze(1), inputs)

    return wrong


def _one_hot(kernel: Any) -> Any:
    def wrong(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        logprobs = (inputs.logits / options.temperature).log_softmax(-1)
        labels = inputs.labels.long().clamp(0, inputs.vocab_size - 1)
        return _mean((logprobs * one_hot(labels, inputs.vocab_size)).sum(1), inputs)

    return wrong


def _at_least_minus_100(kernel: Any) -> Any:
    def wrong(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
        labels = inputs.labels.long().clamp(0, inputs.vocab_size - 1)
        logprobs = (inputs.logits / options.temperature).log_softmax(-1).gather(1, labels[:, None])
        return _mean(logprobs.squeeze(1).clamp(min=-100.0), inputs)

    return wrong


def _cold(options: Any) -> Any:
    return replace(options, temperature=min(options.temperature, 1.9))


def _bug(name: str, sentence: str, wrap: Wrap, **where: Any) -> PropertyBug:
    return PropertyBug(Bug(name, sentence, wrap), **where)


PROPERTY_BUGS: Mapping[str, PropertyBug] = {
    "same-call-twice": _bug(
        "shared workspace",
        "backward uses a buffer that every call of the same sizes writes to",
        _instead(_Workspace(lambda inputs: len(inputs.labels))),
    ),
    "after-another-shape": _bug(
        "size of the last call",
        "a call is a little off if the call before it had twice as many tokens",
        _instead(_LastSize()),
    ),
    "gradients-add-up": _bug(
        "assigned gradient",
        "the gradient is assigned to .grad, whatever is there",
        on_inputs(_assigned),
        also=("second-backward",),
    ),
    "second-backward": _bug(
        "multiplied in place",
        "backward multiplies what forward saved by the upstream gradient, in place",
        on_loss(_multiplied_in_place),
    ),
    "checkpointing": _bug(
        "forgets the mask",
        "a forward that is run again in backward trains every token",
        on_inputs(_when_recomputed),
    ),
    "upstream-scaled": _bug(
        "clamped upstream gradient",
        "the upstream gradient is clamped to +-2",
        _on_upstream(lambda gradient: gradient.clamp(-2.0, 2.0)),
        also=("gradients-add-up", "second-backward"),  # there the second upstream gradient is -2 times the first
    ),
    "upstream-one": _bug(
        "fast path for 1",
        "with an upstream gradient of exactly 1 the gradient is 1% too large",
        _on_upstream(lambda gradient: torch.where(gradient == 1, 1.01 * gradient, gradient)),
    ),
    "upstream-zero": _bug(
        "divides by the upstream gradient",
        "the upstream gradient is normalised, and multiplied in again",
        _on_upstream(lambda gradient: gradient.abs() * (gradient / gradient.abs())),
    ),
    "frozen-inputs": _bug(
        "frozen weight",
        "the hidden states get a gradient of 0 if the weight is frozen",
        on_inputs(_only_with_weight),
        head="hidden",
    ),
    "no-grad": _bug(
        "shortcut without gradients",
        "without gradients the loss is 1% too large",
        on_loss(lambda loss, mesh: loss if torch.is_grad_enabled() else 1.01 * loss),
        also=("checkpointing",),
    ),
    "inputs-kept": _bug(
        "writes to labels",
        "labels of masked tokens are set to 0 in place",
        on_inputs(lambda inputs, mesh: replace(inputs, labels=inputs.labels.masked_fill_(~inputs.mask, 0))),
    ),
    "strided-inputs": _bug("ignores strides", "the mask is read as if it were contiguous", on_inputs(_contiguous_mask)),
    "int32-ids": _bug(
        "labels in int32",
        "labels that are not in int64 are taken for 0",
        on_inputs(lambda inputs, mesh: replace(inputs, labels=inputs.labels * int(inputs.labels.dtype is torch.int64))),
    ),
    "masked-values": _bug(
        "0 times infinity",
        "exp of a masked log-probability is multiplied by 0",
        _instead(lambda inputs, loss: loss + 0.0 * torch.exp(-inputs.logprobs[~inputs.mask]).sum()),
        head="logprobs",
        also=("masked-nan",),
    ),
    "masked-nan": _bug(
        "multiplies by the mask",
        "log-probabilities are multiplied by the mask",
        lambda kernel: (
            lambda inputs, options, mesh: -(inputs.logprobs * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)
        ),
        head="logprobs",
    ),
    "masked-ids": _bug(
        "counts labels",
        "the loss is divided by the tokens that have a label",
        _instead(_counted_labels),
    ),
    "device": _bug(
        "tensor on the CPU",
        "zeros that are added to the loss are made on the CPU",
        _instead(lambda inputs, loss: (loss + torch.zeros(1)).sum()),
    ),
    "sequence-order": _bug(
        "first token of the pack",
        "the first token of the pack is not trained",
        on_inputs(_by_position),
        also=("agreement",),
    ),
    "vocabulary-order": _bug(
        "row 0",
        "the logit of row 0 is 1 too large",
        on_inputs(lambda inputs, mesh: replace(inputs, logits=inputs.logits + torch.eye(1, inputs.logits.shape[1]))),
        also=("agreement",),
    ),
    "temperature": _bug(
        "temperature up to 1.9",
        "temperatures above 1.9 are taken for 1.9",
        on_options(_cold),
    ),
    "autocast": _bug(
        "another branch under autocast",
        "the loss is half as large under autocast",
        on_loss(lambda loss, mesh: 0.5 * loss if torch.is_autocast_enabled("cpu") else loss),
        dtype="bfloat16",
    ),
    "microbatches": _bug(
        "divides by its own tokens",
        "the loss is divided by the tokens of the call, and not by those of the batch",
        on_inputs(_own_count),
    ),
    "other-padding": _bug(
        "padding is trained",
        "the last token of the pack is trained if it is padding to a multiple of 4",
        on_inputs(
            lambda inputs, mesh: replace(
                inputs,
                mask=inputs.mask.index_fill(0, torch.tensor([len(inputs.mask) - 1]), True)
                if len(inputs.mask) > int(inputs.cu_seqlens[-1]) and len(inputs.mask) % 4 == 0
                else inputs.mask,
            )
        ),
    ),
    "reduction-order": _bug(
        "adds up in bfloat16",
        "large numbers that cancel, and a small one, are added up over dp in bfloat16",
        on_loss(_reduced_in_bfloat16),
        layout="dp=3",
    ),
    "idle-rank": _bug(
        "leaves the others waiting",
        "a rank without trained tokens takes no part in a collective",
        _unless_idle,
        layout="dp=2",
        also=("few-tokens", "microbatches", "sequence-order"),
    ),
    "budgets": _bug(
        "logits three times",
        "backward keeps three copies of the logits",
        _instead(lambda inputs, loss: loss + 0.0 * torch.cat([inputs.logits] * 3).clamp(-1.0, 1.0).sum()),
    ),
    "no-leaks": _bug(
        "running total",
        "the losses of all calls are added up, with their graphs",
        _instead(_RunningTotal()),
    ),
    "nothing-trained": _bug(
        "divides by 0",
        "the loss is divided by the trained tokens, of which there may be none",
        lambda kernel: (
            lambda inputs, options, mesh: -inputs.logprobs.masked_fill(~inputs.mask, 0.0).sum() / inputs.valid_tokens
        ),
        head="logprobs",
        also=("few-tokens",),
    ),
    "extreme-logits": _bug(
        "without the maximum",
        "exp is taken of the logits as they are",
        _without_maximum,
    ),
    "suppressed-ids": _bug(
        "multiplies by a one-hot row",
        "log-probabilities are multiplied by a one-hot row of the label",
        _one_hot,
    ),
    "hopeless-labels": _bug(
        "clamped at -100",
        "log-probabilities below -100 are taken for -100",
        _at_least_minus_100,
    ),
    "bad-inputs": _bug(
        "clamps labels",
        "labels that the vocabulary does not have are taken for others",
        on_inputs(lambda inputs, mesh: replace(inputs, labels=inputs.labels.clamp(0, inputs.vocab_size - 1))),
        head="hidden",
    ),
    "few-tokens": _bug(
        "two tokens",
        "the loss of two tokens is 1% too large",
        _instead(lambda inputs, loss: 1.01 * loss if len(inputs.labels) == 2 else loss),
    ),
}
"""A bug for each property beside agreement."""
