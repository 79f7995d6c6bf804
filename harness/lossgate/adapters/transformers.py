# SPDX-License-Identifier: Apache-2.0
"""The losses of transformers: of its models and its Trainer.

Not judged: `ForSequenceClassificationLoss` and `ForQuestionAnsweringLoss`, which no spec has;
`final_logit_softcapping`, which is a part of a model; `ForTokenClassification`, which has no
adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import UPCASTS, entry_of, ignoring, load, rounds, rows_of_labels
from lossgate.declaration.supports import ANY

entry = entry_of("transformers")
of_models = load("transformers", "transformers.loss.loss_utils")
smoother = load("transformers", "transformers.trainer_pt_utils", "LabelSmoother")

_SOFTMAX = rounds("logits", "logsumexp", "logprobs", "dlogits", "loss", returned="float32")


@entry("nll", "logits", **UPCASTS, axes=("dp", "cp"), untrained="nan")
def causal_lm(x, o, mesh):
    return of_models.ForCausalLMLoss(
        x.logits, None, x.logits.shape[1], shift_labels=ignoring(x), num_items_in_batch=x.valid_tokens
    )


@entry("nll", "logits", **UPCASTS, tokens="rows", counts="own", untrained="nan")
def causal_lm_of_rows(x, o, mesh):
    return of_models.ForCausalLMLoss(x.to_rows(x.logits), ignoring(x, x.input_ids), x.logits.shape[1])


@entry("nll", "logits", **UPCASTS, counts="own", untrained="nan")
def masked_lm(x, o, mesh):
    return of_models.ForMaskedLMLoss(x.logits, ignoring(x), x.logits.shape[1])


@entry(
    "label_smoothing",
    "logits",
    **_SOFTMAX,
    counts="own",
    untrained="nan",
    minus_inf="never",
    supports={"smoothing": ANY},
)
def label_smoother(x, o, mesh):
    return smoother(o.smoothing)({"logits": x.to_rows(x.logits)}, rows_of_labels(x))
