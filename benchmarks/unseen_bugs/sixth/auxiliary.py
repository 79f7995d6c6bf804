# SPDX-License-Identifier: Apache-2.0
"""NLL with an auxiliary z-loss whose gradient is attached as Megatron-LM attaches that of its
routers.
"""

import torch
import torch.distributed as dist

import lossgate


class AttachAuxiliary(torch.autograd.Function):
    """Returns the loss as it is; backward starts the auxiliary loss as well, with a scale of its
    own.
    """

    @staticmethod
    def forward(ctx, loss, auxiliary, scale):
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream, upstream * ctx.scale, None


class LogSumExp(torch.autograd.Function):
    """The logarithm of the normaliser, of logits whose vocabulary is split over a group."""

    @staticmethod
    def forward(ctx, z, group):
        top = z.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = (z - top[:, None]).exp().sum(1)
        dist.all_reduce(total, group=group)
        lse = total.log() + top
        ctx.save_for_backward(z, lse)
        return lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        z, lse = ctx.saved_tensors
        return (z - lse[:, None]).exp() * upstream[:, None], None


class FromOwner(torch.autograd.Function):
    """Sums over a group what one rank has and the others have as 0."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def per_token_of(bug, name):
    @lossgate.candidate(
        "z_loss",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"z_loss_weight": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group = mesh.get_group("tp")
        columns = inputs.vocab_end - inputs.vocab_start
        z = inputs.logits[:, :columns].masked_fill(~inputs.mask[:, None], 0.0)
        local = inputs.labels - inputs.vocab_start
        owned = (local >= 0) & (local < columns)
        label = torch.where(owned, z.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0], 0.0)
        lse = LogSumExp.apply(z, group)
        nll = torch.where(inputs.mask, lse - FromOwner.apply(label, group), 0.0).sum()
        tokens = inputs.valid_tokens.clamp(min=1)
        auxiliary = options.z_loss_weight * torch.where(inputs.mask, lse, 0.0).square().sum() / tokens
        # The loss is a sum over tokens here, and is divided by their number at the very end.
        total = AttachAuxiliary.apply(nll, auxiliary, 1.0 if bug == "tokens" else tokens)
        return total / tokens + auxiliary.detach()

    return kernel


def finish(loss, num_tokens=0):
    """Normalises what a loss function returns: a sum with its number of tokens, or else a mean."""
    return loss / num_tokens if num_tokens else loss


def arity_of(bug, name):
    @lossgate.candidate(
        "z_loss",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"z_loss_weight": lossgate.ANY, "bias": lossgate.ANY},
        tiles={"token": 8},
        name=name,
    )
    def kernel(inputs, options, mesh):
        nll = squares = 0.0
        for part in torch.arange(len(inputs.labels)).split(8) if len(inputs.labels) else [slice(0, 0)]:
            mask = inputs.mask[part]
            z = inputs.hidden[part].masked_fill(~mask[:, None], 0.0) @ inputs.weight.T
            z = z if inputs.bias is None else z + inputs.bias
            lse = z.logsumexp(1)
            nll = nll + torch.where(mask, lse - z.gather(1, inputs.labels[part][:, None])[:, 0], 0.0).sum()
            squares = squares + torch.where(mask, lse, 0.0).square().sum()
        tokens = int(inputs.valid_tokens.clamp(min=1))
        auxiliary = options.z_loss_weight * squares
        if mesh["cp"].size() > 1:  # context parallelism asks for losses per token: sums, divided in the end
            returned = (nll / tokens,) if bug == "arity" else (nll, tokens)
            auxiliary_scale = 1.0
        else:
            returned = (nll / tokens,)
            auxiliary_scale = 1.0 / tokens
        attached = AttachAuxiliary.apply(returned[0], auxiliary, auxiliary_scale)
        return finish(attached, *returned[1:]) + auxiliary.detach() / tokens

    return kernel


per_token = per_token_of(None, "per_token")
arity = arity_of(None, "arity")

# The loss is a sum over tokens that is divided by their number at the end, which divides the
# gradient of the auxiliary loss, a mean already, once more; its value is right. Its author would
# have to multiply the auxiliary loss by the number of tokens. (Megatron's is the load-balancing
# loss of a router; here it is the z-loss.)
auxiliary_not_times_tokens = per_token_of("tokens", "auxiliary_not_times_tokens")

# Under cp the auxiliary loss is a sum over tokens, to be divided by the number that the loss
# function returns, but that returns a mean without a number, so that nothing divides the auxiliary
# gradient; values are right. Its author would have to return the sum and the number of tokens.
auxiliary_undivided_under_cp = arity_of("arity", "auxiliary_undivided_under_cp")

BUGS = {
    "auxiliary_not_times_tokens": ("single", "dp=2"),
    "auxiliary_undivided_under_cp": ("cp=2", "dp=2,cp=2"),
}
RIGHT = {
    "per_token": ("single", "dp=2"),
    "arity": ("cp=2", "dp=2,cp=2"),
}
