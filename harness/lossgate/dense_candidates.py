# SPDX-License-Identifier: Apache-2.0
"""A right candidate for every spec at every head, in dense float32 torch.

It gathers everything that is sharded: logits over tp, and values per token over cp. Then every rank
computes the loss of all sequences of its dp rank.

    lossgate verify lossgate.dense_candidates:dense_dpo_logprobs --layout cp=2
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from lossgate.declaration.candidate import Candidate, Kernel, Outputs, candidate
from lossgate.declaration.contract import Contract, Placements
from lossgate.declaration.supports import ANY
from lossgate.losses import SPECS, find_spec
from lossgate.problems.partition import Dims
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.option import COMMON_OPTIONS
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all ranks of a group.

    Every rank computes the same result from the whole, so backward only cuts out the rank's part of
    the gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        size, rank = group.size(), group.rank()
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([part.shape[dim]]), group=group)
        moved = part.detach().movedim(dim, 0).contiguous()
        parts = [moved.new_empty(int(n), *moved.shape[1:]) for n in lengths]
        dist.all_gather(parts, moved, group=group)
        ctx.part = dim, sum(int(n) for n in lengths[:rank]), part.shape[dim]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient.narrow(*ctx.part), None, None


def gather(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return part if group.size() == 1 else _Gather.apply(part, dim, group)  # pyright: ignore[reportReturnType]


def zigzag_order(starts: list[int], cp: int) -> Tensor:
    """Returns the positions in the padded pack of the tokens of all cp ranks, rank after rank.

    Each sequence is cut into 2 cp pieces. Rank r holds piece r from the front and piece r from the
    back.
    """
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
    """Gathers a tensor per token over cp, in the order of the dp rank's padded pack."""
    order = zigzag_order(inputs.cu_seqlens_padded.tolist(), mesh["cp"].size())
    return gather(part, 0, mesh.get_group("cp"))[order.argsort()]


def _kept(inputs: Any, mesh: DeviceMesh) -> Tensor:
    """Returns ``[padded tokens]`` bool: the tokens of the dp rank's padded pack that a reference
    gets.

    Padding is left out, except for padding that the mask trains. A kernel must obey the mask, so a
    wrong mask must show.
    """
    kept = whole_pack(inputs.mask, inputs, mesh).clone()
    for start, length in zip(inputs.cu_seqlens_padded[:-1].tolist(), inputs.lengths.tolist(), strict=True):
        kept[start : start + length] = True
    return kept


def _whole_vocab(part: Tensor, dims: Dims, inputs: Any, mesh: DeviceMesh) -> Tensor:
    """Gathers a tensor over the vocabulary, without padding rows."""
    at = dims.index("vocab")
    return gather(part.narrow(at, 0, inputs.vocab_end - inputs.vocab_start), at, mesh.get_group("tp"))


def local_values(bound: BoundSpec, head: str, inputs: Any, mesh: DeviceMesh) -> TokenValues:
    """Runs the stages before the loss on this rank's tokens."""
    start = HEADS[head]
    given = {name: getattr(inputs, name) for name in start.leaves}
    leaves = {name: leaf.float() for name, leaf in given.items() if leaf is not None}
    if not start.has_logits:
        return bound.token_values(head, leaves, {})
    part = start.logits(leaves)[:, : inputs.vocab_end - inputs.vocab_start]
    logits = gather(part, 1, mesh.get_group("tp"))
    return bound.token_values("logits", {"logits": logits}, vars(inputs))


def dense_kernel(spec: str | Spec, head: str) -> Kernel:
    """Returns a dense kernel of a spec at a head. The spec may be given by name."""
    found = find_spec(spec) if isinstance(spec, str) else spec

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
        with torch.autocast(inputs.labels.device.type, enabled=False):
            return _computed(found, head, inputs, options, mesh)

    return kernel


def _computed(spec: Spec, head: str, inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
    """Gathers the batch of the dp rank without padding, and computes the outputs on it."""
    batch = dict(vars(inputs))
    for name, dims in spec.fields.items():
        if "vocab" in dims:
            batch[name] = _whole_vocab(batch[name], dims, inputs, mesh)
    kept = _kept(inputs, mesh)
    fields_of_tokens = [name for name, dims in spec.fields.items() if dims[:1] == ("token",)]
    for name in ("labels", "mask", "input_ids", "sequence", *fields_of_tokens):
        batch[name] = whole_pack(batch[name], inputs, mesh)[kept]
    batch["labels"] = batch["labels"].clamp(min=0)  # where the mask is false, a label may be -100, which is no index
    starts = pad(kept.cumsum(0), (1, 0))[inputs.cu_seqlens_padded].to(torch.int32)
    batch |= {"cu_seqlens": starts, "cu_seqlens_padded": starts}
    bound = spec.bind_options(options)
    local = local_values(bound, head, inputs, mesh)
    outputs = {name: _VALUES[name](local) for name in spec.outputs if name != "loss"}
    if spec.reference is None:
        return Outputs(**outputs)
    values = local if HEADS[head].gives == "sequence" else _whole_values(local, inputs, mesh, kept)
    loss, metrics = bound.loss(values, batch)
    return Outputs(loss=loss, metrics=metrics, **outputs)


_VALUES: Mapping[str, Callable[[TokenValues], Any]] = {
    "logprobs": lambda values: values.logprobs,
    "token_entropy": lambda values: values.entropy,
}


def _whole_values(local: TokenValues, inputs: Any, mesh: DeviceMesh, kept: Tensor) -> TokenValues:
    return TokenValues(**{name: whole_pack(value, inputs, mesh)[kept] for name, value in local.given.items()})


_GRADIENTS: Mapping[str, Mapping[str, Placements]] = {
    "rewards": {"rewards": {"cp": "replicate"}},
    "hidden": {"hidden": {"tp": "sum"}},
}


@cache
def dense_candidate(spec: Spec, head: str) -> Candidate:
    """Returns the dense candidate of a spec at a head, with every axis and every option."""
    supported = [name for name in spec.supported_options if name not in COMMON_OPTIONS or HEADS[head].has_logits]
    gradients = _GRADIENTS.get(head, {})
    declare = candidate(
        spec,
        head=head,
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports=dict.fromkeys(supported, ANY),
        contract=Contract(
            loss={"cp": "replicate"}, metrics={name: {"cp": "replicate"} for name in spec.metrics}, grads=gradients
        ),
        differentiable=spec.outputs[:1] if spec.reference is not None else spec.outputs,
        exempt={"autocast": "a reference computes in a single dtype, and refuses others"},
        name=f"dense_{spec.name}_{head}",
    )
    return declare(dense_kernel(spec, head))


globals().update(
    {f"dense_{name}_{head}": dense_candidate(spec, head) for name, spec in SPECS.items() for head in spec.inputs}
)
"""A name for each candidate, so that ``lossgate verify lossgate.dense_candidates`` finds them."""
