# SPDX-License-Identifier: Apache-2.0
"""Tests of layouts of hidden states: every one gives each token its own label."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_losses import flatten_like, flatten_tokens

B, S, H = 2, 6, 3
LABELS = torch.arange(B * S).view(B, S)
BATCH = torch.stack([LABELS * 10 + i for i in range(H)], -1).double()
"""``[B, S, H]`` hidden states that tell their label: a tenth of their first number."""
SBH = BATCH.transpose(0, 1).contiguous()
PACKED = BATCH.flatten(0, 1)
"""``[T, H]``"""
OF_PACK = LABELS.flatten()


def part(x: Tensor, rank: int, ranks: int, dim: int = 0) -> Tensor:
    return x.chunk(ranks, dim)[rank]


LAYOUTS: dict[str, tuple[Any, Tensor, Tensor, Callable[[Tensor, int, int], Tensor], bool]] = {
    "[T, H]": ("bsh", PACKED, OF_PACK, part, True),
    "[T, H], labels [1, T]": ("bsh", PACKED, OF_PACK[None], part, True),
    "[1, T, H]": ("bsh", PACKED[None], OF_PACK[None], lambda x, r, n: part(x, r, n, 1), True),
    "[1, T, H], labels [T]": ("bsh", PACKED[None], OF_PACK, lambda x, r, n: part(x, r, n, 1), True),
    "[B, S, H]": ("bsh", BATCH, LABELS, part, False),
    "[S, B, H]": ("sbh", SBH, LABELS, part, True),
    "[T, 1, H], labels [T]": ("sbh", PACKED[:, None], OF_PACK, part, True),
    "[T, 1, H], labels [1, T]": ("sbh", PACKED[:, None], OF_PACK[None], part, True),
    "[T, H] of Megatron": ("sbh", PACKED, OF_PACK, part, True),
    "[B, 1, H]": ("bsh", BATCH[:, :1], LABELS[:, :1], part, False),
    "[1, B, H] of Megatron": ("sbh", SBH[:1], LABELS[:, :1], part, False),
    "no tokens": ("bsh", BATCH[:, :0], LABELS[:, :0], part, False),
    "no tokens of Megatron": ("sbh", SBH[:0], LABELS[:, :0], part, True),
}
"""Layout, hidden states, labels, how ranks share hidden states, and whether they can."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_keeps_its_label(name: str, ranks: int) -> None:
    """Hidden states are not copied; ranks hold the tokens in the order of the labels.

    What is computed for a token returns to the place of its label, and a mask goes with the labels.
    """
    layout, hidden, labels, share, shared = LAYOUTS[name]
    if ranks > 1 and not shared:
        return
    rows = list[Tensor]()
    for rank in range(ranks):
        own = share(hidden, rank, ranks) if ranks > 1 else hidden
        own_rows, flat, restore = flatten_tokens(own, labels, layout, ranks)
        assert own_rows.shape == (len(flat) // ranks, H)
        assert own_rows.data_ptr() == own.data_ptr() or not own.is_contiguous() or not own.numel()
        rows.append(own_rows)
        assert torch.equal(restore(flat), labels)
        assert restore(flat.clone()).is_contiguous()  # so that users can view it in other ways
        assert torch.equal(flatten_like("mask", labels % 2 == 0, labels, layout), flat % 2 == 0)
    assert torch.equal(torch.cat(rows)[:, 0], flat * 10.0)


@pytest.mark.parametrize("layout", ["bsh", "sbh"])
def test_gradients_return_to_their_tokens(layout: Any) -> None:
    hidden = (BATCH if layout == "bsh" else SBH).clone().requires_grad_()
    rows, labels, restore = flatten_tokens(hidden, LABELS, layout)
    weights = torch.arange(B * S).view(B, S).double() + 1
    (restore(rows[:, 0] * labels) * weights).sum().backward()
    assert hidden.grad is not None
    found = hidden.grad[..., 0] if layout == "bsh" else hidden.grad[..., 0].T
    assert torch.equal(found, LABELS * weights)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Megatron's layout, not named": (
        lambda: flatten_tokens(ones(6, 2, 3), LABELS),
        "hidden [6, 2, 3] and labels [2, 6]: layout 'bsh' expects hidden [2, 6, 3]; pass layout='sbh' if that is its",
    ),
    "Megatron's pack, not named": (
        lambda: flatten_tokens(ones(12, 1, 3), OF_PACK),
        "layout 'bsh' expects hidden [1, 12, 3] or [12, 3]; pass layout='sbh' if that is its layout",
    ),
    "a batch, named Megatron's": (
        lambda: flatten_tokens(ones(2, 6, 3), LABELS, "sbh"),
        "layout 'sbh' expects hidden [6, 2, 3]; pass layout='bsh' if that is its layout",
    ),
    "logits": (
        lambda: flatten_tokens(ones(6, 2, 99), LABELS, name="logits"),
        "logits [6, 2, 99] and labels [2, 6]: layout 'bsh' expects logits [2, 6, 99]; pass layout='sbh'",
    ),
    "flat hidden states of a batch": (
        lambda: flatten_tokens(ones(12, 3), LABELS),
        "layout 'bsh' expects hidden [2, 6, 3]; flatten the labels too, in the same order of tokens",
    ),
    "flat labels of a batch": (
        lambda: flatten_tokens(ones(2, 6, 3), OF_PACK),
        "layout 'bsh' expects hidden [1, 12, 3] or [12, 3]; labels are [B, S] for a batch",
    ),
    "a part of a batch": (
        lambda: flatten_tokens(ones(2, 3, 3), LABELS, ranks=2),
        "sequence parallelism over 2 ranks would interleave parts of 2 sequences; pass layout='sbh' with [3, 2, ...]",
    ),
    "all tokens with sequence parallelism": (
        lambda: flatten_tokens(ones(6, 2, 3), LABELS, "sbh", 2),
        "layout 'sbh' expects hidden [3, 2, 3], a part of 2; pass this rank's part alone, or no sequence parallelism",
    ),
    "a part without sequence parallelism": (
        lambda: flatten_tokens(ones(3, 2, 3), LABELS, "sbh"),
        "[6, 2, 3]; labels are [B, S] for a batch, [T] or [1, T] for a pack, and whole with sequence parallelism",
    ),
    "tokens that ranks cannot share": (
        lambda: flatten_tokens(ones(3, 3), OF_PACK, ranks=5),
        "hidden [3, 3] and labels [12]: expected labels of all ranks, a multiple of 5 positions",
    ),
    "no hidden dim": (lambda: flatten_tokens(ones(12), OF_PACK), "layout 'bsh' expects hidden [1, 12, 12] or"),
    "a number": (lambda: flatten_tokens(ones(), OF_PACK), "hidden [] and labels [12]: layout 'bsh' expects hidden"),
    "labels with three dims": (
        lambda: flatten_tokens(ones(2, 6, 3), LABELS[None]),
        "labels [1, 2, 6]: expected [B, S], or [T] or [1, T] for a pack",
    ),
    "an unknown layout": (
        lambda: flatten_tokens(BATCH, LABELS, "thd"),  # type: ignore[arg-type]
        "layout 'thd': expected 'bsh' for [batch, sequence, hidden], or 'sbh' for Megatron's",
    ),
    "an unknown layout of a mask": (
        lambda: flatten_like("mask", LABELS, LABELS, "thd"),  # type: ignore[arg-type]
        "layout 'thd': expected 'bsh'",
    ),
    "a mask of another shape": (
        lambda: flatten_like("mask", LABELS.T, LABELS, "sbh"),
        "mask [6, 2]: expected [2, 6], one for each token, as labels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_way_out(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
