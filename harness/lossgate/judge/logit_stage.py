# SPDX-License-Identifier: Apache-2.0
"""Runs the stages from the leaves to the values per token, and back to the gradient of the logits.

All members of an ensemble run at once, for all tokens or some. Where kernels may compute the same
number in several ways, each member chooses a way at random.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads.head import Head
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.token_values import TokenValues

_COLUMNS, _STEPS = 32, 32
"""Columns of the vocabulary in each step of a running logsumexp, and the most steps that are
assumed."""

_FILTERED = -1e30
"""The logit of each entry that a filter leaves out: as good as -inf, but safe to compute with."""


@dataclass(frozen=True)
class Softmax:
    """Tensors that forward keeps for backward. M members, T tokens, V rows of the vocabulary."""

    p: Tensor  # [M, T, V]
    log_p: Tensor  # [M, T, V]
    p_of_all: Tensor | None  # [M, T, V], without the filter; None if nothing is filtered
    p_of_logsumexp: Tensor | None  # [M, T, V], the slope of the logsumexp; None if the loss does not use that
    ids: Tensor  # [T, k], the ids whose log-probabilities the loss uses
    filtered: Tensor  # [T, k] bool: the filter leaves the id out


class TokenStage:
    """The stage from the logits to the values per token, and back."""

    def __init__(self, fields: Mapping[str, Tensor], bound: BoundSpec, run: RoundedRun) -> None:
        """Prepares the stage.

        Args:
            fields: the fields of the tokens; see ``GlobalBatch``.
            bound: the spec with its options.
            run: the members, and how they round.
        """
        self.fields, self.bound, self.spec, self.run = fields, bound, bound.spec, run

    @property
    def ids(self) -> Tensor:
        """The ids whose log-probabilities the loss uses, ``[T, k]``."""
        return self.spec.ids_of(self.fields)

    # Forward

    def values(self, logits: Tensor, apart: Tensor | None) -> tuple[Softmax | None, TokenValues]:
        """Returns the tensors that backward needs, and the values per token that the loss uses.

        Args:
            logits: ``[M, T, V]``, after soft-cap and temperature.
            apart: ``[M, T, k]``, the logits of ``ids`` again, each computed as a dot product of its
                own; None if kernels do not do so.
        """
        uses = frozenset(self.spec.uses)
        given: dict[str, Tensor | None] = {"logits": logits} if "logits" in uses else {}
        if uses & {"lowest", "highest"}:
            lowest, highest = logits.aminmax(dim=-1)
            # The loss gets the extremes of the logits before the temperature.
            given |= {"lowest": lowest * self.bound.temperature, "highest": highest * self.bound.temperature}
        softmax = None
        if uses - {"logits", "lowest", "highest"}:
            softmax, of_softmax = self._softmax(logits, apart)
            given |= of_softmax
        return softmax, TokenValues(**{name: value for name, value in given.items() if name in uses})

    def _softmax(self, logits: Tensor, apart: Tensor | None) -> tuple[Softmax, dict[str, Tensor | None]]:
        spec, ids = self.spec, self.ids
        filtered = torch.zeros_like(ids, dtype=torch.bool)
        p_of_all = unfiltered = None
        if (passing := self.fields.get(LOGIT_FILTER)) is not None:
            log_p_of_all, p_of_all, _ = self._log_softmax(logits)
            unfiltered = log_p_of_all.gather(-1, ids.expand(self.run.members, -1, -1)).squeeze(-1)
            logits = logits.masked_fill(~passing, _FILTERED)
            filtered = ~passing.gather(1, ids)
        log_p, p, logsumexp = self._log_softmax(logits)
        chosen = log_p.gather(-1, ids.expand(self.run.members, -1, -1))
        if apart is not None:
            own = self.run.round(apart - logsumexp, self.run.stages.logprobs)
            chosen = torch.where(self.run.coins(3), own, chosen)
        chosen = chosen.masked_fill(filtered, float("-inf"))
        values: dict[str, Tensor | None] = {
            "logprobs": chosen if spec.gathered_ids else chosen.squeeze(-1),
            **dict.fromkeys(("entropy", "logsumexp", "mean_logprob")),  # noise is drawn in this order
            "unfiltered": unfiltered,
        }
        slope = None
        if "logsumexp" in spec.uses:
            values["logsumexp"], slope = self._own_logsumexp(logits, logsumexp, p)
        if "entropy" in spec.uses:
            values["entropy"] = self._entropy(p, log_p, logits, logsumexp.squeeze(-1))
        if "mean_logprob" in spec.uses:
            values["mean_logprob"] = self._mean_logprob(log_p, logits, logsumexp)
        return Softmax(p, log_p, p_of_all, slope, ids, filtered), values

    def _log_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities, probabilities and logsumexps."""
        round_, coarse = self.run.round, self.run.stages.logsumexp
        top = logits.amax(-1, keepdim=True)
        total = round_(round_(logits - top).exp_().sum(-1, keepdim=True), coarse)
        logsumexp = round_(top + round_(total.log(), coarse))
        logsumexp = torch.where(self.run.coins(3), self._put_together(logsumexp, logits.shape[-1]), logsumexp)
        logsumexp = self._kept(logsumexp)
        log_p = round_(logits - logsumexp, self.run.stages.logprobs)
        return log_p, self.run.noise.round(log_p.exp(), FLOAT32), logsumexp

    def _kept(self, logsumexp: Tensor) -> Tensor:
        """Returns logsumexps as kernels keep them for the log-probabilities.

        Some members round them to the format of that stage, like ``torch.logsumexp`` of coarse
        logits. Others leave them as they are, like kernels that keep the exact maximum apart.
        """
        coarse = self.run.stages.logsumexp
        if coarse == FLOAT32:
            return logsumexp
        return torch.where(self.run.coins(3), self.run.round(logsumexp, coarse), logsumexp)

    def _own_logsumexp(self, logits: Tensor, logsumexp: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logsumexps that a loss uses, ``[M, T]``, and their slope, ``[M, T, V]``.

        A kernel may compute them apart from the log-probabilities, and so round them apart. The
        slope is ``exp(logits - logsumexp)`` with the rounded logsumexp, so its rounding error is
        the same for a whole row.
        """
        if self.run.stages.logsumexp == FLOAT32:
            return logsumexp.squeeze(-1), p
        own = self._kept(logsumexp)
        return own.squeeze(-1), self.run.noise.round((logits - own).exp(), FLOAT32)

    def _put_together(self, logsumexp: Tensor, vocab: int) -> Tensor:
        """Returns logsumexps with the errors of kernels that go over the vocabulary in tiles, and
        add the logsumexp of each by ``logaddexp``: each step rounds.
        """
        steps = min(-(-vocab // _COLUMNS), _STEPS) - 1
        error = (self.run.noise.round(logsumexp, FLOAT32) - logsumexp) * steps**0.5
        return logsumexp + error

    def _entropy(self, p: Tensor, log_p: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
        """Computes entropies, each member in one of two ways at random.

        With z the logits, ``logsumexp - <p, z>`` loses digits if logits are large. ``-<p, log p>``
        loses digits if p does not quite sum to 1. A kernel may compute either.
        """
        to, round_ = self.run.stages.entropy, self.run.round
        log_p, own_p = self._as_terms(p, log_p)
        if to != FLOAT32:
            p, logits = self.run.noise.round(p, to), self.run.noise.round(logits, to)
        entropy = round_(logsumexp, to) - round_(torch.linalg.vecdot(p, logits), to)
        term_by_term = round_(torch.linalg.vecdot(own_p, log_p), to) * -1
        return round_(torch.where(self.run.coins(2), entropy, term_by_term), to)

    def _as_terms(self, p: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and probabilities, rounded as in the terms ``p log p`` of an
        entropy. Where p is 0, both are 0.
        """
        to = self.run.stages.entropy
        log_p = torch.where(p > 0, log_p, 0.0)
        if to == FLOAT32:
            return log_p, p
        log_p = self.run.noise.round(log_p, to)
        return log_p, torch.where(p > 0, self.run.noise.round(log_p.exp(), to), 0.0)

    def _mean_logprob(self, log_p: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
        """Computes the mean log-probability over the vocabulary, each member in one of two ways at
        random: as the mean of the log-probabilities, or as the mean of the logits less the
        logsumexp.
        """
        of_logits = self._mean(logits) - logsumexp.squeeze(-1)
        return self.run.round(torch.where(self.run.coins(2), of_logits, self._mean(log_p)), self.run.stages.logprobs)

    def _mean(self, x: Tensor) -> Tensor:
        """Returns means over the vocabulary, ``[M, T]``, as float32 sums give them."""
        ones = torch.ones(x.shape[-1], 1, dtype=x.dtype)
        return self.run.round(self.run.matmul(x, ones).squeeze(-1) / x.shape[-1])

    # Backward

    def parts(self, softmax: Softmax | None, values: TokenValues, upstream: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yields the gradient that each value per token adds to that of the logits, ``[M, T, V]``.

        With p the probabilities, H the entropy and g the upstream gradient of the value, it is
        ``(onehot - p) g`` for a log-probability, ``-p (log p + H) g`` for the entropy, ``p g`` for
        the logsumexp, ``(1 / V - p) g`` for the mean log-probability, and g itself for logits.
        """
        round_ = self.run.round
        factors = {name: self.run.noise.round(g / self.bound.temperature, FLOAT32) for name, g in upstream.items()}
        if "logits" in factors:
            yield factors["logits"]
        if softmax is None:
            return
        p, ids = softmax.p, softmax.ids.expand(self.run.members, -1, -1)
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
        if "logsumexp" in factors and softmax.p_of_logsumexp is not None:
            yield round_(softmax.p_of_logsumexp * factors["logsumexp"][..., None])
        if "mean_logprob" in factors:
            yield round_((1 / p.shape[-1] - p) * factors["mean_logprob"][..., None])
        if "unfiltered" in factors and softmax.p_of_all is not None:
            factor = factors["unfiltered"][..., None]
            yield round_(softmax.p_of_all.neg().scatter_add_(-1, ids, torch.ones_like(factor)).mul_(factor))

    def _entropy_slope(self, p: Tensor, log_p: Tensor, entropy: Tensor) -> Tensor:
        """Returns the negative slope of entropies in the logits, ``p (log p + H)``.

        Each member computes it in one of two ways at random: by this formula, or as autograd does
        from ``p log p``. That has the slope ``d = p (log p + 1)`` in log p, from which the backward
        of a softmax makes ``d - p sum(d)``.
        """

        def round_(x: Tensor) -> Tensor:
            return self.run.noise.round(x, self.run.stages.entropy)

        at_once = round_(p * torch.where(p > 0, round_(log_p + entropy[..., None]), 0.0))
        log_p, own_p = self._as_terms(p, log_p)
        slope = round_(round_(own_p * log_p) + own_p)
        projected = self.run.round(slope - p * self.run.round(slope.sum(-1, keepdim=True)))
        return torch.where(self.run.coins(3), at_once, projected)


class LogitStage:
    """The stages of a head with logits. M members, T tokens, V rows of the vocabulary."""

    def __init__(
        self,
        head: Head,
        leaves: Mapping[str, Tensor],
        fields: Mapping[str, Tensor],
        bound: BoundSpec,
        run: RoundedRun,
    ) -> None:
        """Runs forward.

        Args:
            head: where the kernels start.
            leaves: the differentiable inputs of the tokens.
            fields: the fields of the tokens; see ``GlobalBatch``.
            bound: the spec with its options.
            run: the members, and how they round.
        """
        self._bound, self._run, self._tokens = bound, run, TokenStage(fields, bound, run)
        # A kernel holds the temperature in float32, so all logits of a run share one error.
        self._temperature = bound.temperature * (1 + self._error_of_runs())
        capped, self._slope = self._capped(head.rounded_logits(leaves, run))
        self._logits = self._tempered(capped)
        # Some kernels compute the logits of labels again, each as a dot product of its own.
        apart = head.rounded_logits_at(leaves, self._tokens.ids, run)
        if apart is not None:
            apart = self._tempered(self._capped(apart)[0])
        self._softmax: Softmax | None
        self.values: TokenValues
        self._softmax, self.values = self._tokens.values(self._logits, apart)

    @property
    def _stages(self) -> Stages:
        return self._run.stages

    def _error_of_runs(self) -> Tensor:
        """Returns one relative error of float32 for each member, ``[M, 1, 1]``."""
        return FLOAT32.unit * self._run.of_each(3)

    def _capped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits after the soft-cap, and the slope of the cap at each logit. The slope
        is None if there is no cap.
        """
        cap = self._bound.softcap
        if cap is None:
            return logits, None
        round_, stage = self._run.round, self._stages.logits
        # An approximation of tanh is off in the same direction for many tokens.
        bent = round_(round_(logits / cap, stage).tanh() * (1 + self._error_of_runs()), stage)
        return round_(bent * cap, stage), round_(1 - round_(bent.square(), stage), stage)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Returns logits divided by the temperature."""
        if self._bound.temperature == 1.0:
            return logits
        return self._run.round(logits / self._temperature, self._stages.logits)

    def backward(self, upstream: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient of the logits as the head gives them, ``[M, T, V]``.

        Args:
            upstream: the gradients of ``values``, by name. Values without one are left out.
        """
        dlogits = self._of_capped(upstream)
        if self._slope is not None:
            dlogits = self._run.round(dlogits * self._slope, self._stages.logits)
        return self._run.noise.round(dlogits, self._stages.dlogits)

    def _of_capped(self, upstream: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient of the logits after the soft-cap, ``[M, T, V]``, not yet rounded.

        It is the sum of the gradients from all values per token, divided by the temperature.
        """
        if not upstream:
            return torch.zeros_like(self._logits)
        first, *others = self._tokens.parts(self._softmax, self.values, upstream)
        dlogits = first
        for part in others:
            dlogits = self._run.round(dlogits + part)
        if self._bound.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self._run.noise.round(dlogits, self._stages.logits)
        return dlogits
