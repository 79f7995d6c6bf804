# SPDX-License-Identifier: Apache-2.0
"""What the stages before a loss give to it: log-probabilities of the labels, entropies, ranges of
the logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dense_losses import token_entropy, token_logprobs


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Values per token, ``[tokens]`` each.

    Those that need the logits are None at heads without logits.
    """

    logprobs: Tensor
    """Log-probabilities of the labels; ``[tokens, k]`` for a spec with ``Spec.gathered_ids``. At
    heads "values" and "rewards" it holds the values and rewards themselves, ``[tokens]`` and
    ``[sequences]``."""
    entropy: Tensor | None = None
    lowest: Tensor | None = None
    """The smallest logit of each token, before the temperature."""
    highest: Tensor | None = None
    """The largest logit of each token, before the temperature."""
    unfiltered: Tensor | None = None
    """Log-probabilities of the labels without the filter; None if nothing is filtered."""


TokenStage = Callable[[Tensor, Mapping[str, Tensor], Any], TokenValues]
"""``(logits [tokens, vocab], fields of the batch, options) -> token values``: the reference of what
a loss asks of logits."""


def label_values(logits: Tensor, labels: Tensor, temperature: float) -> TokenValues:
    """Returns the log-probabilities of the labels and all else that ``TokenValues`` has."""
    return TokenValues(
        logprobs=token_logprobs(logits, labels, temperature),
        entropy=token_entropy(logits, temperature),
        **logit_range(logits),
    )


def logit_range(logits: Tensor) -> dict[str, Tensor]:
    """Returns the smallest and largest logit of each token, without gradients."""
    lowest, highest = logits.detach().aminmax(dim=-1)
    return {"lowest": lowest, "highest": highest}
