# SPDX-License-Identifier: Apache-2.0
"""The entropy that a kernel returns beside log-probabilities: its logits, and its gradient."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split, tempered
from lossgate.counterfactuals.seams import entropy_of, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec


def entropies(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the entropy of each token."""
    if head not in ("hidden", "logits") or not ("entropy" in spec.uses and "token_entropy" in spec.outputs):
        return
    yield mistake(
        "entropy detached", "the entropy has no gradient", "entropy", entropy=lambda s, z, lp: entropy_of(lp).detach()
    )
    yield mistake(
        "entropy with the other sign in backward",
        "the gradient of the entropy has the other sign",
        "entropy",
        entropy=lambda s, z, lp: scaled_gradient(entropy_of(lp), -1.0),
    )
    for what, power in (("without the temperature", 1), ("with the temperature twice", -1)):
        yield mistake(
            f"entropy {what}",
            f"the entropy is that of logits {what}",
            "temperature",
            tempered,
            entropy=partial(_entropy_at, power),
        )
    for centre, instead in ((0.0, "nothing"), (1.0, "1")):
        yield mistake(
            f"entropy centred by {instead} in backward",
            f"the gradient of the entropy is -p (log p + H), with {instead} in place of H",
            "entropy",
            entropy=partial(_centred_by, centre),
        )
    yield mistake(
        "entropy of each shard in backward",
        "the gradient of the entropy has the part of it that a tp rank's own rows give, not the whole",
        "entropy",
        split("tp"),
        "sum the entropy over tp before you keep it for backward",
        entropy=_of_shards_in_backward,
    )


def _centred_by(centre: float, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    p, finite = logprobs.detach().exp(), torch.where(z.isfinite(), z, 0.0)
    centred = torch.where(p > 0, logprobs.detach() + centre, 0.0)
    return with_gradient_of(entropy_of(logprobs), -(p * centred * finite).sum(-1))


def _entropy_at(power: int, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    return entropy_of((z * setting.temperature**power).log_softmax(-1))


def _of_shards_in_backward(setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    """Gives a logit -p (log p + H of its own rows) in backward, where H should be the whole."""
    whole, p = entropy_of(logprobs), logprobs.detach().exp()
    also, finite = whole, torch.where(z.isfinite(), z, 0.0)
    for shard in setting.vocab_shards:
        rows = slice(shard.start, shard.end)
        own = entropy_of(logprobs[:, rows])
        also = also + (whole - own).detach() * (p[:, rows] * finite[:, rows]).sum(1)
    return with_gradient_of(whole, also)
