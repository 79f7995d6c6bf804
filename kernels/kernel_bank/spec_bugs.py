# SPDX-License-Identifier: Apache-2.0
"""Bugs that kernels of one spec have had, or easily have, in its options and fields.

Each makes a correct kernel wrong by what it is given: other options, or other inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_bank.bugs import Bug, on_inputs, on_options
from lossgate.declaration.candidate import Kernel
from lossgate.specs.spec import Spec


def bugs_of(spec: Spec) -> tuple[Bug, ...]:
    """Returns the bugs of a spec's options and fields, the plainest first."""
    return _OF_SPECS.get(spec.name, ())


def _choice(option: str, value: Any, other: Any) -> Bug:
    """Returns the bug of taking one choice of an option for another."""

    def changed(options: Any) -> Any:
        return replace(options, **{option: other}) if getattr(options, option) == value else options

    return Bug(f"{option}: {value} as {other}", f"computes {option}={value} as {other}", on_options(changed))


def _always(option: str, value: Any, sentence: str) -> Bug:
    """Returns the bug of computing with one value of an option whatever is asked for."""
    return Bug(f"{option} always {value}", sentence, on_options(lambda o: replace(o, **{option: value})))


def _fields(name: str, sentence: str, change: Callable[[Any], Mapping[str, Tensor]]) -> Bug:
    """Returns the bug of replacing some fields of the inputs."""
    return Bug(name, sentence, on_inputs(lambda inputs, mesh: replace(inputs, **change(inputs))))


_EVERY_SEQUENCE_COUNTS = _fields(
    "every sequence counts",
    "sequences that the sample mask leaves out count all the same",
    lambda inputs: {"sample_mask": torch.ones_like(inputs.sample_mask)},
)
_FILTERS_IGNORED = (
    _always("top_k", None, "top-k is ignored"),
    _always("top_p", 1.0, "top-p is ignored"),
)


def _dropped_by_sign_of_sequence(kernel: Kernel) -> Kernel:
    def by_sequence(inputs: Any, options: Any, mesh: Any) -> Any:
        right: Any = kernel(inputs, options, mesh)
        if not (options.use_rho_correction and options.rho_mask_tv_divergence):
            return right
        mask, sequence = inputs.mask, inputs.sequence
        log_rho = torch.where(mask, inputs.old_logprobs - inputs.vllm_logprobs, 0.0).nan_to_num(0.0).clamp(-10, 10)
        zeros = log_rho.new_zeros(len(inputs.cu_seqlens) - 1)
        tv = torch.where(mask, (log_rho.exp() - 1).abs(), 0.0)
        sums, of_tv, count = (zeros.index_add(0, sequence, x) for x in (log_rho, tv, mask.to(tv.dtype)))
        mean = (of_tv / count.clamp(min=1))[sequence]
        beyond = (mean < options.rho_mask_lower_bound) | (mean > (options.rho_mask_upper_bound or torch.inf))
        dropped = beyond & (sums[sequence].sign() * inputs.advantages > 0)
        kept = replace(inputs, advantages=torch.where(dropped, 0.0, inputs.advantages))
        off = replace(options, rho_mask_tv_divergence=False, rho_mask_lower_bound=0.0, rho_mask_upper_bound=0.0)
        wrong: Any = kernel(kept, off, mesh)
        return replace(wrong, metrics=right.metrics)

    return by_sequence


_OF_SPECS: Mapping[str, tuple[Bug, ...]] = {
    "nll": (
        _fields(
            "mask shifted by one",
            "the neighbours of the trained tokens are trained in their place",
            lambda inputs: {"mask": inputs.mask.roll(1)},
        ),
    ),
    "token_logprobs": (
        _always("temperature", 1.0, "the temperature is ignored"),
        _always("softcap", None, "the soft-cap is ignored"),
    ),
    "label_smoothing": (_always("smoothing", 0.0, "labels are not smoothed"),),
    "softcap": (_always("softcap", 1e4, "the logits are not capped"),),
    "z_loss": (_always("z_loss_weight", 0.0, "the z-loss is left out"),),
    "value": (_always("cliprange", None, "values are never clipped"),),
    "preference": (_EVERY_SEQUENCE_COUNTS,),
    "dpo": (
        Bug(
            "sums and means swapped",
            "log-probabilities are averaged where they should be summed, and the other way round",
            on_options(lambda o: replace(o, preference_average_log_probs=not o.preference_average_log_probs)),
        ),
        _EVERY_SEQUENCE_COUNTS,
    ),
    "distill": (
        Bug(
            "KL reversed",
            "the reverse KL is computed for the forward one, and the forward one for all others",
            on_options(lambda o: replace(o, kl_type="reverse" if o.kl_type == "forward" else "forward")),
        ),
        _choice("kl_type", "mixed", "forward"),
    ),
    "divergence": (
        _choice("divergence_type", "forward", "reverse"),
        _choice("divergence_type", "jsd", "forward"),
        _always("beta", 0.5, "beta is ignored"),
    ),
    "grpo": (
        Bug(
            "lower clip too wide",
            "the lower clip is 0.05 too wide",
            on_options(lambda o: replace(o, clip_lower=o.clip_lower + 0.05)),
        ),
        _choice("kl_estimator", 3, 2),
        _choice("rho_clamp_upper_bound", 0.0, 2.0),
        Bug(
            "dropped by the sign of the sequence",
            "whether tv drops a token hangs on the mean of log rho over its sequence, and not on its own",
            _dropped_by_sign_of_sequence,
        ),
        *_FILTERS_IGNORED,
    ),
    "clipped_pg": (
        _always("ratio_clip_max", 10.0, "ratios are practically never clipped from above"),
        _choice("truncated_importance_sampling_type", "seq-mask-tis", "icepop"),
        _choice("truncated_importance_sampling_type", "icepop", "tis"),
        _fields(
            "weights that overflow",
            "an importance weight that is not finite becomes a very large one, and not 0",
            lambda inputs: {
                "generation_logprobs": torch.maximum(inputs.generation_logprobs, inputs.prev_logprobs - 80.0)
            },
        ),
        _choice("kl_input_clamp_value", None, 20.0),
        _choice("ratio_clip_max", 0.2, 0.28),
        _choice("reference_policy_kl_type", "k2", "k1"),
        *_FILTERS_IGNORED,
        _EVERY_SEQUENCE_COUNTS,
    ),
}
