# SPDX-License-Identifier: Apache-2.0
"""The noise of a correct kernel: an ensemble of runs that round as the candidate declares.

The stages from the head to the log-probabilities are spelled out in primitive operations, forward
and backward, for all members at once, with random rounding errors: of the declared dtype at the
stages that ``Precision`` names, of float32 after every other operation. (Perturbing whole operators
instead, such as log_softmax and its backward, misses the cancellation in ``p - 1`` where the
label's probability is near 1, and raised 8 to 9% false alarms in the gradient of the hidden
states.) The loss itself runs as the reference has it, with float32 noise on every operation that
torch dispatches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lossgate.declaration.candidate import Candidate
from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.noise import Noise
from lossgate.numerics.round_every_operation import RoundEveryOperation
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.numerics.rounded_numbers import ERRORS, RoundNumbers
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.specs.heads.base import Head
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.outputs import LOGPROBS, LOSS, TOKEN_ENTROPY, Output, metric_output
from lossgate.specs.spec import BoundSpec
from lossgate.specs.token_values import TokenValues

_ELEMENTS, _FEWEST, _MOST = 1 << 18, 12, 32
"""Members are as many as a bounded number of tensor elements allows, within the two other numbers.
So small problems, whose few numbers say less about their noise, get more of them."""

_COLUMNS, _STEPS = 32, 32
"""Columns of the vocabulary in a step of a running logsumexp, and the most steps that are
assumed."""

_FILTERED = -1e30
"""The logit of what a filter leaves out: as good as -inf, and safe to compute with."""


@dataclass(frozen=True)
class Ensemble:
    """What correct runs give on one rank: the same whatever the layout.

    What hangs on a layout is added by ``gradient_on``.
    """

    outputs: Mapping[Output, Tensor]
    """Each output ``[members, *shape]`` in float64; no gradients at heads with logits."""
    dlogits: Tensor | None
    """``[members, T, V]``, at heads with logits."""


def stages_of(candidate: Candidate, dtype: str) -> Stages:
    """Returns the float format of each stage of a candidate, for inputs of a dtype."""
    hidden_gradient = candidate.contract.grads.get("hidden", {})
    return candidate.precision[dtype].stages(
        dtype, caller_reduces_hidden=hidden_gradient.get("tp", "replicate") != "replicate"
    )


def run_ensemble(head: Head, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> Ensemble:
    """Runs an ensemble of kernels of one precision on a problem.

    Args:
        head: where the kernels start.
        batch: the tensors of the unsharded problem.
        bound: the spec with options, and with the outputs that will be compared.
        run: the members, and how they round.
    """
    return _Ensemble(head, batch, bound, run).run()


def gradient_on(
    partition: Partition, leaf: str, head: Head, batch: GlobalBatch, dlogits: Tensor, run: RoundedRun
) -> Tensor:
    """Returns the gradient of a leaf as the ranks of a layout give it, ``[members, *shape]``.

    Args:
        partition: of the layout, whose ranks' parts are rounded and added up.
        leaf: the leaf.
        head, batch: as for ``run_ensemble``.
        dlogits: of the ensemble.
        run: the members, and how they round.
    """
    gradient = head.rounded_gradient(leaf, batch.leaves, dlogits, partition, run)
    return run.noise.round(gradient, run.stages.inputs) if run.stages.grads_in_forward else gradient


def rounded_runs(batch: GlobalBatch, stages: Stages, seed: str) -> RoundedRun:
    """Returns runs with random errors, as many as a problem needs.

    Args:
        batch: of the problem.
        stages: the formats to which they round.
        seed: of the errors.
    """
    return RoundedRun(Noise(crc32(seed.encode())), _members(batch), stages)


def _members(batch: GlobalBatch) -> int:
    largest = max(leaf.numel() for leaf in batch.leaves.values())
    logits = batch.partition.tokens * batch.partition.vocab
    return min(max(_ELEMENTS // max(largest, logits), _FEWEST), _MOST)


@dataclass(frozen=True)
class _Softmax:
    """What forward keeps for backward. M members, T tokens, V rows of the vocabulary."""

    p: Tensor  # [M, T, V]
    log_p: Tensor  # [M, T, V]
    p_of_all: Tensor | None  # [M, T, V], without the filter; None if nothing is filtered
    ids: Tensor  # [T, k], whose log-probabilities the loss needs
    filtered: Tensor  # [T, k] bool: left out by a filter


class _Ensemble:
    def __init__(self, head: Head, batch: GlobalBatch, bound: BoundSpec, run: RoundedRun) -> None:
        self.head, self.batch, self.bound, self.spec, self.rounded = head, batch, bound, bound.spec, run
        self.noise, self.members = run.noise, run.members
        self.temperature = bound.temperature
        # A kernel holds it, or its inverse, in float32: one error for all logits of a run.
        error = FLOAT32.unit * self.noise.uniform(torch.Size((run.members, 1, 1)))
        self.rounded_temperature = self.temperature * (1 + error)

    @property
    def stages(self) -> Stages:
        return self.rounded.stages

    def run(self) -> Ensemble:
        leaves = self.batch.leaves
        if not self.head.has_logits:
            ((name, leaf),) = leaves.items()
            values = TokenValues(logprobs=leaf.expand(self.members, *leaf.shape))
            outputs, upstream = self._loss(values)
            gradient = self.noise.round(upstream.get("logprobs", torch.zeros_like(values.logprobs)), self.stages.inputs)
            return Ensemble(outputs | {self.head.gradients(leaves)[name]: gradient}, None)
        capped, slope = self._capped(self.head.rounded_logits(leaves, self.rounded))
        logits = self._tempered(capped)
        softmax, values = self._values(logits)
        outputs, upstream = self._loss(values)
        dlogits = self._dlogits(logits, softmax, values, upstream)
        if slope is not None:
            dlogits = self.rounded.round(dlogits * slope, self.stages.logits)
        return Ensemble(outputs, self.noise.round(dlogits, self.stages.dlogits))

    # Forward

    def _capped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits after the soft-cap, and its slope at each; None without one."""
        cap = self.bound.softcap
        if cap is None:
            return logits, None
        round_, stage = self.rounded.round, self.stages.logits
        # An approximation of tanh is off in one direction for many tokens: one error for a run.
        error = FLOAT32.unit * self.noise.uniform(torch.Size((self.members, 1, 1)))
        bent = round_(round_(logits / cap, stage).tanh() * (1 + error), stage)
        return round_(bent * cap, stage), round_(1 - round_(bent.square(), stage), stage)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Returns logits divided by the temperature."""
        if self.temperature == 1.0:
            return logits
        return self.rounded.round(logits / self.rounded_temperature, self.stages.logits)

    def _values(self, logits: Tensor) -> tuple[_Softmax | None, TokenValues]:
        """Returns the values per token that the loss uses, and what their backward needs."""
        uses = frozenset(self.spec.uses)
        given: dict[str, Tensor | None] = {"logits": logits} if "logits" in uses else {}
        if uses & {"lowest", "highest"}:
            lowest, highest = logits.aminmax(dim=-1)  # they are those before the temperature
            given |= {"lowest": lowest * self.temperature, "highest": highest * self.temperature}
        softmax = None
        if uses - {"logits", "lowest", "highest"}:
            softmax, of_softmax = self._softmax(logits)
            given |= of_softmax
        return softmax, TokenValues(**{name: value for name, value in given.items() if name in uses})

    def _softmax(self, logits: Tensor) -> tuple[_Softmax, dict[str, Tensor | None]]:
        fields, spec = self.batch.fields, self.spec
        ids = fields[spec.gathered_ids] if spec.gathered_ids else fields["labels"][:, None]
        filtered = torch.zeros_like(ids, dtype=torch.bool)
        p_of_all = unfiltered = None
        if (passing := fields.get(LOGIT_FILTER)) is not None:
            log_p_of_all, p_of_all, _ = self._log_softmax(logits)
            unfiltered = log_p_of_all.gather(-1, ids.expand(self.members, -1, -1)).squeeze(-1)
            logits = logits.masked_fill(~passing, _FILTERED)
            filtered = ~passing.gather(1, ids)
        log_p, p, logsumexp = self._log_softmax(logits)
        chosen = log_p.gather(-1, ids.expand(self.members, -1, -1))
        if (own := self.head.rounded_logits_at(self.batch.leaves, ids, self.rounded)) is not None:
            own = self.rounded.round(self._tempered(self._capped(own)[0]) - logsumexp, self.stages.logprobs)
            chosen = torch.where(self._coins(3), own, chosen)
        chosen = chosen.masked_fill(filtered, float("-inf"))
        values: dict[str, Tensor | None] = {
            "logprobs": chosen if spec.gathered_ids else chosen.squeeze(-1),
            "entropy": self._entropy(p, log_p, logits, logsumexp.squeeze(-1)) if "entropy" in spec.uses else None,
            "logsumexp": logsumexp.squeeze(-1),
            "mean_logprob": self._mean_logprob(log_p, logits, logsumexp) if "mean_logprob" in spec.uses else None,
            "unfiltered": unfiltered,
        }
        return _Softmax(p, log_p, p_of_all, ids, filtered), values

    def _log_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities, probabilities and logsumexps."""
        round_, coarse = self.rounded.round, self.stages.logsumexp
        top = logits.amax(-1, keepdim=True)
        total = round_(round_(logits - top).exp_().sum(-1, keepdim=True), coarse)
        logsumexp = round_(top + round_(total.log(), coarse))
        logsumexp = torch.where(self._coins(3), self._put_together(logsumexp), logsumexp)
        log_p = round_(logits - logsumexp, self.stages.logprobs)
        return log_p, self.noise.round(log_p.exp(), FLOAT32), logsumexp

    def _put_together(self, logsumexp: Tensor) -> Tensor:
        """Returns logsumexps as ``logaddexp`` of those of tiles of the vocabulary gives them: each
        step rounds.
        """
        steps = min(-(-self.batch.partition.vocab // _COLUMNS), _STEPS) - 1
        error = (self.noise.round(logsumexp, FLOAT32) - logsumexp) * steps**0.5
        return logsumexp + error

    def _entropy(self, p: Tensor, log_p: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
        """Computes entropies in either of two ways, at random for each member.

        ``lse - <p, z>`` loses digits to large logits, and ``-<p, log p>`` to a sum of p that is not
        quite 1. A kernel may compute either.
        """
        to, round_ = self.stages.entropy, self.rounded.round
        log_p, own_p = self._as_terms(p, log_p)
        if to != FLOAT32:
            p, logits = self.noise.round(p, to), self.noise.round(logits, to)
        entropy = round_(logsumexp, to) - round_(torch.linalg.vecdot(p, logits), to)
        term_by_term = round_(torch.linalg.vecdot(own_p, log_p), to) * -1
        return round_(torch.where(self._coins(2), entropy, term_by_term), to)

    def _as_terms(self, p: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities, 0 where there is no probability, and probabilities as what
        computes the terms of an entropy holds them.
        """
        to, log_p = self.stages.entropy, torch.where(p > 0, log_p, 0.0)
        if to == FLOAT32:
            return log_p, p
        log_p = self.noise.round(log_p, to)
        return log_p, torch.where(p > 0, self.noise.round(log_p.exp(), to), 0.0)

    def _mean_logprob(self, log_p: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
        """Computes the means of log-probabilities in either of two ways, at random for each member:
        of the log-probabilities themselves, or of the logits, less the logsumexp.
        """
        of_logits = self._mean(logits) - logsumexp.squeeze(-1)
        return self.rounded.round(torch.where(self._coins(2), of_logits, self._mean(log_p)), self.stages.logprobs)

    def _mean(self, x: Tensor) -> Tensor:
        """Returns means over the vocabulary, ``[M, T]``, as float32 sums give them."""
        ones = torch.ones(x.shape[-1], 1, dtype=x.dtype)
        return self.rounded.round(self.rounded.matmul(x, ones).squeeze(-1) / x.shape[-1])

    def _coins(self, dims: int) -> Tensor:
        """Returns ``[M, 1, ...]`` bool of so many dims, one for each member."""
        return self.noise.uniform(torch.Size((self.members,))).view(-1, *[1] * (dims - 1)) > 0

    def _loss(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Returns every output that is no gradient, and the upstream gradient of each value per
        token.
        """
        outputs: dict[Output, Tensor] = {LOGPROBS: values.logprobs} if "logprobs" in self.spec.outputs else {}
        if "token_entropy" in self.spec.outputs and "entropy" in values.given:
            outputs[TOKEN_ENTROPY] = values.entropy
        upstream: dict[str, Tensor] = {}
        if self.spec.reference is not None:
            scalars, upstream = self._scalars(values)
            outputs |= scalars
        outputs = {output: self._returned(output, tensor) for output, tensor in outputs.items()}
        for name, value in {"logprobs": "logprobs", "token_entropy": "entropy"}.items():
            if (cotangent := self.batch.cotangents.get(name)) is not None:
                total = cotangent.expand(self.members, -1) + upstream.get(value, 0.0)
                upstream[value] = self.noise.round(total, self.stages.loss)
        return outputs, upstream

    def _returned(self, output: Output, x: Tensor) -> Tensor:
        """Rounds an output to the dtype of the loss's arithmetic, and to that in which it is
        returned.
        """
        to = self.stages.returned_in(output.name)
        x = self.noise.round(x, self.stages.loss)
        return x if to.unit <= self.stages.loss.unit else self.noise.round(x, to)

    def _scalars(self, values: TokenValues) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
        """Computes loss and metrics ``[M]``, and the gradients of the values per token."""
        # Everything is expanded, so that each member rounds what it meets for itself.
        upstream = self.batch.cotangents.get("loss", torch.zeros((), dtype=torch.float64)).expand(self.members)
        own = {name: self._cast(field) for name, field in self.batch.numbers.items()}
        given = {name: self._entering(value.detach()) for name, value in values.given.items()}
        extremes = {name: given.pop(name) for name in ("lowest", "highest") if name in given}
        primals = {name: value.requires_grad_() for name, value in given.items()}
        errors = self.noise.uniform(torch.Size((self.members, ERRORS)))
        with RoundEveryOperation(self.noise, self.stages.loss, log_softmax=self.stages.logprobs) as rounding:
            loss, metrics = self._written_in_all_ways(rounding, extremes, own, primals, errors)
            found = torch.autograd.grad(loss, list(primals.values()), upstream, allow_unused=True)
        gradients = {name: g for name, g in zip(primals, found, strict=True) if g is not None and bool(g.any())}  # pyright: ignore[reportUnnecessaryComparison]
        scalars = {LOSS: loss, **{metric_output(name): metric for name, metric in metrics.items()}}
        return {output: tensor.detach() for output, tensor in scalars.items()}, gradients

    def _written_in_all_ways(
        self,
        rounding: RoundEveryOperation,
        extremes: dict[str, Tensor],
        own: dict[str, Tensor],
        primals: dict[str, Tensor],
        errors: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes loss and metrics ``[M]``, in another way in each member, as far as there are."""
        ways = min(len(self.bound.ways), self.members)

        def in_way(way: int) -> tuple[Tensor, dict[str, Tensor]]:
            def one_member(*given: Any) -> tuple[Tensor, dict[str, Tensor]]:
                extremes, own, primals, errors = given
                with RoundNumbers(errors, rounding):
                    return self.bound.loss(TokenValues(**extremes, **primals), {**self.batch.known, **own}, way)

            given = (extremes, own, primals, errors)
            if ways == 1:
                return torch.vmap(one_member)(*given)
            return torch.vmap(one_member)(*tree_map(lambda of_all: of_all[way::ways], given))

        found = [in_way(way) for way in range(ways)]
        loss, metrics = found[0]
        if ways == 1:
            return loss, metrics
        in_turn = torch.cat([torch.arange(way, self.members, ways) for way in range(ways)]).argsort()

        def together(*parts: Tensor) -> Tensor:
            return torch.cat(parts)[in_turn]

        return together(*(one for one, _ in found)), {
            name: together(*(others[name] for _, others in found)) for name in metrics
        }

    def _entering(self, value: Tensor) -> Tensor:
        """Returns values per token as the loss gets them, in the dtype of its arithmetic."""
        if self.stages.loss == FLOAT32:
            return value
        return torch.where(value.isfinite(), self.noise.round(value, self.stages.loss), value)

    def _cast(self, field: Tensor) -> Tensor:
        """Returns a field as the loss meets it, ``[M, *shape]``.

        A loss in a coarse dtype may cast a field, or compute with it as it is.
        """
        # Everything is expanded, so that each member rounds what it meets for itself.
        of_all = field.expand(self.members, *field.shape)
        if self.stages.loss == FLOAT32 or not field.is_floating_point():
            return of_all
        return torch.where(self._coins(of_all.dim()), self.stages.loss.nearest(field), of_all)

    # Backward

    def _dlogits(
        self, logits: Tensor, softmax: _Softmax | None, values: TokenValues, upstream: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the gradient of the logits after the soft-cap, ``[M, T, V]``, not yet rounded.

        It is the sum of what each value per token gives back, divided by the temperature.
        """
        if not upstream:
            return torch.zeros_like(logits)
        found = list(self._parts(softmax, values, upstream))
        dlogits = found[0]
        for part in found[1:]:
            dlogits = self.rounded.round(dlogits + part)
        if self.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self.noise.round(dlogits, self.stages.logits)
        return dlogits

    def _parts(self, softmax: _Softmax | None, values: TokenValues, upstream: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yields what each value per token gives back.

        With p the probabilities and H the entropy: ``(onehot - p) g`` for a log-probability,
        ``-p (log p + H) g`` for the entropy, ``p g`` for the logsumexp, ``(1 / V - p) g`` for the
        mean log-probability, and g itself for logits.
        """
        round_ = self.rounded.round
        factors = {name: self.noise.round(g / self.temperature, FLOAT32) for name, g in upstream.items()}
        if "logits" in factors:
            yield factors["logits"]
        if softmax is None:
            return
        p, ids = softmax.p, softmax.ids.expand(self.members, -1, -1)
        if "logprobs" in factors:
            factor = factors["logprobs"] if self.spec.gathered_ids else factors["logprobs"][..., None]
            factor = factor.masked_fill(softmax.filtered, 0.0)
            if factor.shape[-1] == 1:
                yield p.neg().scatter_add_(-1, ids, torch.ones_like(factor)).mul_(factor)
            else:
                total = round_(factor.sum(-1, keepdim=True))
                yield round_(p * -total).scatter_add_(-1, ids, factor)
        if "entropy" in factors:
            yield self._entropy_slope(p, softmax.log_p, values.entropy) * -factors["entropy"][..., None]
        if "logsumexp" in factors:
            yield round_(p * factors["logsumexp"][..., None])
        if "mean_logprob" in factors:
            yield round_((1 / p.shape[-1] - p) * factors["mean_logprob"][..., None])
        if "unfiltered" in factors and softmax.p_of_all is not None:
            factor = factors["unfiltered"][..., None]
            yield round_(softmax.p_of_all.neg().scatter_add_(-1, ids, torch.ones_like(factor)).mul_(factor))

    def _entropy_slope(self, p: Tensor, log_p: Tensor, entropy: Tensor) -> Tensor:
        """Returns the negative slope of entropies in the logits, ``p (log p + H)``, computed in
        either of two ways, at random for each member: as it stands here; or as autograd does from
        ``p log p``, whose own slope ``d = p (log p + 1)`` a softmax then makes ``d - p sum(d)``.
        """

        def round_(x: Tensor) -> Tensor:
            return self.noise.round(x, self.stages.entropy)

        at_once = round_(p * torch.where(p > 0, round_(log_p + entropy[..., None]), 0.0))
        log_p, own_p = self._as_terms(p, log_p)
        slope = round_(round_(own_p * log_p) + own_p)
        projected = self.rounded.round(slope - p * self.rounded.round(slope.sum(-1, keepdim=True)))
        return torch.where(self._coins(3), at_once, projected)
