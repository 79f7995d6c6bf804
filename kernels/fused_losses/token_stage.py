# SPDX-License-Identifier: Apache-2.0
"""From logits to numbers for each token, and back, for kernels that hold few logits at a time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import check_flags, check_integer, values_are_checked
from fused_losses.filtering import LogitFilter
from fused_losses.numerics import float16_unit
from fused_losses.operators import Form, group_of, name_of
from fused_losses.softmax import TokenLogprobs, TokenSoftmax, add_at_labels_

IGNORED = -(2**62)
"""The label of tokens to ignore, once labels are counted from a rank's first row."""


def own_labels(labels: Tensor, ignore_index: int, vocab_start: int) -> Tensor:
    """Counts labels from this rank's first row; ``ignore_index`` becomes ``IGNORED``."""
    check_integer("ignore_index", ignore_index, least=IGNORED)
    return torch.where(labels == ignore_index, IGNORED, labels.long() - vocab_start)


@dataclass(frozen=True)
class TokenStage:
    """What to compute of the logits of each token."""

    temperature: float
    entropy: bool
    logit_range: bool
    filter: LogitFilter
    unfiltered: bool
    """Whether log-probabilities without the filter are wanted too."""
    group: dist.ProcessGroup | None
    """The ranks among which the vocabulary is split."""

    def __post_init__(self) -> None:
        check_flags(entropy=self.entropy, logit_range=self.logit_range, unfiltered=self.unfiltered)

    OPTIONS = "float temperature, bool entropy, bool range, SymInt? top_k, float top_p, bool unfiltered, str? group"
    """``options`` for ``operator``."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields as numbers and texts."""
        filtered = self.filter.top_k, self.filter.top_p, self.unfiltered
        return self.temperature, self.entropy, self.logit_range, *filtered, name_of(self.group)

    @classmethod
    def of(cls, temperature: float, entropy: bool, logit_range: bool, *filtered: Any) -> "TokenStage":
        """Makes a stage from ``options``."""
        top_k, top_p, unfiltered, group = filtered
        return cls(temperature, entropy, logit_range, LogitFilter(top_k, top_p), unfiltered, group_of(group))

    def forms(self, tokens: int, dtype: torch.dtype) -> list[Form | None]:
        """Returns the forms of ``TokenStatistics.outputs``, and of all in ``Saved`` but the labels.

        Args:
            tokens: the number of tokens.
            dtype: the compute dtype.
        """
        filtered = self.filter.filters
        whole = filtered and (self.unfiltered or self.logit_range)
        given: Any = (True, self.entropy, self.logit_range, self.logit_range, whole)
        kept = (True, self.entropy, whole, filtered)
        numbers = ((tokens,), dtype)
        return [
            *(numbers if there else ((0,), dtype) for there in given),
            *(numbers if there else None for there in kept),
            ((tokens,), torch.bool) if filtered else None,
        ]

    def statistics(
        self, logits_of: Callable[[slice], Tensor], labels: Tensor, chunks: Iterable[slice], empty: Tensor
    ) -> "TokenStatistics":
        """Computes the statistics of all tokens over all ranks' rows.

        Args:
            logits_of: computes the logits ``[n, rows]`` of a slice of the tokens, after the
                temperature; the result is overwritten.
            labels: ``[tokens]``, from ``own_labels``.
            chunks: slices of the tokens.
            empty: ``[0, rows]``, logits of no token.

        Raises:
            ValueError: A label that is not ignored belongs to no rank, or to several.
        """
        parts = [self._of_chunk(logits_of(chunk), labels[chunk]) for chunk in chunks]
        found = TokenStatistics.cat(parts) if parts else self._of_chunk(empty, labels)
        found.softmax.reduce(self.group)
        if found.whole is not None:
            found.whole.reduce(self.group)
        _check_owners(found.softmax.owners, labels, self.group)
        return found

    def _of_chunk(self, logits: Tensor, labels: Tensor) -> "TokenStatistics":
        if not self.filter.filters:
            return TokenStatistics(TokenSoftmax.of(logits, labels, entropy=self.entropy, lowest=self.logit_range))
        whole, bound = None, self.filter.bound(logits, self.group)
        if self.unfiltered or self.logit_range:
            whole = TokenSoftmax.of(logits.clone(), labels, lowest=self.logit_range)
        logits.masked_fill_(logits < bound[:, None], -torch.inf)
        return TokenStatistics(TokenSoftmax.of(logits, labels, entropy=self.entropy), whole, bound)

    def results(self, outputs: tuple[Tensor, ...], restore: Callable[[Tensor], Tensor]) -> TokenLogprobs:
        """Names the outputs of an autograd function, which are those of ``TokenStatistics``.

        Args:
            outputs: the outputs of the function.
            restore: gives ``[tokens]`` numbers the shape of the labels.
        """
        logprobs, entropy, lowest, largest, unfiltered = outputs
        return TokenLogprobs(
            restore(logprobs),
            restore(entropy) if self.entropy else None,
            restore(lowest) if self.logit_range else None,
            restore(largest) if self.logit_range else None,
            restore(unfiltered if self.filter.filters else logprobs) if self.unfiltered else None,
        )


