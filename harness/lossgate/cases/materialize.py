# SPDX-License-Identifier: Apache-2.0
"""Makes all the tensors of a problem: its fields, the upstream gradients, and the padded pack.

The same problem gives the same tensors, bit for bit, on every machine.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from dense_losses import token_logprobs
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.batch import GlobalBatch, draw_tokens
from lossgate.problems.partition import Dims, Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.heads import HEADS
from lossgate.specs.heads.head import HeadContext
from lossgate.specs.logit_filter import filter_fields, filters
from lossgate.specs.token_chunks import chunks

_DIMS: Mapping[str, Dims] = dict.fromkeys(("input_ids", "labels", "mask"), ("token",))


def pack(
    batch: GlobalBatch,
    partition: Partition,
    leaf_dims: Mapping[str, Dims],
    vocab_padding: Mapping[str, Tensor],
    streams: RandomStreams,
) -> GlobalBatch:
    """Returns the tensors of a batch with the padding that a layout needs.

    Padding is filled with copies of real tokens, so that a kernel which uses it is seen. At
    padding, masks are false, and upstream gradients are 0.

    Args:
        batch: the batch without padding.
        partition: how the layout splits and pads it.
        leaf_dims: the dims of the differentiable inputs.
        vocab_padding: the padding rows of the vocabulary, for each leaf that has them.
        streams: the random numbers that choose the tokens to copy.
    """
    real = torch.zeros(partition.tokens, dtype=torch.bool)
    real[partition.real_tokens] = True
    source = streams.integers("padding", batch.partition.tokens, partition.tokens)
    source[real] = torch.arange(batch.partition.tokens)

    def padded(tensor: Tensor, dims: Dims) -> Tensor:
        if "token" not in dims or batch.partition.tokens == partition.tokens:
            return tensor
        tensor = tensor.index_select(dims.index("token"), source)
        is_mask = tensor.dtype is torch.bool and dims == ("token",)
        return tensor & real if is_mask else tensor

    def padded_cotangent(cotangent: Tensor) -> Tensor:
        return torch.where(real, padded(cotangent, ("token",)), 0.0) if cotangent.dim() else cotangent

    dims = {**_DIMS, **batch.field_dims}
    fields = {name: padded(batch.fields[name], dims[name]) for name in dims}
    return replace(
        batch,
        partition=partition,
        leaves={name: padded(leaf, leaf_dims[name]) for name, leaf in batch.leaves.items()},
        fields={**batch.fields, **fields, "sequence": partition.sequence_of_token},
        cotangents={name: padded_cotangent(cotangent) for name, cotangent in batch.cotangents.items()},
        vocab_padding=vocab_padding,
    )


def draw_cotangents(problem: Problem, fields: Mapping[str, Tensor], outputs: Collection[str]) -> dict[str, Tensor]:
    """Draws the upstream gradient of each output that gets one.

    They are of either sign, never 1, and differ from token to token. So a kernel that ignores them,
    or takes one for all tokens, is seen. They have eight significant bits, so every dtype holds
    them exactly.

    Args:
        problem: the problem, which says which outputs get an upstream gradient.
        fields: the fields of the batch. Masked tokens get an upstream gradient of 0.
        outputs: the names of the outputs that the spec has.
    """
    streams = RandomStreams(problem.to_json())
    drawn = {"loss": _eight_bits(streams, "loss cotangent", 1).squeeze(0)}
    for name in ("logprobs", "token_entropy"):
        tokens = _eight_bits(streams, f"{name} cotangent", len(fields["mask"])) * fields["mask"]
        # About the size of the gradient that a mean over tokens gives to each token.
        drawn[name] = tokens * 0.5 ** int(fields["valid_tokens"]).bit_length()
    return {name: value for name, value in drawn.items() if name in outputs and problem.cotangent in (name, "both")}


def _eight_bits(streams: RandomStreams, stream: str, count: int) -> Tensor:
    """Returns odd multiples of 1/128 in +-(0.5, 2)."""
    size = streams.integers(stream, 96, count) * 2 + 65
    sign = 1 - 2 * streams.integers(stream + " sign", 2, count)
    return (sign * size).double() / 128


def materialize(
    problem: Problem, bound: BoundSpec, change: Callable[[GlobalBatch], GlobalBatch] | None = None
) -> GlobalBatch:
    """Draws every tensor of a problem, on one rank and without padding.

    Ids and masks depend on the seed alone. All other numbers depend on the whole problem, because
    Hypothesis makes many problems by one change to another problem, and pooling assumes that the
    rounding errors of problems are independent.

    Args:
        problem: the problem.
        bound: its spec with its options.
        change: gets the batch before the spec's own fields are drawn, and returns another. Fields
            such as old log-probabilities then fit the returned batch.
    """
    problem = problem.unsharded
    streams, fields = RandomStreams(problem.to_json()), draw_tokens(problem)
    head, dtype = HEADS[problem.head], TORCH_DTYPES[problem.dtype]
    leaves = head.draw(HeadContext(problem, fields, bound.temperature, streams))
    batch = GlobalBatch(
        dtype=problem.dtype,
        partition=problem.partition,
        leaves={name: leaf.to(dtype).double() for name, leaf in leaves.items()},
        fields=fields,
    )
    if change is not None:
        batch = change(batch)
    return with_cotangents(_with_fields(batch, problem, bound, streams), problem, bound)


def with_cotangents(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> GlobalBatch:
    """Returns the batch with the upstream gradients that fit its mask."""
    return replace(batch, cotangents=draw_cotangents(problem, batch.fields, bound.spec.outputs))


def lay_out(batch: GlobalBatch, problem: Problem) -> GlobalBatch:
    """Returns the batch with the padding of the problem's layout.

    Args:
        batch: the batch of the unsharded problem.
        problem: the problem with its layout.
    """
    head, streams, partition = HEADS[problem.head], RandomStreams(problem.to_json()), problem.partition
    padding = head.draw_vocab_padding(problem, streams) | _field_padding(batch, partition, streams)
    return pack(batch, partition, head.leaves, padding, streams)


def _field_padding(batch: GlobalBatch, partition: Partition, streams: RandomStreams) -> dict[str, Tensor]:
    """Draws the padding rows of a padded vocabulary, for each field that has the vocab dim."""
    rows = max(shard.padding for shard in partition.vocab_shards)
    if not rows:
        return {}
    sizes = {"vocab": rows, "token": partition.tokens}
    padding: dict[str, Tensor] = {}
    for name, dims in batch.field_dims.items():
        if "vocab" in dims:
            shape = (sizes.get(dim, size) for dim, size in zip(dims, batch.fields[name].shape, strict=True))
            padding[name] = streams.normal(f"{name} vocab padding", *shape)
    return padding


def _with_fields(batch: GlobalBatch, problem: Problem, bound: BoundSpec, streams: RandomStreams) -> GlobalBatch:
    """Adds the fields that the spec makes. Floats are those that a kernel gets, in float32."""
    spec, head = bound.spec, HEADS[problem.head]

    def logits() -> Tensor:
        return bound.capped(head.logits(batch.leaves))

    if head.has_logits and filters(bound.options):
        chosen = filter_fields(logits(), batch.fields, problem.coarsest, bound.options, streams)
        batch = replace(batch, fields={**batch.fields, **chosen})
        if not spec.added:
            return spec.counted(batch)
    if not spec.added:
        return batch
    policy = cache(lambda: _policy_logprobs(batch, problem, bound))
    context = FieldContext(
        batch=batch,
        options=bound.options,
        streams=streams,
        scenario={choice.name: choice.default for choice in spec.scenarios} | problem.scenario,
        policy=policy,
        untempered=logits,
    )
    made = spec.draw_fields(context)
    exact = {name: value.float().double() if value.is_floating_point() else value for name, value in made.items()}
    drawn = replace(batch, fields={**batch.fields, **exact}, field_dims=spec.fields)
    if policy.cache_info().currsize:
        drawn = replace(drawn, policy=policy()[0])
    return spec.counted(drawn)


def _policy_logprobs(batch: GlobalBatch, problem: Problem, bound: BoundSpec) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the labels after filtering, and without it.

    Labels that the filter leaves out have their log-probability without it in both. A head without
    logits returns its inputs as both.
    """
    head = HEADS[problem.head]
    if not head.has_logits:
        given = head.logits(batch.leaves)
        return given, given
    unfiltered = torch.cat(
        [
            token_logprobs(bound.capped(head.logits(leaves)), batch.fields["labels"][some], bound.temperature)
            for some, leaves in chunks(head, batch.leaves)
        ]
    )
    if not filters(bound.options):
        return unfiltered, unfiltered
    filtered = bound.token_values(problem.head, batch.leaves, batch.fields).logprobs
    return torch.where(filtered > -torch.inf, filtered, unfiltered), unfiltered
