# SPDX-License-Identifier: Apache-2.0
"""Runs the dense reference of a spec, in float64, on the whole batch."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dense_losses import filtered_token_entropy, filtered_token_logprobs, token_entropy, token_logprobs
from lossgate.losses import find_spec
from lossgate.problems.batch import Batch
from lossgate.specs.logits import reference_logits
from lossgate.specs.outputs import grad_name
from lossgate.specs.spec import Spec, TokenValues


def run_reference(batch: Batch, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """Every output that a candidate of the problem's spec and head could have, or those ``wanted``, by the names of ``execute.Result``."""
    spec, problem = find_spec(batch.problem.spec), batch.problem
    options = spec.make_options(problem.options)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in batch.leaves.items()}
    values = token_values(batch, spec, options, leaves)
    outputs: dict[str, Tensor] = {"logprobs": values.logprobs} if "logprobs" in spec.outputs else {}
    if "token_entropy" in spec.outputs and values.entropy is not None:
        outputs["token_entropy"] = values.entropy
    if spec.loss is not None:
        loss, metrics = spec.run(values, batch.fields, options, wanted)
        outputs |= {"loss": loss, **metrics}
    roots = [_finite(outputs[name]) for name in batch.cotangents]
    gradients = torch.autograd.grad(roots, list(leaves.values()), list(batch.cotangents.values()))
    return {name: tensor.detach() for name, tensor in outputs.items()} | {
        grad_name(n): g for n, g in zip(leaves, gradients, strict=True)
    }


def _finite(x: Tensor) -> Tensor:
    """Without the log-probabilities of labels that a filter left out: -inf, which no gradient can move."""
    return torch.where(x.isfinite(), x, 0.0)


def token_values(batch: Batch, spec: Spec, options: Any, leaves: Mapping[str, Tensor] | None = None) -> TokenValues:
    """The stages from a head's inputs to the loss."""
    leaves = batch.leaves if leaves is None else leaves
    if "hidden" not in leaves and "logits" not in leaves:
        return TokenValues(logprobs=next(iter(leaves.values())), entropy=None)
    logits = reference_logits(leaves)
    temperature = getattr(options, "temperature", 1.0)
    lowest, highest = logits.detach().aminmax(dim=-1)
    if spec.kept is not None:
        given = (temperature, options.top_k, options.top_p)
        logprobs, entropy = (
            filtered_token_logprobs(logits, batch.fields["labels"], *given),
            filtered_token_entropy(logits, *given),
        )
        return TokenValues(logprobs=logprobs, entropy=entropy, lowest=lowest, highest=highest)
    if spec.columns is not None and spec.columns in batch.fields:
        columns = batch.fields[spec.columns]
        logprobs = torch.stack([token_logprobs(logits, ids, temperature) for ids in columns.unbind(1)], 1)
    else:
        logprobs = token_logprobs(logits, batch.fields["labels"], temperature)
    return TokenValues(logprobs=logprobs, entropy=token_entropy(logits, temperature), lowest=lowest, highest=highest)
