# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``fused_losses`` as training frameworks call them: with whole rows or a packed
stream, which ``Pack`` shifts and splits.

They are judged in float32 alone: all that rounds is judged in ``ours``, in bfloat16 too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ours  # its neighbour; what is imported by name would be a candidate of this file too
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_losses import Pack, vocab_parallel_logprobs
from lossgate import ANY, Contract, Outputs, candidate
from lossgate.losses.clipped_pg import CLIPPED_PG, ClippedPGLogitsInputs, ClippedPGSpecOptions
from lossgate.losses.dpo import DPO, DpoHiddenInputs, DpoLogitsInputs, DpoSpecOptions
from lossgate.losses.grpo import GRPO, GrpoLogitsInputs, GrpoSpecOptions
from lossgate.losses.token_logprobs import TokenLogprobsOptions
from lossgate.specs.inputs import HiddenInputs

EVERYWHERE: dict[str, Any] = {"axes": ("dp", "cp", "tp"), "dtypes": ("float32",)}
SPLIT = {"vocab_split": ANY}
PAIRS_REPLICATED = Contract(loss={"cp": "replicate"}, metrics={name: {"cp": "replicate"} for name in DPO.metrics})

POLICY_FIELDS = (
    "prev_logprobs",
    "generation_logprobs",
    "reference_logprobs",
    "old_logprobs",
    "vllm_logprobs",
    "advantages",
)
"""What a framework has at a token, and a loss needs at the prediction of the token."""


def _pack(inputs: Any, mesh: DeviceMesh) -> Pack:
    return Pack.of(inputs.cu_seqlens, inputs.cu_seqlens_padded, cp_group=mesh.get_group("cp"))


def _own(inputs: Any, mesh: DeviceMesh, rows: Callable[[Tensor, Any], Tensor] = lambda whole, inputs: whole) -> Any:
    """Returns the inputs with this rank's tokens, shifted, in place of whole sequences.

    Args:
        inputs: with rows or a packed stream.
        mesh: of this rank.
        rows: makes rows of what the inputs hold.
    """
    pack = _pack(inputs, mesh)
    shifted = {
        name: pack.from_rows(rows(getattr(inputs, name), inputs), shift=1)
        for name in ("mask", *POLICY_FIELDS)
        if hasattr(inputs, name)
    }
    labels = pack.labels(rows(inputs.input_ids, inputs), fill=0)  # the mask leaves out what has no label
    return replace(inputs, labels=labels, sequence=pack.sequence, **shifted)


def _cut(whole: Tensor, inputs: Any) -> Tensor:
    """Cuts a packed stream ``[1, T]`` into a row for each sequence."""
    sequences = whole[0].split(inputs.cu_seqlens_padded.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True) if sequences else whole[:0]


def _logprobs(own: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    return vocab_parallel_logprobs(
        own.logits, own.labels, temperature=options.temperature, **ours._split(own, mesh)
    ).logprobs


@candidate(
    "clipped_pg",
    head="logits",
    tokens="rows",
    **EVERYWHERE,
    supports={option.name: ANY for option in CLIPPED_PG.options} | SPLIT,
    good_for="PPO, GRPO, REINFORCE, GSPO and CISPO from tensor-parallel logits of a pack, with rows of all else",
)
def fused_vocab_parallel_clipped_pg(
    inputs: ClippedPGLogitsInputs, options: ClippedPGSpecOptions, mesh: DeviceMesh
) -> Outputs:
    own = _own(inputs, mesh)
    return ours._clipped_pg(_logprobs(own, options, mesh), own, options, mesh)


@candidate(
    "grpo",
    head="logits",
    tokens="packed",
    **EVERYWHERE,
    supports={option.name: ANY for option in GRPO.options} | SPLIT,
    good_for="GRPO with DAPO or CISPO from tensor-parallel logits, everything packed",
)
def fused_vocab_parallel_grpo(inputs: GrpoLogitsInputs, options: GrpoSpecOptions, mesh: DeviceMesh) -> Outputs:
    own = _own(inputs, mesh, _cut)
    return ours._grpo(_logprobs(own, options, mesh), own, options, mesh)


@candidate(
    "dpo",
    head="logits",
    tokens="packed",
    **EVERYWHERE,
    contract=PAIRS_REPLICATED,
    supports={option.name: ANY for option in DPO.options} | SPLIT,
    good_for="DPO and IPO from tensor-parallel logits, everything packed",
)
def fused_vocab_parallel_dpo(inputs: DpoLogitsInputs, options: DpoSpecOptions, mesh: DeviceMesh) -> Outputs:
    own = _with_reference(_own(inputs, mesh, _cut), _cut(inputs.reference_logprobs, inputs), options, mesh)
    return ours._dpo(_logprobs(own, options, mesh), own, options, mesh)


@candidate(
    "dpo",
    head="hidden",
    tokens="rows",
    **EVERYWHERE,
    contract=PAIRS_REPLICATED,
    supports={option.name: ANY for option in DPO.options} | SPLIT | {"bias": ANY},
    tiles={"token": ours.CHUNK},
    good_for="DPO and IPO from hidden states of a pack, with rows of all else",
)
def fused_linear_dpo_of_rows(inputs: DpoHiddenInputs, options: DpoSpecOptions, mesh: DeviceMesh) -> Outputs:
    own = _with_reference(_own(inputs, mesh), inputs.reference_logprobs, options, mesh)
    return ours.fused_linear_dpo.kernel(own, options, mesh)


def _with_reference(own: Any, rows: Tensor, options: DpoSpecOptions, mesh: DeviceMesh) -> Any:
    """Returns the inputs with reference log-probabilities from rows, aligned as the option says."""
    shift = 1 if options.reference_layout == "token" else 0
    return replace(own, reference_logprobs=_pack(own, mesh).from_rows(rows, shift=shift))


@candidate(
    "token_logprobs",
    head="hidden",
    tokens="rows",
    **EVERYWHERE,
    supports={"temperature": ANY, "bias": ANY} | SPLIT,
    contract=Contract(logprobs={"cp": "replicate"}),
    differentiable=("logprobs", "token_entropy"),
    tiles={"token": ours.CHUNK},
    good_for="rows of log-probabilities and entropies from hidden states of a pack, as reference policies need them",
)
def fused_linear_logprobs_of_rows(inputs: HiddenInputs, options: TokenLogprobsOptions, mesh: DeviceMesh) -> Outputs:
    found = ours.fused_linear_logprobs.kernel(_own(inputs, mesh), options, mesh)
    pack, group, width = _pack(inputs, mesh), mesh.get_group("cp"), inputs.input_ids.shape[1]

    def rows(local: Tensor) -> Tensor:
        """Returns values at the tokens that are predicted, behind a column of zeros."""
        return F.pad(pack.to_rows(local, width, group)[:, :-1], (1, 0))

    return Outputs(logprobs=rows(found.logprobs), token_entropy=rows(found.token_entropy))
