# SPDX-License-Identifier: Apache-2.0
"""From a problem to its tensors: the whole batch in float64, and the local shards of each rank."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lossgate.dtypes import DTYPES
from lossgate.problems.partition import Dims, Partition
from lossgate.problems.problem import MaskPattern, Problem
from lossgate.problems.random_streams import Bits


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Every tensor of a problem, unsplit. T counts the tokens of the padded pack.

    leaves: the differentiable inputs, float64 but holding numbers of the problem's dtype, so that reference and
    candidate start from exactly the same values. fields: what else the loss needs, by name.
    cotangents: the upstream gradient of each output that gets one.
    field_dims: of the fields that a spec adds.
    filler: the padding rows of a padded vocabulary, for each leaf that has the vocab dim.
    """

    problem: Problem
    partition: Partition
    leaves: Mapping[str, Tensor]
    fields: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]
    filler: Mapping[str, Tensor]
    field_dims: Mapping[str, Dims] = field(default_factory=dict)
    policy: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """``[T]``: the reference's log-probabilities of the labels, for specs with a scenario; others have none here."""

    def local_leaf(self, name: str, dims: Dims, rank: int) -> Tensor:
        part = self.partition.shard(self.leaves[name], dims, rank, self.filler.get(name))
        return part.to(DTYPES[self.problem.dtype])

    def local_fields(self, rank: int) -> dict[str, Any]:
        """What ``PackedBatch`` holds, and what the spec adds to it, for one rank."""
        at = self.partition.layout.coordinate(rank)
        shard, sequences = self.partition.vocab_shards[at["tp"]], self.partition.sequences(at["dp"])
        token_fields = {
            name: self.partition.shard(self.fields[name], ("token",), rank) for name in ("labels", "mask", "input_ids")
        }
        added = {name: self.partition.shard(self.fields[name], dims, rank) for name, dims in self.field_dims.items()}
        added = {name: value.float() if value.is_floating_point() else value for name, value in added.items()}
        return (
            token_fields
            | added
            | {
                "sequence": self.partition.shard(self.fields["sequence"], ("token",), rank) - sequences.start,
                "cu_seqlens": _offsets(self.partition.lengths[s] for s in sequences),
                "cu_seqlens_padded": _offsets(self.partition.padded_lengths[s] for s in sequences),
                "valid_tokens": self.fields["valid_tokens"].clone(),
                "vocab_size": self.partition.vocab,
                "vocab_start": shard.start,
                "vocab_end": shard.end,
            }
        )


def _offsets(lengths: Any) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(problem: Problem) -> Batch:
    """Make the tensors of ``problem`` that every spec has. ``specs.materialize`` makes all."""
    # Ids and masks hang on the seed alone, so that a problem that shrinks keeps them. The numbers hang on all of the
    # problem: Hypothesis makes many problems by changing one thing in another, and what is pooled over problems
    # takes their rounding errors to be independent.
    bits, partition = Bits(problem.to_json()), problem.partition
    fields = _token_fields(problem, Bits(problem.seed), partition)
    leaves = _HEADS[problem.head](problem, bits, partition, fields)
    dtype = DTYPES[problem.dtype]
    return Batch(
        problem=problem,
        partition=partition,
        leaves={name: leaf.to(dtype).double() for name, leaf in leaves.items()},
        fields=fields,
        cotangents=cotangents(problem, fields),
        filler=_filler(problem, bits, partition),
    )


def _token_fields(problem: Problem, bits: Bits, partition: Partition) -> dict[str, Tensor]:
    ids = bits.integers("ids", problem.vocab, problem.tokens)
    for token, row in problem.pins:
        if token + 1 < problem.tokens:
            ids[token + 1] = row
    mask = _mask(problem, bits)
    # The wrap-around at the end of the pack and the neighbour's first token at the end of a sequence stay in the
    # labels: they are what a roll gives, and the mask must keep them out.
    packed = _Packed(partition, bits, problem.vocab)
    return {
        "input_ids": packed.scatter("ids padding", ids),
        "labels": packed.scatter("labels padding", ids.roll(-1)),
        "mask": packed.scatter(None, mask),
        "sequence": partition.sequence_of_token,
        "lengths": torch.tensor(partition.lengths),
        "valid_tokens": mask.sum(),
    }


@dataclass(frozen=True)
class _Packed:
    """Puts per-token values where they belong in the padded pack; padding gets garbage, so that using it shows."""

    partition: Partition
    bits: Bits
    vocab: int

    def scatter(self, garbage: str | None, values: Tensor) -> Tensor:
        shape = (self.partition.tokens, *values.shape[1:])
        if garbage is None:
            full = torch.zeros(shape, dtype=values.dtype)
        elif values.is_floating_point():
            full = self.bits.normal(garbage, *shape)
        else:
            full = self.bits.integers(garbage, self.vocab, *shape)
        full[self.partition.real_tokens] = values
        return full


