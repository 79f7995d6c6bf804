# SPDX-License-Identifier: Apache-2.0
"""Computes values per token in chunks of tokens, if the logits of all tokens would take
gigabytes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lossgate.specs.heads.head import Head
from lossgate.specs.token_values import TokenValues

_AT_ONCE = 1 << 23
"""Logits that are computed at once: 64 MiB in float64."""


def chunks(head: Head, leaves: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yields the tokens of each chunk, and the leaves for them. Most problems have a single chunk,
    which is ``slice(None)``.

    Args:
        head: one that has logits.
        leaves: its inputs.
    """
    by_token = [name for name, dims in head.leaves.items() if dims[0] == "token"]
    tokens = len(leaves[by_token[0]])
    vocab = next(leaves[name].shape[dims.index("vocab")] for name, dims in head.leaves.items() if "vocab" in dims)
    at_once = max(1, _AT_ONCE // vocab)
    if tokens <= at_once:
        yield slice(None), dict(leaves)
        return
    for start in range(0, tokens, at_once):
        some = slice(start, start + at_once)
        yield some, {name: leaf[some] if name in by_token else leaf for name, leaf in leaves.items()}


def in_chunks(
    head: Head,
    leaves: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    compute: Callable[[Mapping[str, Tensor], Mapping[str, Any]], TokenValues],
) -> TokenValues:
    """Computes values per token chunk by chunk; backward computes each chunk again.

    Args:
        head: one that has logits.
        leaves: its inputs.
        fields: those that are needed, with the tokens first.
        compute: gives the values for leaves and fields.
    """
    found: list[TokenValues] = []
    for tokens, leaves_of_chunk in chunks(head, leaves):
        if tokens == slice(None):  # a single chunk
            return compute(leaves, fields)
        fields_of_chunk = {name: field[tokens] for name, field in fields.items()}
        found.append(_again_in_backward(compute, leaves_of_chunk, fields_of_chunk))
    names = found[0].given
    return TokenValues(**{name: torch.cat([values.given[name] for values in found]) for name in names})


def _again_in_backward(
    compute: Callable[[Mapping[str, Tensor], Mapping[str, Any]], TokenValues],
    leaves: Mapping[str, Tensor],
    fields: Mapping[str, Any],
) -> TokenValues:
    """Computes values, and computes them again in backward, so that nothing is kept for it."""
    if not torch.is_grad_enabled():
        return compute(leaves, fields)

    def of_tensors(*tensors: Tensor) -> dict[str, Tensor]:
        return compute(dict(zip(leaves, tensors, strict=True)), fields).given

    computed: Any = checkpoint(of_tensors, *leaves.values(), use_reentrant=False, preserve_rng_state=False)
    return TokenValues(**computed)
