# SPDX-License-Identifier: Apache-2.0
"""The padded pack: lays an unsharded batch out as the ranks of a layout hold it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims, Partition
from lossgate.problems.random_streams import RandomStreams

_DIMS: Mapping[str, Dims] = dict.fromkeys(("input_ids", "labels", "mask"), ("token",))


def pack(
    batch: GlobalBatch,
    partition: Partition,
    leaf_dims: Mapping[str, Dims],
    vocab_padding: Mapping[str, Tensor],
    streams: RandomStreams,
) -> GlobalBatch:
    """Returns the tensors of a batch with the padding that a layout needs.

    Padding is filled with copies of real tokens, so that a kernel which uses it is seen. Masks are
    false there, and upstream gradients 0.

    Args:
        batch: without padding.
        partition: how the layout splits and pads it.
        leaf_dims: the dims of the differentiable inputs.
        vocab_padding: the padding rows of the vocabulary, for each leaf that has them.
        streams: decides which tokens are copied.
    """
    real = torch.zeros(partition.tokens, dtype=torch.bool)
    real[partition.real_tokens] = True
    source = streams.integers("padding", batch.partition.tokens, partition.tokens)
    source[real] = torch.arange(batch.partition.tokens)

    def padded(tensor: Tensor, dims: Dims) -> Tensor:
        if "token" not in dims or batch.partition.tokens == partition.tokens:
            return tensor
        tensor = tensor.index_select(dims.index("token"), source)
        return tensor & real if tensor.dtype is torch.bool and dims == ("token",) else tensor

    dims = {**_DIMS, **batch.field_dims}
    fields = {name: padded(batch.fields[name], dims[name]) for name in dims}
    return replace(
        batch,
        partition=partition,
        leaves={name: padded(leaf, leaf_dims[name]) for name, leaf in batch.leaves.items()},
        fields={**batch.fields, **fields, "sequence": partition.sequence_of_token},
        cotangents={
            name: torch.where(real, padded(cotangent, ("token",)), 0.0) if cotangent.dim() else cotangent
            for name, cotangent in batch.cotangents.items()
        },
        vocab_padding=vocab_padding,
    )
