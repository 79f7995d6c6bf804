# SPDX-License-Identifier: Apache-2.0
"""The reference's logits, at the heads that have them."""

from collections.abc import Mapping

from torch import Tensor

from dense_losses import linear_logits


def reference_logits(leaves: Mapping[str, Tensor]) -> Tensor:
    """``[T, V]``, before the temperature."""
    return (
        leaves["logits"]
        if "logits" in leaves
        else linear_logits(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    )
