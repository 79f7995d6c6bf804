# SPDX-License-Identifier: Apache-2.0
"""An honest candidate for every spec at every head: dense float32 torch, which gathers whatever is split.

Logits are gathered over tp, per-token values over cp; then every rank of a dp group computes the loss of all of its sequences.

    lossgate verify property_tests/dense_candidates.py:dense_dpo_logprobs --layout cp=2
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from dense_losses import filtered_token_entropy, filtered_token_logprobs, linear_logits, token_entropy, token_logprobs
from lossgate import ANY, Candidate, Contract, Outputs
from lossgate.losses import SPECS
from lossgate.specs.spec import FEATURES, Spec, TokenValues


class _Gather(torch.autograd.Function):
    """Parts of a group laid end to end. Every rank computes the same of the whole, so that each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        size, rank = group.size(), group.rank()
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([part.shape[dim]]), group=group)
        moved = part.detach().movedim(dim, 0).contiguous()
        parts = [moved.new_empty(int(n), *moved.shape[1:]) for n in lengths]
        dist.all_gather(parts, moved, group=group)
        ctx.place = dim, sum(int(n) for n in lengths[:rank]), part.shape[dim]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient.narrow(*ctx.place), None, None


def gather(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return part if group.size() == 1 else _Gather.apply(part, dim, group)  # pyright: ignore[reportReturnType]


def zigzag_order(starts: list[int], cp: int) -> Tensor:
    """Where the tokens of all cp ranks, rank after rank, belong in the padded pack."""
    if cp == 1:
        return torch.arange(starts[-1])
    order: list[int] = []
    for rank in range(cp):
        for start, end in pairwise(starts):
            piece = (end - start) // (2 * cp)
            for index in (rank, 2 * cp - 1 - rank):
                order.extend(range(start + index * piece, start + (index + 1) * piece))
    return torch.tensor(order, dtype=torch.long)


def whole_pack(part: Tensor, inputs: Any, mesh: DeviceMesh) -> Tensor:
    """A per-token tensor of this dp rank's whole padded pack."""
    order = zigzag_order(inputs.cu_seqlens_padded.tolist(), mesh["cp"].size())
    return gather(part, 0, mesh.get_group("cp"))[order.argsort()]


def local_values(spec: Spec, head: str, inputs: Any, options: Any, mesh: DeviceMesh) -> TokenValues:
    """The stages before the loss, on this rank's tokens."""
    if head not in ("hidden", "logits"):
        return TokenValues(logprobs=getattr(inputs, head).float(), entropy=None)
    part = (
        inputs.logits.float()
        if hasattr(inputs, "logits")
        else linear_logits(*(x if x is None else x.float() for x in _linear(inputs)))
    )
    logits = gather(part[:, : inputs.vocab_end - inputs.vocab_start], 1, mesh.get_group("tp"))
    temperature = getattr(options, "temperature", 1.0)
    lowest, highest = logits.detach().aminmax(dim=1)
    if spec.kept is not None:
        given = (temperature, options.top_k, options.top_p)
        logprobs, entropy = (
            filtered_token_logprobs(logits, inputs.labels, *given),
            filtered_token_entropy(logits, *given),
        )
        return TokenValues(logprobs=logprobs, entropy=entropy)
    ids = getattr(inputs, spec.columns).unbind(1) if spec.columns else (inputs.labels,)
    logprobs = torch.stack([token_logprobs(logits, column, temperature) for column in ids], 1)
    entropy = token_entropy(logits, temperature)
    return TokenValues(
        logprobs=logprobs if spec.columns else logprobs.squeeze(1), entropy=entropy, lowest=lowest, highest=highest
    )


def _linear(inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return inputs.hidden, inputs.weight, inputs.bias


Spoil = Callable[[dict[str, Any], Any], Any]
"""``(fields of the batch, options) -> options``: changes what a kernel sees, for a candidate that is wrong."""


def dense_kernel(name: str, head: str, spoil: Spoil | None = None) -> Callable[[Any, Any, DeviceMesh], Outputs]:
    spec = SPECS[name]

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
        batch = {f.name: getattr(inputs, f.name) for f in fields(inputs)} | {"lengths": inputs.cu_seqlens.diff()}
        per_token = {
            "labels",
            "mask",
            "sequence",
            *(field for field, dims in spec.fields.items() if dims[:1] == ("token",)),
        }
        batch |= {field: whole_pack(batch[field], inputs, mesh) for field in per_token}
        if spoil is not None:
            options = spoil(batch, options)
        local = local_values(spec, head, inputs, options, mesh)
        outputs: dict[str, Any] = {
            field: getattr(local, {"token_entropy": "entropy"}.get(field, field))
            for field in spec.outputs
            if field != "loss"
        }
        if spec.loss is None:
            return Outputs(**outputs)
        given = {
            field: value
            for field in ("logprobs", "entropy", "lowest", "highest")
            if (value := getattr(local, field)) is not None
        }
        values = (
            given if head == "rewards" else {field: whole_pack(value, inputs, mesh) for field, value in given.items()}
        )
        loss, metrics = spec.run(TokenValues(**{"entropy": None, **values}), batch, options)
        return Outputs(loss=loss, metrics=metrics, **outputs)

    return kernel


def dense_candidate(name: str, head: str, spoil: Spoil | None = None) -> Candidate:
    """Of a spec, at a head, on every axis and with every option."""
    spec = SPECS[name]
    with_logits = head in ("hidden", "logits")
    features: Mapping[str, Any] = {feature: ANY for feature in spec.features if feature not in FEATURES or with_logits}
    gradients: Mapping[str, Mapping[Any, Any]] = {
        "rewards": {"rewards": {"cp": "replicate"}},
        "hidden": {"hidden": {"tp": "sum"}},
    }.get(head, {})
    return lossgate.candidate(
        name,
        head=head,
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports=features,
        contract=Contract(
            loss={"cp": "replicate"}, metrics={metric: {"cp": "replicate"} for metric in spec.metrics}, grads=gradients
        ),  # type: ignore[arg-type]
        differentiable=spec.outputs[:1] if name != "token_logprobs" else spec.outputs,
        name=f"dense_{name}_{head}" + ("_wrong" if spoil else ""),
    )(dense_kernel(name, head, spoil))


globals().update(
    {f"dense_{name}_{head}": dense_candidate(name, head) for name, spec in SPECS.items() for head in spec.inputs}
)
"""One for each, so that ``lossgate verify property_tests/dense_candidates.py`` finds them."""
