# SPDX-License-Identifier: Apache-2.0
"""The clipped loss of a critic, with its metrics."""

import torch

import lossgate


def critic(bug, name):
    @lossgate.candidate(
        "value",
        head="values",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"cliprange": lossgate.ANY, "scale": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        mask = inputs.mask
        values = torch.where(mask, inputs.values, 0.0)
        old = torch.where(mask, inputs.old_values, 0.0)
        returns = torch.where(mask, inputs.returns, 0.0)
        errors = (values - returns).square()
        if options.cliprange is not None:
            clipped = torch.maximum(torch.minimum(values, old + options.cliprange), old - options.cliprange)
            errors = torch.maximum(errors, (clipped - returns).square())
        count = inputs.valid_tokens.clamp(min=1)
        loss = 0.5 * options.scale * torch.where(mask, errors, 0.0).sum() / count

        kept = values.detach()
        if bug == "mean_of_means":
            mean = kept.sum() / mask.sum().clamp(min=1) / (mesh["dp"].size() * mesh["cp"].size())
        else:
            mean = kept.sum() / count
        smallest = kept if bug == "minimum_with_masked" else torch.where(mask, kept, torch.inf)
        smallest = smallest.min() if len(smallest) else kept.new_tensor(torch.inf)
        return lossgate.Outputs(loss=loss, metrics={"values_mean": mean, "values_min": smallest})

    return kernel


critic_right = critic(None, "critic_right")

# The mean of the values is taken on each rank, and averaged over ranks.
mean_of_means = critic("mean_of_means", "mean_of_means")

# Masked tokens, which were set to 0, take part in the smallest value.
minimum_with_masked = critic("minimum_with_masked", "minimum_with_masked")

BUGS = {"mean_of_means": ("dp=2",), "minimum_with_masked": ("single",)}
RIGHT = ("critic_right",)
