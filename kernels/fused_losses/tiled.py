# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through an lm-head that is any module, by calling it tile by tile.

This is for heads that are more than the weight that ``linear_logprobs`` takes: with LoRA adapters,
wrapped, or collective when called. Together with ``grpo_loss`` it replaces open-instruct's tiled
lm-head loss. Unlike there, gradients reach the parameters through autograd. So hooks of
data-parallel wrappers fire once, after the gradient is complete, and any upstream gradient
multiplies all gradients.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused_losses.numerics import check_temperature
from fused_losses.vocab_parallel import vocab_parallel_logprobs


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

    Gradients are computed for the head's parameters as they are when the head is called. The model
    may be wrapped in DistributedDataParallel, or in FSDP that leaves the head to its root module
    (``use_orig_params=True``). Backward raises if something else takes the place of the parameters
    during the call: FSDP's flat parameter, DTensors of an FSDP2 module of its own, or parameters
    that ZeRO-3 partitions. Gather them around forward and backward.

    Args:
        lm_head: maps ``[n, hidden]`` to logits ``[n, vocab]``, also for n = 0. It treats each token
            on its own and uses no random numbers.
        hidden: ``[tokens, hidden]``.
        labels: ``[tokens]`` integer ids. A label outside of the vocabulary, such as -100, has a
            meaningless result.
        temperature: divides the logits; positive.
        tiles: how many times the head is called in forward, and again in backward; by default once
            for every 256 tokens. If calling the head is collective, pass the same number on every
            rank: the head is called that often for any number of tokens, also for none. A rank on
            which nothing needs a gradient, or that does not call backward, makes no second pass,
            and the other ranks would wait for it.
        entropy: whether to return the entropy of p.

    Returns:
        Log-probabilities ``[tokens]``, and entropies ``[tokens]`` in nats if asked for, else None;
        in float32 (float64 for float64 logits). Both carry gradients to hidden and to every
        parameter of the head that needs one. Gradients of parameters are added up over tiles in
        float32 and rounded once.

    Raises:
        ValueError: A shape or number does not fit, or a parameter has hooks of its own
            (``register_hook``), which would fire for every tile and once more. A hook by
            ``register_post_accumulate_grad_hook`` fires once and is allowed. In backward: the head
            uses a tensor whose gradient would be lost.
        RuntimeError: In backward: a parameter was changed in place after forward.

    Memory:
        The logits of one tile and their gradient; in backward a float32 gradient of every
        parameter. Saved for backward: hidden and labels.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and labels {list(labels.shape)}: expected [tokens, H] and [tokens]; "
            "flatten a batch of rows"
        )
    if tiles is not None and tiles < 1:
        raise ValueError(f"tiles {tiles}: expected a positive number, or None to choose one")
    check_temperature(temperature)
    parameters = [parameter for parameter in lm_head.parameters() if parameter.requires_grad]
    hooked = next((name for name, parameter in lm_head.named_parameters() if parameter._backward_hooks), None)
    if hooked is not None and torch.is_grad_enabled():
        raise ValueError(
            f"lm_head: its parameter {hooked} has a hook that would fire for every tile; "
            "use register_post_accumulate_grad_hook"
        )
    number = tiles or max(1, -(-len(hidden) // 256))
    logprobs, entropies = _TiledLogprobs.apply(lm_head, temperature, number, entropy, hidden, labels, *parameters)  # type: ignore[misc]
    return logprobs, entropies if entropy else None


def tiles_of(tokens: int, tiles: int) -> list[slice]:
    """Cuts a number of tokens into ``tiles`` slices.

    Their sizes differ by one at most. Some are empty if there are fewer tokens than tiles.
    """
    edges = [tokens * i // tiles for i in range(tiles + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lm_head: nn.Module,
        temperature: float,
        tiles: int,
        entropy: bool,
        hidden: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _logprobs(lm_head, temperature, entropy, hidden[tile], labels[tile])
            for tile in tiles_of(len(hidden), tiles)
        ]
        ctx.save_for_backward(hidden, labels)
        ctx.lm_head, ctx.temperature, ctx.tiles, ctx.entropy = lm_head, temperature, tiles, entropy
        # Saved tensors may come back as other objects. These must be the objects that the head
        # uses.
        ctx.parameters, ctx.versions = parameters, [parameter._version for parameter in parameters]
        device = hidden.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        ctx.set_materialize_grads(False)
        logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        parameters: Sequence[Tensor] = ctx.parameters
        if [parameter._version for parameter in parameters] != ctx.versions:
            raise RuntimeError(
                "lm_head: a parameter was changed in place after forward, but backward needs its value in forward; "
                "step the optimizer after backward"
            )
        need_hidden = ctx.needs_input_grad[4]
        given = [u for u in upstream[: 2 if ctx.entropy else 1] if u is not None]
        live = torch.stack([u != 0 for u in given]).any(0)
        sums = [
            torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device) for p in parameters
        ]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        for tile in tiles_of(len(hidden), ctx.tiles):
            x = torch.where(live[tile, None], hidden[tile], 0.0).detach().requires_grad_(need_hidden)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                outputs = _logprobs(ctx.lm_head, ctx.temperature, ctx.entropy, x, labels[tile])
            pairs = [(output, u[tile]) for output, u in zip(outputs, upstream, strict=True) if u is not None]
            wanted = [x, *parameters] if need_hidden else list(parameters)
            if tile.start == 0:
                _check_graph(outputs, wanted)
            found = list(
                torch.autograd.grad(
                    [output for output, _ in pairs], wanted, [u for _, u in pairs], materialize_grads=True
                )
            )
            if grad_hidden is not None:
                grad_hidden[tile] = found.pop(0)
            for total, grad in zip(sums, found, strict=True):
                total += grad
        rounded = (total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True))
        return None, None, None, None, grad_hidden, None, *rounded


def _check_graph(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Checks that the outputs of a head depend on no other leaf than the wanted ones.

    The gradient of another leaf would be lost.

    Raises:
        ValueError: There is another leaf.
    """
    known = {id(tensor) for tensor in wanted}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"lm_head: when called it uses a {type(leaf).__name__} {list(leaf.shape)} that is none of its trained "
                "parameters(), so its gradient would be lost; with FSDP pass use_orig_params=True and leave the head "
                "to the root module, or gather parameters around forward and backward"
            )
        nodes += [following for following, _ in node.next_functions]


def _logprobs(
    lm_head: nn.Module, temperature: float, entropy: bool, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    found = vocab_parallel_logprobs(lm_head(hidden), labels, temperature=temperature, entropy=entropy)
    return found.logprobs, found.logprobs.new_zeros(0) if found.entropy is None else found.entropy
