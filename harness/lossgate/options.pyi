# SPDX-License-Identifier: Apache-2.0
# Written by python -m lossgate.reports.spec_files: change the specs, and run that.
"""The options of each spec, as a kernel is given them."""

from typing import Literal

from lossgate.losses.clipped_pg import ClippedPgOptions as _ClippedPgOptions
from lossgate.losses.distill import DistillOptions as _DistillOptions
from lossgate.losses.divergence import DivergenceOptions as _DivergenceOptions
from lossgate.losses.dpo import DpoOptions as _DpoOptions
from lossgate.losses.grpo import GrpoOptions as _GrpoOptions
from lossgate.losses.label_smoothing import LabelSmoothingOptions as _LabelSmoothingOptions
from lossgate.losses.nll import NllOptions as _NllOptions
from lossgate.losses.preference import PreferenceOptions as _PreferenceOptions
from lossgate.losses.softcap import SoftcapOptions as _SoftcapOptions
from lossgate.losses.token_logprobs import TokenLogprobsOptions as _TokenLogprobsOptions
from lossgate.losses.value import ValueOptions as _ValueOptions
from lossgate.losses.z_loss import ZLossOptions as _ZLossOptions

class ClippedPgOptions(_ClippedPgOptions):
    """The options of spec clipped_pg: clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO,
    CISPO, with KL penalty and off-policy weights.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    disable_ppo_ratio: bool = False
    """REINFORCE: the log-probability stands in place of the ratio, without a clip.
    force_on_policy_ratio overrides it.

    Default: False. Problems draw: False, True.
    """

    token_level_loss: bool = True
    """the loss is the mean over tokens. If not, it is the mean over sequences of each sequence's
    mean over its tokens.

    Default: True. Problems draw: True, False.
    """

    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio for each sequence, from the mean of its tokens' log-ratios to prev_logprobs,
    and one importance weight, from the sum of those of prev_logprobs to generation_logprobs.

    Default: False. Problems draw: False, True.
    """

    ratio_clip_min: float = 0.2
    """the ratio is clamped from below to 1 minus this.

    Default: 0.2. Problems draw: 0.2, 0.1, 0.4.
    """

    ratio_clip_max: float = 0.2
    """the ratio is clamped from above to 1 plus this.

    Default: 0.2. Problems draw: 0.2, 0.28, 0.1.
    """

    ratio_clip_c: float | None = None
    """dual clip: the loss of a token with a negative advantage is at most minus the advantage times
    this number, which is above 1. None for no such bound.

    Default: None. Problems draw: None, 3.0, 1.75.
    """

    reference_policy_kl_penalty: float = 0.01
    """beta, the weight of the KL penalty.

    Default: 0.01. Problems draw: 0.01, 0.0, 0.5.
    """

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """the KL estimator of the penalty and of the metrics gen_kl_error and policy_kl_error.

    Default: 'k3'. Problems draw: 'k3', 'k1', 'k2'.
    """

    kl_input_clamp_value: float | None = 20.0
    """the log-ratio of reference and policy is clamped to plus or minus this many nats. None for no
    clamp.

    Default: 20.0. Problems draw: 20.0, None, 5.0.
    """

    kl_output_clamp_value: float | None = 10.0
    """the weighted KL estimate is clamped to plus or minus this many nats. None for no clamp.

    Default: 10.0. Problems draw: 10.0, None, 2.0.
    """

    use_kl_in_reward: bool = False
    """the penalty is part of the reward already, so that the loss has none.

    Default: False. Problems draw: False, True.
    """

    use_importance_sampling_correction: bool = False
    """the policy loss is weighted by the probability in prev_logprobs over that in
    generation_logprobs. If not, this weight is a metric only.

    Default: False. Problems draw: False, True.
    """

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """how the importance weight is bounded. None for no bound.

    Default: None. Problems draw: None, 'tis', 'icepop', 'seq-mask-tis'.
    """

    truncated_importance_sampling_ratio: float | None = None
    """the upper bound of the importance weight; for seq-mask-tis, of its geometric mean over a
    sequence.

    Default: None. Problems draw: None, 2.0, 1.5.
    """

    truncated_importance_sampling_ratio_min: float | None = None
    """the lower bound of the importance weight. None for 0, with tis only.

    Default: None. Problems draw: None, 0.5.
    """

    use_on_policy_kl_approximation: bool = False
    """the KL estimate is weighted by the policy's probability over that in generation_logprobs,
    which corrects for the policy that generated. If not, its weight is 1, which only adds the
    gradient of a score term.

    Default: False. Problems draw: False, True.
    """

    force_on_policy_ratio: bool = False
    """prev_logprobs are replaced by the policy's own, without their gradient: the ratio is 1, and
    there is no clip.

    Default: False. Problems draw: False, True.
    """

    use_cispo: bool = False
    """CISPO: the ratio, clamped on both sides, is a weight without a gradient.

    Default: False. Problems draw: False, True.
    """

    positive_example_nll_weight: float = 0.0
    """mu of VAPO, the weight of the mean NLL of tokens in sequences with a positive reward.

    Default: 0.0. Problems draw: 0.0, 0.1.
    """

    positive_nll_normaliser: Literal["global", "local"] = "global"
    """"global" divides that NLL by positive_tokens. "local" divides it, as NeMo-RL does, by the
    number of such tokens in this call; the losses of parts then do not add up.

    Default: 'global'. Problems draw: 'global'.
    """

    epsilon: float = 0.0
    """added to every count that divides; 1e-8 in NeMo-RL's masked_mean. At 0, a mean over nothing
    is 0.

    Default: 0.0. Problems draw: 0.0, 1e-08, 0.5.
    """

    temperature: float = 1.0
    """divides the logits, before they are filtered.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

    top_k: int | None = None
    """only the k largest logits take part in the softmax; ties with the last of them too. None for
    all.

    Default: None. Problems draw: None, 8, 3.
    """

    top_p: float = 1.0
    """of the logits that top_k leaves, only the most probable, until their probabilities reach this
    sum. 1 for all.

    Default: 1.0. Problems draw: 1.0, 0.9, 0.5.
    """

class DistillOptions(_DistillOptions):
    """The options of spec distill: distillation: forward, reverse or mixed KL over the teacher's
    top-k.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    kl_type: Literal["forward", "reverse", "mixed"] = "forward"
    """"forward" is KL(teacher || student), "reverse" is KL(student || teacher), "mixed" is a
    weighted mean of both.

    Default: 'forward'. Problems draw: 'forward', 'reverse', 'mixed'.
    """

    mixed_kl_weight: float = 0.5
    """the weight of the forward KL in "mixed", in [0, 1]; the reverse KL has 1 minus that.

    Default: 0.5. Problems draw: 0.5, 0.25, 0.8.
    """

    zero_outside_topk: bool = False
    """the student's probabilities are those in the whole vocabulary. If not, both models are
    renormalised over the teacher's top-k.

    Default: False. Problems draw: False, True.
    """

    log_infinitesimal: float = -100.0
    """the teacher's log-probability, in nats, of each token outside its top-k, in the reverse KL
    with zero_outside_topk.

    Default: -100.0. Problems draw: -100.0, -20.0.
    """

    temperature: float = 1.0
    """divides the logits of the student and of the teacher; there is no factor of its square. In
    NeMo-RL it is the temperature of generation, which the workers apply.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

    epsilon: float = 0.0
    """added to the token count in the denominator; 1e-8 in NeMo-RL's masked_mean.

    Default: 0.0. Problems draw: 0.0, 1e-08, 0.5.
    """

class DivergenceOptions(_DivergenceOptions):
    """The options of spec divergence: distillation over the whole vocabulary: forward or reverse
    KL, or a Jensen-Shannon divergence.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    divergence_type: Literal["forward", "reverse", "jsd"] = "forward"
    """forward is KL(teacher || student), reverse is KL(student || teacher), jsd is the generalised
    Jensen-Shannon divergence.

    Default: 'forward'. Problems draw: 'forward', 'reverse', 'jsd'.
    """

    beta: float = 0.5
    """the weight of the teacher in jsd, between 0 and 1.

    Default: 0.5. Problems draw: 0.5, 0.1, 0.9.
    """

    temperature: float = 1.0
    """divides the logits of the student and of the teacher.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

class DpoOptions(_DpoOptions):
    """The options of spec dpo: direct preference optimisation and IPO, with an optional SFT term.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    reference_policy_kl_penalty: float = 0.05
    """beta, in 1 / nat: how strongly the loss holds the policy to the reference. beta in TRL.

    Default: 0.05. Problems draw: 0.05, 0.5, 0.1.
    """

    preference_loss_weight: float = 1.0
    """the factor of the preference loss.

    Default: 1.0. Problems draw: 1.0, 0.5.
    """

    sft_loss_weight: float = 0.0
    """the factor of the NLL of the chosen responses. At 0 the NLL is not evaluated.

    Default: 0.0. Problems draw: 0.0, 1.0, 0.25.
    """

    preference_average_log_probs: bool = False
    """rewards are means over the trained tokens of a sequence, not sums. TRL does so for IPO only.

    Default: False. Problems draw: False, True.
    """

    sft_average_log_probs: bool = False
    """the NLL of a chosen response is the mean over its trained tokens, not their sum.

    Default: False. Problems draw: False, True.
    """

    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """"sigmoid" is DPO, "ipo" is IPO. NeMo-RL has only DPO.

    Default: 'sigmoid'. Problems draw: 'sigmoid', 'ipo'.
    """

    reference_layout: Literal["next", "token", "rolled"] = "next"
    """which prediction each of the reference's log-probabilities belongs to: "next" is that of the
    next token, "token" that of the token itself, and "rolled" is "token" rolled left by one.

    Default: 'next'. Problems draw: 'next', 'token', 'rolled'.
    """

    epsilon: float = 0.0
    """added to the number of pairs, which divides the loss and the metrics; 1e-8 in NeMo-RL.

    Default: 0.0. Problems draw: 0.0, 1e-08, 0.5.
    """

    temperature: float = 1.0
    """divides the logits.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

class GrpoOptions(_GrpoOptions):
    """The options of spec grpo: group relative policy optimisation: DAPO or CISPO, with a KL
    penalty and corrections for the sampler.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    use_rho_correction: bool = True
    """the policy loss is weighted by rho, the probability in old_logprobs over that in
    vllm_logprobs. If not, every weight is 1. Switch it off if old_logprobs come from vLLM.

    Default: True. Problems draw: True, False.
    """

    rho_clamp_lower_bound: float = 0.0
    """the smallest weight of a token that is not dropped; below 1.

    Default: 0.0. Problems draw: 0.0, 0.5.
    """

    rho_clamp_upper_bound: float = 2.0
    """the largest weight; above 1. 0 for no bound.

    Default: 2.0. Problems draw: 2.0, 0.0, 1.5.
    """

    rho_mask_lower_bound: float = 0.0
    """tokens with a smaller rho are dropped; below 1. With rho_mask_tv_divergence it bounds tv
    instead, and any positive number is allowed.

    Default: 0.0. Problems draw: 0.0, 0.4.
    """

    rho_mask_upper_bound: float = 0.0
    """tokens with a larger rho are dropped; above 1. 0 for no bound. With rho_mask_tv_divergence it
    bounds tv instead, and any positive number is allowed; open-instruct still requires more than
    1.

    Default: 0.0. Problems draw: 0.0, 3.0.
    """

    rho_mask_sequence_level: bool = False
    """every token has the rho of its sequence, a geometric mean, for the mask and as its weight.
    open-instruct documents the mask alone, but its code does both.

    Default: False. Problems draw: False, True.
    """

    rho_mask_tv_divergence: bool = False
    """the mask bounds apply to tv, the mean over the sequence of |rho - 1| of each token's own rho.
    Only tokens whose update would increase tv are dropped.

    Default: False. Problems draw: False, True.
    """

    loss_fn: Literal["dapo", "cispo"] = "dapo"
    """the policy loss: DAPO clips the ratio, CISPO makes the clamped ratio a weight without a
    gradient.

    Default: 'dapo'. Problems draw: 'dapo', 'cispo'.
    """

    clip_lower: float = 0.2
    """the ratio is clipped from below at 1 minus this, by DAPO alone. ratio_clip_min in NeMo-RL.

    Default: 0.2. Problems draw: 0.2, 0.1, 0.4.
    """

    clip_higher: float = 0.272
    """the ratio is clipped from above at 1 plus this. ratio_clip_max in NeMo-RL.

    Default: 0.272. Problems draw: 0.272, 0.2, 0.5.
    """

    beta: float = 0.05
    """the factor of the KL term. Without a reference policy, set it to 0 and pass any finite
    reference_logprobs.

    Default: 0.05. Problems draw: 0.05, 0.0, 0.5.
    """

    kl_estimator: Literal[0, 1, 2, 3] = 2
    """which estimate of KL(policy || reference) is the KL term. With d the log-ratio of policy to
    reference: 0 is d, 1 is d^2 / 2, 2 is exp(-d) - 1 + d, 3 is the ratio times d.

    Default: 2. Problems draw: 2, 0, 1, 3.
    """

    loss_denominator: Literal["token"] | float = "token"
    """what divides the sums over tokens: "token" for the number of trained tokens of the whole
    batch, or a positive constant, as in Dr. GRPO.

    Default: 'token'. Problems draw: 'token', 7.0, 0.5, 512.0.
    """

    loss_scale: int = 1
    """the factor of the loss, but not of metrics. It is world_size // sequence_parallel_size in
    open-instruct: DeepSpeed averages over data-parallel ranks, so each rank must return that
    many times its part for the average to be the loss of the batch.

    Default: 1. Problems draw: 1, 4.
    """

    temperature: float = 1.0
    """divides the logits, before they are filtered.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

    top_k: int | None = None
    """only the k largest logits take part in the softmax; ties with the last of them too. None for
    all.

    Default: None. Problems draw: None, 8, 3.
    """

    top_p: float = 1.0
    """of the logits that top_k leaves, only the most probable, until their probabilities reach this
    sum. 1 for all.

    Default: 1.0. Problems draw: 1.0, 0.9, 0.5.
    """

class LabelSmoothingOptions(_LabelSmoothingOptions):
    """The options of spec label_smoothing: negative log-likelihood with smoothed labels.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    smoothing: float = 0.1
    """the weight that goes to the whole vocabulary, 0 to 1.

    Default: 0.1. Problems draw: 0.1, 0.0, 0.3, 0.75.
    """

