# SPDX-License-Identifier: Apache-2.0
"""Losses through an lm-head that is any module, with gradients computed in forward, tile by tile.

A loss that is a sum over tokens has one upstream gradient, a scalar. So the gradient of each tile
can be computed right after its logits, and the head is called once for each tile; with
``tiled_token_logprobs`` it is called twice. open-instruct's tiled lm-head loss works in the same
way. Unlike there, gradients are held until backward and go through autograd: the upstream gradient
multiplies all of them, forward writes to no ``.grad``, and hooks of data-parallel wrappers fire
once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_losses.arguments import UNTRAINED, as_count, as_labels_of, as_mask, unchecked_values
from fused_losses.grpo import grpo_loss
from fused_losses.metrics import Metrics
from fused_losses.names import named
from fused_losses.numerics import float16_unit
from fused_losses.passes import check_not_transformed, once_differentiable
from fused_losses.rho import RhoCorrection, RhoWeights, given_weights, rho_weights
from fused_losses.softmax import TokenLogprobs
from fused_losses.tiled import tiled_token_logprobs
from fused_losses.tiled_head import (
    GradientSums,
    Statistics,
    TiledHead,
    check_tiled_call,
    given,
    leaves,
    multiplied,
    tensors_with_gradients,
    tiles_of,
    used_leaves,
    without_dead_rows,
)
from fused_losses.token_layouts import TokenLayout, flatten_like, flatten_tokens
from fused_losses.wrappers import check_parameter, leave_compiled_code, leaves_of, run_in_forward

LossOfTile = Callable[[TokenLogprobs, slice], tuple[Tensor, Metrics]]

_OF_TOKENS = ("advantages", "old_logprobs", "reference_logprobs", "vllm_logprobs", "sequence", "rho")
"""Arguments of ``grpo_loss`` with one number for each token. ``rho`` may be such a tensor, too."""


@partial(named, also=grpo_loss)
def tiled_grpo_loss(
    lm_head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    valid_tokens: Tensor | float,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    tiles: int | None = None,
    layout: TokenLayout = "bsh",
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """Computes ``grpo_loss`` through an lm-head module, calling the head once for each tile.

    It replaces open-instruct's tiled lm-head loss.

    Args:
        lm_head: as for ``tiled_loss``.
        hidden: ``[tokens, hidden]``, or a batch, ``[B, S, hidden]`` or ``[S, B, hidden]`` as
            ``layout`` says.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids.
        mask: of the shape of labels, bool, or numbers 0 and 1: the tokens that count. The hidden
            states, labels and options of other tokens have no effect.
        valid_tokens: as for ``grpo_loss``.
        temperature: divides the logits; positive.
        top_k: only the k largest logits of a token stay in its softmax; see ``linear_logprobs``.
            KL estimates use log-probabilities without this filter.
        top_p: of these, only the most probable stay, until their probabilities sum to this number.
        tiles: as for ``tiled_loss``.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        options: the other arguments of ``grpo_loss``, such as ``advantages``, for all tokens, but
            without ``unfiltered_logprobs``. Arguments with a number for each token have the shape
            of labels.

    Returns:
        The loss and the metrics of ``grpo_loss``.

    Raises:
        ValueError: As in ``grpo_loss`` and ``tiled_loss``.

    Collectives:
        Those of ``grpo_loss``, once for all tiles.

    A correction ``rho`` with ``rho_mask_sequence_level`` or ``rho_mask_tv_divergence`` averages
    over sequences, which lie across tiles. Its weights are computed before the first tile. If
    ``old_logprobs`` is None, they need all new log-probabilities, so ``tiled_token_logprobs`` calls
    the head twice for each tile.
    """
    leave_compiled_code()
    if "unfiltered_logprobs" in options:
        raise ValueError("unfiltered_logprobs: expected none, since they are computed here; pass top_k and top_p")
    check_tiled_call(lm_head, hidden, labels, tiles, runs_again=False)
    check_not_transformed(mask=mask, **{name: x for name, x in options.items() if isinstance(x, Tensor)})
    mask = as_mask("mask", mask, labels, "labels")
    options = _flattened({**options, "mask": mask}, labels, layout)
    hidden, labels, _ = flatten_tokens(hidden, labels, layout)
    like = labels.new_empty(0, dtype=torch.float64)
    options["valid_tokens"] = as_count("valid_tokens", valid_tokens, like, options["mask"].sum())
    given_head: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "tiles": tiles}
    given_head["unfiltered"] = top_k is not None or top_p != 1
    rho = options.get("rho")
    if isinstance(rho, RhoCorrection) and rho.of_sequences and options.get("old_logprobs") is None:
        masked = as_labels_of(options["mask"], labels)
        found = tiled_token_logprobs(lm_head, hidden, masked, ignore_index=UNTRAINED, **given_head)
        return grpo_loss(found.logprobs, unfiltered_logprobs=found.unfiltered_logprobs, **options)
    options["rho"] = _weights_of_tokens(options)

    def loss_of_tile(values: TokenLogprobs, tile: slice) -> tuple[Tensor, Metrics]:
        with unchecked_values():  # The values are checked above, for all tiles at once.
            unfiltered = values.unfiltered_logprobs
            return grpo_loss(values.logprobs, unfiltered_logprobs=unfiltered, **_of_tile(options, tile))

    return tiled_loss(lm_head, hidden, labels, loss_of_tile, mask=options["mask"], **given_head)


def _flattened(options: dict[str, Any], labels: Tensor, layout: TokenLayout) -> dict[str, Any]:
    """Flattens each argument with a number for each token, as ``flatten_tokens`` does labels."""

    def flat(name: str, x: Any) -> Any:
        return flatten_like(name, x, labels, layout) if isinstance(x, Tensor) else x

    found: dict[str, Any] = {name: flat(name, x) if name in (*_OF_TOKENS, "mask") else x for name, x in options.items()}
    if isinstance(rho := options.get("rho"), RhoWeights):
        of_tokens: list[Any] = [flat(f"rho.{name}", x) for name, x in rho._asdict().items()]
        return {**found, "rho": RhoWeights(*of_tokens)}
    return found


def _of_tile(options: dict[str, Any], tile: slice) -> dict[str, Any]:
    """Returns the arguments of ``grpo_loss`` for a tile."""
    names = (*_OF_TOKENS, "mask")
    of_tokens = {name: options[name][tile] for name in names if isinstance(options.get(name), Tensor)}
    rho = options["rho"]
    return {**options, **of_tokens, "rho": rho.part(tile) if isinstance(rho, RhoWeights) else rho}


def _weights_of_tokens(options: dict[str, Any]) -> Any:
    """Returns rho in a form that ``grpo_loss`` takes for any part of the tokens.

    Raises:
        ValueError: rho does not fit, or a weight is negative or not finite.
    """
    rho, mask = options.get("rho"), options["mask"]
    if isinstance(rho, RhoWeights | Tensor):
        return given_weights(rho, torch.empty_like(mask, dtype=torch.float32), mask)
    if not isinstance(rho, RhoCorrection) or not rho.of_sequences:
        return rho
    names = ("old_logprobs", "vllm_logprobs", "advantages", "mask", "sequence", "sequences", "cp_group")
    of_policies: dict[str, Any] = {name: options.get(name) for name in names}
    return rho_weights(rho, **of_policies)


@named
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
    top_k: int | None = None,
    top_p: float = 1.0,
    unfiltered: bool = False,
    ignore_index: int = -100,
    layout: TokenLayout = "bsh",
) -> tuple[Tensor, Metrics]:
    """Computes a loss that is a sum over tokens through an lm-head module, with its gradients.

    The head is called once in its wrappers, as by ``tiled_token_logprobs``, and its ``forward``
    runs once for each tile: the gradients of a tile are computed right after its logits. Backward
    only multiplies them by the upstream gradient of the loss. If nothing needs a gradient, or under
    ``torch.no_grad``, no gradients are computed.

    Args:
        lm_head: maps ``[n, hidden]`` to logits ``[n, vocab]``, also for n = 0. It treats each token
            on its own. It may use random numbers, as dropout of adapters does: they are drawn tile
            by tile.
        hidden: ``[tokens, hidden]``, or a batch, ``[B, S, hidden]`` or ``[S, B, hidden]`` as
            ``layout`` says.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids, or ``ignore_index``.
        loss_of_tile: takes the statistics of a tile, ``[n]`` each, and the slice of its tokens, in
            the order of ``flatten_tokens``. Returns the tile's part of the loss, a scalar, and its
            part of ``Metrics``. The parts of the loss must add up: divide by a number of the whole
            batch, not of the tile, and use no sum over tokens that lie across tiles.
        mask: of the shape of labels, bool, or numbers 0 and 1: the tokens that count; all by
            default. At other tokens the head gets another hidden state, labels are ignored, and
            gradients are zero. ``loss_of_tile`` must still leave these tokens out, because their
            values are meaningless.
        temperature: divides the logits; positive.
        tiles: how many times the head's forward runs; by default once for every 256 tokens. If that
            forward makes collective calls, pass the same number on every rank: it runs that often
            for any number of tokens, also for none. Either all ranks need gradients, or none does.
        entropy: whether ``loss_of_tile`` is given entropies of ``softmax(logits / temperature)``.
        top_k: only the k largest logits of a token stay in its softmax; see ``linear_logprobs``.
        top_p: of these, only the most probable stay, until their probabilities sum to this number.
        unfiltered: whether ``loss_of_tile`` is given log-probabilities without this filter too.
        ignore_index: the label of tokens whose log-probability is 0, without a gradient. With a
            mask, no token that counts may have it.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.

    Returns:
        The loss, a scalar with gradients to hidden and to every parameter of the head that needs
        one; and the metrics of all tiles.

    Raises:
        ValueError: As by ``tiled_token_logprobs``; or ``loss_of_tile`` returns no scalar, returns
            other metrics than ``Metrics``, or uses another tensor whose gradient would be lost.
        RuntimeError: In backward: the gradient is differentiated again.

    Memory:
        With l, L, G and g as for ``tiled_token_logprobs``, forward holds as much as backward does
        there: G and the gradient of hidden (in float32 for float16), and in addition first 2 l + L
        and then l + g. If no gradient is needed, it holds only l + L.
        Saved for backward: G and the gradient of hidden. Backward also holds their products with
        the upstream gradient, in the dtypes of parameters and hidden.
    """
    leave_compiled_code()
    ignored = ignore_index if mask is None else UNTRAINED
    statistics = Statistics(temperature, entropy, top_k=top_k, top_p=top_p, unfiltered=unfiltered, ignore_index=ignored)
    check_tiled_call(lm_head, hidden, labels, tiles, runs_again=False)
    counted = None if mask is None else flatten_like("mask", as_mask("mask", mask, labels, "labels"), labels, layout)
    hidden, labels, _ = flatten_tokens(hidden, labels, layout)
    own_labels = labels if counted is None else as_labels_of(counted, labels, ignore_index)
    metrics = list[Metrics]()

    def in_forward(module: nn.Module, own: Tensor) -> Tensor:
        candidates = tensors_with_gradients(module)
        head = TiledHead(module, tuple(candidates))
        computed = _LossAndGradients(head, statistics, list(candidates.values()), own, loss_of_tile)
        for tile in tiles_of(len(own), tiles):
            computed.add(tile, own_labels[tile], None if counted is None else counted[tile])
        statistics.check(own_labels, computed.vocab)
        metrics.append(computed.metrics())
        return computed.loss()

    return run_in_forward(lm_head, in_forward, hidden), metrics[-1]


class _LossAndGradients:
    """A loss, its metrics and its gradients, computed tile by tile inside the forward of the head.

    Args:
        head: the head, with the places of ``tensors``.
        statistics: the statistics that ``loss_of_tile`` gets.
        tensors: the tensors of the head that need gradients.
        hidden: ``[tokens, hidden]``.
        loss_of_tile: as for ``tiled_loss``.
    """

    def __init__(
        self,
        head: TiledHead,
        statistics: Statistics,
        tensors: list[Tensor],
        hidden: Tensor,
        loss_of_tile: LossOfTile,
    ) -> None:
        self._head, self._statistics, self._tensors, self._hidden = head, statistics, tensors, hidden
        self._loss_of_tile = loss_of_tile
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
            tile: the slice of its tokens.
            labels: ``[n]``, the labels of the tile.
            counted: ``[n]`` bool, the tokens of the tile that count; None for all.
        """
        x = self._hidden[tile].detach()
        x = x if counted is None else without_dead_rows(x, counted)
        x.requires_grad_(self._of_hidden is not None)
        with _without_callers_hooks():
            logits = self._head.logits(self._ends, x)
            self.vocab, half = logits.shape[1], logits.dtype == torch.float16
            found = self._statistics.of(logits, labels)
            del logits
            self._check_used(given(found), x)
            upstream = self._upstream(found, tile)
            if found.logprobs.requires_grad:
                upstream = [u if counted is None else torch.where(counted, u, 0.0) for u in upstream]
                self._add_gradients(given(found), upstream, x, tile, self._unit(upstream) if half else None)

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
        returned = self._loss_of_tile(values, tile)
        if not isinstance(returned, tuple) or len(returned) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise ValueError(
                f"loss_of_tile returned a {type(returned).__name__}: expected a loss and Metrics; "
                "return loss, Metrics()"
            )
        loss, metrics = returned
        if loss.dim():
            raise ValueError(f"loss_of_tile returned a loss {list(loss.shape)}: expected a scalar, the tile's part")
        for leaf in leaves_of(loss):
            if not any(leaf is value for value in given(values)):
                raise ValueError(
                    f"loss_of_tile uses a {type(leaf).__name__} {list(leaf.shape)} that needs a gradient, which would "
                    "be lost; detach it, or compute the loss from tiled_token_logprobs"
                )
        self._losses.append(loss.detach())
        if not isinstance(metrics, Metrics):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"loss_of_tile returned metrics of type {type(metrics).__name__}: expected fused_losses.Metrics, which "
                "know how tiles make the whole; Metrics() for none"
            )
        self._metrics.append(metrics)
        if not loss.requires_grad:
            return [torch.zeros_like(value) for value in given(values)]
        return list(torch.autograd.grad(loss, given(values), materialize_grads=True))

    def _unit(self, upstream: list[Tensor]) -> Tensor:
        """Returns the unit ``[1]`` of upstream gradients, for logits in float16.

        It is needed because the factor of a GradScaler is known only in backward.
        """
        largest = torch.cat([u.abs() for u in upstream] + [upstream[0].new_zeros(1)]).amax(0, keepdim=True)
        return float16_unit(largest / self._statistics.temperature)

    def _add_gradients(
        self, outputs: tuple[Tensor, ...], upstream: list[Tensor], x: Tensor, tile: slice, unit: Tensor | None
    ) -> None:
        """Computes a tile's gradients in units of ``unit``, and adds them up."""
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

    def metrics(self) -> Metrics:
        """Returns the metrics of all tiles."""
        return sum(self._metrics, Metrics())


def _leaf(statistic: Tensor | None) -> Tensor | None:
    return None if statistic is None else statistic.detach().requires_grad_(statistic.requires_grad)


def _without_callers_hooks() -> AbstractContextManager[Any]:
    """Keeps the caller's hooks on saved tensors away from tensors that a tile saves for itself.

    Activation checkpointing has such hooks, and would compute all tiles again for the gradients of
    the first. Without hooks, torch itself notices tensors that were changed in place.
    """
    hooks: Any = getattr(torch._C, "_autograd")  # noqa: B009
    if hooks._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _Held(torch.autograd.Function):
    """A loss whose gradients were computed with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # CUDA would round a 0-dim factor to the dtype of a half-precision gradient first.
        scale = upstream.reshape(1)
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(multiplied(gradient, scale, dtype) for gradient, dtype in gradients)
