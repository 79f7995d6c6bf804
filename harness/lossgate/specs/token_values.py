# SPDX-License-Identifier: Apache-2.0
"""What a loss may ask of the logits: log-probabilities, entropies, normalisers, or the logits
themselves.
"""

from typing import Any

from torch import Tensor

from lossgate.base.errors import UsageError


class TokenValues:
    """Values per token, ``[tokens]`` each. A spec names those that it ``uses``.

    All are after the soft-cap and the temperature, where a spec has them, except the range of the
    logits, which is before the temperature. Heads without logits give ``logprobs`` alone. To read
    another one is an ``AttributeError`` that says so; ``given`` has those that are there.
    """

    logprobs: Tensor
    """Log-probabilities of the labels; of the ids ``[tokens, k]`` in the field that
    ``gathered_ids`` names, if the spec has one. At heads "values" and "rewards" it holds the values
    and rewards themselves, ``[tokens]`` and ``[sequences]``."""
    entropy: Tensor
    """Entropies, in nats."""
    logsumexp: Tensor
    """Logarithms of the softmax's normaliser."""
    mean_logprob: Tensor
    """Means of the log-probabilities over the vocabulary, as label smoothing needs them."""
    lowest: Tensor
    """The smallest logit of each token, before the temperature, without a gradient."""
    highest: Tensor
    """The largest logit of each token, before the temperature, without a gradient."""
    unfiltered: Tensor
    """Log-probabilities of the labels without the filter; only where something is filtered."""
    logits: Tensor
    """``[tokens, vocab]``: the logits, for whatever else a loss computes of them."""

    def __init__(self, **given: Tensor | None) -> None:
        for name in given:
            if name not in USES:
                raise UsageError(f"TokenValues({name}=...): expected some of {', '.join(USES)}")
        self.given = {name: value for name, value in given.items() if value is not None}

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        if name in USES:
            raise AttributeError(
                f"values.{name} is not there: either the spec does not name {name!r} in uses=, "
                "or the head has no logits (drop it from heads=, or look into values.given first)"
            )
        raise AttributeError(f"TokenValues has no {name!r}; there are {', '.join(USES)}")

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """Those that are there and have a gradient."""
        return {name: value for name, value in self.given.items() if name not in ("lowest", "highest")}

    def replace(self, **changed: Tensor) -> "TokenValues":
        """Returns the same with other values."""
        return TokenValues(**{**self.given, **changed})


USES = tuple(TokenValues.__annotations__)
"""What a spec may use."""