class NllOptions(_NllOptions):
    """The options of spec nll: negative log-likelihood of the labels, over trained tokens (SFT).

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    reduction: Literal["mean", "sum"] = "mean"
    """whether the sum is divided by the trained tokens of the whole batch.

    Default: 'mean'. Problems draw: 'mean', 'sum'.
    """

    temperature: float = 1.0
    """divides the logits.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

    epsilon: float = 0.0
    """added to the number of trained tokens: 1e-8 in NeMo-RL, 1e-5 in AReaL.

    Default: 0.0. Problems draw: 0.0, 1e-08, 1e-05, 0.5.
    """

    softcap: float | None = None
    """the logits are softcap tanh(z / softcap), before the temperature. None for no cap.

    Default: None. Problems draw: None, 2.0, 30.0.
    """

class PreferenceOptions(_PreferenceOptions):
    """The options of spec preference: the Bradley-Terry loss of a reward model.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    epsilon: float = 0.0
    """added to the number of pairs that divides the loss and the metrics: 1e-8 in NeMo-RL.

    Default: 0.0. Problems draw: 0.0, 1e-08, 0.5.
    """

class SoftcapOptions(_SoftcapOptions):
    """The options of spec softcap: negative log-likelihood of soft-capped logits.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    softcap: float = 30.0
    """the logits are softcap tanh(z / softcap).

    Default: 30.0. Problems draw: 30.0, 2.0.
    """

