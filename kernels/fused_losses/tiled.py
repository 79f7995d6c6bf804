# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through an lm-head that is any module, by calling it tile by tile.

This is for heads that are more than the weight that ``linear_logprobs`` takes: with LoRA adapters,
wrapped, or collective when called. The head is called again in backward, which knows the upstream
gradient of each token. ``tiled_loss`` needs one pass, for losses that are sums over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_losses.names import named
from fused_losses.passes import once_differentiable
from fused_losses.softmax import TokenLogprobs
from fused_losses.tiled_head import (
    GradientSums,
    Statistics,
    TiledHead,
    check_tiled_call,
    given,
    leaves,
    tensors_with_gradients,
    tiles_of,
    used_leaves,
    without_dead_rows,
)
from fused_losses.token_layouts import TokenLayout, flatten_tokens
from fused_losses.wrappers import check_parameter, leave_compiled_code, run_in_forward


@named
def tiled_token_logprobs(
    lm_head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    tiles: int | None = None,
    entropy: bool = False,
    logit_range: bool = False,
    top_k: int | None = None,
    top_p: float = 1.0,
    unfiltered: bool = False,
    ignore_index: int = -100,
    layout: TokenLayout = "bsh",
) -> TokenLogprobs:
    """Computes ``log p(label)`` of each token through an lm-head module.

    The distribution is ``p = softmax(lm_head(hidden) / temperature)``. A token whose upstream
    gradient is zero does not contribute to any gradient. Under ``torch.no_grad`` nothing is saved;
    use that for old log-probabilities and the reference policy.

    The head is called once, in its wrappers if it has any. DistributedDataParallel, FSDP, FSDP2
    (``fully_shard``) and DeepSpeed's ZeRO gather its weights once for all tiles of a pass, and get
    each gradient once, when it is complete. Only the head's ``forward`` runs for every tile,
    without hooks of the head itself and not compiled. If a wrapper of the whole model gathers the
    head, call this inside the model's forward; see ``run_in_forward``.

    Args:
        lm_head: maps ``[n, hidden]`` to logits ``[n, vocab]``, also for n = 0. It treats each token
            on its own and uses no random numbers. It must not change between forward and backward,
            not even its frozen parts or its choice of active adapters.
        hidden: ``[tokens, hidden]``, or a batch, ``[B, S, hidden]`` or ``[S, B, hidden]`` as
            ``layout`` says. The head gets ``[n, hidden]`` of it at a time.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids, or ``ignore_index``.
        temperature: divides the logits; positive.
        tiles: how many times the head's forward runs, and again in backward; by default once for
            every 256 tokens. If that forward makes collective calls, pass the same number on every
            rank: it runs that often for any number of tokens, also for none. A rank on which
            nothing needs a gradient, or that does not call backward, makes no second pass, and the
            other ranks would wait for it.
        entropy: whether to return the entropy of p.
        logit_range: whether to return the smallest and the largest logit.
        top_k: only the k largest logits of a token stay in its softmax; see ``linear_logprobs``.
        top_p: of these, only the most probable stay, until their probabilities sum to this number.
        unfiltered: whether to return log-probabilities without this filter too.
        ignore_index: the label of tokens that do not count: their log-probability is 0, without a
            gradient.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.

    Returns:
        ``logprobs`` and, if asked for, ``entropy`` in nats, ``min_logits`` and ``max_logits``
        (before temperature and filter), and ``unfiltered_logprobs``; else None. Each has the shape
        of the labels and is in float32 (float64 for float64 logits). Log-probabilities and
        entropies carry gradients to hidden and to every parameter of the head that needs one. A
        label that is filtered out has -inf, without a gradient. Gradients of parameters are added
        up over tiles in float32 and rounded once.

    Raises:
        ValueError: A shape, dtype or number does not fit; a wrapper has not gathered the head's
            weights, or would gather them for every tile; a hook of the head would be given
            log-probabilities instead of logits; a part of the head is dropout in training mode; the
            head uses a tensor whose gradient would be lost; or a label is outside of the
            vocabulary. The check of labels waits once for the device; ``unchecked_values`` switches
            it off, and such a label then has NaN.
        RuntimeError: In backward: a trained parameter was changed in place after forward, the head
            no longer uses a trained parameter, or this gradient is differentiated again.

    Memory:
        Let l be the logits of one tile in the head's dtype. Let L be a float32 copy of at most 16
        MiB of them: two copies for a head in half precision, and up to four with entropy or a
        filter. Let G be a float32 gradient of every trained parameter, and g the same in the
        parameters' dtype (plus a sixteenth of G if that is half precision). Forward holds l + L.
        Backward holds G and the gradient of hidden, and in addition first 2 l + L and then l + g.
        Both also hold a few numbers for each token, and up to three times a tile's hidden states.
        At 256 tokens in a tile, hidden size 1024 and 32768 rows, G and the rest of a tile take 288
        MiB in float32 and 216 MiB in bfloat16.
        Saved for backward: hidden, labels and the parameters themselves.
    """
    leave_compiled_code()
    statistics = Statistics(temperature, entropy, logit_range, top_k, top_p, unfiltered, ignore_index)
    check_tiled_call(lm_head, hidden, labels, tiles, runs_again=True)
    hidden, labels, restore = flatten_tokens(hidden, labels, layout)

    def in_forward(module: nn.Module, own: Tensor) -> tuple[Tensor, ...]:
        return _in_forward(TiledHead(module), statistics, own, labels, tiles)

    outputs: tuple[Tensor, ...] = run_in_forward(lm_head, in_forward, hidden)
    return statistics.named(map(restore, outputs))


