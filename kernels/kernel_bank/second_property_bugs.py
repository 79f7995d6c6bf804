# SPDX-License-Identifier: Apache-2.0
"""More bugs by the property that shows them, in kernels of many losses.

Those of ``kernel_bank.property_bugs`` are all in one cross-entropy. These were written by someone
who knew what each property promises, and not how it is checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lossgate.base.layout import Layout
from lossgate.declaration.budgets import Budgets
from lossgate.declaration.candidate import Candidate, Outputs, candidate
from lossgate.declaration.supports import ANY


@dataclass(frozen=True)
class SecondBug:
    """A wrong kernel. Most agree with the reference in plain calls."""

    property: str
    """The property that shows it."""
    sentence: str
    """What the kernel does, for people."""
    candidate: Candidate
    layout: str
    """Where it shows."""


_BUGS: dict[str, SecondBug] = {}
KEPT: dict[Any, Any] = {}
"""What wrong kernels keep from one call to the next."""
_BIAS = {"bias": (False, True)}
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "clipped_pg": {"reference_policy_kl_penalty": 0.0},
    "grpo": {"use_rho_correction": False, "beta": 0.0},
}
"""Options by which a loss has one term."""


def _bug(
    property: str, sentence: str, start: str, layout: str = "single", dtype: str = "float32", **declared: Any
) -> Callable[[Callable[[Any, Any, Any], Any]], Candidate]:
    """Adds the decorated kernel to the bugs. ``start`` is its spec and its head."""

    def add(kernel: Callable[[Any, Any, Any], Any]) -> Candidate:
        name, (spec, head) = kernel.__name__.strip("_").replace("_", " "), start.split()
        declared["supports"] = {**_PLAIN.get(spec, {}), **declared.get("supports", {})}
        axes = Layout.parse(layout).axes
        own = candidate(spec, head=head, axes=axes, dtypes=(dtype,), name=name, **declared)(kernel)
        _BUGS[name] = SecondBug(property, sentence, own, layout)
        return own

    return add


# Building blocks, all of them right


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], back: Callable[..., Any], *tensors: Tensor | None) -> Tensor:
        with torch.enable_grad():
            leaves = [None if one is None else one.detach().requires_grad_() for one in tensors]
            out = forward(*leaves)

        def right(gradient: Tensor) -> list[Any]:
            found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], gradient, retain_graph=True))
            return [None if leaf is None else next(found) for leaf in leaves]

        ctx.right, ctx.back = right, back
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, *ctx.back(ctx, gradient)


def _own(forward: Callable[..., Tensor], back: Callable[[Any, Tensor], Any], *tensors: Tensor | None) -> Tensor:
    """Calls a function with a backward of its own, which finds the right one in ``ctx.right``."""
    return _Own.apply(forward, back, *tensors)  # type: ignore[return-value]


class _Summed(torch.autograd.Function):
    """Adds up over a group. Each rank gets the same upstream gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class _SummedBack(torch.autograd.Function):
    """The identity, whose gradients are added up over a group, in a dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        summed = gradient.to(ctx.dtype, copy=True)
        dist.all_reduce(summed, group=ctx.group)
        return summed.to(gradient.dtype), None, None


def _mean(total: Tensor, count: Tensor) -> Any:
    return total / count.clamp(min=1)


def _pick(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, labels.long()[:, None])[:, 0]


def _head(labels: Tensor) -> Callable[..., Tensor]:
    """Returns a function from hidden states, weight and bias to the labels' log-probabilities."""

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = hidden.float() @ weight.float().T
        return _pick(logits if bias is None else logits + bias.float(), labels)

    return logprobs


def _of_head(inputs: Any, back: Callable[[Any, Tensor], Any] | None = None) -> Tensor:
    """Returns the labels' log-probabilities from hidden states, with a backward of their own."""
    logprobs, tensors = _head(inputs.labels), (inputs.hidden, inputs.weight, inputs.bias)
    return logprobs(*tensors) if back is None else _own(logprobs, back, *tensors)


