# SPDX-License-Identifier: Apache-2.0
"""The options of the clipped policy gradient, named as in NeMo-RL's ``ClippedPGLossConfig``."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from fused_losses.arguments import check_choice, check_flags, check_setting
from fused_losses.names import named_options


@named_options
@dataclass(frozen=True, kw_only=True)
class ClippedPGConfig:
    """Options of ``clipped_pg_loss``.

    Below, c is the log-probability of a token under the current policy, p under the policy before
    the update, g under the policy at generation, and q under the reference policy. A is the
    advantage.

    Raises:
        ValueError: An option is out of range, or contradicts another one; the message names it.
    """

    disable_ppo_ratio: bool = False
    """REINFORCE: c replaces the ratio and nothing is clipped.

    ``force_on_policy_ratio`` takes precedence.
    """
    token_level_loss: bool = True
    """The loss is a mean over tokens; else a mean over each sequence, and then over sequences."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): ratios and importance weights belong to sequences.

    The ratio of a sequence is exp of its mean of c - p, its importance weight exp of its sum of
    p - g. With ``disable_ppo_ratio`` there is no ratio, and with ``force_on_policy_ratio`` it is 1;
    then only the weight belongs to the sequence.
    """
    ratio_clip_min: float = 0.2
    """The ratio is clamped from below at ``1 - ratio_clip_min``."""
    ratio_clip_max: float = 0.2
    """The ratio is clamped from above at ``1 + ratio_clip_max``."""
    ratio_clip_c: float | None = None
    """Dual clip (arXiv:1912.09729): where A < 0 the loss is at most ``-A ratio_clip_c``.

    It is above 1; None for no dual clip.
    """
    reference_policy_kl_penalty: float = 0.01
    """Weight of the KL estimate in the loss."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = 20.0
    """Bound of ``|q - c|``, in nats; None for no bound."""
    kl_output_clamp_value: float | None = 10.0
    """Bound of the absolute KL estimate of a token, in nats; None for no bound."""
    use_kl_in_reward: bool = False
    """The KL penalty is part of the rewards, so the loss has none."""
    use_importance_sampling_correction: bool = False
    """The policy loss of a token has the importance weight exp(p - g), without gradient."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """How importance weights are bounded; None for no bounds.

    ``"tis"`` clamps them to the bounds. ``"icepop"`` sets weights outside of the bounds to zero.
    ``"seq-mask-tis"`` sets all weights of a sequence to zero if their geometric mean is outside.
    """
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of importance weights."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of importance weights."""
    use_on_policy_kl_approximation: bool = False
    """The KL estimate has the weight exp(c - g).

    By default its weight is exp(c - c), where only the first c has a gradient: its value is 1, and
    its gradient is that of the score function.
    """
    force_on_policy_ratio: bool = False
    """p is c without its gradient, and nothing is clipped."""
    use_cispo: bool = False
    """CISPO (arXiv:2506.13585), with the ratio clamped on both sides."""
    positive_example_nll_weight: float = 0.0
    """Weight of the NLL of sequences with a reward above 0 (VAPO, arXiv:2504.05118)."""
    positive_nll_normaliser: Literal["global", "local"] = "global"
    """The number by which the sum of that NLL is divided.

    ``"global"``: ``positive_tokens``, the count of the whole batch. ``"local"``: the number of such
    tokens in this call, over ``cp_group``, as in NeMo-RL. The losses of data-parallel ranks and
    microbatches then do not add up to the loss of the batch.
    """
    filtered_tokens: Literal["left_out", "zero"] = "left_out"
    """What becomes of a token whose c or p is -inf, because top-k or top-p filtered its label out.

    ``"left_out"``: it is not part of what is computed of that number. ``"zero"``: that number is 0,
    without gradient, and the token counts, as in NeMo-RL. Its ratio is then exp(-p), exp(c) or 1,
    and its importance weight exp(-g) if p is -inf.
    """
    epsilon: float = 0.0
    """Is added to divisors; 1e-8 in NeMo-RL. If it is 0, a mean over nothing is 0."""

    @property
    def has_ratio(self) -> bool:
        """Whether the policy loss has a ratio exp(c - p)."""
        return self.force_on_policy_ratio or not self.disable_ppo_ratio

    @property
    def of_sequences(self) -> bool:
        """Whether an option needs sums over whole sequences."""
        return (
            not self.token_level_loss
            or self.sequence_level_importance_ratios
            or self.truncated_importance_sampling_type == "seq-mask-tis"
            or (self.positive_example_nll_weight != 0 and self.positive_nll_normaliser == "local")
        )

    @property
    def counts_positive(self) -> bool:
        """Whether the loss is divided by a count of the tokens of positive examples."""
        return self.positive_example_nll_weight != 0 and self.positive_nll_normaliser == "global"

    @property
    def has_kl(self) -> bool:
        """Whether the loss has a KL penalty."""
        return self.reference_policy_kl_penalty != 0 and not self.use_kl_in_reward

    def __post_init__(self) -> None:
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        check_flags(**{field.name: given[field.name] for field in fields(self) if isinstance(field.default, bool)})
        for name, choices in _CHOICES.items():
            check_choice(name, given[name], choices)
        for name in _WEIGHTS:
            check_setting(name, given[name], least=0)
        for name, (above, meaning) in _BOUNDS.items():
            check_setting(name, given[name], above=above, also=(None,), otherwise=f"or None for no {meaning}")
        check_setting("truncated_importance_sampling_ratio_min", self.truncated_importance_sampling_ratio_min, **_LOWER)
        for wrong, message in (*_contradictions(self), *_contradictions_of_truncation(self)):
            if wrong:
                raise ValueError(message)


