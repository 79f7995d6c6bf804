# SPDX-License-Identifier: Apache-2.0
"""Hidden states and logits with one row for each token, from batches as models return them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

TokenLayout = Literal["bsh", "sbh"]
"""Order of the dims of a batch: "bsh" is ``[batch, sequence, hidden]``, as in transformers, and
"sbh" Megatron's ``[sequence, batch, hidden]``. Labels are ``[batch, sequence]`` in both."""


def flatten_tokens(
    hidden: Tensor, labels: Tensor, layout: TokenLayout = "bsh", ranks: int = 1, *, name: str = "hidden"
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Flattens hidden states, or logits, and labels to one row for each token.

    Tokens are in the order in which hidden states lie in memory, so ``layout="sbh"`` transposes the
    labels.

    ========  ======  ================  ======================================================
    labels    layout  hidden, one rank  hidden, with sequence parallelism
    ========  ======  ================  ======================================================
    [B, S]    "bsh"   [B, S, H]         refused if B > 1: parts of sequences would interleave
    [B, S]    "sbh"   [S, B, H]         [S / ranks, B, H]
    [T]       "bsh"   [T, H], [1, T, H] [T / ranks, H], [1, T / ranks, H]
    [T]       "sbh"   [T, H], [T, 1, H] [T / ranks, H], [T / ranks, 1, H]
    ========  ======  ================  ======================================================

    Args:
        hidden: hidden states or logits of the shapes above; the last dim is hidden or vocab.
        labels: ``[B, S]``, or ``[T]`` or ``[1, T]`` for a pack, whole on every rank.
        layout: "bsh" or "sbh".
        ranks: number of ranks over which sequence parallelism splits the tokens. Each rank has its
            part of ``hidden``, in rank order.
        name: what error messages call ``hidden``.

    Returns:
        Hidden states ``[tokens / ranks, H]``, a view if ``hidden`` is contiguous; the labels of all
        ranks, ``[tokens]``; and a function that gives ``[tokens]`` numbers, such as
        log-probabilities, the shape of the labels. ``flatten_like`` flattens other numbers that
        come with the labels, such as a mask.

    Raises:
        ValueError: A shape does not fit; the message names it, what was expected, and the way out.
    """
    check_layout(layout)
    for what, x in ((name, hidden), ("labels", labels)):
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{what} is a {type(x).__name__}: expected a tensor")
    if labels.dim() not in (1, 2):
        raise ValueError(f"labels {list(labels.shape)}: expected [B, S], or [T] or [1, T] for a pack")
    batch, length = (1, len(labels)) if labels.dim() == 1 else (labels.shape[0], labels.shape[1])
    _check(hidden, labels, _Expected(batch, length, layout, ranks), name)
    rows = hidden.flatten(0, 1) if hidden.dim() == 3 else hidden

    def restore(numbers: Tensor) -> Tensor:
        if layout == "sbh" and batch > 1:
            return numbers.reshape(length, batch).T.contiguous()
        return numbers.reshape(labels.shape)

    return rows, _flat(labels, layout), restore


def flatten_like(name: str, x: Tensor, labels: Tensor, layout: TokenLayout = "bsh") -> Tensor:
    """Flattens numbers of single tokens, such as a mask, as ``flatten_tokens`` does labels.

    Args:
        name: what error messages call ``x``.
        x: a tensor of the shape of the labels.
        labels: as ``flatten_tokens`` was given.
        layout: as ``flatten_tokens`` was given.

    Returns:
        ``[tokens]``.

    Raises:
        ValueError: ``x`` has another shape than the labels.
    """
    check_layout(layout)
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} is a {type(x).__name__}: expected a tensor {list(labels.shape)}, as labels")
    if x.shape != labels.shape:
        raise ValueError(f"{name} {list(x.shape)}: expected {list(labels.shape)}, one for each token, as labels")
    return _flat(x, layout)


def check_layout(layout: str) -> None:
    """Checks the name of a layout.

    Raises:
        ValueError: There is no such layout.
    """
    if layout not in get_args(TokenLayout):
        raise ValueError(
            f"layout {layout!r}: expected 'bsh' for [batch, sequence, hidden], or 'sbh' for Megatron's "
            "[sequence, batch, hidden]"
        )


def _flat(x: Tensor, layout: TokenLayout) -> Tensor:
    return x.T.flatten() if layout == "sbh" and x.dim() == 2 else x.flatten()


@dataclass(frozen=True)
class _Expected:
    """The shape that hidden states must have to fit the labels."""

    batch: int
    length: int
    layout: TokenLayout
    ranks: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes that fit, without the last dim."""
        own = self.length // self.ranks
        return [
            (self.batch, own) if self.layout == "bsh" else (own, self.batch),
            *([(own,)] if self.batch == 1 else []),
        ]

    def fits(self, hidden: Tensor) -> bool:
        return hidden.shape[:-1] in self.shapes

    def way_out(self, hidden: Tensor) -> str:
        """Returns advice for hidden states that do not fit, for a message."""
        other: TokenLayout = "bsh" if self.layout == "sbh" else "sbh"
        if replace(self, layout=other).fits(hidden):
            return f"pass layout={other!r} if that is its layout"
        if replace(self, ranks=1).fits(hidden):
            return "pass this rank's part alone, or no sequence parallelism"
        if hidden.dim() == 2 and self.batch > 1:
            return "flatten the labels too, in the same order of tokens"
        return "labels are [B, S] for a batch, [T] or [1, T] for a pack, and whole with sequence parallelism"


def _check(hidden: Tensor, labels: Tensor, expected: _Expected, name: str) -> None:
    given, ranks = f"{name} {list(hidden.shape)} and labels {list(labels.shape)}", expected.ranks
    if expected.length % ranks:
        raise ValueError(
            f"{given}: expected labels of all ranks, a multiple of {ranks} positions, for sequence "
            "parallelism; pad sequences, or pass the labels of all ranks"
        )
    if expected.batch > 1 and ranks > 1 and expected.layout == "bsh":
        raise ValueError(
            f"{given}: in layout 'bsh', sequence parallelism over {ranks} ranks would interleave parts of "
            f"{expected.batch} sequences; pass layout='sbh' with [{expected.length // ranks}, {expected.batch}, ...], "
            "or pack the sequences into one"
        )
    if not expected.fits(hidden):
        last = hidden.shape[-1] if hidden.dim() else 1
        shapes = " or ".join(str([*shape, last]) for shape in expected.shapes)
        part = f", a part of {ranks}" if ranks > 1 else ""
        raise ValueError(
            f"{given}: layout {expected.layout!r} expects {name} {shapes}{part}; {expected.way_out(hidden)}"
        )