def _mask(problem: Problem, bits: Bits) -> Tensor:
    chance = bits.uniform("mask", problem.tokens)
    parts = [_sequence_mask(p, c) for p, c in zip(problem.masks, chance.split(list(problem.lengths)), strict=True)]
    return torch.cat(parts)


def _sequence_mask(pattern: MaskPattern, chance: Tensor) -> Tensor:
    if not len(chance):
        return torch.zeros(0, dtype=torch.bool)
    mask = torch.ones(len(chance), dtype=torch.bool)
    if pattern == "none":
        mask[:] = False
    elif pattern == "holes":
        mask = chance < 0.6
    elif pattern == "response":
        mask[: int(chance[0] * len(chance))] = False
    mask[-1] = False  # it has no next token
    return mask


def _hidden_head(problem: Problem, bits: Bits, partition: Partition, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tokens, width, vocab, spread = problem.tokens, problem.hidden, problem.vocab, problem.spread
    packed = _Packed(partition, bits, vocab)
    weight = bits.normal("weight", vocab, width) * (spread / sqrt(width))
    # A row of weight has a squared norm of about spread^2: moving hidden along it by c / spread^2 lifts its logit by c.
    labels = fields["labels"][partition.real_tokens]
    hidden = bits.normal("hidden", tokens, width) + _boost(problem, bits)[:, None] / spread**2 * weight[labels]
    _put_spikes(problem, hidden)
    leaves = {"hidden": packed.scatter("hidden padding", hidden), "weight": weight}
    if problem.bias:
        leaves["bias"] = bits.normal("bias", vocab) * (0.3 * spread)
    return leaves


def _logits_head(problem: Problem, bits: Bits, partition: Partition, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    logits = bits.normal("logits", problem.tokens, problem.vocab) * problem.spread
    labels = fields["labels"][partition.real_tokens]
    logits[torch.arange(problem.tokens), labels] += _boost(problem, bits)
    _put_spikes(problem, logits)
    return {"logits": _Packed(partition, bits, problem.vocab).scatter("logits padding", logits)}


def _logprobs_head(
    problem: Problem, bits: Bits, partition: Partition, fields: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """From a little below 0, a confident label, to some ``spread`` nats."""
    logprobs = -problem.spread * bits.uniform("logprobs", problem.tokens) - 2.0**-6
    return {"logprobs": _Packed(partition, bits, problem.vocab).scatter("logprobs padding", logprobs)}


def _values_head(problem: Problem, bits: Bits, partition: Partition, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = bits.normal("values", problem.tokens) * problem.spread
    return {"values": _Packed(partition, bits, problem.vocab).scatter("values padding", values)}


def _rewards_head(
    problem: Problem, bits: Bits, partition: Partition, fields: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {"rewards": bits.normal("rewards", len(problem.lengths)) * problem.spread}


_HEADS = {
    "hidden": _hidden_head,
    "logits": _logits_head,
    "logprobs": _logprobs_head,
    "values": _values_head,
    "rewards": _rewards_head,
}


def _boost(problem: Problem, bits: Bits) -> Tensor:
    chosen = bits.uniform("confident", problem.tokens) < 0.5
    return chosen.double() * (problem.confidence * problem.options.get("temperature", 1.0))


def _put_spikes(problem: Problem, tensor: Tensor) -> None:
    for token, column, value in problem.spikes:
        tensor[token, column] = value


def _filler(problem: Problem, bits: Bits, partition: Partition) -> dict[str, Tensor]:
    rows = max(shard.padding for shard in partition.vocab_shards)
    if not rows or problem.head not in ("hidden", "logits"):
        return {}
    if problem.head == "logits":
        return {"logits": bits.normal("logits filler", partition.tokens, rows) * problem.spread}
    return {"weight": bits.normal("weight filler", rows, problem.hidden), "bias": bits.normal("bias filler", rows)}


def cotangents(
    problem: Problem, fields: Mapping[str, Tensor], outputs: Collection[str] = ("loss", "logprobs")
) -> dict[str, Tensor]:
    """Random, never 1, of either sign, different for each token; eight bits long, so exact in every dtype."""
    bits = Bits(problem.to_json())
    wanted = {"loss": _eight_bits(bits, "loss cotangent", 1).squeeze(0)}
    for name in ("logprobs", "token_entropy"):
        tokens = _eight_bits(bits, f"{name} cotangent", len(fields["mask"])) * fields["mask"]
        wanted[name] = (
            tokens * 0.5 ** int(fields["valid_tokens"]).bit_length()
        )  # about what a token mean gives each token
    return {name: value for name, value in wanted.items() if name in outputs and problem.cotangent in (name, "both")}


def _eight_bits(bits: Bits, stream: str, count: int) -> Tensor:
    """Odd multiples of 1/128 in +-(0.5, 2)."""
    size = bits.integers(stream, 96, count) * 2 + 65
    sign = 1 - 2 * bits.integers(stream + " sign", 2, count)
    return (sign * size).double() / 128
