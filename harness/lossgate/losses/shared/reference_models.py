# SPDX-License-Identifier: Apache-2.0
"""A reference model whose hidden states and lm-head weight are given, for kernels that compute its
log-probabilities themselves.

Each row of its weight has a single 1, so that its logits are entries of the hidden states, exactly,
in any dtype. What kernels round on the way to its log-probabilities is then no more than float32
arithmetic does in a softmax.
"""

import torch
from torch import Tensor

from lossgate.specs.field_context import FieldContext

_LEAST = -30.0
"""Log-probabilities are asked for from here on."""
_BELOW = 0.1
"""Nats that a label's log-probability stays below that of a label whose logit is far above all."""


def without_model(context: FieldContext) -> dict[str, Tensor]:
    """Returns hidden states and weight of no width."""
    hidden, weight = context.streams.normal("", context.tokens, 0), context.streams.normal("", context.vocab, 0)
    return {"reference_hidden": hidden, "reference_weight": weight}


def draw_model(context: FieldContext, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws a reference model.

    Args:
        context: of the problem.
        wanted: ``[T]``, log-probabilities of the labels that it should nearly give. If its hidden
            states are narrower than the vocabulary, labels share logits with others, and are less
            likely.

    Returns:
        Those that it gives, and the two fields: ``[T, width]`` and ``[vocab, width]``.
    """
    hidden = context.batch.leaves.get("hidden")
    width = 8 if hidden is None else hidden.shape[1]
    column = context.streams.integers("reference columns", width, context.vocab)
    sharing = torch.bincount(column, minlength=width).double()
    states = context.streams.normal("reference hidden", context.tokens, width)
    own = column[context.labels][:, None]
    given = _logit_of(wanted.clamp(min=_LEAST), states.scatter(1, own, -torch.inf), sharing, sharing[own.squeeze(1)])
    # If all rows share a column, its logit is theirs, whatever it is.
    states = states.scatter(1, own, torch.where(given.isfinite(), given, 0.0)[:, None])
    states = states.to(context.batch.leaf_dtype).double()
    logprobs = states.gather(1, own).squeeze(1) - (states + sharing.log()).logsumexp(1)
    weight = torch.nn.functional.one_hot(column, width).double()
    return logprobs, {"reference_hidden": states, "reference_weight": weight}


def _logit_of(wanted: Tensor, others: Tensor, sharing: Tensor, alike: Tensor) -> Tensor:
    """Returns the logit that gives a label a log-probability, ``[T]``.

    Args:
        wanted: the log-probability.
        others: ``[T, width]``, the logits of all columns, and -inf for that of the label.
        sharing: ``[width]``, how many rows have each column.
        alike: ``[T]``, how many have the label's.
    """
    wanted = torch.minimum(wanted, -alike.log() - _BELOW)
    return wanted + (others + sharing.log()).logsumexp(1) - torch.log1p(-alike * wanted.exp())
