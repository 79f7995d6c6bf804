# SPDX-License-Identifier: Apache-2.0
"""Kernels around the softmax: log-probabilities of tokens, a loss that returns them, and a
distillation.
"""

import torch
import torch.distributed as dist

import lossgate

ROWS = 16  # tokens of a tile


class _VocabParallelLogprobs(torch.autograd.Function):
    """Megatron's calculation: each rank has columns of the logits, and three numbers of a token are
    reduced.
    """

    @staticmethod
    def forward(ctx, logits, labels, start, group, shift):
        z = logits.clone()
        if shift:
            top = z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            z -= top[:, None]
        local = labels - start
        mine = (local >= 0) & (local < z.shape[1])
        local = local.clamp(0, max(z.shape[1] - 1, 0))
        target = torch.where(mine, z.gather(1, local[:, None])[:, 0], 0.0)
        exps = z.exp_()
        both = torch.stack((exps.sum(1), target))
        dist.all_reduce(both, group=group)
        total, target = both
        probs = exps / total[:, None]
        ctx.save_for_backward(probs, mine, local)
        return target - total.log()

    @staticmethod
    def backward(ctx, grad):
        probs, mine, local = ctx.saved_tensors
        dz = -probs * grad[:, None]
        dz.scatter_add_(1, local[:, None], torch.where(mine, grad, 0.0)[:, None])
        return dz, None, None, None, None


def vocab_parallel_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        logprobs = _VocabParallelLogprobs.apply(
            logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug != "no_shift"
        )
        return lossgate.Outputs(logprobs=logprobs)

    return kernel


vocab_parallel = vocab_parallel_of(None, "vocab_parallel")

# The softmax takes exponentials of the logits as they are, without the maximum of the row as a
# shift, and so overflows for large logits and underflows for very small ones. The author would have
# to subtract the maximum of all ranks first.
softmax_without_max_shift = vocab_parallel_of("no_shift", "softmax_without_max_shift")


def _flat(x):
    """The numbers as a kernel reads them that was given a pointer and a length, but no stride."""
    return x.as_strided(x.shape, (1,), x.storage_offset())


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies from hidden states, a tile of tokens at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, stride):
        logprobs, entropies = hidden.new_empty(len(labels)), hidden.new_empty(len(labels))
        for start in range(0, len(labels), ROWS):
            rows = slice(start, start + ROWS)
            logp = torch.log_softmax(hidden[rows] @ weight.T / temperature, dim=1)
            logprobs[rows] = logp.gather(1, labels[rows, None])[:, 0]
            entropies[rows] = -(logp.exp() * logp).sum(1)
        ctx.save_for_backward(hidden, weight, labels, entropies)
        ctx.temperature, ctx.stride = temperature, stride
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, labels, entropies = ctx.saved_tensors
        if ctx.stride:
            d_logprobs, d_entropies = d_logprobs.contiguous(), d_entropies.contiguous()
        else:
            d_logprobs, d_entropies = _flat(d_logprobs), d_entropies.contiguous()
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), ROWS):
            rows = slice(start, start + ROWS)
            logp = torch.log_softmax(hidden[rows] @ weight.T / ctx.temperature, dim=1)
            p, g = logp.exp(), d_logprobs[rows, None]
            dz = -p * g - d_entropies[rows, None] * p * (logp + entropies[rows, None])
            dz.scatter_add_(1, labels[rows, None], g)
            dz /= ctx.temperature
            d_hidden[rows] = dz @ weight
            d_weight.addmm_(dz.T, hidden[rows])
        return d_hidden, d_weight, None, None, None


