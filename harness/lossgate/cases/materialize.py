# SPDX-License-Identifier: Apache-2.0
"""Makes all the tensors of a problem.

The same problem gives the same tensors, bit for bit, on every machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from dense_losses import token_logprobs
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.cotangents import draw_cotangents
from lossgate.problems.packing import pack
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.problems.tokens import draw_tokens
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.heads import HEADS
from lossgate.specs.heads.base import HeadContext
from lossgate.specs.logit_filter import filter_fields, filters
from lossgate.specs.token_chunks import chunks


def materialize(
    problem: Problem, bound: BoundSpec, change: Callable[[GlobalBatch], GlobalBatch] | None = None
) -> GlobalBatch:
    """Draws every tensor of a problem, on one rank and without padding.

    Ids and masks depend on the seed alone. All other numbers depend on the whole problem:
    Hypothesis makes many problems by changing one thing in another, and pooling over problems
    assumes that their rounding errors are independent.

    Args:
        problem: the problem.
        bound: its spec with its options.
        change: gets the batch before the spec's own fields are drawn, and returns another. Fields
            such as old log-probabilities then fit what it returns.
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
    """Returns the batch as the ranks of the problem's layout hold it, with padding.

    Args:
        batch: of the unsharded problem.
        problem: with its layout.
    """
    head, streams, partition = HEADS[problem.head], RandomStreams(problem.to_json()), problem.partition
    padding = head.draw_vocab_padding(problem, streams) | _field_padding(batch, partition, streams)
    return pack(batch, partition, head.leaves, padding, streams)


def _field_padding(batch: GlobalBatch, partition: Partition, streams: RandomStreams) -> dict[str, Tensor]:
    """Draws the padding rows of a padded vocabulary, for each field that has the vocab dim."""
    rows = max(shard.padding for shard in partition.vocab_shards)
    sizes = {"vocab": rows, "token": partition.tokens}
    padding: dict[str, Tensor] = {}
    for name, dims in batch.field_dims.items():
        if rows and "vocab" in dims:
            shape = (sizes.get(dim, size) for dim, size in zip(dims, batch.fields[name].shape, strict=True))
            padding[name] = streams.normal(f"{name} vocab padding", *shape)
    return padding


def _with_fields(batch: GlobalBatch, problem: Problem, bound: BoundSpec, streams: RandomStreams) -> GlobalBatch:
    """Adds the fields that the spec makes, as the float32 numbers that a kernel gets."""
    spec, head = bound.spec, HEADS[problem.head]

    def logits() -> Tensor:
        return bound.capped(head.logits(batch.leaves))

    if head.has_logits and filters(bound.options):
        chosen = filter_fields(logits(), batch.fields, problem.coarsest, bound.options, streams)
        batch = replace(batch, fields={**batch.fields, **chosen})
        batch = batch if spec.added else spec.counted(batch)
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
    """Returns the log-probabilities of the labels, or what the head gives in their place.

    The first are those after filtering, except where that leaves a label out. The second are those
    without it.
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
