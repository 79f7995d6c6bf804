# SPDX-License-Identifier: Apache-2.0
"""Metrics that know how the parts of microbatches and ranks are combined."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from math import inf, nan
from typing import Self
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import as_mask, check_number, values_are_checked
from fused_losses.numerics import divisor
from fused_losses.ranks import alone

_SENT_TOGETHER = 64
"""``reduce`` sends a multiple of so many numbers. So ranks with different metrics usually send
messages of the same size, and get an error instead of waiting for each other."""


class Metrics(Mapping[str, Tensor]):
    """Named numbers without gradients, each this rank's and this microbatch's part of a whole.

    As a mapping it has the numbers of this part. ``sum(parts)`` or ``a + b`` combines several
    microbatches, and ``reduce`` combines all ranks. ``reductions`` says how each number is made:

    - ``"sum"``: parts add up. This holds for counts, and for means whose count is known beforehand:
      a loss that divides by the ``valid_tokens`` of the whole batch gives parts of a mean.
    - ``"min"``, ``"max"``: the smallest and the largest part; +inf and -inf over nothing.
    - ``"mean over COUNT"``: sums and counts add up, and the mapping divides them. COUNT is the name
      of another metric. The mean over nothing is 0.

    ``Metrics()`` has no names. It is neutral in a sum, as is 0, and an extremum over nothing is
    neutral too. So every call of a loss returns the same names, also without any token.

    ``normalisers`` says which count of the whole batch has divided a number. Where that count is
    not known before the last microbatch, ``divided_by`` divides afterwards.

    Numbers have the dtype in which they were computed. Additions are done in float64.

    Args:
        values: one number for each name, a tensor ``[]`` or a Python number. For a mean, give the
            sum before any division.
        minima: names of metrics that are reduced by minimum.
        maxima: names of metrics that are reduced by maximum.
        means: the name of the count for each metric that is a mean. All other metrics are sums.
        normalisers: for sums that are divided by a count of the whole batch already, the argument
            of the loss that has this count, such as ``"valid_tokens"``.

    Raises:
        ValueError: A name is unknown or has two reductions, a count or a metric with a normaliser
            is not a sum, or a value is not one number; the message names it.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor | float] | None = None,
        *,
        minima: Iterable[str] = (),
        maxima: Iterable[str] = (),
        means: Mapping[str, str] | None = None,
        normalisers: Mapping[str, str] | None = None,
    ) -> None:
        values, self._counts = dict(values or {}), dict(means or {})
        declared = {"min": tuple(minima), "max": tuple(maxima), "mean": tuple(self._counts)}
        self._kinds = _kinds(values, declared, self._counts)
        self._normalisers = dict(normalisers or {})
        for name in self._normalisers:
            if self._kinds.get(name) != "sum":
                raise ValueError(f"normalisers {{{name!r}: ...}}: expected the name of a sum among the values")
        # Sums and means come first, then minima, then maxima, whatever the order of the arguments.
        added, lowest, largest = (
            sorted(name for name, kind in self._kinds.items() if kind in kinds)
            for kinds in (("sum", "mean"), ("min",), ("max",))
        )
        self._sizes = len(added), len(lowest), len(largest)
        self._places = {name: place for place, name in enumerate((*added, *lowest, *largest))}
        self._parts = _stacked({name: values[name] for name in self._places})
        self._ranks: frozenset[int] = frozenset()

    @classmethod
    def over(cls, counts: Mapping[str, Tensor], values: Mapping[str, tuple[Tensor, str]]) -> Self:
        """Makes metrics of numbers of tokens or sequences: counts, averages and extrema.

        Args:
            counts: tensors of bool, or of numbers 0 and 1: the tokens or sequences that count.
                AReaL calls them denominators.
            values: for each name a tensor, and the name of the count of the same shape over which
                it is averaged.

        Returns:
            Metrics in float64: each count under its name, and for each value ``NAME_avg``, which is
            the mean, ``NAME_min`` and ``NAME_max``.

        Raises:
            ValueError: A value has another shape than its count, or there is no such count.
        """
        numbers: dict[str, Tensor | float] = {name: where.sum() for name, where in counts.items()}
        for name, (x, count) in values.items():
            if count not in counts:
                raise ValueError(f"values: {name} is averaged over {count!r}: expected one of {', '.join(counts)}")
            where, x = as_mask(count, counts[count], x, name), x.detach().double()
            bound = x.new_full((1,), inf)
            numbers[f"{name}_avg"] = torch.where(where, x, 0.0).sum()
            numbers[f"{name}_min"] = torch.cat([bound, torch.where(where, x, inf).flatten()]).amin()
            numbers[f"{name}_max"] = torch.cat([-bound, torch.where(where, x, -inf).flatten()]).amax()
        return cls(
            numbers,
            minima=(f"{name}_min" for name in values),
            maxima=(f"{name}_max" for name in values),
            means={f"{name}_avg": count for name, (_, count) in values.items()},
        )

    @property
    def reductions(self) -> dict[str, str]:
        """How the parts of each metric are combined: see the class."""
        return {
            name: f"mean over {self._counts[name]}" if kind == "mean" else kind for name, kind in self._kinds.items()
        }

    @property
    def normalisers(self) -> dict[str, str]:
        """The count of the whole batch that divides each metric, by the name of the loss's
        argument.

        Metrics that no such count divides are left out: raw counts, extrema, and means over another
        metric. NeMo-RL calls this ``metric_normalizations``.
        """
        return dict(self._normalisers)

    def divided_by(self, **counts: Tensor | float) -> Self:
        """Divides each metric by the count that is its normaliser.

        This is for steps that compute losses before they know the counts of the whole batch. Give
        the losses any other count, and this method the true count divided by that one.

        Args:
            counts: for each of ``normalisers`` a number from 0, or a tensor with one such number. A
                mean over nothing stays 0. Other counts are ignored.

        Returns:
            The metrics in float64, without normalisers.

        Raises:
            ValueError: A count is missing, or is no such number.
        """
        for name, needed in self._normalisers.items():
            if needed not in counts:
                raise ValueError(f"{needed} is missing: expected the count of the whole batch, which divides {name}")
        divisors = torch.ones_like(self._parts, dtype=torch.float64)
        for name, count in counts.items():
            if not isinstance(count, Tensor):
                check_number(name, count, least=0, otherwise="or a tensor with one such number")
            elif count.numel() != 1:
                raise ValueError(f"{name} {list(count.shape)}: expected a number, or a tensor with one")
            by = divisor(torch.as_tensor(count, dtype=torch.float64, device=divisors.device).detach().reshape(()))
            for metric in (metric for metric, needed in self._normalisers.items() if needed == name):
                divisors[self._places[metric]] = by
        made = self._with(self._parts.double() / divisors)
        made._normalisers = {}
        return made

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[self._places[name]]
        if name not in self._counts:
            return part
        count = self._parts[self._places[self._counts[name]]]
        return part / torch.where(count == 0, 1.0, count)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __repr__(self) -> str:
        found, reductions = self.floats(), self.reductions
        return f"{type(self).__name__}({', '.join(f'{name}={found[name]:.6g} ({reductions[name]})' for name in self)})"

    def __add__(self, other: "Metrics | int") -> "Metrics":
        """Merges the metrics of two microbatches.

        Raises:
            ValueError: They have different names, reductions or normalisers, or were reduced over
                different ranks.
        """
        if not isinstance(other, Metrics):
            return self if other == 0 else NotImplemented  # sum() starts from 0.
        if not other or not self:
            return self or other
        if self.reductions != other.reductions:
            odd = sorted({name for name, _ in self.reductions.items() ^ other.reductions.items()})
            raise ValueError(
                f"{', '.join(odd)}: expected the same metrics, with the same reductions, on both sides of +; "
                "join the metrics of two losses with |"
            )
        if self._normalisers != other._normalisers:
            odd = sorted({name for name, _ in self._normalisers.items() ^ other._normalisers.items()})
            raise ValueError(
                f"{', '.join(odd)}: expected the same normalisers on both sides of +; add microbatches up, and call "
                "divided_by once"
            )
        self._check_ranks(other)
        return self._with(_merged(torch.stack([self._parts.double(), other._parts.double()]), self._sizes))

    __radd__ = __add__

    def __or__(self, other: "Metrics") -> "Metrics":
        """Joins the metrics of two losses, with different names.

        Raises:
            ValueError: A name is in both, or they were reduced over different ranks.
        """
        if common := [name for name in self if name in other]:
            raise ValueError(
                f"{', '.join(common)}: expected different names on both sides of |; "
                "use prefixed on one side, or + for microbatches of one loss"
            )
        self._check_ranks(other)
        return _joined([self, other])

    def prefixed(self, prefix: str) -> "Metrics":
        """Returns the metrics with ``prefix`` in front of all names, including those of counts."""
        return _joined([self], prefix)

    def reduce(self, *groups: dist.ProcessGroup | None) -> Self:
        """Combines the metrics of all ranks.

        Call it once, after adding microbatches up, over context- and data-parallel ranks. Ranks of
        a tensor-parallel group have the same metrics, which must not be added up.

        Args:
            groups: one group, or several to reduce over in turn; None stands for this rank alone.

        Returns:
            The combined metrics in float64, the same on every rank, bit for bit.

        Raises:
            ValueError: A rank would count twice, or ranks have different metrics. The second check
                waits for the device; with ``unchecked_values`` all numbers are NaN instead.

        Collectives:
            One all-gather over each group of more than one rank, of all metrics at once: a multiple
            of 64 numbers in float64.
        """
        whole = self._with(self._parts.double())
        for group in groups:
            if group is not None and not alone(group):
                whole = whole._over(group)
        return whole

    def export(self) -> dict[str, Tensor]:
        """Returns the numbers as a plain dict of tensors ``[]``."""
        return dict(self)

    def floats(self, *, empty: float | None = None) -> dict[str, float]:
        """Returns Python numbers, for a log. It waits for the device once.

        Args:
            empty: what replaces an extremum over nothing; infinite by default, -1.0 in NeMo-RL.
        """
        parts = self._parts.tolist()
        found = {name: parts[place] for name, place in self._places.items()}
        for name, kind in self._kinds.items():
            if kind == "mean":
                found[name] /= parts[self._places[self._counts[name]]] or 1.0
            elif empty is not None and found[name] == {"min": inf, "max": -inf}.get(kind):
                found[name] = empty
        return {name: found[name] for name in self}

    def _over(self, group: dist.ProcessGroup) -> Self:
        ranks = dist.get_process_group_ranks(group)
        if twice := self._ranks & (set(ranks) - {dist.get_rank()}):
            raise ValueError(
                f"group of ranks {ranks}: the metrics of rank {', '.join(map(str, sorted(twice)))} are included "
                "already and would count twice; expected a group with other ranks; reduce over each group once"
            )
        known = sorted(self.reductions.items()), sorted(self._normalisers.items())
        mark = float(crc32(repr(known).encode()))
        sent = self._parts.new_zeros(-(-(1 + len(self)) // _SENT_TOGETHER) * _SENT_TOGETHER)
        sent[0], sent[1 : 1 + len(self)] = mark, self._parts
        gathered = sent.new_empty(len(ranks), len(sent))
        dist.all_gather(list(gathered), sent, group=group)
        differ = gathered[:, 0] != gathered[0, 0]
        if values_are_checked() and (other := [rank for rank, d in zip(ranks, differ.tolist(), strict=True) if d]):
            raise ValueError(
                f"metrics of rank {', '.join(map(str, other))}: expected those of rank {ranks[0]}, with the same "
                f"names and reductions, but they differ (here: {', '.join(self) or 'none'}); "
                "a rank without tokens calls the same losses"
            )
        whole = _merged(gathered[:, 1 : 1 + len(self)], self._sizes).masked_fill(differ.any(), nan)
        return self._with(whole, self._ranks.union(ranks))

    def _check_ranks(self, other: "Metrics") -> None:
        if self and other and self._ranks != other._ranks:
            left, right = (sorted(x._ranks) or "this rank alone" for x in (self, other))
            raise ValueError(
                f"metrics over {left} and over {right}: expected the same ranks on both sides; "
                "reduce once, after adding microbatches up"
            )

    def _with(self, parts: Tensor, ranks: frozenset[int] | None = None) -> Self:
        made = copy(self)
        made._parts, made._ranks = parts, self._ranks if ranks is None else ranks
        return made


def _joined(every: Sequence[Metrics], prefix: str = "") -> Metrics:
    def of_kind(kind: str) -> list[str]:
        return [f"{prefix}{name}" for one in every for name in one if one._kinds[name] == kind]

    joined = Metrics(
        {f"{prefix}{name}": one._parts[one._places[name]] for one in every for name in one},
        minima=of_kind("min"),
        maxima=of_kind("max"),
        means={f"{prefix}{name}": f"{prefix}{count}" for one in every for name, count in one._counts.items()},
        normalisers={f"{prefix}{name}": count for one in every for name, count in one._normalisers.items()},
    )
    joined._ranks = joined._ranks.union(*(one._ranks for one in every))
    return joined


def _kinds(
    values: Mapping[str, object], declared: Mapping[str, Sequence[str]], counts: Mapping[str, str]
) -> dict[str, str]:
    kinds = dict.fromkeys(values, "sum")
    for kind, names in declared.items():
        for name in names:
            if kinds.get(name) != "sum":
                raise ValueError(
                    f"{name}: expected one of the values in minima, maxima or means, in one of them, once; "
                    f"values are {', '.join(values) or 'none'}"
                )
            kinds[name] = kind
    for name, count in counts.items():
        if kinds.get(count) != "sum":
            raise ValueError(f"means {{{name!r}: {count!r}}}: expected the name of a sum among the values")
    return kinds


def _stacked(values: Mapping[str, Tensor | float]) -> Tensor:
    """Returns the values as a vector, in float64 if an integer or a Python number is among them."""
    device = next((value.device for value in values.values() if isinstance(value, Tensor)), None)
    parts: list[Tensor] = []
    for name, value in values.items():
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64, device=device)
        if value.dim():
            raise ValueError(f"{name} {list(value.shape)}: expected one number; sum it, or use Metrics.over")
        parts.append(value.detach() if value.is_floating_point() else value.detach().double())
    return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _merged(parts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Merges parts ``[n, metrics]``, whose columns are sums, then minima, then maxima."""
    sums, minima, maxima = parts.split(sizes, dim=1)
    return torch.cat([sums.sum(0), minima.amin(0), maxima.amax(0)])
