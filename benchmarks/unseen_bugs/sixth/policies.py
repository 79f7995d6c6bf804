# SPDX-License-Identifier: Apache-2.0
"""Policy gradient losses: GRPO on a linear head in chunks, GFPO's filter, NeMo-RL's metrics,
accumulation steps.
"""

import torch

import lossgate

CHUNK = 8  # tokens of a chunk or micro-batch
GA = 2  # gradient accumulation steps


def _logprobs_of(logits, labels):
    return logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)


def _grpo_of_token(logprobs, old, reference, advantages, options):
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    d = (logprobs - reference).clamp(-40, 40)
    return torch.maximum(-advantages * ratio, -advantages * clipped) + options.beta * (torch.expm1(-d) + d)


class _FusedLinearGrpo(torch.autograd.Function):
    """Liger's way: the gradients of a chunk are computed in forward, by autograd."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, old, reference, advantages, mask, count, options):
        total, d_hidden, d_weight = hidden.new_zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            m = mask[rows]
            with torch.enable_grad():
                x = hidden[rows].detach().masked_fill(~m[:, None], 0.0).requires_grad_()
                w = weight.detach().requires_grad_()
                logprobs = torch.where(m, _logprobs_of(x @ w.T / options.temperature, labels[rows]), 0.0)
                given = (torch.where(m, value[rows], 0.0) for value in (old, reference, advantages))
                loss = torch.where(m, _grpo_of_token(logprobs, *given, options), 0.0).sum() / count
            dx, dw = torch.autograd.grad(loss, (x, w))
            total += loss.detach()
            d_hidden[rows] = dx
            d_weight += dw
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, *[None] * 7


def _completions(mask, sequence):
    """True from the first to the last token that the policy is trained on, in each sequence: with
    what tools said.
    """
    position = torch.arange(len(mask))
    if not len(mask):
        return mask
    n = int(sequence.max()) + 1
    first = torch.full((n,), len(mask)).scatter_reduce(0, sequence, torch.where(mask, position, len(mask)), "amin")
    last = torch.full((n,), -1).scatter_reduce(0, sequence, torch.where(mask, position, -1), "amax")
    return (position >= first[sequence]) & (position <= last[sequence])


def fused_grpo_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="hidden",
        axes=("dp",),
        dtypes=("float32",),
        supports={
            "use_rho_correction": False,
            "temperature": lossgate.ANY,
            "clip_lower": lossgate.ANY,
            "clip_higher": lossgate.ANY,
            "beta": lossgate.ANY,
        },
        tiles={"token": CHUNK},
        precision=lossgate.Precision(grads_in_forward=True),
        name=name,
    )
    def kernel(inputs, options, mesh):
        tool_mask = inputs.mask
        mask = _completions(inputs.mask, inputs.sequence)
        if bug != "completion_mask":
            mask = mask & tool_mask
        return _FusedLinearGrpo.apply(
            inputs.hidden,
            inputs.weight,
            inputs.labels,
            inputs.old_logprobs,
            inputs.reference_logprobs,
            inputs.advantages,
            mask,
            inputs.valid_tokens.clamp(min=1),
            options,
        )

    return kernel


fused_grpo = fused_grpo_of(None, "fused_grpo")

# As in TRL #4975. The fused path takes the mask of the completion, from its first to its last
# token, and ignores the holes in it where the tokens come from a tool, so those are trained, too.
# The author would have to multiply the completion mask by the tool mask.
completion_mask_ignores_tool_holes = fused_grpo_of("completion_mask", "completion_mask_ignores_tool_holes")


def filtered_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
            "ratio_clip_c": lossgate.ANY,
            "reference_policy_kl_penalty": 0.0,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        # GFPO: of each group only some responses stay; all that belongs to tokens is filtered.
        keep = inputs.sample_mask[inputs.sequence]
        mask, logprobs, advantages = inputs.mask[keep], inputs.logprobs[keep], inputs.advantages[keep]
        old = inputs.prev_logprobs[: len(logprobs)] if bug == "old" else inputs.prev_logprobs[keep]
        ratio = torch.where(mask, logprobs - old, 0.0).exp()
        advantages = torch.where(mask, advantages, 0.0)
        clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if options.ratio_clip_c is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * options.ratio_clip_c), loss)
        return torch.where(mask, loss, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


filtered = filtered_of(None, "filtered")

# As in TRL #4454, GFPO. Log-probabilities, advantages and mask are filtered to the responses that
# stay, but the old log-probabilities are not, so tokens are compared with those of other responses.
# The author would have to filter the old log-probabilities by the same rows.
old_logprobs_not_filtered = filtered_of("old", "old_logprobs_not_filtered")


def with_metrics_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "reference_policy_kl_penalty": 0.0,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
        },
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask & inputs.sample_mask[inputs.sequence]
        count = inputs.valid_tokens.clamp(min=1)
        losses, metrics = [inputs.logits[:0].sum()], []
        batches = [slice(start, start + CHUNK) for start in range(0, len(mask), CHUNK)]
        for rows in batches:
            m = mask[rows]
            logprobs = _logprobs_of(inputs.logits[rows].masked_fill(~m[:, None], 0.0), inputs.labels[rows])
            ratio = torch.where(m, logprobs - inputs.prev_logprobs[rows], 0.0).exp()
            clamped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
            advantages = torch.where(m, inputs.advantages[rows], 0.0)
            loss = torch.maximum(-advantages * ratio, -advantages * clamped)
            losses.append(torch.where(m, loss, 0.0).sum() / count)
            one = {}
            for key, value in (("probs_ratio", ratio.detach()), ("probs_ratio_clamped", clamped.detach())):
                one[key] = torch.where(m, value, 0.0).sum() / count
                one[key + "_min"] = torch.where(m, value, torch.inf).amin()
                one[key + "_max"] = torch.where(m, value, -torch.inf).amax()
            metrics.append(one)
        merged = {}
        for key in ("probs_ratio", "probs_ratio_clamped"):
            merged[key] = sum((one[key] for one in metrics), torch.zeros(()))
            lows, highs = ([one[key + end] for one in metrics] for end in ("_min", "_max"))
            merged[key + "_min"] = torch.stack([torch.tensor(torch.inf), *lows]).amin()
            merged[key + "_max"] = torch.stack([torch.tensor(-torch.inf), *highs]).amax()
            if bug == "divided":
                for end in ("_min", "_max"):
                    merged[key + end] = merged[key + end] / max(len(batches), 1)
        return lossgate.Outputs(loss=torch.stack(losses).sum(), metrics=merged)

    return kernel


with_metrics = with_metrics_of(None, "with_metrics")

# As in NeMo-RL #1818. The smallest and the largest ratio over micro-batches are divided by the
# number of micro-batches, as if they were sums to be averaged. The author would have to leave
# metrics that are minima and maxima out of that division.
extremes_divided_by_microbatches = with_metrics_of("divided", "extremes_divided_by_microbatches")


def accumulated_of(bug, name):
    @lossgate.candidate(
        "grpo",
        head="logits",
        axes=("dp",),
        dtypes=("float32",),
        supports={"use_rho_correction": False, "temperature": lossgate.ANY, "beta": lossgate.ANY},
        contract=lossgate.Contract(loss={"dp": "avg"}, grads={"logits": {"dp": "avg"}}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        m = inputs.mask
        logits = inputs.logits.masked_fill(~m[:, None], 0.0) / options.temperature
        logprobs = torch.where(m, _logprobs_of(logits, inputs.labels), 0.0)
        given = (torch.where(m, x, 0.0) for x in (inputs.old_logprobs, inputs.reference_logprobs, inputs.advantages))
        of_token = _grpo_of_token(logprobs, *given, options)
        total = logits[:0].sum()
        for step in range(GA):
            part = m & (inputs.sequence % GA == step)
            loss = torch.where(part, of_token, 0.0).sum()
            if bug == "local":
                loss = loss / part.sum().clamp(min=1) / GA
            else:  # data parallelism averages over ranks
                loss = loss / inputs.valid_tokens.clamp(min=1) * mesh["dp"].size()
            total = total + loss
        return total

    return kernel


accumulated = accumulated_of(None, "accumulated")

# As in TRL #5890. The fused path never gets the number of tokens of the whole batch: each
# accumulation step is divided by its own trained tokens and then by the number of steps, so tokens
# of short steps weigh more. The author would have to divide all steps by the count of the whole
# batch, and not by the number of steps.
each_step_own_token_mean = accumulated_of("local", "each_step_own_token_mean")

BUGS = {
    "completion_mask_ignores_tool_holes": ("single", "dp=2"),
    "old_logprobs_not_filtered": ("single", "dp=2"),
    "extremes_divided_by_microbatches": ("single", "cp=2"),
    "each_step_own_token_mean": ("single", "dp=2"),
}
RIGHT = {
    "fused_grpo": ("single", "dp=2"),
    "filtered": ("single", "dp=2"),
    "with_metrics": ("single", "cp=2"),
    "accumulated": ("single", "dp=2"),
}
