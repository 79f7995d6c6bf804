# SPDX-License-Identifier: Apache-2.0
"""The tokens and sequences of a batch that are not trained, and so must not count."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.specs.spec import Spec


def untrained(spec: Spec, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns masks of the tokens and of the sequences that are not trained, by dim, bool."""
    trained, sequence = spec.trained_of(fields), fields["sequence"]
    if spec.trained_dim == "sequence":
        return {"token": ~(fields["mask"] & trained[sequence]), "sequence": ~trained}
    trained_tokens = torch.zeros(len(fields["cu_seqlens"]) - 1).index_add(0, sequence, trained.float())
    return {"token": ~trained, "sequence": trained_tokens == 0}


def replaced(tensor: Tensor, away: Tensor, by: Tensor | float = torch.nan) -> Tensor:
    """Returns a tensor with entries of ``by`` where ``away`` is true, along its first dim."""
    return torch.where(away.view(-1, *[1] * (tensor.dim() - 1)), by, tensor)


def without_trained(spec: Spec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with nothing trained: with an empty mask, and if that is not enough, with
    every bool of a sequence set to false.
    """
    emptied = {**fields, "mask": torch.zeros_like(fields["mask"])}
    if bool(spec.trained_of(emptied).any()):
        bools = [n for n, own in spec.added.items() if own.dtype == "bool" and own.dims == ("sequence",)]
        emptied |= {name: torch.zeros_like(fields[name]) for name in bools}
    return emptied
