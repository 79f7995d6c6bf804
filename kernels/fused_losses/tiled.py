# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through an lm-head that is a module of any kind: tile by tile, by calling it.

For heads that ``linear_logprobs`` can't take, since they are no plain weight: with LoRA adapters, wrapped, or collective when called.
As open-instruct's tiled lm-head loss, without its defects: gradients reach the parameters through autograd, so that hooks of data-parallel
wrappers fire once, after they are complete, and any upstream gradient multiplies them all.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    """``log p(label)`` and the entropy of ``p = softmax(lm_head(hidden) / temperature)``, token by token.

    lm_head: maps ``[n, H]`` to logits ``[n, vocab]``, each token for itself and without randomness, also for n = 0. hidden: ``[T, H]``;
    labels: ``[T]`` integer ids; one outside of the vocabulary, such as -100, means nothing.

    tiles: how many times the head is called in forward, and again in backward; by default one for every 256 tokens. Where calling it is
    collective give the same number on every rank: it is called that many times whatever the number of tokens, also with none.
    A rank on which nothing needs a gradient, or that calls no backward, makes no second pass, and the others would wait for it.

    Returns logprobs ``[T]``, and entropy ``[T]`` in nats if asked for (else None), in float32 (float64 for float64 logits). Both carry gradients to
    hidden and to every parameter of the head that needs one, added up over tiles in float32 and rounded once.
    A token whose upstream gradient is zero takes no part. Under ``torch.no_grad`` nothing is saved: the pass for old
    log-probabilities and the reference policy.

    Memory: the logits of a tile and their gradient, in backward a float32 gradient of every parameter. Saved: hidden and labels.

    Gradients are made for the head's parameters as they are when it is called: the wrapper of the model may be DistributedDataParallel, or FSDP that
    leaves the head to its root (``use_orig_params=True``). Where something else takes their place during the call (FSDP's flat parameter,
    DTensors of an FSDP2 module of its own, what ZeRO-3 puts aside) backward raises: gather them around forward and backward.

    Raises ``ValueError`` for shapes and numbers that do not fit, and for a parameter with hooks of its own (``register_hook``), which would fire for
    every tile and once more; ``register_post_accumulate_grad_hook`` fires once.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and labels {list(labels.shape)}: expected [tokens, H] and [tokens]; flatten a batch of rows"
        )
    if tiles is not None and tiles < 1:
        raise ValueError(f"tiles {tiles}: expected a positive number, or None to choose one")
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: expected a positive number; for greedy decoding there is no log-probability"
        )
    parameters = [parameter for parameter in lm_head.parameters() if parameter.requires_grad]
    hooked = next((name for name, parameter in lm_head.named_parameters() if parameter._backward_hooks), None)
    if hooked is not None and torch.is_grad_enabled():
        raise ValueError(
            f"lm_head: its parameter {hooked} has a hook that would fire for every tile; use register_post_accumulate_grad_hook"
        )
    number = tiles or max(1, -(-len(hidden) // 256))
    logprobs, entropies = _TiledLogprobs.apply(lm_head, temperature, number, entropy, hidden, labels, *parameters)  # type: ignore[misc]
    return logprobs, entropies if entropy else None


def tiles_of(tokens: int, tiles: int) -> list[slice]:
    """So many parts of a number of tokens, their sizes at most one apart, some of them empty where there are fewer tokens."""
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
        # Not among the saved tensors, which may come back as others: they must be those that the head uses.
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
                "lm_head: a parameter was changed in place after forward, which backward needs as it was; step the optimizer later"
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
    """Raises where what a head's outputs hang on is not what gradients are made for: they would be lost."""
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
                f"lm_head: when called it uses a {type(leaf).__name__} {list(leaf.shape)} that is none of its trained parameters(), and whose "
                "gradient would be lost; with FSDP give use_orig_params=True and leave the head to the root, or gather parameters around both passes"
            )
        nodes += [following for following, _ in node.next_functions]


def _logprobs(
    lm_head: nn.Module, temperature: float, entropy: bool, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    found = vocab_parallel_logprobs(lm_head(hidden), labels, temperature=temperature, entropy=entropy)
    return found.logprobs, found.logprobs.new_zeros(0) if found.entropy is None else found.entropy
