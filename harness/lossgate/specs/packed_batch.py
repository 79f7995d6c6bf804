# SPDX-License-Identifier: Apache-2.0
"""The inputs of a kernel on each rank: its shards of one packed batch, and counts of the whole
batch.

The inputs of a spec at a head are the fields of its batch class and the leaves of the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.record import Field, Record, built_in_field, fields_of


class Batch(Record):
    """A packed batch, common to every spec and head.

    A rank holds its own tokens, padding included. Labels and mask are shifted on the full sequence
    before it is split: position t's label is token t + 1. The raw ids are there for kernels that
    shift themselves.

    A candidate with ``tokens="rows"`` or ``"packed"`` gets whole sequences for each field that is
    ``[token, ...]`` here, as a framework has them before it shifts and splits. With "rows" the
    shape is ``[B, S, ...]``: a row for each sequence of its dp rank, of any width. With "packed" it
    is ``[1, padded T, ...]``: the padded pack of its dp rank. A value that belongs to the
    prediction of a token is then at that token, one entry later. So labels are the ids themselves,
    and advantages and log-probabilities of other policies have no value at the first token. The
    first entry of such a field, even of the mask, may hold anything. So may padding, except that
    masks are false there. Hidden states, logits and other differentiable inputs stay those of this
    rank: its tokens after padding and split.

    A reference gets the same fields for the whole batch, on one rank, without padding and in
    float64.
    """

    labels: Tensor = built_in_field(
        "token",
        "ids in the whole vocabulary. Where mask is false they mean nothing, but are valid ids",
        dtype="int64",
    )
    mask: Tensor = built_in_field(
        "token",
        "the label is trained. Never true for the last token of a sequence, nor for padding",
        dtype="bool",
    )
    input_ids: Tensor = built_in_field("token", "the tokens themselves", dtype="int64", unshifted=True)
    sequence: Tensor = built_in_field(
        "token", "the number of each token's sequence, among those of this dp rank", dtype="int64"
    )
    cu_seqlens: Tensor = built_in_field(
        "sequences+1",
        "where the sequences of this dp rank would start if they were laid end to end without padding",
        dtype="int32",
    )
    cu_seqlens_padded: Tensor = built_in_field(
        "sequences+1",
        "where the sequences start in this dp rank's padded pack, before cp splits it",
        dtype="int32",
    )
    valid_tokens: Tensor = built_in_field(
        "",
        "trained tokens of the whole batch, over every rank. The normaliser of a token mean; may be 0",
        dtype="int64",
    )
    vocab_size: int = built_in_field(
        "", "rows of the whole vocabulary, over every tp rank, without padding rows", dtype="int"
    )
    vocab_start: int = built_in_field("", "first row of the vocabulary that this rank owns", dtype="int")
    vocab_end: int = built_in_field(
        "",
        "one past the last row that this rank owns. Rows beyond vocab_end - vocab_start of the local weight or logits "
        "are padding, and take no part in the softmax",
        dtype="int",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_fields(cls)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Returns an object with these fields. Fields that are not computed yet may be missing."""
        made = object.__new__(cls)
        vars(made).update(fields)
        return made

    if not TYPE_CHECKING:  # else type checkers would take any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # Python itself asks
                raise AttributeError(name)
            known = vars(self)
            same = [own for own, one in fields_of(type(self)).items() if name in one.elsewhere]
            hint = f"here it is {same[0]!r}" if same else ""
            raise AttributeError(f"{type(self).__name__} has no {name!r}; {nearest(name, known, hint)}")

    @property
    def lengths(self) -> Tensor:
        """``[sequences]`` int32: tokens of each sequence of this dp rank, without padding."""
        return self.cu_seqlens.diff()

    @property
    def sequences(self) -> int:
        """The number of this dp rank's sequences."""
        return len(self.cu_seqlens) - 1

    def to_rows(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Lays tokens out in a row for each sequence, padded on the right, as in most frameworks:
        ``inputs.to_rows(inputs.hidden)``. Gradients flow through.

        Args:
            tensor: ``[T, ...]``, of the tokens of this rank; not on layouts with cp, where a rank
                holds a part of each sequence.
            fill: the value of padding, such as False for masks, or -100 for labels to ignore.

        Returns:
            ``[B, S, ...]``: B sequences of this dp rank, S tokens of the longest, at least 1. With
            ``tokens="rows"``, S is that of ``input_ids``.

        Raises:
            UsageError: if the tensor does not have this rank's tokens, or cp splits them.
        """
        return self._rows.lay(tensor, fill)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undoes ``to_rows``, for log-probabilities that a framework returns. Gradients flow
        through.

        Args:
            rows: ``[B, S, ...]``. S may differ from that of ``to_rows``. It is at least one less
                than the tokens of the longest sequence, because its last token predicts nothing.

        Returns:
            ``[T, ...]``, as the kernel returns them; 0 at padding.

        Raises:
            UsageError: if there are not as many rows as sequences, or they are too narrow.
        """
        return self._rows.pack(rows)

    def per_sequence(self, tensor: Tensor) -> Tensor:
        """Returns for each sequence the number that all its trained tokens share:
        ``inputs.per_sequence(inputs.advantages)``. See scenario ``advantages_per``.

        Args:
            tensor: in the shape of ``mask``; not on layouts with cp.

        Returns:
            ``[B]``; 0 for a sequence of which nothing is trained.

        Raises:
            UsageError: if the trained tokens of a sequence have different numbers, or cp splits
                them.
        """
        return self._rows.of_trained(tensor, self.mask)

    @property
    def _rows(self) -> "PaddedRows":
        return PaddedRows.of(self.cu_seqlens, self.cu_seqlens_padded, self.input_ids)


def _check_fields(batch: type[Batch]) -> None:
    """Checks the fields that a class adds to ``Batch``.

    Raises:
        UsageError: if a field is not declared with ``lossgate.field``, or has a name that every
            batch has already. But a field of ``Batch`` may be declared again with another meaning,
            and ``valid_tokens`` with another count.
    """
    declared, common = fields_of(batch), fields_of(Batch)
    for f in dataclass_fields(batch):
        if f.name not in declared:
            raise UsageError(
                f"{batch.__name__}.{f.name} does not say what it holds; write "
                f"{f.name}: Tensor = lossgate.field('token', 'what it is', ...)"
            )
    annotated = vars(batch).get("__annotations__", {})
    overridden = [name for name in _OWN if name in vars(batch)]
    for name in (*annotated, *overridden):
        if name in common and _only_means_otherwise(name, declared[name]):
            continue
        if name in common or name in _OWN:
            way_out = "only its count= may differ" if name == "valid_tokens" else "give it another name"
            raise UsageError(f"{batch.__name__}.{name}: every batch has {name!r} already; {way_out}")


_OWN = ("of", "lengths", "sequences", "to_rows", "from_rows", "per_sequence", "logit_filter")
"""Names of every batch that are not fields. It has the last one only if options filter."""


def _only_means_otherwise(name: str, own: Field) -> bool:
    """Returns whether a field differs from that of ``Batch`` only in its meaning, in ``unshifted``,
    or in the count of ``valid_tokens``.
    """
    common = fields_of(Batch)[name]
    count = own.count if name == "valid_tokens" else None
    return own == replace(common, meaning=own.meaning, unshifted=own.unshifted, count=count)


@dataclass(frozen=True)
class PaddedRows:
    """Lays the tokens of a rank's padded pack out in rows, and back.

    Gradients flow through both ways.
    """

    starts: Tensor
    """``[B]`` int64: where each sequence starts in the padded pack."""
    lengths: Tensor
    """``[B]`` int64: its tokens, without padding."""
    tokens: int
    """Length of the padded pack."""
    width: int
    """Columns of the rows, S."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, input_ids: Tensor) -> "PaddedRows":
        """Returns rows as wide as the longest sequence, or as those that the batch has already."""
        starts, lengths = cu_seqlens_padded.long(), cu_seqlens.long().diff()
        given_rows = input_ids.dim() == 2 and len(input_ids) == len(lengths)
        width = input_ids.shape[1] if given_rows else max([1, *lengths.tolist()])
        return cls(starts[:-1], lengths, int(starts[-1]), width)

    def lay(self, tensor: Tensor, fill: float) -> Tensor:
        """Lays ``[T, ...]`` out as ``[B, S, ...]``.

        Raises:
            UsageError: if the tensor does not have the tokens of the padded pack.
        """
        if not tensor.dim() or len(tensor) != self.tokens:
            raise UsageError(
                f"to_rows(a tensor of shape {list(tensor.shape)}): expected [{self.tokens}, ...], the tokens of this "
                f"dp rank's padded pack; {_CP}"
            )
        in_rows, in_pack = self._places(tensor.device, self.width)
        rows = tensor.new_full((len(self.lengths) * self.width, *tensor.shape[1:]), fill)
        rows = rows.index_copy(0, in_rows, tensor.index_select(0, in_pack))
        return rows.unflatten(0, (len(self.lengths), self.width))

    def pack(self, rows: Tensor) -> Tensor:
        """Undoes ``lay``: returns ``[T, ...]``, 0 at padding.

        Raises:
            UsageError: if there are not as many rows as sequences, or they are too narrow.
        """
        sequences, needed = len(self.lengths), max([1, *self.lengths.tolist()]) - 1
        if rows.dim() < 2 or len(rows) != sequences or rows.shape[1] < needed:
            raise UsageError(
                f"from_rows(a tensor of shape {list(rows.shape)}): expected [{sequences}, S, ...], a row for each "
                f"sequence of this dp rank; S is at least {needed}: the tokens of the longest sequence, less one"
            )
        in_rows, in_pack = self._places(rows.device, rows.shape[1])
        pack = rows.new_zeros((self.tokens, *rows.shape[2:]))
        return pack.index_copy(0, in_pack, rows.flatten(0, 1).index_select(0, in_rows))

    def of_trained(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """Returns ``[B]``: the number that all trained tokens of a sequence share; 0 if no token is
        trained.

        Args:
            tensor: ``[T]`` of shards; or whole sequences, ``[B, S]`` or ``[1, T]``, where the
                number of a prediction is at the token that is predicted, and the first has none.
            mask: the trained tokens, in the same shape.

        Raises:
            UsageError: if the trained tokens of a sequence have different numbers.
        """
        if tensor.shape != mask.shape:
            raise UsageError(
                f"per_sequence(a tensor of shape {list(tensor.shape)}): expected a number for each token, in the "
                f"shape of mask, {list(mask.shape)}"
            )
        numbers, trained = self._predicted(tensor), self._predicted(mask)
        first = trained.int().argmax(1, keepdim=True)
        found = torch.where(trained.any(1), numbers.gather(1, first).squeeze(1), 0)
        if bool((trained & (numbers != found[:, None])).any()):
            raise UsageError(
                f"per_sequence(a tensor of shape {list(tensor.shape)}): the trained tokens of a sequence have "
                "different numbers. If they are advantages, declare in supports that they never differ by token: "
                "{'advantages_per': lossgate.Excluded('token', because='...')}"
            )
        return found

    def _predicted(self, tensor: Tensor) -> Tensor:
        """Returns rows ``[B, S]`` with the number of each prediction; 0 where nothing is predicted.

        Each number is at the token that predicts, as in shards.
        """
        if tensor.dim() == 1:
            return self.lay(tensor, 0)
        given_rows = tensor.shape == (len(self.lengths), self.width)
        rows = (tensor if given_rows else self.lay(tensor[0], 0)).roll(-1, 1)
        there = torch.arange(self.width, device=rows.device) < self.lengths.to(rows.device)[:, None] - 1
        return torch.where(there, rows, 0)

    def _places(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Returns the places of all real tokens in rows that are laid end to end, and in the padded
        pack. If rows are narrower than a sequence, its last tokens are left out.
        """
        columns = torch.arange(width, device=self.lengths.device)
        sequence, column = (columns < self.lengths[:, None]).nonzero(as_tuple=True)
        return (sequence * width + column).to(device), (self.starts[sequence] + column).to(device)


_CP = "a rank of a layout with cp holds a part of each sequence, so leave cp out of axes, or gather the tokens first"
