# SPDX-License-Identifier: Apache-2.0
"""An ensemble of runs that are correct but rounded, as the candidate declares: the noise that a right kernel may have.

The stages from the head to the log-probabilities are spelled out here in primitive operations, forward and backward,
for all members at once, with stochastic rounding at the seams that ``Precision`` declares and to float32 after every
other operation. (Perturbing whole operators instead, such as log_softmax and its backward, misses the cancellation in
``p - 1`` where the label's probability is near 1, and raised 8 to 9% false alarms in dX.) The loss itself runs as the
reference has it, with float32 noise on every operation that torch dispatches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.judge.grids import FLOAT32, GRIDS, Grid, Noise
from lossgate.problems.batch import Batch
from lossgate.problems.partition import VocabShard
from lossgate.specs import find_spec
from lossgate.specs.base import Spec, TokenValues
from lossgate.specs.outputs import grad_name


def run_ensemble(candidate: Candidate, batch: Batch, members: int, seed: int) -> dict[str, Tensor]:
    """``members`` correct but rounded runs of the problem: each output as ``[members, *shape]``, by the names of ``Result``."""
    return _Ensemble(candidate, batch, members, Noise(seed)).run()


@dataclass(frozen=True)
class _Softmax:
    """What forward keeps for backward. M members, T tokens, V rows of the vocabulary."""

    p: Tensor  # [M, T, V]
    logprobs: Tensor  # [M, T]
    entropy: Tensor  # [M, T]


class _Ensemble:
    def __init__(self, candidate: Candidate, batch: Batch, members: int, noise: Noise) -> None:
        self.batch, self.members, self.noise = batch, members, noise
        self.spec: Spec = find_spec(candidate.spec)
        self.options = self.spec.make_options(batch.problem.options)
        self.temperature = float(getattr(self.options, "temperature", 1.0))
        self.precision: Precision = candidate.precision[batch.problem.dtype]
        self.contract = candidate.contract
        self.output_grid = GRIDS[batch.problem.dtype]
        self.loss_grid = GRIDS[self.precision.loss]

    def run(self) -> dict[str, Tensor]:
        labels = self.batch.fields["labels"]
        softmax = self._softmax(self._logits(), labels)
        outputs, upstream = self._loss(softmax)
        dlogits = self._dlogits(softmax.p, labels, upstream)
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

    def _softmax(self, logits: Tensor, labels: Tensor) -> _Softmax:
        coarse = GRIDS[self.precision.logsumexp]
        top = logits.amax(-1, keepdim=True)
        total = self._round(self._round(logits - top).exp_().sum(-1, keepdim=True), coarse)
        logsumexp = self._round(top + self._round(total.log(), coarse))
        logprobs = self._round(logits - logsumexp, GRIDS[self.precision.logprobs])
        p = self.noise.round(logprobs.exp(), FLOAT32)
        chosen = logprobs.gather(-1, labels.expand(self.members, -1)[..., None]).squeeze(-1)
        # lse - <p, z> cancels where -<p, log p> does not; a kernel may compute either.
        mean_logit = torch.linalg.vecdot(p, logits)
        return _Softmax(p, chosen, self._round(logsumexp.squeeze(-1)) - self._round(mean_logit))

    def _round(self, x: Tensor, grid: Grid = FLOAT32) -> Tensor:
        """Of numbers whose logarithm does not matter."""
        return self.noise.round(x, grid, near_zero=False)

    def _loss(self, softmax: _Softmax) -> tuple[dict[str, Tensor], Tensor]:
        """Loss, log-probabilities and metrics; and the upstream gradient of the log-probabilities, ``[M, T]``."""
        cotangents = self.batch.cotangents
        # Expanded, so that what the upstream gradient meets is rounded by each member for itself.
        upstream = cotangents.get("loss", torch.zeros((), dtype=torch.float64)).expand(self.members)

        def one_member(logprobs: Tensor, entropy: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            def loss_of(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                return self.spec.loss(TokenValues(logprobs=values, entropy=entropy), self.batch.fields, self.options)

            loss, backward, metrics = cast("tuple[Tensor, Any, dict[str, Tensor]]", torch.func.vjp(loss_of, logprobs, has_aux=True))
            (gradient,) = backward(upstream)
            return loss, gradient, metrics

        with _RoundEveryOperation(self.noise, self.loss_grid):
            loss, gradient, metrics = torch.vmap(one_member)(softmax.logprobs, softmax.entropy, upstream)
        outputs = {"loss": loss, "logprobs": softmax.logprobs, **metrics}
        outputs = {name: self.noise.round(tensor, self.loss_grid) for name, tensor in outputs.items()}
        if "logprobs" in cotangents:
            gradient = self.noise.round(gradient + cotangents["logprobs"], self.loss_grid)
        return outputs, gradient

    # Backward

    def _dlogits(self, p: Tensor, labels: Tensor, upstream: Tensor) -> Tensor:
        """``(onehot - p) g / temperature``, ``[M, T, V]``."""
        factor = self.noise.round(upstream / self.temperature, FLOAT32)[..., None]
        dlogits = p.neg().scatter_add_(-1, labels.expand(self.members, -1)[..., None], torch.ones_like(factor)).mul_(factor)
        if self.temperature != 1.0:  # the gradient of the tempered logits has the logits' dtype
            dlogits = self.noise.round(dlogits, GRIDS[self.precision.logits])
        return self.noise.round(dlogits, GRIDS[self.precision.dlogits])

    def _gradients(self, dlogits: Tensor) -> dict[str, Tensor]:
        leaves = self.batch.leaves
        if "logits" in leaves:
            gradients = {"logits": self.noise.round(dlogits, self.output_grid)}
        else:
            gradients = {"hidden": self._grad_hidden(dlogits, leaves["weight"]), "weight": self._grad_weight(dlogits, leaves["hidden"])}
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
        parts = [self._token_part(dlogits, hidden, tokens) for tokens in self.batch.partition.token_shards.values() if len(tokens)]
        return sum((self.noise.round(part, self.output_grid) for part in parts[1:]), self.noise.round(parts[0], self.output_grid))

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


_EXACT = frozenset(
    [
        "view",
        "expand",
        "select",
        "slice",
        "neg",
        "where",
        "detach",
        "alias",
        "clone",
        "unsqueeze",
        "squeeze",
        "maximum",
        "minimum",
        "clamp",
        "zeros_like",
        "ones_like",
        "scalar_tensor",
        "lift_fresh",
        "new_zeros",
        "zeros",
        "gather",
        "index",
        "permute",
        "transpose",
        "abs",
    ]
)
"""Operations that do not round."""


class _RoundEveryOperation(TorchDispatchMode):
    """Rounds the float64 result of every dispatched operation."""

    def __init__(self, noise: Noise, grid: Grid) -> None:
        super().__init__()
        self.noise, self.grid = noise, grid

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in _EXACT:
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float64 and tensor.dim():
                tensor.copy_(self.noise.round(tensor, self.grid))
        return result
