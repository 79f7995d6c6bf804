# SPDX-License-Identifier: Apache-2.0
"""Holds the tensors of a problem and gives each rank its shards; draws the tokens of a problem."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.masks import draw_mask
from lossgate.problems.partition import Dims, Partition
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import RandomStreams
from lossgate.problems.whole_sequences import Tokens, WholeSequences


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Every tensor of a problem, before it is split over ranks.

    T is the number of tokens: of the sequences end to end, or of the padded pack of a layout.
    """

    dtype: str
    """The dtype of the differentiable inputs."""
    partition: Partition
    leaves: Mapping[str, Tensor]
    """The differentiable inputs: float64 tensors that hold numbers of the problem's dtype, so that
    reference and candidate start from exactly the same values."""
    fields: Mapping[str, Tensor]
    """The other tensors that the loss needs, by name."""
    field_dims: Mapping[str, Dims] = field(default_factory=dict)
    """The dims of the fields that a spec adds, by name."""
    cotangents: Mapping[str, Tensor] = field(default_factory=dict)
    """The upstream gradient of each output that gets one."""
    vocab_padding: Mapping[str, Tensor] = field(default_factory=dict)
    """The padding rows of a padded vocabulary, for each leaf that has the vocab dim."""
    policy: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """``[T]``: the reference's log-probabilities of the labels; empty unless fields were drawn
    from them."""

    @cached_property
    def known(self) -> dict[str, Any]:
        """The fields and sizes of the whole batch that a reference is given."""
        starts = offsets(self.partition.padded_lengths)
        vocab = self.partition.vocab
        whole = {"cu_seqlens": offsets(self.partition.lengths), "cu_seqlens_padded": starts}
        return {**self.fields, **whole, "vocab_size": vocab, "vocab_start": 0, "vocab_end": vocab}

    @property
    def leaf_dtype(self) -> torch.dtype:
        """The torch dtype of the differentiable inputs."""
        return TORCH_DTYPES[self.dtype]

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The fields that a loss may round: floats, masks and counts. Indices are left out."""
        return {
            name: field
            for name, field in self.fields.items()
            if field.is_floating_point() or field.dtype is torch.bool or not field.dim()
        }

    def local_leaf(self, name: str, dims: Dims, rank: int) -> Tensor:
        """Returns the shard of a differentiable input that a rank holds, in the problem's dtype."""
        part = self.partition.shard(self.leaves[name], dims, rank, self.vocab_padding.get(name))
        return part.to(self.leaf_dtype)

    def local_fields(self, rank: int, tokens: Tokens = "shard", unshifted: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields of ``Batch`` on a rank, and the fields that the spec adds.

        Args:
            rank: the rank.
            tokens: how the rank is given the fields of tokens.
            unshifted: the fields that belong to a token, and not to the prediction of the next one.
        """
        at = self.partition.layout.coordinate(rank)
        shard, sequences = self.partition.vocab_shards[at["tp"]], self.partition.sequences(at["dp"])
        whole = None if tokens == "shard" else WholeSequences.of(self.partition, tokens, rank)
        dims: dict[str, Dims] = {**dict.fromkeys(("labels", "mask", "input_ids"), ("token",)), **self.field_dims}
        fields: dict[str, Any] = {}
        for name, own in dims.items():
            if whole is None or "token" not in own:
                local = self._shard(name, own, rank)
            else:
                local = whole.lay(self._shard(name, _whole_tokens(own), rank), shifted=name not in unshifted)
            fields[name] = local.float() if local.is_floating_point() else local
        sequence = self.partition.shard(self.fields["sequence"], ("token",), rank) if whole is None else whole.sequence
        return fields | {
            "sequence": sequence - sequences.start,
            "cu_seqlens": offsets(self.partition.lengths[s] for s in sequences),
            "cu_seqlens_padded": offsets(self.partition.padded_lengths[s] for s in sequences),
            "valid_tokens": self.fields["valid_tokens"].clone(),
            "vocab_size": self.partition.vocab,
            "vocab_start": shard.start,
            "vocab_end": shard.end,
        }

    def _shard(self, name: str, dims: Dims, rank: int) -> Tensor:
        return self.partition.shard(self.fields[name], dims, rank, self.vocab_padding.get(name))


def _whole_tokens(dims: Dims) -> Dims:
    """Returns the dims with another name for that of tokens, so that it is not split."""
    return tuple("whole tokens" if dim == "token" else dim for dim in dims)


def offsets(lengths: Iterable[int]) -> Tensor:
    """Returns the start of each sequence, and the end of the last one, if they lie end to end;
    int32.
    """
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw_tokens(problem: Problem) -> dict[str, Tensor]:
    """Draws the fields that every spec has, for the sequences end to end without padding.

    Ids and masks depend on the seed alone, so a problem keeps them while it is made smaller.
    """
    streams = RandomStreams(problem.seed)
    ids = streams.integers("ids", problem.vocab, problem.tokens)
    for token, row in problem.forced_labels:
        if token + 1 < problem.tokens:
            ids[token + 1] = row
    mask = draw_mask(problem.masks, problem.lengths, streams)
    return {
        "input_ids": ids,
        # A roll gives the last token of a sequence the first id of the next sequence as its label,
        # and the last token of the pack the first id of the pack. The mask must keep such labels
        # out.
        "labels": ids.roll(-1),
        "mask": mask,
        "sequence": torch.repeat_interleave(torch.arange(len(problem.lengths)), torch.tensor(problem.lengths)),
        "lengths": torch.tensor(problem.lengths),
        "valid_tokens": mask.sum(),
    }
