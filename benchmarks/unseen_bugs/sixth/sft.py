# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, as trainers write it: micro-batches, tiles of tokens, and averages over
ranks.
"""

import torch
import torch.nn.functional as F

import lossgate

STEPS = 2  # gradient accumulation steps
MICRO = 8  # tokens in a micro-batch
SHARDS = 4  # parts in which the tiled loss goes over the tokens


def accumulated_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        targets = inputs.labels.masked_fill(~inputs.mask, -100)
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        num_items = inputs.valid_tokens.clamp(min=1)
        total = logits.new_zeros(())
        for part, labels in zip(logits.tensor_split(STEPS), targets.tensor_split(STEPS), strict=True):
            loss = F.cross_entropy(part, labels, ignore_index=-100, reduction="sum") / num_items
            if bug == "divided_twice":
                loss = loss / STEPS
            total = total + loss
        return total

    return kernel


accumulated = accumulated_of(None, "accumulated")

# As in unsloth-zoo #1023. The loss of each accumulation step is divided by the number of trained
# tokens of the whole batch, and then once more by the number of accumulation steps. The author
# would have to drop the second division, since num_items counts the tokens of all steps already.
num_items_then_accumulation_steps = accumulated_of("divided_twice", "num_items_then_accumulation_steps")


class _MicroBatchedZLoss(torch.autograd.Function):
    """Goes over the tokens in micro-batches, and computes the gradients on the way.

    The loss of a micro-batch is scaled up by their number, as by a trainer that averages over them.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, mask, count, z_weight, summed):
        n = max(1, -(-len(labels) // MICRO))
        loss = hidden.new_zeros(())
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(labels), MICRO):
            rows = slice(start, start + MICRO)
            x = hidden[rows].masked_fill(~mask[rows, None], 0.0)
            z = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
            lse = z.logsumexp(1)
            scale = mask[rows] * (n / count)
            of_token = lse - z.gather(1, labels[rows, None])[:, 0] + z_weight * lse * lse
            loss += (of_token * scale).sum() / n
            dz = (z - lse[:, None]).exp() * (1 + 2 * z_weight * lse)[:, None]
            dz[torch.arange(len(dz)), labels[rows]] -= 1
            dz *= scale[:, None]
            if not summed:
                dz /= n
            d_hidden[rows] = dz @ weight
            d_weight.addmm_(dz.T, x)
            if d_bias is not None:
                d_bias += dz.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None if d_bias is None else grad * d_bias, *[None] * 5


def micro_batched_of(bug, name):
    @lossgate.candidate(
        "z_loss",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"z_loss_weight": lossgate.ANY, "bias": lossgate.ANY},
        tiles={"token": MICRO},
        precision=lossgate.Precision(grads_in_forward=True),
        name=name,
    )
    def kernel(inputs, options, mesh):
        return _MicroBatchedZLoss.apply(
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            inputs.labels,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.z_loss_weight,
            bug == "summed",
        )

    return kernel


micro_batched = micro_batched_of(None, "micro_batched")

# As in NeMo-RL #86. The loss is the mean over micro-batches, but the gradients of the micro-batches
# are added up without a division, so they are too large by the number of micro-batches. The author
# would have to divide the gradient of each micro-batch by their number, as the loss is.
microbatch_gradients_not_averaged = micro_batched_of("summed", "microbatch_gradients_not_averaged")


def _part_loss(hidden, weight, labels, temperature):
    """The mean over the trained tokens of a part, 0 if there are none."""
    total = F.cross_entropy(hidden @ weight.T / temperature, labels, ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


class _TiledNll(torch.autograd.Function):
    """Computes the loss part by part, and recomputes each part in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, count, temperature, equal):
        total = hidden.new_zeros(())
        for x, y in zip(hidden.tensor_split(SHARDS), labels.tensor_split(SHARDS), strict=True):
            total += _part_loss(x, weight, y, temperature) * (y != -100).sum()
        ctx.save_for_backward(hidden, weight, labels, count)
        ctx.temperature, ctx.equal = temperature, equal
        return total / count

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels, count = ctx.saved_tensors
        d_hidden, d_weight = [], torch.zeros_like(weight)
        for x, y in zip(hidden.tensor_split(SHARDS), labels.tensor_split(SHARDS), strict=True):
            share = 1 / SHARDS if ctx.equal else (y != -100).sum() / count
            with torch.enable_grad():
                x, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = _part_loss(x, w, y, ctx.temperature)
            dx, dw = torch.autograd.grad(loss, (x, w), grad * share)
            d_hidden.append(dx)
            d_weight += dw
        return torch.cat(d_hidden), d_weight, None, None, None, None


def tiled_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp",),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
        labels = inputs.labels.masked_fill(~inputs.mask, -100)
        count = inputs.valid_tokens.clamp(min=1)
        return _TiledNll.apply(hidden, inputs.weight, labels, count, options.temperature, bug == "equal")

    return kernel


tiled = tiled_of(None, "tiled")

# As in DeepSpeed #8587. Forward weights the mean of each tile by its trained tokens, but backward
# gives every tile the same share, one over the number of tiles, so the loss is right and the
# gradients are not. The author would have to give a tile in backward its trained tokens over those
# of the batch.
backward_weighs_tiles_equally = tiled_of("equal", "backward_weighs_tiles_equally")


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


AVERAGE = {"dp": "avg", "cp": "avg"}


def averaged_of(bug, name):
    @lossgate.candidate(
        "label_smoothing",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"smoothing": lossgate.ANY},
        contract=lossgate.Contract(grads={"hidden": AVERAGE, "weight": AVERAGE, "bias": AVERAGE}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        # The optimizer averages gradients over all ranks that share the parameters.
        ranks = mesh["dp"].size()
        if bug != "dp_only":
            ranks *= mesh["cp"].size()
        hidden, weight = _ScaleGradient.apply(inputs.hidden, ranks), _ScaleGradient.apply(inputs.weight, ranks)
        total = hidden.new_zeros(())
        for x, labels, mask in zip(
            hidden.split(MICRO), inputs.labels.split(MICRO), inputs.mask.split(MICRO), strict=True
        ):
            logits = x.masked_fill(~mask[:, None], 0.0) @ weight.T
            target = logits.gather(1, labels[:, None])[:, 0]
            mean = logits.mean(1)
            loss = logits.logsumexp(1) - (1 - options.smoothing) * target - options.smoothing * mean
            total = total + torch.where(mask, loss, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


averaged = averaged_of(None, "averaged")

# As in tmax #9. Gradients are averaged over all ranks, those of sequence parallelism (here cp) too,
# but the multiplier that undoes the average is the number of data-parallel ranks alone, so
# gradients are too small by the number of cp ranks. The author would have to multiply by dp times
# cp.
gradient_multiplier_lacks_cp = averaged_of("dp_only", "gradient_multiplier_lacks_cp")

BUGS = {
    "num_items_then_accumulation_steps": ("single", "dp=2"),
    "microbatch_gradients_not_averaged": ("single", "cp=2"),
    "backward_weighs_tiles_equally": ("single",),
    "gradient_multiplier_lacks_cp": ("cp=2", "dp=2,cp=2"),
}
RIGHT = {
    "accumulated": ("single", "dp=2"),
    "micro_batched": ("single", "cp=2"),
    "tiled": ("single",),
    "averaged": ("cp=2", "dp=2,cp=2"),
}