class TokenLogprobsOptions(_TokenLogprobsOptions):
    """The options of spec token_logprobs: log-probabilities of the labels and entropies, with
    temperature and top-k / top-p filtering; no loss.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    temperature: float = 1.0
    """divides the logits, before they are filtered.

    Default: 1.0. Problems draw: 0.3 to 3.
    """

    top_k: int | None = None
    """only the k largest logits take part in the softmax; ties with the last of them too. None for
    all.

    Default: None. Problems draw: None, 1, 3, 8.
    """

    top_p: float = 1.0
    """of the logits that top_k leaves, only the most probable, until their probabilities reach this
    sum. 1 for all.

    Default: 1.0. Problems draw: 1.0, 0.9, 0.5.
    """

    softcap: float | None = None
    """the logits are softcap tanh(z / softcap), before the temperature. None for no cap.

    Default: None. Problems draw: None, 2.0, 30.0.
    """

class ValueOptions(_ValueOptions):
    """The options of spec value: clipped squared error of a value model.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    cliprange: float | None = None
    """how far a value may move from its old value, in the unit of the values. None for no clip.
    NeMo-RL also takes 0 for no clip; here 0 is refused.

    Default: None. Problems draw: None, 0.2, 0.5.
    """

    scale: float = 1.0
    """the factor of the loss, in addition to the 1/2. It does not scale metrics.

    Default: 1.0. Problems draw: 1.0, 0.5.
    """

    epsilon: float = 0.0
    """added to the number of trained tokens, which divides the loss and the metrics; 1e-8 in
    NeMo-RL.

    Default: 0.0. Problems draw: 0.0, 1e-08, 0.5.
    """

class ZLossOptions(_ZLossOptions):
    """The options of spec z_loss: negative log-likelihood plus the squared logarithm of the
    softmax's normaliser.

    An option that a candidate does not name in ``supports`` keeps its default.
    """

    z_loss_weight: float = 0.0001
    """the weight of the squared logsumexp, 1e-4 in PaLM.

    Default: 0.0001. Problems draw: 0.0001, 0.0, 0.125, 1.0.
    """
