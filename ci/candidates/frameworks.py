# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``fused_losses`` as training frameworks call them: with whole rows or a packed
stream, which ``Pack`` shifts and splits.

They are judged in float32 alone: all that rounds is judged in ``ours``, in bfloat16 too.
"""

from dataclasses import replace
from typing import Any

import ours  # its neighbour; what is imported by name would be a candidate of this file too
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_losses import Pack, TokenLogprobs, vocab_parallel_logprobs
from lossgate import ANY, Contract, Outputs, candidate
from lossgate.inputs import ClippedPgLogits, DpoHidden, DpoLogits, GrpoLogits, TokenLogprobsHidden
from lossgate.losses import SPECS
from lossgate.options import ClippedPgOptions, DpoOptions, GrpoOptions, TokenLogprobsOptions
from lossgate.specs.logit_filter import FilterOptions

EVERYWHERE: dict[str, Any] = {"axes": ("dp", "cp", "tp"), "dtypes": ("float32",)}
SPLIT = {"vocab_split": ANY}
PAIRS_REPLICATED = Contract(loss={"cp": "replicate"})

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


def _own(inputs: Any, mesh: DeviceMesh) -> Any:
    """Returns the inputs with this rank's tokens, shifted, in place of whole sequences."""
    pack = _pack(inputs, mesh)
    shifted = {
        name: pack.from_rows(getattr(inputs, name), shift=1)
        for name in ("mask", *POLICY_FIELDS)
        if hasattr(inputs, name)
    }
    return replace(inputs, labels=pack.labels(inputs.input_ids), sequence=pack.sequence, **shifted)


def _filtered_logprobs(own: Any, options: FilterOptions, mesh: DeviceMesh) -> TokenLogprobs:
    return vocab_parallel_logprobs(
        own.logits,
        own.labels,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        unfiltered=True,
        chunk=ours.CHUNK,
        **ours._split(own, mesh),
    )


@candidate(
    "clipped_pg",
    head="logits",
    tokens="rows",
    **EVERYWHERE,
    supports={option.name: ANY for option in SPECS["clipped_pg"].options} | SPLIT,
    good_for="PPO, GRPO, REINFORCE, GSPO and CISPO from tensor-parallel logits of a pack, with rows of all else",
)
def fused_vocab_parallel_clipped_pg(inputs: ClippedPgLogits, options: ClippedPgOptions, mesh: DeviceMesh) -> Outputs:
    own = _own(inputs, mesh)
    return ours._clipped_pg(_filtered_logprobs(own, options, mesh), own, options, mesh)


@candidate(
    "grpo",
    head="logits",
    tokens="packed",
    **EVERYWHERE,
    supports={option.name: ANY for option in SPECS["grpo"].options} | SPLIT,
    good_for="GRPO with DAPO or CISPO from tensor-parallel logits, everything packed",
)
def fused_vocab_parallel_grpo(inputs: GrpoLogits, options: GrpoOptions, mesh: DeviceMesh) -> Outputs:
    own = _own(inputs, mesh)
    return ours._grpo(_filtered_logprobs(own, options, mesh), own, options, mesh, ours._rho(options))


@candidate(
    "dpo",
    head="logits",
    tokens="packed",
    **EVERYWHERE,
    contract=PAIRS_REPLICATED,
    supports={option.name: ANY for option in SPECS["dpo"].options} | SPLIT,
    good_for="DPO and IPO from tensor-parallel logits, everything packed",
)
def fused_vocab_parallel_dpo(inputs: DpoLogits, options: DpoOptions, mesh: DeviceMesh) -> Outputs:
    own = _with_reference(_own(inputs, mesh), inputs.reference_logprobs, options, mesh)
    given = {"temperature": options.temperature, "chunk": ours.CHUNK, **ours._split(own, mesh)}
    return ours._dpo(vocab_parallel_logprobs(own.logits, own.labels, **given).logprobs, own, options, mesh)


@candidate(
    "dpo",
    head="hidden",
    tokens="rows",
    **EVERYWHERE,
    contract=PAIRS_REPLICATED,
    supports={option.name: ANY for option in SPECS["dpo"].options} | SPLIT | {"bias": ANY},
    tiles={"token": ours.CHUNK},
    good_for="DPO and IPO from hidden states of a pack, with rows of all else",
)
def fused_linear_dpo_of_rows(inputs: DpoHidden, options: DpoOptions, mesh: DeviceMesh) -> Outputs:
    own = _with_reference(_own(inputs, mesh), inputs.reference_logprobs, options, mesh)
    return ours.fused_linear_dpo.kernel(own, options, mesh)


def _with_reference(own: Any, whole: Tensor, options: DpoOptions, mesh: DeviceMesh) -> Any:
    """Returns the inputs with reference log-probabilities aligned as the option says."""
    shift = 1 if options.reference_layout == "token" else 0
    return replace(own, reference_logprobs=_pack(own, mesh).from_rows(whole, shift=shift))


@candidate(
    "token_logprobs",
    head="hidden",
    tokens="rows",
    **EVERYWHERE,
    supports={option.name: ANY for option in SPECS["token_logprobs"].options} | SPLIT | {"bias": ANY},
    contract=Contract(logprobs={"cp": "replicate"}),
    differentiable=("logprobs", "token_entropy"),
    tiles={"token": ours.CHUNK},
    good_for="rows of log-probabilities and entropies from hidden states of a pack, as reference policies need them",
)
def fused_linear_logprobs_of_rows(
    inputs: TokenLogprobsHidden, options: TokenLogprobsOptions, mesh: DeviceMesh
) -> Outputs:
    found = ours.fused_linear_logprobs.kernel(_own(inputs, mesh), options, mesh)
    pack, group, width = _pack(inputs, mesh), mesh.get_group("cp"), inputs.input_ids.shape[1]

    logprobs, entropy = (pack.to_rows(local, width, group, shift=1) for local in (found.logprobs, found.token_entropy))
    return Outputs(logprobs=logprobs, token_entropy=entropy)