def _sharded(logits: Tensor, labels: Tensor, start: int, group: Any) -> Tensor:
    """Returns the labels' log-probabilities from logits that are split over a group."""
    logits = logits.float()
    top = logits.detach().max(-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total: Any = _Summed.apply((logits - top[:, None]).exp().sum(-1), group)
    owned = (labels >= start) & (labels < start + logits.shape[1])
    own = logits.gather(1, (labels - start).where(owned, 0)[:, None])[:, 0]
    mine: Any = _Summed.apply(torch.where(owned, own, 0.0), group)
    return mine - top - total.log()


def _nll(logprobs: Tensor, inputs: Any) -> Any:
    return -_mean(torch.where(inputs.mask, logprobs, 0.0).sum(), inputs.valid_tokens)


def _clipped(ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return torch.where(mask, losses, 0.0)


def _pg_terms(logprobs: Tensor, inputs: Any, options: Any) -> Tensor:
    mask = inputs.mask & inputs.sample_mask[inputs.sequence]
    ratio = torch.where(mask, logprobs.float() - inputs.prev_logprobs, 0.0).exp()
    return _clipped(ratio, inputs.advantages, mask, options.ratio_clip_min, options.ratio_clip_max)


def _pg(logprobs: Tensor, inputs: Any, options: Any) -> Any:
    return _mean(_pg_terms(logprobs, inputs, options).sum(), inputs.valid_tokens)


def _grpo_terms(logprobs: Tensor, inputs: Any, options: Any) -> Tensor:
    ratio = torch.where(inputs.mask, logprobs.float() - inputs.old_logprobs, 0.0).exp()
    return _clipped(ratio, inputs.advantages, inputs.mask, options.clip_lower, options.clip_higher)


def _grpo(logprobs: Tensor, inputs: Any, options: Any) -> Any:
    return _mean(_grpo_terms(logprobs, inputs, options).sum(), inputs.valid_tokens)


def _sums(tokens: Tensor, inputs: Any, sequence: Tensor | None = None) -> Tensor:
    zeros = torch.zeros(len(inputs.sample_mask), device=tokens.device)
    return zeros.index_add(0, inputs.sequence if sequence is None else sequence, tokens)


def _rewards(logprobs: Tensor, inputs: Any, sequence: Tensor | None = None) -> Tensor:
    return _sums(torch.where(inputs.mask, logprobs.float() - inputs.reference_logprobs, 0.0), inputs, sequence)


def _pairs(rewards: Tensor, inputs: Any, options: Any) -> Tensor:
    losses = -F.logsigmoid(options.reference_policy_kl_penalty * (rewards[0::2] - rewards[1::2]))
    return torch.where(inputs.sample_mask[0::2], losses, 0.0)


def _dpo_of(rewards: Tensor, inputs: Any, options: Any) -> Any:
    return _mean(_pairs(rewards, inputs, options).sum(), inputs.valid_sequences / 2)


def _dpo(logprobs: Tensor, inputs: Any, options: Any) -> Any:
    return _dpo_of(_rewards(logprobs, inputs), inputs, options)


def _value_terms(values: Tensor, inputs: Any, options: Any) -> Tensor:
    returns, old, values = (torch.where(inputs.mask, x, 0.0) for x in (inputs.returns, inputs.old_values, values))
    error = (values - returns) ** 2
    if (by := options.cliprange) is not None:
        clipped = torch.minimum(torch.maximum(values, old - by), old + by)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return error / 2


def _value(values: Tensor, inputs: Any, options: Any) -> Any:
    return _mean(_value_terms(values, inputs, options).sum(), inputs.valid_tokens)


def _distill(logits: Tensor, ids: Tensor, inputs: Any, count: Tensor) -> Any:
    student = logits.float().gather(1, ids).log_softmax(-1)
    teacher = inputs.teacher_logits.log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    return _mean(torch.where(inputs.mask, divergence, 0.0).sum(), count)


def _flat(tensor: Tensor) -> Tensor:
    """Reads a tensor as a kernel does that is given a pointer and no strides."""
    rows = (tensor.shape[1], 1) if tensor.dim() == 2 else (1,)
    return tensor.as_strided(tensor.shape, rows)


def _eight_bytes(ids: Tensor) -> Tensor:
    """Reads ids as a kernel does that takes each for 8 bytes."""
    words = ids.contiguous().view(torch.int32).flatten()
    return words[(2 * torch.arange(ids.numel())).clamp(max=words.numel() - 1)].long().view(ids.shape)


# Bad inputs


@_bug("bad-inputs", "labels are bounded above only, and -1 wraps round", "grpo logits", refuses=("labels",))
def _wraps_round(inputs: Any, options: Any, mesh: Any) -> Any:
    if bool((inputs.labels >= inputs.vocab_size).any()):
        raise ValueError("a label is out of range")
    logprobs = inputs.logits.float().log_softmax(-1)[torch.arange(len(inputs.labels)), inputs.labels]
    return _grpo(logprobs, inputs, options)


@_bug("bad-inputs", "labels that are too few are padded with 0", "nll hidden", supports=_BIAS, refuses=("shapes",))
def _pads_labels(inputs: Any, options: Any, mesh: Any) -> Any:
    labels = F.pad(inputs.labels, (0, len(inputs.hidden) - len(inputs.labels)))
    return _nll(_head(labels)(inputs.hidden, inputs.weight, inputs.bias), inputs)


@_bug("bad-inputs", "only labels of chosen responses are checked", "dpo logits", refuses=("labels",))
def _checks_the_chosen(inputs: Any, options: Any, mesh: Any) -> Any:
    labels = inputs.labels.clamp(0, inputs.vocab_size - 1)
    if bool((labels != inputs.labels)[inputs.sequence % 2 == 0].any()):
        raise ValueError("a label is out of range")
    return _dpo(_pick(inputs.logits, labels), inputs, options)


# Calls, and what is kept between them


@_bug("same-call-twice", "the gradient of values is kept beside the function, not on ctx", "value values")
def _one_gradient_for_all(inputs: Any, options: Any, mesh: Any) -> Any:
    def loss(values: Tensor) -> Tensor:
        KEPT["values"] = inputs.values.detach() - inputs.returns
        return _value(values, inputs, options)

    def back(ctx: Any, gradient: Tensor) -> Any:
        return (_mean(torch.where(inputs.mask, KEPT["values"], 0.0), inputs.valid_tokens) * gradient,)

    return _own(loss, back, inputs.values)


@_bug("same-call-twice", "calls of one size share a buffer for labels, which backward reads", "clipped_pg logits")
def _shared_labels(inputs: Any, options: Any, mesh: Any) -> Any:
    labels = KEPT.setdefault(("labels", inputs.logits.shape), inputs.labels.clone()).copy_(inputs.labels)

    def back(ctx: Any, gradient: Tensor) -> Any:
        return ((F.one_hot(labels, inputs.logits.shape[1]) - softmax) * gradient[:, None],)

    softmax = inputs.logits.detach().float().softmax(-1)
    return _pg(_own(lambda logits: _pick(logits, inputs.labels), back, inputs.logits), inputs, options)


@_bug("same-call-twice", "calls of one size share a buffer for the mask, which backward reads", "value values")
def _shared_mask(inputs: Any, options: Any, mesh: Any) -> Any:
    mask = KEPT.setdefault(("mask", inputs.mask.shape), inputs.mask.clone()).copy_(inputs.mask)

    def back(ctx: Any, gradient: Tensor) -> Any:
        slope = torch.where(mask, inputs.values.detach() - inputs.returns, 0.0)
        return (_mean(slope, inputs.valid_tokens) * gradient,)

    return _own(lambda values: _value(values, inputs, options), back, inputs.values)


@_bug("same-call-twice", "calls of one size share a buffer for old log-probabilities", "grpo logprobs")
def _shared_old_logprobs(inputs: Any, options: Any, mesh: Any) -> Any:
    old = KEPT.setdefault(("old", inputs.mask.shape), inputs.old_logprobs.clone()).copy_(inputs.old_logprobs)

    def back(ctx: Any, gradient: Tensor) -> Any:
        (right,) = ctx.right(gradient)
        return (right * torch.where(inputs.mask, inputs.old_logprobs - old, 0.0).exp(),)

    return _own(lambda logprobs: _grpo(logprobs, inputs, options), back, inputs.logprobs)


@_bug("same-call-twice", "calls of one size share a workspace for the softmax", "clipped_pg logits")
def _shared_softmax(inputs: Any, options: Any, mesh: Any) -> Any:
    return _pg(_with_workspace(inputs.logits, inputs.labels), inputs, options)


def _with_workspace(logits: Tensor, labels: Tensor) -> Tensor:
    workspace = KEPT.setdefault(logits.shape, torch.empty(logits.shape)).copy_(logits.detach().float().softmax(-1))

    def back(ctx: Any, gradient: Tensor) -> Any:
        return ((F.one_hot(labels, logits.shape[1]) - workspace) * gradient[:, None],)

    return _own(lambda own: _pick(own, labels), back, logits)


@_bug(
    "same-call-twice",
    "calls share a workspace if there is a temperature",
    "token_logprobs logits",
    supports={"temperature": (1.0, 0.5)},
)
def _shared_if_tempered(inputs: Any, options: Any, mesh: Any) -> Any:
    picked = _pick if options.temperature == 1 else _with_workspace
    return Outputs(logprobs=picked(inputs.logits.float() / options.temperature, inputs.labels))


@_bug("after-another-shape", "backward divides by the count of the latest forward", "grpo logprobs")
def _latest_count(inputs: Any, options: Any, mesh: Any) -> Any:
    def loss(logprobs: Tensor) -> Tensor:
        KEPT["count"] = inputs.valid_tokens
        return _grpo(logprobs, inputs, options)

    def back(ctx: Any, gradient: Tensor) -> Any:
        (right,) = ctx.right(gradient)
        return (_mean(right * inputs.valid_tokens, KEPT["count"]),)

    return _own(loss, back, inputs.logprobs)


@_bug("same-call-twice", "calls of as many tokens share the numbers of their sequences", "dpo logprobs")
def _shared_sequences(inputs: Any, options: Any, mesh: Any) -> Any:
    key = "sequences", len(inputs.mask)

    def sums(logprobs: Tensor) -> Tensor:
        KEPT[key] = inputs.sequence
        return _rewards(logprobs, inputs)

    def back(ctx: Any, gradient: Tensor) -> Any:
        return (torch.where(inputs.mask, gradient[KEPT[key].clamp(max=len(gradient) - 1)], 0.0),)

    return _dpo_of(_own(sums, back, inputs.logprobs), inputs, options)


@_bug("after-another-shape", "backward reads the sequences of the latest forward", "dpo logprobs")
def _latest_sequences(inputs: Any, options: Any, mesh: Any) -> Any:
    def sums(logprobs: Tensor) -> Tensor:
        KEPT["sequence"] = inputs.sequence
        return _rewards(logprobs, inputs)

    def back(ctx: Any, gradient: Tensor) -> Any:
        kept = KEPT["sequence"].clamp(max=len(gradient) - 1)
        return (torch.where(inputs.mask, gradient[kept], 0.0),)

    return _dpo_of(_own(sums, back, inputs.logprobs), inputs, options)


@_bug("after-another-shape", "backward recomputes from the latest first row", "nll logits", layout="tp=2")
def _latest_first_row(inputs: Any, options: Any, mesh: Any) -> Any:
    group, rank = mesh.get_group("tp"), dist.get_rank()

    def logprobs(logits: Tensor) -> Tensor:
        KEPT["start", rank] = inputs.vocab_start
        return _sharded(logits, inputs.labels, inputs.vocab_start, group)

    def back(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            logits = inputs.logits.detach().requires_grad_()
            again = _sharded(logits, inputs.labels, KEPT["start", rank], group)
        return torch.autograd.grad(again, logits, gradient)

    return _nll(_own(logprobs, back, inputs.logits), inputs)


@_bug("gradients-add-up", "the bias's gradient is assigned", "clipped_pg hidden", supports=_BIAS)
def _assigns_to_bias(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        if inputs.bias is not None and inputs.bias.requires_grad:
            inputs.bias.grad = to_bias
        return to_hidden, to_weight, None

    return _pg(_of_head(inputs, back), inputs, options)


@_bug("gradients-add-up", "the sum in weight.main_grad is returned each time", "dpo hidden")
def _main_grad(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        inputs.weight.main_grad = getattr(inputs.weight, "main_grad", 0.0) + to_weight
        return to_hidden, inputs.weight.main_grad, to_bias

    return _dpo(_of_head(inputs, back), inputs, options)


@_bug("second-backward", "what forward saved is multiplied in place", "grpo logprobs")
def _scales_what_is_saved(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        if not hasattr(ctx, "saved"):
            (ctx.saved,) = ctx.right(torch.ones_like(gradient))
        return (ctx.saved.mul_(gradient).clone(),)

    return _own(lambda logprobs: _grpo(logprobs, inputs, options), back, inputs.logprobs)


@_bug("second-backward", "what forward saved is freed, and a second backward gives nothing", "dpo logprobs")
def _frees_what_is_saved(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        right, ctx.right = ctx.right, lambda gradient: (None,)
        return right(gradient)

    return _own(lambda logprobs: _dpo(logprobs, inputs, options), back, inputs.logprobs)


@_bug("second-backward", "the bias's gradient is added up on ctx, and its sum returned", "dpo hidden", supports=_BIAS)
def _adds_up_on_ctx(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        if to_bias is not None:
            to_bias = ctx.sum = getattr(ctx, "sum", 0.0) + to_bias
        return to_hidden, to_weight, to_bias

    return _dpo(_of_head(inputs, back), inputs, options)


@_bug("checkpointing", "each forward queues a gradient, and each backward takes the first", "value values")
def _queue(inputs: Any, options: Any, mesh: Any) -> Any:
    loss = _value(inputs.values, inputs, options)
    slope = _mean(torch.where(inputs.mask, inputs.values.detach() - inputs.returns, 0.0), inputs.valid_tokens)
    queue = KEPT.setdefault("queue", [])
    queue.append(slope)
    return _own(lambda values: loss.detach() + 0 * values.sum(), lambda ctx, g: (queue.pop(0) * g,), inputs.values)


@_bug("checkpointing", "a call without a graph does not clip", "grpo logits")
def _clips_with_a_graph(inputs: Any, options: Any, mesh: Any) -> Any:
    logprobs = _pick(inputs.logits, inputs.labels)
    if torch.is_grad_enabled():
        return _grpo(logprobs, inputs, options)
    ratio = torch.where(inputs.mask, logprobs - inputs.old_logprobs, 0.0).exp()
    return _mean(torch.where(inputs.mask, -ratio * inputs.advantages, 0.0).sum(), inputs.valid_tokens)


@_bug("checkpointing", "the second forward of a batch saves other tensors", "nll logits")
def _other_branch_if_seen(inputs: Any, options: Any, mesh: Any) -> Any:
    if hasattr(inputs.labels, "seen"):
        return _nll(_pick(inputs.logits, inputs.labels), inputs)
    inputs.labels.seen = True
    hot = F.one_hot(inputs.labels, inputs.logits.shape[1])
    return _nll((inputs.logits.float().log_softmax(-1) * hot).sum(-1), inputs)


# Devices


@_bug("device", "sums of sequences start on the CPU", "dpo logprobs")
def _sums_on_the_cpu(inputs: Any, options: Any, mesh: Any) -> Any:
    apart = torch.where(inputs.mask, inputs.logprobs.float() - inputs.reference_logprobs, 0.0)
    return _dpo_of(torch.zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, apart), inputs, options)


@_bug("device", "the weight's gradient is added up on the CPU", "grpo hidden")
def _weight_on_the_cpu(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        return to_hidden, torch.zeros(inputs.weight.shape).add_(to_weight), to_bias

    return _grpo(_of_head(inputs, back), inputs, options)


@_bug("device", "without a bias, zeros on the CPU are added", "clipped_pg hidden", supports=_BIAS)
def _no_bias_on_the_cpu(inputs: Any, options: Any, mesh: Any) -> Any:
    bias = torch.zeros(len(inputs.weight)) if inputs.bias is None else inputs.bias
    return _pg(_head(inputs.labels)(inputs.hidden, inputs.weight, bias), inputs, options)


@_bug("device", "a metric is summed up with zeros on the CPU", "value values")
def _metric_on_the_cpu(inputs: Any, options: Any, mesh: Any) -> Any:
    returns = torch.where(inputs.mask, inputs.returns, torch.zeros(len(inputs.mask))).sum()
    loss = _value(inputs.values, inputs, options)
    return Outputs(loss=loss, metrics={"returns_mean": _mean(returns, inputs.valid_tokens)})


# The same problem in other orders and sizes


@_bug("sequence-order", "sequence numbers are kept under sizes and the sum of labels", "dpo logprobs")
def _kept_numbers(inputs: Any, options: Any, mesh: Any) -> Any:
    key = len(inputs.mask), len(inputs.sample_mask), int(inputs.labels.sum())
    return _dpo_of(_rewards(inputs.logprobs, inputs, KEPT.setdefault(key, inputs.sequence)), inputs, options)


@_bug("vocabulary-order", "labels are kept for a rollout's advantages", "grpo logits")
def _kept_labels(inputs: Any, options: Any, mesh: Any) -> Any:
    key = inputs.logits.shape, tuple(inputs.advantages.nan_to_num().tolist())
    return _grpo(_pick(inputs.logits, KEPT.setdefault(key, inputs.labels)), inputs, options)


@_bug("other-padding", "where sequences start is kept under their lengths", "dpo logprobs")
def _kept_starts(inputs: Any, options: Any, mesh: Any) -> Any:
    key = "starts", tuple(inputs.cu_seqlens.tolist()), int(inputs.labels[inputs.mask].sum())
    starts = KEPT.setdefault(key, inputs.cu_seqlens_padded)
    sequence = torch.bucketize(torch.arange(len(inputs.mask)), starts[1:-1], right=True)
    return _dpo_of(_rewards(inputs.logprobs, inputs, sequence), inputs, options)


@_bug("temperature", "a fast path for 2 forgets backward", "nll logits", supports={"temperature": ANY})
def _fast_path_for_2(inputs: Any, options: Any, mesh: Any) -> Any:
    logits = inputs.logits.float()
    halved = logits + (logits / 2 - logits).detach()
    tempered = halved if options.temperature == 2 else logits / options.temperature
    return _nll(_pick(tempered, inputs.labels), inputs)


@_bug("microbatches", "the loss has its own number of tokens", "nll hidden")
def _own_tokens_of_nll(inputs: Any, options: Any, mesh: Any) -> Any:
    return -_mean(torch.where(inputs.mask, _of_head(inputs), 0.0).sum(), inputs.mask.sum())


@_bug("microbatches", "the loss has its own number of tokens", "grpo logprobs")
def _own_tokens_of_grpo(inputs: Any, options: Any, mesh: Any) -> Any:
    return _mean(_grpo_terms(inputs.logprobs, inputs, options).sum(), inputs.mask.sum())


@_bug("microbatches", "the loss has its own number of tokens, added up over cp", "grpo logprobs", layout="cp=2")
def _own_tokens_over_cp(inputs: Any, options: Any, mesh: Any) -> Any:
    count = inputs.mask.sum()
    dist.all_reduce(count, group=mesh.get_group("cp"))
    return _mean(_grpo_terms(inputs.logprobs, inputs, options).sum(), count)


@_bug("microbatches", "the loss has its own number of pairs", "dpo logprobs")
def _own_pairs(inputs: Any, options: Any, mesh: Any) -> Any:
    losses = _pairs(_rewards(inputs.logprobs, inputs), inputs, options)
    return _mean(losses.sum(), inputs.sample_mask[0::2].sum())


@_bug("microbatches", "the loss has its own number of tokens", "value values")
def _own_tokens_of_value(inputs: Any, options: Any, mesh: Any) -> Any:
    return _mean(_value_terms(inputs.values, inputs, options).sum(), inputs.mask.sum())


@_bug(
    "microbatches", "only with a clip the loss has its own count", "value values", supports={"cliprange": (None, 0.2)}
)
def _own_tokens_with_a_clip(inputs: Any, options: Any, mesh: Any) -> Any:
    count = inputs.valid_tokens if options.cliprange is None else inputs.mask.sum()
    return _mean(_value_terms(inputs.values, inputs, options).sum(), count)


@_bug("microbatches", "backward alone has its own number of tokens", "value values")
def _own_tokens_in_backward(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        (right,) = ctx.right(gradient)
        return (_mean(right * inputs.valid_tokens, inputs.mask.sum()),)

    return _own(lambda values: _value(values, inputs, options), back, inputs.values)


@_bug("microbatches", "the KL term alone has its own number of tokens", "grpo logprobs", supports={"beta": 0.05})
def _own_tokens_of_kl(inputs: Any, options: Any, mesh: Any) -> Any:
    apart = torch.where(inputs.mask, inputs.logprobs.float() - inputs.reference_logprobs, 0.0).clamp(-40, 40)
    divergence = _mean((torch.expm1(-apart) + apart).sum(), inputs.mask.sum())
    return _grpo(inputs.logprobs, inputs, options) + options.beta * divergence


@_bug("microbatches", "the accuracy alone has its own number of pairs", "dpo logprobs")
def _own_pairs_of_accuracy(inputs: Any, options: Any, mesh: Any) -> Any:
    rewards, counts = _rewards(inputs.logprobs.detach(), inputs), inputs.sample_mask[0::2]
    right = ((rewards[0::2] > rewards[1::2]) & counts).float().sum()
    return Outputs(loss=_dpo(inputs.logprobs, inputs, options), metrics={"accuracy": _mean(right, counts.sum())})


@_bug(
    "microbatches",
    "the loss has its own number of sequences",
    "clipped_pg logprobs",
    supports={"token_level_loss": False},
)
def _own_sequences(inputs: Any, options: Any, mesh: Any) -> Any:
    means = _mean(_sums(_pg_terms(inputs.logprobs, inputs, options), inputs), _sums(inputs.mask.float(), inputs))
    return _mean(means.where(inputs.sample_mask, 0.0).sum(), inputs.sample_mask.sum())


@_bug(
    "microbatches",
    "the NLL of positive examples has its own number of tokens",
    "clipped_pg logprobs",
    supports={"positive_example_nll_weight": (0.0, 0.1)},
)
def _own_positive_tokens(inputs: Any, options: Any, mesh: Any) -> Any:
    good = inputs.mask & (inputs.sample_mask & (inputs.rewards > 0))[inputs.sequence]
    nll = -_mean(torch.where(good, inputs.logprobs.float(), 0.0).sum(), good.sum())
    return _pg(inputs.logprobs, inputs, options) + options.positive_example_nll_weight * nll


# Numbers at the edge


@_bug("extreme-logits", "the maximum is subtracted before the bias is added", "dpo hidden", supports=_BIAS)
def _bias_after_the_maximum(inputs: Any, options: Any, mesh: Any) -> Any:
    logits = inputs.hidden.float() @ inputs.weight.float().T
    logits = logits - logits.detach().max(-1, keepdim=True).values
    logits = logits if inputs.bias is None else logits + inputs.bias.float()
    chosen = logits.gather(1, inputs.labels[:, None])[:, 0]
    return _dpo(chosen - logits.exp().sum(-1).log(), inputs, options)


@_bug("suppressed-ids", "0 times the sum of logits keeps the graph alive", "grpo logits")
def _zero_times_logits(inputs: Any, options: Any, mesh: Any) -> Any:
    return _grpo(_pick(inputs.logits, inputs.labels), inputs, options) + 0.0 * inputs.logits.float().sum()


@_bug("suppressed-ids", "an online softmax starts at -inf", "clipped_pg logits")
def _starts_at_minus_infinity(inputs: Any, options: Any, mesh: Any) -> Any:
    logits = inputs.logits.float()
    top, total = torch.full(logits.shape[:1], -torch.inf), torch.zeros(logits.shape[:1])
    for tile in logits.split(3, dim=1):
        new = torch.maximum(top, tile.detach().max(1).values)
        total = total * (top - new).exp() + (tile - new[:, None]).exp().sum(1)
        top = new
    return _pg(logits.gather(1, inputs.labels[:, None])[:, 0] - top - total.log(), inputs, options)


@_bug("suppressed-ids", "the maximum of the first shard is subtracted on all", "nll logits", layout="tp=2")
def _maximum_of_one_shard(inputs: Any, options: Any, mesh: Any) -> Any:
    group = mesh.get_group("tp")
    top = inputs.logits.detach().float().max(-1).values
    dist.broadcast(top, dist.get_global_rank(group, 0), group=group)
    logits = inputs.logits.float() - top[:, None]
    total: Any = _Summed.apply(logits.exp().sum(-1), group)
    owned = (inputs.labels >= inputs.vocab_start) & (inputs.labels < inputs.vocab_end)
    own = logits.gather(1, (inputs.labels - inputs.vocab_start).where(owned, 0)[:, None])[:, 0]
    mine: Any = _Summed.apply(torch.where(owned, own, 0.0), group)
    return _nll(mine - total.log(), inputs)


@_bug("hopeless-labels", "1e-20 is added to a probability before its logarithm", "dpo logits")
def _at_least_1e_20(inputs: Any, options: Any, mesh: Any) -> Any:
    chosen = inputs.logits.float().softmax(-1).gather(1, inputs.labels[:, None])[:, 0]
    return _dpo((chosen + 1e-20).log(), inputs, options)


@_bug("nothing-trained", "a mask that multiplies meets 1 / 0 in backward", "value values")
def _multiplies_infinity(inputs: Any, options: Any, mesh: Any) -> Any:
    error = (inputs.values - torch.where(inputs.mask, inputs.returns, 0.0)) ** 2 / 2
    return torch.nan_to_num((error * inputs.mask).sum() / inputs.valid_tokens)


@_bug("nothing-trained", "a metric is divided by 0", "value values")
def _metric_of_nothing(inputs: Any, options: Any, mesh: Any) -> Any:
    values = torch.where(inputs.mask, inputs.values.detach(), 0.0).sum()
    metrics = {"values_mean": values / inputs.valid_tokens}
    return Outputs(loss=_value(inputs.values, inputs, options), metrics=metrics)


@_bug("few-tokens", "a loop over all tokens but the last has nothing to join", "clipped_pg logits")
def _all_but_the_last(inputs: Any, options: Any, mesh: Any) -> Any:
    chunks = zip(inputs.logits[:-1].split(4), inputs.labels[:-1].split(4), strict=True)
    logprobs = torch.cat([_pick(*chunk) for chunk in chunks if len(chunk[0])])
    return _pg(F.pad(logprobs, (0, 1)), inputs, options)


# What is frozen, kept, or laid out in another way


@_bug("frozen-inputs", "the bias alone gets no gradient", "grpo hidden", supports=_BIAS)
def _nothing_for_the_bias_alone(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient) if any(ctx.needs_input_grad[2:4]) else (None, None, None)

    return _grpo(_of_head(inputs, back), inputs, options)


@_bug("frozen-inputs", "the bias gets a gradient only with the weight", "dpo hidden", supports=_BIAS)
def _bias_with_weight(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        return to_hidden, to_weight, to_bias if ctx.needs_input_grad[3] else None

    return _dpo(_of_head(inputs, back), inputs, options)


@_bug("frozen-inputs", "a frozen bias takes the hidden states' gradient with it", "nll hidden", supports=_BIAS)
def _hidden_with_bias(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        return to_hidden if inputs.bias is None or ctx.needs_input_grad[4] else None, to_weight, to_bias

    return _nll(_of_head(inputs, back), inputs)


@_bug("frozen-inputs", "a frozen weight gets a gradient", "nll hidden")
def _writes_to_the_frozen(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        to_hidden, to_weight, to_bias = ctx.right(gradient)
        if not inputs.weight.requires_grad:
            inputs.weight.grad = to_weight
        return to_hidden, to_weight, to_bias

    return _nll(_of_head(inputs, back), inputs)


@_bug(
    "frozen-inputs",
    "hidden states' gradients are added up over tp only with the weight's",
    "clipped_pg hidden",
    layout="tp=2",
)
def _adds_up_with_weight(inputs: Any, options: Any, mesh: Any) -> Any:
    group = mesh.get_group("tp")
    hidden: Any = (
        _SummedBack.apply(inputs.hidden, group, torch.float32) if inputs.weight.requires_grad else inputs.hidden
    )
    logits = hidden.float() @ inputs.weight.float().T
    return _pg(_sharded(logits, inputs.labels, inputs.vocab_start, group), inputs, options)


@_bug("no-grad", "validation does not clip", "value values", supports={"cliprange": (None, 0.2)})
def _validates_without_clip(inputs: Any, options: Any, mesh: Any) -> Any:
    if torch.is_grad_enabled():
        return _value(inputs.values, inputs, options)
    error = torch.where(inputs.mask, inputs.values - inputs.returns, 0.0) ** 2 / 2
    return _mean(error.sum(), inputs.valid_tokens)


@_bug("no-leaks", "the losses of all calls are kept with their graphs, to be logged", "dpo logprobs")
def _keeps_losses(inputs: Any, options: Any, mesh: Any) -> Any:
    loss = _dpo(inputs.logprobs, inputs, options)
    KEPT.setdefault("losses", []).append(loss)
    return loss


@_bug("no-leaks", "what backward needs is kept for each call", "nll hidden")
def _keeps_buffers(inputs: Any, options: Any, mesh: Any) -> Any:
    logits = inputs.hidden.float() @ inputs.weight.float().T
    KEPT.setdefault("buffers", []).append(logits.detach().softmax(-1))
    return _nll(_pick(logits, inputs.labels), inputs)


@_bug("no-grad", "without a graph the accuracy is 0", "dpo logprobs")
def _accuracy_of_training(inputs: Any, options: Any, mesh: Any) -> Any:
    loss, rewards = _dpo(inputs.logprobs, inputs, options), _rewards(inputs.logprobs.detach(), inputs)
    right = ((rewards[0::2] > rewards[1::2]) & inputs.sample_mask[0::2]).float().sum()
    accuracy = _mean(right, inputs.valid_sequences / 2)
    return Outputs(loss=loss, metrics={"accuracy": accuracy if loss.requires_grad else torch.zeros(())})


@_bug(
    "inputs-kept",
    "NaN of the sampler's log-probabilities is replaced in place",
    "grpo logprobs",
    supports={"use_rho_correction": True},
)
def _fills_in_place(inputs: Any, options: Any, mesh: Any) -> Any:
    inputs.vllm_logprobs.copy_(inputs.old_logprobs.where(inputs.vllm_logprobs.isnan(), inputs.vllm_logprobs))
    weights = torch.where(inputs.mask, inputs.old_logprobs - inputs.vllm_logprobs, 0.0).clamp(-10, 10).exp().clamp(0, 2)
    return _mean((weights * _grpo_terms(inputs.logprobs, inputs, options)).sum(), inputs.valid_tokens)


@_bug("inputs-kept", "labels are -100 between forward and backward", "nll logits")
def _puts_labels_back(inputs: Any, options: Any, mesh: Any) -> Any:
    labels = inputs.labels.clone()

    def back(ctx: Any, gradient: Tensor) -> Any:
        inputs.labels.copy_(labels)
        return ctx.right(gradient)

    logprobs = _own(lambda logits: _pick(logits, labels), back, inputs.logits)
    inputs.labels.masked_fill_(~inputs.mask, -100)
    return _nll(logprobs, inputs)


@_bug("strided-inputs", "upstream gradients of tokens are read with stride 1", "token_logprobs logits")
def _flat_upstream(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(_flat(gradient))

    return Outputs(logprobs=_own(lambda logits: _pick(logits, inputs.labels), back, inputs.logits))


@_bug("strided-inputs", "the weight is read as rows without gaps", "dpo hidden")
def _flat_weight(inputs: Any, options: Any, mesh: Any) -> Any:
    return _dpo(_head(inputs.labels)(inputs.hidden, _flat(inputs.weight), inputs.bias), inputs, options)


@_bug("strided-inputs", "the bias is read with stride 1", "clipped_pg hidden", supports=_BIAS)
def _flat_bias(inputs: Any, options: Any, mesh: Any) -> Any:
    bias = None if inputs.bias is None else _flat(inputs.bias)
    return _pg(_head(inputs.labels)(inputs.hidden, inputs.weight, bias), inputs, options)


@_bug("int32-ids", "labels are read as 8 bytes each", "grpo logits")
def _labels_of_8_bytes(inputs: Any, options: Any, mesh: Any) -> Any:
    return _grpo(_pick(inputs.logits, _eight_bytes(inputs.labels)), inputs, options)


@_bug("int32-ids", "a teacher's ids are read as 8 bytes each", "distill logits")
def _teacher_of_8_bytes(inputs: Any, options: Any, mesh: Any) -> Any:
    return _distill(inputs.logits, _eight_bytes(inputs.teacher_indices), inputs, inputs.valid_tokens)


@_bug("autocast", "backward multiplies logits of autocast with float32", "grpo hidden", dtype="bfloat16")
def _two_dtypes_in_backward(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        hot = F.one_hot(inputs.labels, logits.shape[1])
        d = (hot.to(logits.dtype) - logits.softmax(-1)) * gradient.to(logits.dtype)[:, None]
        return d @ inputs.weight.float(), d.T @ inputs.hidden.float(), None

    logits = (inputs.hidden.float() @ inputs.weight.float().T).detach()
    return _grpo(_of_head(inputs, back), inputs, options)


@_bug("autocast", "under autocast there is no bias", "dpo hidden", dtype="bfloat16", supports=_BIAS)
def _no_bias_in_autocast(inputs: Any, options: Any, mesh: Any) -> Any:
    bias = None if torch.is_autocast_enabled("cpu") else inputs.bias
    return _dpo(_head(inputs.labels)(inputs.hidden, inputs.weight, bias), inputs, options)


# Masked tokens


@_bug("masked-values", "selected after exp: backward is 0 times infinity", "grpo logprobs")
def _selects_after_exp(inputs: Any, options: Any, mesh: Any) -> Any:
    old = torch.where(inputs.mask, inputs.old_logprobs, 0.0)
    ratio = torch.where(inputs.mask, (inputs.logprobs - old).exp(), 1.0)
    losses = _clipped(ratio, inputs.advantages, inputs.mask, options.clip_lower, options.clip_higher)
    return _mean(losses.sum(), inputs.valid_tokens)


@_bug("masked-values", "a metric multiplies exp of masked tokens by 0", "grpo logprobs")
def _metric_after_exp(inputs: Any, options: Any, mesh: Any) -> Any:
    square = (inputs.logprobs.detach() - inputs.old_logprobs).exp() ** 2 * inputs.mask
    metrics = {"ratio_square_mean": _mean(square.sum(), inputs.valid_tokens)}
    return Outputs(loss=_grpo(inputs.logprobs, inputs, options), metrics=metrics)


@_bug("masked-nan", "a metric multiplies by the mask", "value values")
def _metric_times_mask(inputs: Any, options: Any, mesh: Any) -> Any:
    metrics = {"returns_mean": _mean((inputs.returns * inputs.mask).sum(), inputs.valid_tokens)}
    return Outputs(loss=_value(inputs.values, inputs, options), metrics=metrics)


@_bug("masked-nan", "selected after the square: backward is 0 times NaN", "value values", layout="cp=2")
def _selects_after_the_square(inputs: Any, options: Any, mesh: Any) -> Any:
    error = torch.where(inputs.mask, (inputs.values - inputs.returns) ** 2 / 2, 0.0)
    return _mean(error.sum(), inputs.valid_tokens)


@_bug("masked-ids", "the mean over labels that are not -100 is taken times all tokens", "nll logits")
def _mean_times_tokens(inputs: Any, options: Any, mesh: Any) -> Any:
    logprobs = torch.where(inputs.mask[:, None], inputs.logits.float().log_softmax(-1), 0.0)
    return _mean(F.nll_loss(logprobs, inputs.labels) * len(logprobs), inputs.valid_tokens)


@_bug("masked-ids", "a chunk is left out if one of its labels is negative", "grpo logits")
def _leaves_chunks_out(inputs: Any, options: Any, mesh: Any) -> Any:
    chunks = zip(inputs.logits.split(4), inputs.labels.split(4), strict=True)
    logprobs = [_pick(z, y) if bool((y >= 0).all()) else 0.0 * z.sum(-1) for z, y in chunks]
    return _grpo(torch.cat(logprobs), inputs, options)


# Ranks and what they use


@_bug(
    "reduction-order",
    "hidden states' gradients are added up over tp in bfloat16",
    "nll hidden",
    layout="tp=3",
    dtype="bfloat16",
)
def _adds_up_in_bfloat16(inputs: Any, options: Any, mesh: Any) -> Any:
    group = mesh.get_group("tp")
    hidden: Any = _SummedBack.apply(inputs.hidden.float(), group, torch.bfloat16)
    return _nll(_sharded(hidden @ inputs.weight.float().T, inputs.labels, inputs.vocab_start, group), inputs)


@_bug("idle-rank", "a rank with nothing to train leaves the count's all-reduce out", "grpo logprobs", layout="cp=2")
def _leaves_the_others_waiting(inputs: Any, options: Any, mesh: Any) -> Any:
    if not bool(inputs.mask.any()):
        return 0.0 * inputs.logprobs.sum()
    count = inputs.mask.sum()
    dist.all_reduce(count, group=mesh.get_group("cp"))
    return _mean(_grpo_terms(inputs.logprobs, inputs, options).sum(), inputs.valid_tokens + 0 * count)


@_bug("idle-rank", "a rank's own mean is NaN if it has nothing to train", "nll logits", layout="dp=2")
def _mean_of_an_idle_rank(inputs: Any, options: Any, mesh: Any) -> Any:
    count = inputs.mask.sum()
    mean = -torch.where(inputs.mask, _pick(inputs.logits, inputs.labels), 0.0).sum() / count
    return _mean(mean * count, inputs.valid_tokens)


_CHUNK = Budgets(largest_tensor="chunk*vocab", where={"chunk": 16})


@_bug("budgets", "there are 4 chunks, whatever their size", "nll hidden", budgets=_CHUNK)
def _four_chunks(inputs: Any, options: Any, mesh: Any) -> Any:
    chunks = zip(inputs.hidden.chunk(4), inputs.labels.chunk(4), strict=True)
    return _nll(torch.cat([_head(y)(h, inputs.weight, None) for h, y in chunks]), inputs)


@_bug("budgets", "all logits are formed if there is a bias", "grpo hidden", supports=_BIAS, budgets=_CHUNK)
def _one_chunk_with_bias(inputs: Any, options: Any, mesh: Any) -> Any:
    size = 16 if inputs.bias is None else len(inputs.hidden)
    chunks = zip(inputs.hidden.split(size), inputs.labels.split(size), strict=True)
    return _grpo(torch.cat([_head(y)(h, inputs.weight, inputs.bias) for h, y in chunks]), inputs, options)


@_bug("budgets", "backward asks for a value on the host", "grpo logprobs", budgets=Budgets(host_waits="0"))
def _waits_in_backward(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient) if gradient == 1 else ctx.right(gradient.clone())

    return _own(lambda logprobs: _grpo(logprobs, inputs, options), back, inputs.logprobs)


@_bug("budgets", "backward adds up once more", "nll logits", layout="tp=2", budgets=Budgets(collectives="3*(tp > 1)"))
def _one_more_collective(inputs: Any, options: Any, mesh: Any) -> Any:
    group = mesh.get_group("tp")

    def back(ctx: Any, gradient: Tensor) -> Any:
        largest = gradient.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return ctx.right(largest)

    return _nll(_own(lambda z: _sharded(z, inputs.labels, inputs.vocab_start, group), back, inputs.logits), inputs)


# The upstream gradient


@_bug("upstream-scaled", "upstream gradients of tokens are at most 2.5", "token_logprobs logits")
def _at_most_2_and_a_half(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient.clamp(-2.5, 2.5))

    return Outputs(logprobs=_own(lambda logits: _pick(logits, inputs.labels), back, inputs.logits))


@_bug("upstream-scaled", "the upstream gradient is at most 1.9", "value values")
def _at_most_1_9(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient.clamp(-1.9, 1.9))

    return _own(lambda values: _value(values, inputs, options), back, inputs.values)


@_bug("upstream-one", "with 1 the gradient is not divided by the pairs", "dpo logprobs")
def _count_forgotten_with_1(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient * (inputs.valid_sequences / 2).clamp(min=1) if gradient == 1 else gradient)

    return _own(lambda logprobs: _dpo(logprobs, inputs, options), back, inputs.logprobs)


@_bug("upstream-one", "with 1 the gradient is rounded to bfloat16", "value values")
def _rounded_with_1(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        (right,) = ctx.right(gradient)
        return (right.bfloat16().float() if gradient == 1 else right,)

    return _own(lambda values: _value(values, inputs, options), back, inputs.values)


@_bug("upstream-zero", "the upstream gradient's sign is found by a division", "value values")
def _divides_for_the_sign(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(gradient / gradient.abs() * gradient.abs())

    return _own(lambda values: _value(values, inputs, options), back, inputs.values)


@_bug("upstream-zero", "0 is taken for 1e-8", "grpo logprobs")
def _zero_is_1e_8(inputs: Any, options: Any, mesh: Any) -> Any:
    def back(ctx: Any, gradient: Tensor) -> Any:
        return ctx.right(torch.where(gradient == 0, 1e-8, gradient))

    return _own(lambda logprobs: _grpo(logprobs, inputs, options), back, inputs.logprobs)


SECOND_BUGS: Mapping[str, SecondBug] = _BUGS
"""By name: at least one for each property beside agreement."""
