# SPDX-License-Identifier: Apache-2.0
"""rho: weights of the policy loss that correct for the engine that sampled the tokens.

The engine's policy differs slightly from the old policy. rho is p_old / p_vllm.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import (
    as_count,
    as_mask,
    as_sequence,
    check_flags,
    check_integer,
    check_setting,
    check_tokens,
    values_are_checked,
)
from fused_losses.names import named, named_options
from fused_losses.numerics import divisor
from fused_losses.ranks import sum_over

_LARGEST_LOG_RHO = 10.0
"""Bound of ``|log p_old - log p_vllm|``, in nats, as in open-instruct."""


@named_options
@dataclass(frozen=True, kw_only=True)
class RhoCorrection:
    """How rho becomes the weight of a token in the policy loss.

    Names and defaults are those of open-instruct's options. A bound of 0 is disabled.

    Raises:
        ValueError: An option is out of range; the message names it.
    """

    use_rho_correction: bool = True
    """The policy loss is weighted; if not, every weight is 1."""
    rho_clamp_lower_bound: float = 0.0
    """The smallest weight of a token that is not dropped; below 1."""
    rho_clamp_upper_bound: float = 2.0
    """The largest weight; above 1."""
    rho_mask_lower_bound: float = 0.0
    """Tokens with a smaller rho are dropped: their weight is 0; below 1."""
    rho_mask_upper_bound: float = 0.0
    """Tokens with a larger rho are dropped; above 1."""
    rho_mask_sequence_level: bool = False
    """Every token has the rho of its sequence, a geometric mean, for the mask and as its weight."""
    rho_mask_tv_divergence: bool = False
    """The mask bounds apply to tv, the mean of ``|rho - 1|`` over the token's sequence.

    They may then be any positive numbers. Only tokens whose own update would increase tv are
    dropped.
    """

    @property
    def of_sequences(self) -> bool:
        """Whether an option averages over sequences."""
        return self.use_rho_correction and (self.rho_mask_sequence_level or self.rho_mask_tv_divergence)

    def __post_init__(self) -> None:
        tv, low, high = self.rho_mask_tv_divergence, self.rho_mask_lower_bound, self.rho_mask_upper_bound
        check_flags(
            use_rho_correction=self.use_rho_correction,
            rho_mask_sequence_level=self.rho_mask_sequence_level,
            rho_mask_tv_divergence=tv,
        )
        bounds: dict[str, Any] = {"also": (0,), "otherwise": "or 0 for no bound"}
        check_setting("rho_clamp_lower_bound", self.rho_clamp_lower_bound, above=0, below=1, **bounds)
        check_setting("rho_clamp_upper_bound", self.rho_clamp_upper_bound, above=1, **bounds)
        check_setting("rho_mask_lower_bound", low, above=0, below=inf if tv else 1, **bounds)
        check_setting("rho_mask_upper_bound", high, above=0 if tv else 1, **bounds)
        if 0 < high <= low:
            raise ValueError(f"rho_mask_upper_bound {high}: expected more than rho_mask_lower_bound {low}, or 0")


class RhoWeights(NamedTuple):
    """Weights of tokens in the policy loss, and how they came about.

    Each field is ``[tokens]``, without gradient. Values at tokens that do not count have no
    meaning. Weights that you compute yourself need only ``weight``. For histograms of the tokens
    that count, take ``weights.rho[mask]`` and ``weights.weight[mask]``.
    """

    weight: Tensor
    """The factor of the policy loss; 0 if the token is dropped."""
    rho: Tensor | None = None
    """p_old / p_vllm of the token itself, also with ``rho_mask_sequence_level``."""
    clamped: Tensor | None = None
    """Bool: a clamp bound changed the rho of the token, dropped or not."""
    dropped_low: Tensor | None = None
    """Bool: the lower mask bound dropped the token."""
    dropped_high: Tensor | None = None
    """Bool: the upper mask bound dropped the token."""

    def part(self, tokens: slice | Tensor) -> "RhoWeights":
        """Returns the weights of some of the tokens.

        Weights belong to tokens once they are computed. So a loss that is computed in parts takes
        the weights of each part, whatever its sequences are.

        Args:
            tokens: a slice, or a tensor that is an index.
        """
        return RhoWeights(*(None if x is None else x[tokens] for x in self))  # type: ignore[arg-type]

    def metrics(self, mask: Tensor, valid_tokens: Tensor | float) -> dict[str, Tensor]:
        """Computes the metrics of these tokens. Metrics of fields that are None are left out.

        Args:
            mask: ``[tokens]``, the tokens that count.
            valid_tokens: the number of tokens that count in the whole batch.

        Returns:
            ``rho_mean``, ``rho_weight``, ``rho_clipfrac``, ``rho_drop_frac``,
            ``rho_drop_low_frac`` and ``rho_drop_high_frac``, parts of means over ``valid_tokens``;
            ``rho_min`` and ``rho_max``, which are infinite without tokens.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        mask = as_mask("mask", mask, self.weight, of="the weights")
        like = self.weight.new_empty(0, dtype=dtype)
        return self.means(mask, divisor(as_count("valid_tokens", valid_tokens, like, mask.sum())))

    def means(self, mask: Tensor, count: Tensor) -> dict[str, Tensor]:
        """Computes ``metrics`` from a bool mask and a divisor, which are not checked."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        averaged = {
            "rho_mean": self.rho,
            "rho_weight": self.weight,
            "rho_clipfrac": self.clamped,
            "rho_drop_frac": self.weight == 0,
            "rho_drop_low_frac": self.dropped_low,
            "rho_drop_high_frac": self.dropped_high,
        }
        metrics = {
            name: torch.where(mask, x.to(dtype), 0.0).sum() / count for name, x in averaged.items() if x is not None
        }
        return metrics if self.rho is None else metrics | _range(self.rho, mask)


def _range(rho: Tensor, mask: Tensor) -> dict[str, Tensor]:
    infinity = rho.new_full((1,), inf)
    return {
        "rho_min": torch.cat([infinity, torch.where(mask, rho, infinity)]).amin(),
        "rho_max": torch.cat([-infinity, torch.where(mask, rho, -infinity)]).amax(),
    }


@named
@torch.no_grad()
def rho_weights(
    rho: RhoCorrection,
    *,
    old_logprobs: Tensor,
    vllm_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor | None = None,
    sequences: int | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> RhoWeights:
    """Computes the weight of each token in the policy loss of ``grpo_loss``.

    ``grpo_loss`` takes the result in place of the correction. This is useful for histograms, and
    for losses that are computed in parts while rho averages over whole sequences.

    Args:
        rho: the options.
        old_logprobs: ``[tokens]``, log-probabilities of the old policy.
        vllm_logprobs: ``[tokens]``, log-probabilities from the engine that sampled. A token for
            which it is not known has NaN, and is not corrected.
        advantages: ``[tokens]``.
        mask: ``[tokens]`` of bool, or of numbers 0 and 1: the tokens that count.
        sequence: ``[tokens]`` integers, each token's sequence; needed with
            ``rho_mask_sequence_level`` or ``rho_mask_tv_divergence``.
        sequences: the number of sequences in the pack; needed with ``sequence``.
        cp_group: the ranks over which the tokens of sequences are split.

    Returns:
        The weights, in float32, or in the dtype of ``old_logprobs`` if that is wider.

    Raises:
        ValueError: An argument is missing or does not fit; the message names it.

    Collectives:
        One all-reduce SUM of ``[3, sequences]`` over ``cp_group`` if ``rho`` averages over
        sequences; else none.
    """
    if not isinstance(rho, RhoCorrection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"rho is a {type(rho).__name__}: expected a RhoCorrection; pass RhoCorrection() for the defaults"
        )
    check_tokens(
        {"old_logprobs": old_logprobs, "vllm_logprobs": vllm_logprobs, "advantages": advantages},
        {"sequence": sequence},
    )
    if sequences is not None:
        check_integer("sequences", sequences, least=0)
    mask = as_mask("mask", mask, old_logprobs, of="old_logprobs")
    old = old_logprobs.to(torch.promote_types(old_logprobs.dtype, torch.float32))
    bounded = (old - vllm_logprobs).clamp(-_LARGEST_LOG_RHO, _LARGEST_LOG_RHO)
    x = torch.where(mask & ~bounded.isnan(), bounded, 0.0)  # NaN if unknown, or left out by both policies
    own = x.exp()
    if not rho.use_rho_correction:
        nothing = torch.zeros_like(mask)
        return RhoWeights(torch.ones_like(own), own, nothing, nothing, nothing)
    weighting = judged = own
    droppable = mask
    if rho.of_sequences:
        mean_x, tv = _means_of_sequences(x, mask, sequence, sequences, cp_group)
        weighting = judged = mean_x.exp() if rho.rho_mask_sequence_level else own
        if rho.rho_mask_tv_divergence:
            judged, droppable = tv, mask & (x.sign() * advantages > 0)
    low = droppable & (judged < (rho.rho_mask_lower_bound or -inf))
    high = droppable & (judged > (rho.rho_mask_upper_bound or inf))
    clamped = weighting.clamp(rho.rho_clamp_lower_bound, rho.rho_clamp_upper_bound or inf)
    return RhoWeights(torch.where(low | high, 0.0, clamped), own, mask & (clamped != weighting), low, high)


def _means_of_sequences(
    x: Tensor, mask: Tensor, sequence: Tensor | None, sequences: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Computes the means of x and of ``|exp(x) - 1|`` over the sequence of each token."""
    if sequence is None or sequences is None:
        raise ValueError(
            "sequence or sequences is missing: expected [T] integers and the number of sequences with "
            "rho_mask_sequence_level or rho_mask_tv_divergence; pass both, or set these options of rho to False"
        )
    sequence = as_sequence(sequence, mask, sequences, group)
    per_token = torch.where(mask, torch.stack([x, x.expm1().abs(), torch.ones_like(x)]), 0.0)
    sums = sum_over(group, x.new_zeros(3, sequences).index_add(1, sequence, per_token))
    mean_x, tv = (sums[:2] / divisor(sums[2]))[:, sequence]
    return mean_x, tv


def given_weights(rho: RhoWeights | Tensor, logprobs: Tensor, mask: Tensor) -> RhoWeights:
    """Prepares weights that the caller of ``grpo_loss`` has computed.

    Args:
        rho: the weights, or a tensor ``[tokens]`` of their numbers.
        logprobs: ``[tokens]``, the argument of the loss.
        mask: ``[tokens]`` bool.

    Raises:
        ValueError: A tensor does not fit, or a weight is negative or not finite. Weights are not
            checked inside of ``unchecked_values``.
    """
    weights = RhoWeights(rho) if isinstance(rho, Tensor) else rho
    fields = {f"rho.{name}": x for name, x in weights._asdict().items()}
    check_tokens({"logprobs": logprobs, "rho.weight": fields.pop("rho.weight")}, fields)
    right = (weights.weight >= 0) & (weights.weight < inf)
    if values_are_checked() and len(wrong := (mask & ~right).nonzero()):
        token = int(wrong[0])
        raise ValueError(
            f"rho: the weight of token {token} is {weights.weight[token]:g}, expected a finite number from 0"
        )
    return RhoWeights(*(None if x is None else x.detach() for x in weights))  # type: ignore[arg-type]
