# SPDX-License-Identifier: Apache-2.0
"""Losses through an lm-head that is any module, whose gradients are made in forward, tile by tile.

A loss that is a sum over tokens has one upstream gradient, a scalar. So the gradient of each tile
can be made right after its logits, and the head is called once for each tile; with
``tiled_token_logprobs`` it is called twice. open-instruct's tiled lm-head loss does so too. Unlike
there, gradients are held until backward and go through autograd: any upstream gradient multiplies
all of them, forward writes to no ``.grad``, and hooks of data-parallel wrappers fire once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_losses.arguments import as_mask, check_labels
from fused_losses.grpo import RhoCorrection, grpo_loss
from fused_losses.softmax import TokenLogprobs
from fused_losses.tiled import tiled_token_logprobs
from fused_losses.tiled_head import (
    GradientSums,
    TiledHead,
    check_tiled_call,
    first_derivative_only,
    given,
    leaves,
    multiplied,
    tensors_with_gradients,
    tiles_of,
    used_leaves,
    without_dead_rows,
)
from fused_losses.vocab_parallel import vocab_parallel_logprobs
from fused_losses.wrappers import check_parameter, leaves_of, run_in_forward

Metrics = Mapping[str, Tensor]
LossOfTile = Callable[[TokenLogprobs, slice], tuple[Tensor, Metrics]]


def tiled_grpo_loss(
    lm_head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    temperature: float = 1.0,
    tiles: int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes ``grpo_loss`` through an lm-head module, calling the head once for each tile.

    It replaces open-instruct's tiled lm-head loss.

    Args:
        lm_head: as for ``tiled_loss``.
        hidden: ``[tokens, hidden]``.
        labels: ``[tokens]`` integer ids.
        mask: ``[tokens]`` bool, the tokens that count. Whatever is at other tokens has no effect,
            in hidden, labels and options alike.
        temperature: divides the logits; positive.
        tiles: as for ``tiled_loss``.
        options: the other arguments of ``grpo_loss``, for all tokens: ``advantages``,
            ``valid_tokens`` and so on.

    Returns:
        The loss and the metrics of ``grpo_loss``.

    Raises:
        ValueError: As in ``grpo_loss`` and ``tiled_loss``.

    Collectives:
        Those of ``grpo_loss``.

    A correction ``rho`` with ``rho_mask_sequence_level`` or ``rho_mask_tv_divergence`` averages
    over sequences, which lie across tiles, and if ``old_logprobs`` is None it averages the new
    log-probabilities. With these options the head is called twice for each tile, by
    ``tiled_token_logprobs``.
    """
    check_tiled_call(lm_head, hidden, labels, temperature, tiles)
    options["mask"] = mask = as_mask("mask", mask, labels, "labels")
    of_tokens = {name: x for name, x in options.items() if isinstance(x, Tensor) and name != "valid_tokens"}
    for name, x in of_tokens.items():
        if x.shape != labels.shape:
            raise ValueError(f"{name} {list(x.shape)}: expected {list(labels.shape)}, one for each token, as labels")
    given_head: dict[str, Any] = {"temperature": temperature, "tiles": tiles}
    rho = options.get("rho")
    if isinstance(rho, RhoCorrection) and rho.of_sequences:
        return grpo_loss(tiled_token_logprobs(lm_head, hidden, labels, **given_head)[0], **options)

    def loss_of_tile(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
        of_tile: dict[str, Any] = {name: x[tile] for name, x in of_tokens.items()}
        return grpo_loss(values.logprobs, **{**options, **of_tile})

    return tiled_loss(lm_head, hidden, labels, loss_of_tile, mask=mask, **given_head)


def tiled_loss(
    lm_head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    loss_of_tile: LossOfTile,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    tiles: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes a loss that is a sum over tokens through an lm-head module, with its gradients.

    The head is called once in its wrappers, as by ``tiled_token_logprobs``, and its ``forward``
    runs once for each tile: the gradients of a tile are made right after its logits. Backward
    multiplies them by the upstream gradient of the loss, and calls nothing. Where nothing needs a
    gradient, or under ``torch.no_grad``, no gradient is made.

    Args:
        lm_head: maps ``[n, hidden]`` to logits ``[n, vocab]``, also for n = 0. It treats each token
            on its own.
        hidden: ``[tokens, hidden]``.
        labels: ``[tokens]`` integer ids.
        loss_of_tile: takes the log-probabilities and entropies of a tile, ``[n]`` each, and the
            slice of the tokens that it is. Returns the tile's part of the loss, a scalar, and of
            metrics. The parts of the loss must add up: divide by a number of the whole batch, not
            of the tile, and use no sum over tokens that lie across tiles.
        mask: ``[tokens]`` bool, the tokens that count; all by default. At other tokens the head is
            given another hidden state, and gradients are zero. ``loss_of_tile`` still must select
            them away, since their values are meaningless.
        temperature: divides the logits; positive.
        tiles: how many times the head's forward runs; by default once for every 256 tokens. If that
            forward is collective itself, pass the same number on every rank: it runs that often for
            any number of tokens, also for none. Either all ranks need gradients, or none.
        entropy: whether ``loss_of_tile`` is given entropies of ``softmax(logits / temperature)``.

    Returns:
        The loss, a scalar with gradients to hidden and to every parameter of the head that needs
        one; and the metrics without gradients: scalars are added up over tiles, and of names that
        end in ``_min`` or ``_max`` the smallest or largest is taken. Metrics ``[n]``, one number
        for each token, become ``[tokens]``.

    Raises:
        ValueError: As by ``tiled_token_logprobs``; a label that counts is outside of the vocabulary
            (see ``unchecked_values``); or ``loss_of_tile`` returns no scalar, or uses another
            tensor whose gradient would be lost.
        RuntimeError: In backward: the gradient is differentiated again.

    Memory:
        Forward holds what backward does for ``tiled_token_logprobs``, with the same l, L, G and g:
        G and the gradient of hidden (in float32 for float16), and beside them first 2 l + L and
        then l + g. Where no gradient is needed, it holds l + L alone.
        Saved for backward: G and the gradient of hidden. Backward holds their products with the
        upstream gradient beside them, in the dtypes of parameters and hidden.
    """
    check_tiled_call(lm_head, hidden, labels, temperature, tiles)
    counted = None if mask is None else as_mask("mask", mask, labels, "labels")
    metrics = dict[str, Tensor]()

    def in_forward(module: nn.Module, own: Tensor) -> Tensor:
        candidates = tensors_with_gradients(module)
        head = TiledHead(module, tuple(candidates), {"temperature": temperature, "entropy": entropy})
        computed = _LossAndGradients(head, list(candidates.values()), own, loss_of_tile)
        for tile in tiles_of(len(own), tiles):
            computed.add(tile, labels[tile], None if counted is None else counted[tile])
        if counted is not None:
            check_labels(labels, counted, computed.vocab)
        metrics.update(computed.metrics())
        return computed.loss()

    return run_in_forward(lm_head, in_forward, hidden), metrics


class _LossAndGradients:
    """A loss, its metrics and its gradients, computed tile by tile inside the forward of the head.

    Args:
        head: whose places are those of ``tensors``.
        tensors: those of the head that need gradients.
        hidden: ``[tokens, hidden]``.
        loss_of_tile: as for ``tiled_loss``.
    """

    def __init__(self, head: TiledHead, tensors: list[Tensor], hidden: Tensor, loss_of_tile: LossOfTile) -> None:
        self._head, self._tensors, self._hidden, self._loss_of_tile = head, tensors, hidden, loss_of_tile
        self._ends, self._checked = leaves(tensors), set[int]()
        self._sums, self._of_hidden = GradientSums(len(tensors)), None
        if hidden.requires_grad and torch.is_grad_enabled():
            held = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
            self._of_hidden = torch.zeros_like(hidden, dtype=held)
        self._losses, self._metrics = list[Tensor](), list[Metrics]()
        self.vocab = 0

    def add(self, tile: slice, labels: Tensor, counted: Tensor | None) -> None:
        """Computes a tile.

        Only its results outlive this method, so the logits of two tiles never exist at a time.

        Args:
            tile: which tokens of hidden.
            labels: ``[n]``, those of the tile.
            counted: ``[n]`` bool, which of them count; None for all.
        """
        x = self._hidden[tile].detach()
        x = x if counted is None else without_dead_rows(x, counted)
        x.requires_grad_(self._of_hidden is not None)
        with _without_callers_hooks():
            logits = self._head.logits(self._ends, x)
            self.vocab, half = logits.shape[1], logits.dtype == torch.float16
            found = vocab_parallel_logprobs(logits, labels, **self._head.statistics)
            del logits
            self._check_used(given(found), x)
            upstream = self._upstream(found, tile)
            if found.logprobs.requires_grad:
                upstream = [u if counted is None else torch.where(counted, u, 0.0) for u in upstream]
                self._add_gradients(given(found), upstream, x, tile, _unit(upstream) if half else None)

    def _check_used(self, outputs: tuple[Tensor, ...], x: Tensor) -> None:
        """Checks the tensors that the head uses for the first time."""
        used = used_leaves(outputs, [*self._ends, x]) - self._checked
        for place, tensor, end in zip(self._head.places, self._tensors, self._ends, strict=True):
            if id(end) in used:
                check_parameter(f"lm_head: its {place.name}", tensor)
        self._checked |= used

    def _upstream(self, found: TokenLogprobs, tile: slice) -> list[Tensor]:
        """Computes the loss of a tile, and its gradients with respect to the tile's statistics."""
        values = TokenLogprobs(*map(_leaf, found))  # pyright: ignore[reportArgumentType]
        loss, metrics = self._loss_of_tile(values, tile)
        if loss.dim():
            raise ValueError(f"loss_of_tile returned a loss {list(loss.shape)}: expected a scalar, the tile's part")
        for leaf in leaves_of(loss):
            if not any(leaf is value for value in given(values)):
                raise ValueError(
                    f"loss_of_tile uses a {type(leaf).__name__} {list(leaf.shape)} that needs a gradient, which would "
                    "be lost; detach it, or compute the loss from tiled_token_logprobs"
                )
        self._losses.append(loss.detach())
        self._metrics.append({name: metric.detach() for name, metric in metrics.items()})
        if not loss.requires_grad:
            return [torch.zeros_like(value) for value in given(values)]
        return list(torch.autograd.grad(loss, given(values), materialize_grads=True))

    def _add_gradients(
        self, outputs: tuple[Tensor, ...], upstream: list[Tensor], x: Tensor, tile: slice, unit: Tensor | None
    ) -> None:
        """Adds a tile's gradients, which are computed as multiples of ``unit``."""
        wanted = self._ends if self._of_hidden is None else [*self._ends, x]
        scaled = upstream if unit is None else [u / unit for u in upstream]
        with torch.autocast(x.device.type, enabled=False):
            found = torch.autograd.grad(outputs, wanted, scaled, allow_unused=True)
        gradients = cast("Sequence[Tensor | None]", found)
        self._sums.add(gradients[: len(self._ends)], unit)
        if self._of_hidden is not None and (of_x := gradients[-1]) is not None:
            self._of_hidden[tile] = of_x if unit is None else of_x.float() * unit

    def loss(self) -> Tensor:
        """Returns the loss, with its gradients."""
        total = torch.stack(self._losses).sum()
        gradients = zip([*self._tensors, self._hidden], [*self._sums.sums, self._of_hidden], strict=True)
        known = [(tensor, gradient) for tensor, gradient in gradients if gradient is not None]
        if not known:
            return total
        return _Held.apply(total, [gradient for _, gradient in known], *(tensor for tensor, _ in known))  # type: ignore[return-value]

    def metrics(self) -> dict[str, Tensor]:
        """Returns the metrics of all tiles."""
        return {name: _merged(name, [metrics[name] for metrics in self._metrics]) for name in self._metrics[0]}


def _leaf(statistic: Tensor | None) -> Tensor | None:
    return None if statistic is None else statistic.detach().requires_grad_(statistic.requires_grad)


def _without_callers_hooks() -> AbstractContextManager[Any]:
    """Keeps hooks on saved tensors away from what a tile saves and uses up at once.

    Activation checkpointing has such hooks: it would compute all tiles again for the gradients of
    the first. Without any, torch itself notices tensors that were changed in place.
    """
    hooks: Any = getattr(torch._C, "_autograd")  # noqa: B009
    if hooks._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _unit(upstream: list[Tensor]) -> Tensor:
    """Returns the largest of upstream gradients ``[1]``, or 1 if all are zero.

    The gradients of logits in float16 are computed as multiples of it, or small ones would be lost:
    the factor of a GradScaler comes only in backward.
    """
    largest = torch.cat([u.abs() for u in upstream] + [upstream[0].new_zeros(1)]).amax(0, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _merged(name: str, parts: list[Tensor]) -> Tensor:
    """Returns a metric of all tiles, given its parts."""
    if parts[0].dim():
        return torch.cat(parts)
    stacked = torch.stack(parts)
    return stacked.amin() if name.endswith("_min") else stacked.amax() if name.endswith("_max") else stacked.sum()


class _Held(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return loss.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # CUDA rounds a 0-dim factor to a half-precision gradient's dtype first, but no 1-dim one.
        scale = upstream.reshape(1)
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(multiplied(gradient, scale, dtype) for gradient, dtype in gradients)
