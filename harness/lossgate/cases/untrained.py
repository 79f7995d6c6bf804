# SPDX-License-Identifier: Apache-2.0
"""What of a batch is not trained, and so counts for nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossgate.specs.spec import Spec


def untrained(spec: Spec, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what is not trained, by dim: ``[tokens]`` and ``[sequences]``, bool."""
    trained, sequence = spec.trained_of(fields), fields["sequence"]
    if spec.trained_dim == "sequence":
        return {"token": ~(fields["mask"] & trained[sequence]), "sequence": ~trained}
    none = torch.zeros(len(fields["cu_seqlens"]) - 1)
    return {"token": ~trained, "sequence": none.index_add(0, sequence, trained.float()) == 0}


def replaced(tensor: Tensor, away: Tensor, by: Tensor | float = torch.nan) -> Tensor:
    """Returns a tensor with other entries where ``away`` is true, along its first dim."""
    return torch.where(away.view(-1, *[1] * (tensor.dim() - 1)), by, tensor)


def without_trained(spec: Spec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with an empty mask; if that is not enough, with no bool of a sequence true."""
    emptied = {**fields, "mask": torch.zeros_like(fields["mask"])}
    if bool(spec.trained_of(emptied).any()):
        bools = [n for n, own in spec.added.items() if own.dtype == "bool" and own.dims == ("sequence",)]
        emptied |= {name: torch.zeros_like(fields[name]) for name in bools}
    return emptied