def _in_forward(
    head: TiledHead, statistics: Statistics, hidden: Tensor, labels: Tensor, tiles: int | None
) -> tuple[Tensor, ...]:
    """Computes the results inside the forward of the head, where its parameters are gathered.

    The trained tensors of the head are inputs of one autograd node. So their gradients arrive once
    and complete, where a wrapper expects the gradients of an ordinary head: at parameters, or at
    views of a flat parameter.
    """
    candidates = tensors_with_gradients(head.module)
    first, ends = tiles_of(len(hidden), tiles)[0], leaves(candidates.values())
    logits = head.only(candidates).logits(ends, hidden[first].detach())
    vocab, of_first = logits.shape[1], given(statistics.of(logits, labels[first]))
    del logits
    # A forward may have left attributes behind that need gradients, but are not used again.
    used = used_leaves(of_first, ends)
    trained = {
        place: tensor for (place, tensor), leaf in zip(candidates.items(), ends, strict=True) if id(leaf) in used
    }
    for place, tensor in trained.items():
        check_parameter(f"lm_head: its {place.name}", tensor)
    of_first = tuple(output.detach() for output in of_first)
    call = _Call(head.only(trained), statistics, tiles)
    outputs: Any = _TiledLogprobs.apply(call, hidden, labels, of_first, *trained.values())
    statistics.check(labels, vocab)
    return outputs


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors."""

    head: TiledHead
    statistics: Statistics
    tiles: int | None

    def outputs(self, trained: Sequence[Tensor], hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Computes the statistics of a tile that were asked for, ``[n]`` each.

        Args:
            trained: tensors that take the places of the head's own.
            hidden: ``[n, hidden]``.
            labels: ``[n]``.
        """
        return given(self.statistics.of(self.head.logits(trained, hidden), labels))


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        hidden: Tensor,
        labels: Tensor,
        of_first: tuple[Tensor, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        others = tiles_of(len(hidden), call.tiles)[1:]
        parts = [of_first, *(call.outputs(trained, hidden[tile], labels[tile]) for tile in others)]
        ctx.save_for_backward(hidden, labels, *trained)
        ctx.call = call
        device = hidden.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        found = call.statistics.named(outputs)
        ctx.mark_non_differentiable(*(x for x in (found.min_logits, found.max_logits) if x is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels, *trained = _saved(ctx)
        if all(u is None for u in upstream):
            return (None,) * (4 + len(trained))
        ends, sums = leaves(trained), GradientSums(len(trained))
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        for tile in tiles_of(len(hidden), ctx.call.tiles):
            own = tuple(None if u is None else u[tile] for u in upstream)
            x = _add_gradients(ctx, ends, hidden[tile], labels[tile], own, sums, needed=grad_hidden is not None)
            if grad_hidden is not None and x is not None:
                grad_hidden[tile] = x
        return None, grad_hidden, None, None, *_rounded(ctx.call.head, sums, trained)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "lm_head: a parameter was changed in place after forward, or hidden or labels were, but backward needs "
            "what they were in forward; step the optimizer after backward"
        ) from error


def _add_gradients(
    ctx: Any,
    ends: list[Tensor],
    hidden: Tensor,
    labels: Tensor,
    upstream: tuple[Tensor | None, ...],
    sums: GradientSums,
    *,
    needed: bool,
) -> Tensor | None:
    """Adds a tile's gradients of the parameters to their sums.

    Nothing of the tile outlives this function, so two tiles never exist at a time.

    Returns:
        The tile's gradient of hidden; None if it is not ``needed`` or the head does not use hidden.
    """
    live = torch.stack([u != 0 for u in upstream if u is not None]).any(0)
    x = without_dead_rows(hidden.detach(), live).requires_grad_()
    with torch.enable_grad(), torch.autocast(**ctx.autocast):
        outputs = ctx.call.outputs(ends, x, labels)
    pairs = [(output, u) for output, u in zip(outputs, upstream, strict=True) if u is not None]
    wanted = [*ends, x] if needed else ends
    del outputs
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True)
    sums.add(found[: len(ends)])
    return found[-1] if needed else None


def _rounded(head: TiledHead, sums: GradientSums, trained: list[Tensor]) -> list[Tensor]:
    """Returns sums in the dtypes of the parameters.

    Raises:
        RuntimeError: Backward did not use a parameter.
    """
    rounded = list[Tensor]()
    for place, total, tensor in zip(head.places, sums.sums, trained, strict=True):
        if total is None:
            raise RuntimeError(
                f"lm_head: forward used its {place.name}, but backward does not; leave the head as it was in forward "
                "until backward is over, its adapters too"
            )
        rounded.append(total.to(tensor.dtype))
    return rounded
