# SPDX-License-Identifier: Apache-2.0
"""An ensemble of runs that are correct but rounded, as the candidate declares: the noise that a right kernel may have.

The stages from the head to the log-probabilities are spelled out here in primitive operations, forward and backward,
for all members at once, with random rounding errors: of the declared dtype at the seams that ``Precision`` names, of
float32 after every other operation. (Perturbing whole operators instead, such as log_softmax and its backward, misses the cancellation in
``p - 1`` where the label's probability is near 1, and raised 8 to 9% false alarms in dX.) The loss itself runs as the
reference has it, with float32 noise on every operation that torch dispatches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.losses import find_spec
from lossgate.numerics.float_formats import FLOAT32, GRIDS, Grid, Noise
from lossgate.numerics.rounding import RoundEveryOperation
from lossgate.problems.batch import Batch
from lossgate.problems.partition import VocabShard
from lossgate.specs.outputs import grad_name
from lossgate.specs.spec import Spec, TokenValues


def run_ensemble(
    candidate: Candidate, batch: Batch, members: int, seed: int, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """``members`` correct but rounded runs: each output, or those ``wanted``, as ``[members, *shape]``, by the names of ``Result``."""
    return _Ensemble(candidate, batch, members, Noise(seed), wanted).run()


@dataclass(frozen=True)
class _Softmax:
    """What forward keeps for backward. M members, T tokens, V rows of the vocabulary."""

    p: Tensor  # [M, T, V]
    log_p: Tensor  # [M, T, V]
    ids: Tensor  # [T, k], whose log-probabilities are asked for
    left_out: Tensor  # [T, k] bool: by a filter
    values: TokenValues  # [M, T] each, or [M, T, k]


_LEFT_OUT = -1e30
"""The logit of what a filter leaves out: as good as -inf, and safe to compute with."""


class _Ensemble:
    def __init__(
        self, candidate: Candidate, batch: Batch, members: int, noise: Noise, wanted: Collection[str] | None
    ) -> None:
        self.batch, self.members, self.noise, self.wanted = batch, members, noise, wanted
        self.spec: Spec = find_spec(candidate.spec)
        self.options = self.spec.make_options(batch.problem.options)
        self.temperature = float(getattr(self.options, "temperature", 1.0))
        self.precision: Precision = candidate.precision[batch.problem.dtype]
        self.contract = candidate.contract
        self.output_grid = GRIDS[batch.problem.dtype]
        self.loss_grid = GRIDS[self.precision.loss]

    def run(self) -> dict[str, Tensor]:
        leaves = self.batch.leaves
        if "hidden" not in leaves and "logits" not in leaves:
            ((name, leaf),) = leaves.items()
            values = TokenValues(logprobs=leaf.expand(self.members, *leaf.shape), entropy=None)
            outputs, upstream, _ = self._loss(values)
            return outputs | {grad_name(name): self.noise.round(upstream, self.output_grid)}
        softmax = self._softmax(self._logits())
        outputs, upstream, of_entropy = self._loss(softmax.values)
        dlogits = self._dlogits(softmax, upstream, of_entropy)
        return outputs | {grad_name(name): grad for name, grad in self._gradients(dlogits).items()}

    # Forward

    def _logits(self) -> Tensor:
        """Tempered logits, ``[M, T, V]``."""
        leaves, grid = self.batch.leaves, GRIDS[self.precision.logits]
        if "logits" in leaves:
            logits = leaves["logits"].expand(self.members, -1, -1)
        else:
            logits = self._round(self._matmul(leaves["hidden"], leaves["weight"].T), grid)
            if (bias := leaves.get("bias")) is not None:
                logits = self._round(logits + bias, grid)
        if self.temperature == 1.0:
            return logits
        # A kernel holds the temperature, or its inverse, in float32: one error for all logits of a run.
        temperature = self.temperature * (1 + FLOAT32.unit * self.noise.uniform(torch.Size((self.members, 1, 1))))
        return self._round(logits / temperature, grid)

    def _softmax(self, logits: Tensor) -> _Softmax:
        fields, spec = self.batch.fields, self.spec
        lowest, highest = self._range(logits)
        ids = fields[spec.columns] if spec.columns else fields["labels"][:, None]
        left_out = torch.zeros_like(ids, dtype=torch.bool)
        if spec.kept is not None:
            logits = logits.masked_fill(~fields[spec.kept], _LEFT_OUT)
            left_out = ~fields[spec.kept].gather(1, ids)
        coarse = GRIDS[self.precision.logsumexp]
        top = logits.amax(-1, keepdim=True)
        total = self._round(self._round(logits - top).exp_().sum(-1, keepdim=True), coarse)
        logsumexp = self._round(top + self._round(total.log(), coarse))
        logprobs = self._round(logits - logsumexp, GRIDS[self.precision.logprobs])
        p = self.noise.round(logprobs.exp(), FLOAT32)
        chosen = logprobs.gather(-1, ids.expand(self.members, -1, -1)).masked_fill(left_out, float("-inf"))
        entropy = self._entropy(p, logprobs, logits, logsumexp.squeeze(-1))
        values = TokenValues(
            logprobs=chosen if spec.columns else chosen.squeeze(-1), entropy=entropy, lowest=lowest, highest=highest
        )
        return _Softmax(p, logprobs, ids, left_out, values)

    def _entropy(self, p: Tensor, logprobs: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
        """lse - <p, z> loses digits to large logits, -<p, log p> to a sum of p that is not quite 1; a kernel may compute either."""
        entropy = self._round(logsumexp) - self._round(torch.linalg.vecdot(p, logits))
        if self.wanted is not None and not any("entropy" in name for name in self.wanted):
            return entropy
        one_by_one = self._round(torch.linalg.vecdot(p, torch.where(p > 0, logprobs, 0.0))) * -1
        coin = self.noise.uniform(torch.Size((self.members, 1))) > 0
        return torch.where(coin, entropy, one_by_one)

    def _range(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token's logits, before the temperature."""
        lowest, highest = logits.aminmax(dim=-1)
        return lowest * self.temperature, highest * self.temperature

    def _round(self, x: Tensor, grid: Grid = FLOAT32) -> Tensor:
        """Of numbers whose logarithm does not matter."""
        return self.noise.round(x, grid, near_zero=False)

    def _loss(self, values: TokenValues) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Every output that is no gradient; and the upstream gradients of log-probabilities and, if any, of entropies."""
        outputs = {"logprobs": values.logprobs} if "logprobs" in self.spec.outputs else {}
        if "token_entropy" in self.spec.outputs and values.entropy is not None:
            outputs["token_entropy"] = values.entropy
        gradient, of_entropy = torch.zeros_like(values.logprobs), None
        if self.spec.loss is not None:
            found, gradient, of_entropy = self._scalars(values)
            outputs |= found
        outputs = {name: self.noise.round(tensor, self.loss_grid) for name, tensor in outputs.items()}
        if (cotangent := self.batch.cotangents.get("logprobs")) is not None:
            gradient = self.noise.round(gradient + cotangent, self.loss_grid)
        if (cotangent := self.batch.cotangents.get("token_entropy")) is not None:
            of_entropy = self.noise.round(cotangent.expand(self.members, -1), self.loss_grid)
        return outputs, gradient, of_entropy

    def _scalars(self, values: TokenValues) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Loss and metrics ``[M]``; and the gradients of log-probabilities and entropies."""
        # Everything is expanded, so that what it meets is rounded by each member for itself.
        upstream = self.batch.cotangents.get("loss", torch.zeros((), dtype=torch.float64)).expand(self.members)
        own = {
            name: field.expand(self.members, *field.shape)
            for name, field in self.batch.fields.items()
            if _is_a_number(field)
        }
        given = {
            name: getattr(values, name)
            for name in ("entropy", "lowest", "highest")
            if getattr(values, name) is not None
        }

        def one_member(
            logprobs: Tensor, given: dict[str, Tensor], own: dict[str, Tensor], upstream: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
            fields, extremes = {**self.batch.fields, **own}, {name: given.get(name) for name in ("lowest", "highest")}

            def loss_of(logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
                return self.spec.run(
                    TokenValues(logprobs=logprobs, entropy=entropy, **extremes), fields, self.options, self.wanted
                )

            primals = (logprobs, given["entropy"]) if "entropy" in given else (logprobs,)
            of = loss_of if "entropy" in given else lambda logprobs: loss_of(logprobs, None)
            loss, backward, metrics = cast(
                "tuple[Tensor, Any, dict[str, Tensor]]", torch.func.vjp(of, *primals, has_aux=True)
            )
            gradient, *rest = backward(upstream)
            return loss, gradient, rest[0] if rest else torch.zeros_like(loss), metrics

        with RoundEveryOperation(self.noise, self.loss_grid):
            loss, gradient, of_entropy, metrics = torch.vmap(one_member)(values.logprobs, given, own, upstream)
        return {"loss": loss, **metrics}, gradient, of_entropy if bool(of_entropy.any()) else None

    # Backward

    def _dlogits(self, softmax: _Softmax, upstream: Tensor, of_entropy: Tensor | None) -> Tensor:
        """``(onehot - p) g / temperature``, summed over the ids, and ``-p (log p + H) h / temperature`` of the entropy. ``[M, T, V]``."""
        p, ids = softmax.p, softmax.ids.expand(self.members, -1, -1)
        factor = self.noise.round(upstream / self.temperature, FLOAT32)
        factor = (factor if self.spec.columns else factor[..., None]).masked_fill(softmax.left_out, 0.0)
        if factor.shape[-1] == 1:
            dlogits = p.neg().scatter_add_(-1, ids, torch.ones_like(factor)).mul_(factor)
        else:
            total = self._round(factor.sum(-1, keepdim=True))
            dlogits = self._round(p * -total).scatter_add_(-1, ids, factor)
        if of_entropy is not None:
            assert softmax.values.entropy is not None
            surprise = self._round(softmax.log_p + softmax.values.entropy[..., None])
            factor = self.noise.round(of_entropy / self.temperature, FLOAT32)[..., None]
            dlogits = self._round(dlogits - self._round(p * torch.where(p > 0, surprise, 0.0)) * factor)
        if self.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self.noise.round(dlogits, GRIDS[self.precision.logits])
        return self.noise.round(dlogits, GRIDS[self.precision.dlogits])

    def _gradients(self, dlogits: Tensor) -> dict[str, Tensor]:
        leaves = self.batch.leaves
        if "logits" in leaves:
            gradients = {"logits": self.noise.round(dlogits, self.output_grid)}
        else:
            gradients = {
                "hidden": self._grad_hidden(dlogits, leaves["weight"]),
                "weight": self._grad_weight(dlogits, leaves["hidden"]),
            }
        if "bias" in leaves:
            ones = torch.ones(dlogits.shape[1], 1, dtype=dlogits.dtype)
            gradients["bias"] = self._grad_weight(dlogits, ones).squeeze(-1)
        if self.precision.grads_in_forward:
            gradients = {name: self.noise.round(gradient, self.output_grid) for name, gradient in gradients.items()}
        return gradients

    def _grad_hidden(self, dlogits: Tensor, weight: Tensor) -> Tensor:
        """Each tp rank multiplies its own rows of the vocabulary, then the parts are added."""
        shards = [s for s in self.batch.partition.vocab_shards if s.end > s.start]
        parts = [self._vocab_part(dlogits, weight, shard) for shard in shards]
        if len(parts) == 1:
            return self.noise.round(parts[0], self.output_grid)
        by_caller = self.contract.of_grad("hidden")["tp"] != "replicate"
        grid = self.output_grid if by_caller else GRIDS[self.precision.reduce]
        return self.noise.round(self._sum(parts, grid), self.output_grid)

    def _vocab_part(self, dlogits: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
        return self._matmul(dlogits[..., shard.start : shard.end], weight[shard.start : shard.end])

    def _grad_weight(self, dlogits: Tensor, hidden: Tensor) -> Tensor:
        """Each dp and cp rank multiplies its own tokens, chunk by chunk; the caller adds the ranks' parts."""
        parts = [
            self._token_part(dlogits, hidden, tokens)
            for tokens in self.batch.partition.token_shards.values()
            if len(tokens)
        ]
        return sum(
            (self.noise.round(part, self.output_grid) for part in parts[1:]),
            self.noise.round(parts[0], self.output_grid),
        )

    def _token_part(self, dlogits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        everything = len(tokens) == dlogits.shape[1]
        left = (dlogits if everything else dlogits[:, tokens]).transpose(-1, -2)
        right = hidden if everything else hidden[tokens]
        grid, chunk = GRIDS[self.precision.accumulate], self.precision.chunk or len(tokens)
        if grid == FLOAT32 or chunk >= len(tokens):
            return self._matmul(left, right)
        steps = [left[..., i : i + chunk] @ right[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return self._sum(steps, grid)

    def _sum(self, parts: Sequence[Tensor], grid: Grid) -> Tensor:
        """One after the other, in numbers of the grid."""
        total = self.noise.round(parts[0], grid)
        for part in parts[1:]:
            total = self.noise.round(total + self.noise.round(part, grid), grid)
        return total

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """A product as float32 accumulation gives it, in any order.

        Added one by one, K terms make partial sums of about ``k / K`` of the result, plus what cancels later, whose
        size is that of the norms of row and column; each is rounded. (Higham, Accuracy and Stability, section 3.1.)
        """
        product, terms = left @ right, right.shape[-2]
        norms = left.square().sum(-1, keepdim=True) * right.square().sum(-2, keepdim=True)
        size = torch.add(norms / 2, product.square(), alpha=terms / 3).sqrt_()
        noise = self.noise.uniform(torch.Size((self.members, *product.shape[-2:])))
        return torch.addcmul(product, size, noise, value=FLOAT32.unit)


def _is_a_number(field: Tensor) -> bool:
    """Not an index: numbers, masks that are summed, counts."""
    return field.is_floating_point() or field.dtype is torch.bool or not field.dim()