@dataclass(frozen=True)
class TokenStatistics:
    """Softmax statistics of tokens."""

    softmax: TokenSoftmax
    """Statistics of the logits that stay."""
    whole: TokenSoftmax | None = None
    """Statistics of all logits; None if there is no filter, or they are not wanted."""
    bound: Tensor | None = None
    """``[tokens]``: logits below it are filtered out; None if there is no filter."""

    @classmethod
    def cat(cls, parts: "list[TokenStatistics]") -> "TokenStatistics":
        """Joins the statistics of consecutive tokens."""
        first = parts[0]
        return cls(
            TokenSoftmax.cat([part.softmax for part in parts]),
            None if first.whole is None else TokenSoftmax.cat([part.whole for part in parts if part.whole is not None]),
            None if first.bound is None else torch.cat([part.bound for part in parts if part.bound is not None]),
        )

    def outputs(self, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """Returns log-probabilities, entropies, ranges, and log-probabilities without the filter.

        Statistics that are not wanted are empty.
        """
        whole = self.softmax if self.whole is None else self.whole
        unfiltered = self.softmax.total.new_zeros(0) if self.whole is None else _of_labels(self.whole, labels)
        return _of_labels(self.softmax, labels), self.softmax.entropy, *whole.range(temperature), unfiltered

    def saved(self) -> tuple[Tensor | None, ...]:
        """Returns the fields of ``Saved`` after the labels, in order."""
        return (
            self.softmax.logsumexp,
            None if self.softmax.weighted is None else self.softmax.entropy,
            None if self.whole is None else self.whole.logsumexp,
            self.bound,
            None if self.bound is None else self.softmax.label == -torch.inf,
        )


def _of_labels(softmax: TokenSoftmax, labels: Tensor) -> Tensor:
    """Returns log-probabilities of the labels: 0 at ignored ones, NaN where no rank owns one."""
    found = torch.where(softmax.owners == 1, softmax.logprobs, torch.nan)
    return torch.where(labels == IGNORED, 0.0, found)


def _check_owners(owners: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> None:
    """Checks that exactly one rank owns each label that is not ignored.

    The check passes on all ranks, or fails on all ranks.
    """
    if not values_are_checked():
        return
    wrong = ((owners != 1) & (labels != IGNORED)).nonzero()
    if not len(wrong):
        return
    token = int(wrong[0])
    if owners[token] > 1:
        raise ValueError(
            f"vocab_start: {int(owners[token])} ranks own the label of token {token}; pass on each rank of tp_group "
            "the id of its own first row, such as tp_group.rank() * rows for shards of equal size"
        )
    whose = "this rank's rows" if group is None or group.size() == 1 else "the rows of all ranks of tp_group"
    raise ValueError(
        f"labels: token {token} has a label outside of the vocabulary, {whose}; give tokens that do not count the "
        "label ignore_index, or declare how the vocabulary is split (tp_group, vocab_start, vocab_rows)"
    )


class Saved(NamedTuple):
    """What backward needs in addition to the logits, ``[tokens]`` each."""

    labels: Tensor
    logsumexp: Tensor
    entropy: Tensor | None
    logsumexp_of_all: Tensor | None
    """The logsumexp without the filter; None unless wanted."""
    bound: Tensor | None
    """Logits below it are filtered out; None without a filter."""
    label_gone: Tensor | None
    """Bool: the label is filtered out; None without a filter."""

    def part(self, tokens: slice) -> "Saved":
        """Returns the same for a slice of the tokens."""
        return Saved(*(None if x is None else x[tokens] for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients of some tokens, divided by the temperature and by ``unit``.

    The final gradients must be multiplied by ``unit``. It is 1, except for products in float16; see
    ``float16_unit``.
    """

    unit: Tensor
    """A scalar."""
    of_logprobs: Tensor
    """``[tokens]``."""
    of_entropy: Tensor | None
    """``[tokens]``; None if the entropy has no gradient."""
    of_unfiltered: Tensor | None
    """``[tokens]``; None if log-probabilities without the filter have no gradient."""

    @classmethod
    def of(cls, given: Sequence[Tensor | None], saved: Saved, temperature: float, products: torch.dtype) -> "Upstream":
        """Scales the gradients that autograd passes to backward.

        Args:
            given: the gradients of ``TokenStatistics.outputs``, ``[tokens]`` each, or None.
            saved: what forward has saved.
            temperature: the divisor of the logits.
            products: dtype of the matrix products that follow.
        """
        ignored = saved.labels == IGNORED
        gone = ignored if saved.label_gone is None else ignored | saved.label_gone
        of_logprobs = _without(given[0], gone)
        of_entropy = None if saved.entropy is None else given[1]
        of_unfiltered = None if saved.logsumexp_of_all is None else _without(given[4], ignored)
        unit = saved.logsumexp.new_ones(())
        known = [x.abs().amax() for x in (of_logprobs, of_entropy, of_unfiltered) if x is not None and len(x)]
        if known and products == torch.float16:
            unit = float16_unit(torch.stack(known).amax() / temperature)
        scale = 1 / (unit * temperature)
        return cls(
            unit,
            torch.zeros_like(saved.logsumexp) if of_logprobs is None else of_logprobs * scale,
            None if of_entropy is None else of_entropy * scale,
            None if of_unfiltered is None else of_unfiltered * scale,
        )

    def part(self, tokens: slice) -> "Upstream":
        """Returns the gradients of a slice of the tokens."""
        cut: Any = (None if x is None else x[tokens] for x in (self.of_logprobs, self.of_entropy, self.of_unfiltered))
        return Upstream(self.unit, *cut)

    @property
    def live(self) -> Tensor:
        """``[tokens]`` bool: the token has a gradient other than 0."""
        live = self.of_logprobs != 0
        for other in (self.of_entropy, self.of_unfiltered):
            live = live if other is None else live | (other != 0)
        return live

    def dlogits(self, z: Tensor, saved: Saved) -> Tensor:
        """Computes the gradient of the logits.

        A token whose upstream gradients are 0 gets zeros, even if its logsumexp is NaN.

        Args:
            z: ``[n, rows]`` logits after the temperature, overwritten.
            saved: what forward has saved for these tokens.
        """
        of_all = None
        if self.of_unfiltered is not None and saved.logsumexp_of_all is not None:
            of_all = _dlogits(z.clone(), saved.labels, saved.logsumexp_of_all, self.of_unfiltered)
        if saved.bound is not None:
            z.masked_fill_(z < saved.bound[:, None], -torch.inf)
        entropy = None if self.of_entropy is None or saved.entropy is None else (self.of_entropy, saved.entropy)
        d = _dlogits(z, saved.labels, saved.logsumexp, self.of_logprobs, entropy)
        return d if of_all is None else d.add_(of_all)


def _without(upstream: Tensor | None, dead: Tensor) -> Tensor | None:
    return None if upstream is None else upstream.masked_fill(dead, 0.0)


def _dlogits(
    z: Tensor, labels: Tensor, logsumexp: Tensor, u: Tensor, entropy: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Computes ``u (onehot - p) - v p (log p + H)``, where u and v are upstream gradients.

    Args:
        z: ``[n, rows]``, overwritten.
        labels: ``[n]``, counted from the first of the rows.
        logsumexp: ``[n]``.
        u: ``[n]``, the upstream gradient of the log-probabilities.
        entropy: v and H, ``[n]`` each; None if the entropy has no gradient.
    """
    live = u != 0 if entropy is None else (u != 0) | (entropy[0] != 0)
    log_p = z.sub_(torch.where(live, logsumexp, 0.0)[:, None])
    if entropy is None:
        d = log_p.exp_().mul_(-u[:, None])
    else:
        v, h = entropy
        surprise = log_p + torch.where(live, h, 0.0)[:, None]
        factor = surprise.mul_(v[:, None]).add_(u[:, None]).neg_()
        d = log_p.exp_().mul_(factor.masked_fill_(log_p == 0, 0.0))  # p is 0 there: 0 log 0 = 0
    d.masked_fill_(~live[:, None], 0.0)
    return add_at_labels_(d, labels, u)
