# SPDX-License-Identifier: Apache-2.0
"""The signatures of losses that frameworks have: which of their parameters is what.

A preset names parameters and not one function. A function need not have all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lossgate.declaration.supports import Excluded

Things = Mapping[str, Any]
"""What each parameter of a function is given: the name of a thing of the batch, or a constant."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is known of the functions of one signature."""

    spec: str
    names: Mapping[str, str]
    """By parameter, what it is given. Several may be given the same: a function has one of them."""
    needs: tuple[str, ...]
    """The things that a parameter must be given."""
    rows: bool = False
    """Whether the function takes rows."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    conventions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The conventions beside those of all plain functions."""


_CROSS_ENTROPY = {
    **dict.fromkeys(("input", "_input", "logits"), "logits"),
    **dict.fromkeys(("target", "targets", "labels"), "labels"),
}
_CLAMPED = Excluded("extreme", because="it clamps log-ratios at 20 nats")

PRESETS: Mapping[str, Preset] = {
    "torch.cross_entropy": Preset(spec="nll", names=_CROSS_ENTROPY, needs=("logits", "labels")),
    "transformers.causal_lm_loss": Preset(
        spec="nll",
        names={
            "logits": "logits",
            "labels": "unshifted_labels",
            "vocab_size": "vocab_size",
            "num_items_in_batch": "valid_tokens",
        },
        needs=("logits", "unshifted_labels"),
        rows=True,
    ),
    "liger.cross_entropy": Preset(
        spec="nll",
        names=_CROSS_ENTROPY,
        needs=("logits", "labels"),
        conventions={"inputs": "written", "minus_inf": "never"},
    ),
    "liger.fused_linear_cross_entropy": Preset(
        spec="nll",
        names={
            **dict.fromkeys(("input", "_input"), "hidden"),
            **dict.fromkeys(("weight", "lin_weight"), "weight"),
            "target": "labels",
            "bias": "bias",
        },
        needs=("hidden", "weight", "labels"),
    ),
    "trl.selective_log_softmax": Preset(
        spec="token_logprobs",
        names={"logits": "logits", "index": "labels", "temperature": "temperature"},
        needs=("logits", "labels"),
        rows=True,
    ),
    "trl.dpo_loss": Preset(
        spec="dpo",
        names={
            **dict.fromkeys(("chosen_logps", "policy_chosen_logps"), "chosen_logprobs"),
            **dict.fromkeys(("rejected_logps", "policy_rejected_logps"), "rejected_logprobs"),
            **dict.fromkeys(("ref_chosen_logps", "reference_chosen_logps"), "chosen_reference_logprobs"),
            **dict.fromkeys(("ref_rejected_logps", "reference_rejected_logps"), "rejected_reference_logprobs"),
            "beta": "reference_policy_kl_penalty",
        },
        needs=("chosen_logprobs", "rejected_logprobs"),
    ),
    "trl.grpo_loss": Preset(
        spec="grpo",
        names={
            "per_token_logps": "logprobs",
            "old_per_token_logps": "old_logprobs",
            "ref_per_token_logps": "reference_logprobs",
            "advantages": "advantages_per_sequence",
            **dict.fromkeys(("mask", "completion_mask"), "int_mask"),
            "epsilon_low": "clip_lower",
            "epsilon_high": "clip_higher",
            "beta": "beta",
        },
        needs=("logprobs", "old_logprobs", "advantages_per_sequence", "int_mask"),
        rows=True,
        options={"use_rho_correction": False, "beta": 0.0},
    ),
    "verl.policy_loss": Preset(
        spec="clipped_pg",
        names={
            "old_log_prob": "prev_logprobs",
            "log_prob": "logprobs",
            "advantages": "advantages",
            **dict.fromkeys(("response_mask", "eos_mask"), "int_mask"),
            "cliprange_low": "ratio_clip_min",
            "cliprange_high": "ratio_clip_max",
            "clip_ratio_c": "ratio_clip_c",
        },
        needs=("prev_logprobs", "logprobs", "advantages", "int_mask"),
        rows=True,
        options={"reference_policy_kl_penalty": 0.0, "ratio_clip_c": 3.0, "ratios": _CLAMPED},
    ),
}
"""The presets by name: the framework, then its loss."""
