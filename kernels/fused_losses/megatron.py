# SPDX-License-Identifier: Apache-2.0
"""Makes the output layers of megatron-core's models callable like other lm-heads.

Megatron is recognised by the modules of its classes, so it is not imported.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

_RANKS = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
"""Fields of Megatron's configurations with the numbers of ranks over which a forward is split."""


class MegatronLmHead(nn.Module):
    """An lm-head that maps ``[n, H]`` to logits ``[n, vocab]`` through Megatron's output layer.

    Megatron's layer returns a pair, has only a part of the vocabulary on each rank, and has no
    weight of its own if it is tied to the embedding. ``linear_logprobs`` takes ``weight``, ``bias``
    and ``split``: ``linear_logprobs(hidden, head.weight, labels, layout="sbh", **head.split)``.

    Collectives:
        A call gathers the logits over ``tp_group``, and its backward sums the gradient of hidden.
    """

    def __init__(self, output_layer: Any, weight: nn.Parameter | None) -> None:
        """Takes Megatron's layer.

        Args:
            output_layer: a ``ColumnParallelLinear``, also with adapters.
            weight: the weight that the model passes to the layer at each call; None if the layer
                uses its own.
        """
        super().__init__()
        self.output_layer = output_layer
        self.tied = weight is not None
        self.register_parameter("weight", weight if self.tied else getattr(output_layer, "weight", None))

    @property
    def bias(self) -> Tensor | None:
        """``[rows]``, the bias of this rank's rows; None if there is none."""
        return getattr(self.output_layer, "bias", None)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks among which the vocabulary is split; None if it is whole here."""
        group = getattr(self.output_layer, "tp_group", None)
        return group if group is not None and group.size() > 1 else None

    @property
    def sequence_parallel(self) -> bool:
        """Whether this rank's hidden states are only a part of the sequence."""
        return bool(getattr(self.output_layer, "sequence_parallel", False)) and self.tp_group is not None

    @property
    def split(self) -> dict[str, Any]:
        """How tokens and vocabulary are split: arguments of ``linear_logprobs``."""
        if self.tp_group is None:  # Megatron marks whole weights as shards, too; a group of one rank tells them apart
            own = getattr(self.output_layer, "tp_group", None)
            return {} if own is None else {"tp_group": own}
        start = self.tp_group.rank() * self.output_layer.output_size_per_partition
        return {"tp_group": self.tp_group, "vocab_start": start, "sequence_parallel": self.sequence_parallel}

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes logits of the whole vocabulary.

        Raises:
            ValueError: Tokens are split, so the layer would return logits of other ranks' tokens;
                or the layer leaves it to the caller to add a bias that is split.
        """
        if self.sequence_parallel:
            raise ValueError(
                "lm_head: Megatron's output layer gathers the tokens of all ranks (sequence_parallel), so its logits "
                "are not those of hidden; use linear_logprobs(hidden, head.weight, labels, **head.split)"
            )
        given: dict[str, Any] = {"weight": self.weight} if self.tied else {}
        if self.tp_group is not None:
            given["runtime_gather_output"] = True
        logits, bias = self.output_layer(hidden, **given)
        if bias is not None and self.tp_group is not None:
            raise ValueError(
                "lm_head: Megatron's output layer returns this rank's part of its bias (skip_bias_add); use "
                "linear_logprobs(hidden, head.weight, labels, bias=head.bias, **head.split)"
            )
        return logits if bias is None else logits + bias


def is_megatron(module: nn.Module) -> bool:
    """Returns whether a module's class comes from one of the ``megatron`` packages."""
    return any(f"{one.__module__}.".startswith("megatron.") for one in type(module).__mro__)


def megatron_lm_head(model: Any, output_layer: nn.Module) -> MegatronLmHead:
    """Returns the lm-head of a Megatron model, also if it shares the embedding's weight."""
    tied = getattr(output_layer, "weight", None) is None and getattr(model, "share_embeddings_and_output_weights", 0)
    return MegatronLmHead(output_layer, model.shared_embedding_or_output_weight() if tied else None)


def ranks_of(model: nn.Module) -> int:
    """Returns the number of ranks over which a Megatron model's forward is split."""
    config = getattr(model, "config", None)
    ranks = 1
    for name in _RANKS:
        ranks *= int(getattr(config, name, None) or 1)
    return ranks
