# SPDX-License-Identifier: Apache-2.0
"""Runs the dense reference of a spec in float64 on the whole batch."""

import torch
from torch import Tensor

from lossgate.problems.batch import GlobalBatch
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import LOGPROBS, LOSS, TOKEN_ENTROPY, Output, metric_output
from lossgate.specs.spec import BoundSpec


def run_reference(batch: GlobalBatch, head: str, bound: BoundSpec) -> dict[Output, Tensor]:
    """Computes the reference outputs of a batch: values, metrics and the gradient of each leaf.

    Args:
        batch: the whole batch.
        head: where the kernel starts.
        bound: the spec with options, and with the outputs that will be compared.
    """
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in batch.leaves.items()}
    values = bound.token_values(head, leaves, batch.fields)
    outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in bound.spec.outputs else {}
    if "token_entropy" in bound.spec.outputs and values.entropy is not None:
        outputs[TOKEN_ENTROPY] = values.entropy
    if bound.spec.loss is not None:
        loss, metrics = bound.loss(values, batch.fields)
        outputs |= {LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}}
    roots = [_finite(outputs[bound.spec.output(name)]) for name in batch.cotangents]
    gradients = torch.autograd.grad(roots, list(leaves.values()), list(batch.cotangents.values()))
    found = {output: tensor.detach() for output, tensor in outputs.items()}
    return found | dict(zip(HEADS[head].gradients(leaves).values(), gradients, strict=True))


def _finite(x: Tensor) -> Tensor:
    """Returns ``x`` with zeros in place of the log-probabilities of labels that a filter left out.

    They are -inf, which no gradient can move.
    """
    return torch.where(x.isfinite(), x, 0.0)