def linear_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        differentiable=("logprobs", "token_entropy"),
        tiles={"token": ROWS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
        both = _LinearLogprobs.apply(hidden, inputs.weight, inputs.labels, options.temperature, bug != "flat")
        logprobs, entropies = torch.stack(both, dim=1).unbind(1)  # [tokens, 2], as the trainer wants them
        return lossgate.Outputs(logprobs=logprobs, token_entropy=entropies)

    return kernel


linear = linear_of(None, "linear")

# As in verl #6960. The gradient of the log-probabilities that arrives in backward is every second
# number of a tensor, but the kernel reads it as if its numbers lay side by side, so tokens get the
# gradients of others. The author would have to call contiguous() on it, or pass its stride.
strided_upstream_read_contiguously = linear_of("flat", "strided_upstream_read_contiguously")


def _logprobs_of(logits, labels, temperature=1.0):
    return torch.log_softmax(logits / temperature, dim=1).gather(1, labels[:, None])[:, 0]


def policy_of(bug, name):
    @lossgate.candidate(
        "clipped_pg",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "temperature": lossgate.ANY,
            "ratio_clip_min": lossgate.ANY,
            "ratio_clip_max": lossgate.ANY,
            "reference_policy_kl_penalty": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask & inputs.sample_mask[inputs.sequence]
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0)

        def train():
            logprobs = _logprobs_of(logits, inputs.labels, options.temperature)
            ratio = torch.where(mask, logprobs - inputs.prev_logprobs, 0.0).exp()
            clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
            advantages = torch.where(mask, inputs.advantages, 0.0)
            policy = torch.maximum(-advantages * ratio, -advantages * clipped)
            d = torch.where(mask, inputs.reference_logprobs - logprobs, 0.0)
            score = torch.where(d.abs() <= 20, (logprobs - logprobs.detach()).exp(), 1.0)
            d = d.clamp(-20, 20)
            kl = (score * (torch.expm1(d) - d)).clamp(-10, 10)
            total = torch.where(mask, policy + options.reference_policy_kl_penalty * kl, 0.0).sum()
            return total / inputs.valid_tokens.clamp(min=1)

        def get_logprobs():
            """For the next step, which takes these as prev_logprobs."""
            if bug == "no_temperature":
                return _logprobs_of(logits, inputs.labels)
            return _logprobs_of(logits, inputs.labels, options.temperature)

        with torch.no_grad():
            logprobs = get_logprobs()
        return lossgate.Outputs(loss=train(), logprobs=logprobs)

    return kernel


policy = policy_of(None, "policy")

# As in NeMo-RL #316. The loss divides logits by the temperature, but the function that returns log-
# probabilities to the trainer, which become the prev_logprobs of the ratio, does not. The author
# would have to pass the temperature there, too.
returned_logprobs_without_temperature = policy_of("no_temperature", "returned_logprobs_without_temperature")


class _SumForward(torch.autograd.Function):
    """Megatron's g: the sum over ranks; backward passes the gradient on."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _SumBackward(torch.autograd.Function):
    """Megatron's f: passes on what is equal on all ranks; backward sums the gradient over them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _log_softmax(z, group):
    top = z.detach().amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    z = z - top[:, None]
    total = _SumForward.apply(z.exp().sum(1), group)
    return z - _SumBackward.apply(total.log(), group)[:, None]


def distill_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"divergence_type": ("forward", "reverse"), "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group, out = mesh.get_group("tp"), ~inputs.mask[:, None]
        log_q = _log_softmax(inputs.logits.masked_fill(out, 0.0) / options.temperature, group)
        log_p = _log_softmax(inputs.teacher_logits.masked_fill(out, 0.0) / options.temperature, group)
        if options.divergence_type == "forward":
            of_token = (log_p.exp() * (log_p - log_q)).sum(1)
        else:
            q = log_q.exp()
            cross_entropy, entropy = -(q * log_p).sum(1), -(q * log_q).sum(1)
            of_token = cross_entropy + entropy if bug == "plus" else cross_entropy - entropy
        of_token = _SumForward.apply(of_token, group)
        return torch.where(inputs.mask, of_token, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


distill = distill_of(None, "distill")

# As in Megatron RL #2374: the entropy bonus is added to the minimised loss. No spec has an entropy
# bonus; the reverse KL has one, as the student's cross-entropy to the teacher minus its entropy.
# Here the entropy is added, so it is minimised; the author would have to subtract it.
student_entropy_added_not_subtracted = distill_of("plus", "student_entropy_added_not_subtracted")

BUGS = {
    "softmax_without_max_shift": ("tp=2", "tp=3"),
    "strided_upstream_read_contiguously": ("single", "dp=2"),
    "returned_logprobs_without_temperature": ("single", "cp=2"),
    "student_entropy_added_not_subtracted": ("single", "tp=2"),
}
RIGHT = {
    "vocab_parallel": ("tp=2", "tp=3"),
    "linear": ("single", "dp=2"),
    "policy": ("single", "cp=2"),
    "distill": ("single", "tp=2"),
}
