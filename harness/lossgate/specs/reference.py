# SPDX-License-Identifier: Apache-2.0
"""Runs the dense reference of a spec, in float64, on the whole batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dense_losses import linear_logits, token_entropy, token_logprobs
from lossgate.problems.batch import Batch
from lossgate.specs import find_spec
from lossgate.specs.base import TokenValues
from lossgate.specs.outputs import grad_name


def run_reference(batch: Batch) -> dict[str, Tensor]:
    """Every output that a candidate of the problem's spec and head could have, by the names of ``execute.Result``."""
    spec, problem = find_spec(batch.problem.spec), batch.problem
    options = spec.make_options(problem.options)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in batch.leaves.items()}
    values = token_values(leaves, batch.fields["labels"], getattr(options, "temperature", 1.0))
    loss, metrics = spec.loss(values, batch.fields, options)
    outputs = {"loss": loss, "logprobs": values.logprobs, **metrics}
    roots = [outputs[name] for name in batch.cotangents]
    gradients = torch.autograd.grad(roots, list(leaves.values()), list(batch.cotangents.values()))
    return {name: tensor.detach() for name, tensor in outputs.items()} | {grad_name(n): g for n, g in zip(leaves, gradients, strict=True)}


def token_values(leaves: Mapping[str, Tensor], labels: Tensor, temperature: Any) -> TokenValues:
    """The stages from a head's inputs to the loss."""
    logits = leaves["logits"] if "logits" in leaves else linear_logits(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    return TokenValues(logprobs=token_logprobs(logits, labels, temperature), entropy=token_entropy(logits, temperature))