_CHOICES = {
    "reference_policy_kl_type": ("k1", "k2", "k3"),
    "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
    "positive_nll_normaliser": ("global", "local"),
    "filtered_tokens": ("left_out", "zero"),
}
_WEIGHTS = (
    "ratio_clip_min",
    "ratio_clip_max",
    "reference_policy_kl_penalty",
    "positive_example_nll_weight",
    "epsilon",
)
_BOUNDS = {
    "ratio_clip_c": (1, "dual clip"),
    "kl_input_clamp_value": (0, "bound"),
    "kl_output_clamp_value": (0, "bound"),
    "truncated_importance_sampling_ratio": (0, "bound"),
}
"""Options that may be None: the number that they must exceed, and what None leaves out."""
_LOWER: dict[str, Any] = {"least": 0, "also": (None,), "otherwise": "or None for no bound"}


def _contradictions(c: ClippedPGConfig) -> Iterator[tuple[bool, str]]:
    """Yields, for every rule, whether the options break it, and the error message."""
    yield (
        c.sequence_level_importance_ratios and c.token_level_loss,
        "token_level_loss True: expected False with sequence_level_importance_ratios",
    )
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios", "ratio_clip_c"):
        yield (
            c.use_cispo and bool(getattr(c, name)),
            f"use_cispo with {name}: CISPO uses the detached clamped ratio of each token; leave {name} out",
        )
    yield c.use_cispo and not c.token_level_loss, "use_cispo with token_level_loss False: expected True"


def _contradictions_of_truncation(c: ClippedPGConfig) -> Iterator[tuple[bool, str]]:
    kind = c.truncated_importance_sampling_type
    low, high = c.truncated_importance_sampling_ratio_min, c.truncated_importance_sampling_ratio
    if kind is None:
        yield (
            low is not None or high is not None,
            f"truncated_importance_sampling_ratio {high}, _min {low}: set the type that they bound, or leave both None",
        )
        return
    yield (
        not c.use_importance_sampling_correction,
        f"use_importance_sampling_correction False: expected True with truncated_importance_sampling_type {kind!r}",
    )
    yield high is None, f"truncated_importance_sampling_ratio None: expected a positive number with type {kind!r}"
    yield (
        low is None and kind != "tis",
        f"truncated_importance_sampling_ratio_min None: expected a number with type {kind!r}",
    )
    yield (
        low is not None and high is not None and low > high,
        f"truncated_importance_sampling_ratio_min {low}: expected at most {high}, the upper bound",
    )
    yield (
        kind == "seq-mask-tis" and c.sequence_level_importance_ratios,
        f"truncated_importance_sampling_type {kind!r}: expected another with sequence_level_importance_ratios",
    )
