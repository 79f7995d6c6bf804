# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through an lm-head that is any module, by calling it tile by tile.

This is for heads that are more than the weight that ``linear_logprobs`` takes: with LoRA adapters,
wrapped, or collective when called. The head is called again in backward, which knows the upstream
gradient of each token. ``tiled_loss`` needs one pass, for losses that are sums over tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fused_losses.tiled_head import (
    GradientSums,
    TiledHead,
    check_tiled_call,
    first_derivative_only,
    leaves,
    tensors_with_gradients,
    tiles_of,
    used_leaves,
    without_dead_rows,
)
from fused_losses.wrappers import check_parameter, run_in_forward


def tiled_token_logprobs(
    lm_head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    tiles: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes ``log p(label)`` of each token through an lm-head module.

    The distribution is ``p = softmax(lm_head(hidden) / temperature)``. A token whose upstream
    gradient is zero does not contribute to any gradient. Under ``torch.no_grad`` nothing is saved;
    use that for old log-probabilities and the reference policy.

    The head is called once, in its wrappers if it has any. DistributedDataParallel, FSDP, FSDP2
    (``fully_shard``) and DeepSpeed's ZeRO gather its weights once for all tiles of a pass, and get
    each gradient once, when it is complete. What runs for every tile is the head's ``forward``,
    without hooks of the head itself and not compiled. If a wrapper of the whole model gathers the
    head, call this inside the model's forward; see ``run_in_forward``.

    Args:
        lm_head: maps ``[n, hidden]`` to logits ``[n, vocab]``, also for n = 0. It treats each token
            on its own and uses no random numbers. In backward it is as it was in forward, also in
            its frozen parts and in which adapters are active.
        hidden: ``[tokens, hidden]``.
        labels: ``[tokens]`` integer ids. A label outside of the vocabulary, such as -100, has a
            meaningless result.
        temperature: divides the logits; positive.
        tiles: how many times the head's forward runs, and again in backward; by default once for
            every 256 tokens. If that forward is collective itself, pass the same number on every
            rank: it runs that often for any number of tokens, also for none. A rank on
            which nothing needs a gradient, or that does not call backward, makes no second pass,
            and the other ranks would wait for it.
        entropy: whether to return the entropy of p.

    Returns:
        Log-probabilities ``[tokens]``, and entropies ``[tokens]`` in nats if asked for, else None;
        in float32 (float64 for float64 logits). Both carry gradients to hidden and to every
        parameter of the head that needs one. Gradients of parameters are added up over tiles in
        float32 and rounded once.

    Raises:
        ValueError: A shape, dtype or number does not fit; a wrapper has not gathered the head's
            weights, or would gather them for every tile; a hook of the head would be given
            log-probabilities for logits; a part of the head is dropout in training mode; or the
            head uses a tensor whose gradient would be lost.
        RuntimeError: In backward: a trained parameter was changed in place after forward, or the
            head does not use one any more; or this gradient is differentiated again.

    Memory:
        Let l be the logits of one tile in the head's dtype, L a float32 copy of them (two for a
        head in half precision), G a float32 gradient of every trained parameter, and g the same in
        the parameters' dtype (and a sixteenth of G where that is half precision). Forward holds
        l + L. Backward holds G and the gradient of hidden, and beside them first 2 l + L and then
        l + g. Both also hold a few numbers for each token, and up to three times a tile's hidden
        states. At 256 tokens in a tile, hidden size 1024 and 32768 rows, G and the rest of a tile
        take 288 MiB in float32 and 224 MiB in bfloat16.
        Saved for backward: hidden, labels and the parameters themselves.
    """
    check_tiled_call(lm_head, hidden, labels, temperature, tiles)
    statistics = {"temperature": temperature, "entropy": entropy}
    results = run_in_forward(
        lm_head, lambda module, own: _in_forward(TiledHead(module, (), statistics), own, labels, tiles), hidden
    )
    return results if entropy else (results, None)


def _in_forward(head: TiledHead, hidden: Tensor, labels: Tensor, tiles: int | None) -> Tensor | tuple[Tensor, ...]:
    """Computes the results inside the forward of the head, where its parameters are gathered.

    Its trained tensors are inputs of one autograd node, so their gradients arrive once, complete,
    wherever a wrapper expects those of an ordinary head: at parameters, or at views of a flat one.
    """
    candidates = tensors_with_gradients(head.module)
    first, ends = tiles_of(len(hidden), tiles)[0], leaves(candidates.values())
    of_first = head.only(candidates).outputs(ends, hidden[first].detach(), labels[first])
    # A forward may have left attributes behind that depend on gradients, but are not used again.
    used = used_leaves(of_first, ends)
    trained = {
        place: tensor for (place, tensor), leaf in zip(candidates.items(), ends, strict=True) if id(leaf) in used
    }
    for place, tensor in trained.items():
        check_parameter(f"lm_head: its {place.name}", tensor)
    of_first = tuple(output.detach() for output in of_first)
    outputs: Any = _TiledLogprobs.apply(head.only(trained), hidden, labels, tiles, of_first, *trained.values())
    return outputs if len(outputs) > 1 else outputs[0]


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: TiledHead,
        hidden: Tensor,
        labels: Tensor,
        tiles: int | None,
        of_first: tuple[Tensor, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        others = tiles_of(len(hidden), tiles)[1:]
        parts = [of_first, *(head.outputs(trained, hidden[tile], labels[tile]) for tile in others)]
        ctx.save_for_backward(hidden, labels, *trained)
        ctx.head, ctx.tiles = head, tiles
        device = hidden.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        ctx.set_materialize_grads(False)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels, *trained = _saved(ctx)
        if all(u is None for u in upstream):
            return (None,) * (5 + len(trained))
        ends, sums = leaves(trained), GradientSums(len(trained))
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        for tile in tiles_of(len(hidden), ctx.tiles):
            own = tuple(None if u is None else u[tile] for u in upstream)
            x = _add_gradients(ctx, ends, hidden[tile], labels[tile], own, sums, needed=grad_hidden is not None)
            if grad_hidden is not None and x is not None:
                grad_hidden[tile] = x
        return None, grad_hidden, None, None, None, *_rounded(ctx.head, sums, trained)


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
        outputs = ctx.head.outputs(ends, x, labels)
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
                f"lm_head: forward used its {place.name}, and backward does not; leave the head as it was in forward "
                "until backward is over, its adapters too"
            )
        rounded.append(total.to(tensor.dtype))
    return rounded
