# SPDX-License-Identifier: Apache-2.0
"""Spec ``z_loss``: negative log-likelihood with the z-loss of PaLM."""

import dense_losses
from lossgate.specs.declare import spec
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, option
from lossgate.specs.terms import Term, Terms
from lossgate.specs.token_values import TokenValues


class ZLossOptions(Options):
    """The options of spec ``z_loss``."""

    z_loss_weight: float = option(
        1e-4, "the weight of the squared logsumexp, 1e-4 in PaLM", choices=(1e-4, 0.0, 0.125, 1.0)
    )


@spec(
    "z_loss",
    summary="negative log-likelihood plus the squared logarithm of the softmax's normaliser",
    source="PaLM (Chowdhery et al. 2022, section 5), ST-MoE, Liger lse_square_scale",
    options=ZLossOptions,
    heads=("hidden", "logits"),
    uses=("logprobs", "logsumexp"),
    metrics={"z_loss": "the squared logsumexp, mean over trained tokens, before its weight"},
)
def z_loss(values: TokenValues, batch: Batch, options: ZLossOptions) -> Terms:
    """Negative log-likelihood with a z-loss."""
    penalty = dense_losses.z_penalty(values.logsumexp, batch.mask)
    nll, _ = dense_losses.smoothed_nll(values.logprobs, values.logprobs, batch.mask, 0.0)
    normalisers = {"trained tokens": batch.valid_tokens.clamp(min=1)}
    return Terms(
        terms={
            "nll": Term(values=nll, over="trained tokens"),
            "z": Term(values=options.z_loss_weight * penalty, over="trained tokens"),
        },
        normalisers=normalisers,
        metrics={"z_loss": penalty.detach().sum() / normalisers["trained tokens"]},
    )
