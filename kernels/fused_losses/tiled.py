# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through an lm-head that is any module, by calling it tile by tile.

This is for heads that are more than the weight that ``linear_logprobs`` takes: with LoRA adapters,
wrapped, or collective when called. Together with ``grpo_loss`` it replaces open-instruct's tiled
lm-head loss. Unlike there, gradients reach the parameters through autograd. So hooks of
data-parallel wrappers fire once, after the gradient is complete, and any upstream gradient
multiplies all gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused_losses.numerics import check_temperature
from fused_losses.vocab_parallel import vocab_parallel_logprobs
from fused_losses.wrappers import check_lm_head, check_parameter, leaves_of, run_in_forward


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
        ValueError: A shape or number does not fit; a wrapper has not gathered the head's weights,
            or would gather them for every tile; a hook of the head would be given log-probabilities
            for logits; a part of the head is dropout in training mode; or the head uses a tensor
            whose gradient would be lost.
        RuntimeError: In backward: a trained parameter was changed in place after forward, or the
            head does not use one any more.

    Memory:
        The logits of one tile and their gradient; in backward a float32 gradient of every
        parameter. Saved for backward: hidden, labels and the parameters themselves.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and labels {list(labels.shape)}: expected [tokens, H] and [tokens]; "
            "flatten a batch of rows"
        )
    if tiles is not None and tiles < 1:
        raise ValueError(f"tiles {tiles}: expected a positive number, or None to choose one")
    check_temperature(temperature)
    check_lm_head(lm_head)
    number = tiles or max(1, -(-len(hidden) // 256))
    results = run_in_forward(
        lm_head, lambda head, own: _in_forward(head, own, labels, temperature, number, entropy), hidden
    )
    return results if entropy else (results, None)


def tiles_of(tokens: int, tiles: int) -> list[slice]:
    """Cuts a number of tokens into ``tiles`` slices.

    Their sizes differ by one at most. Some are empty if there are fewer tokens than tiles.
    """
    edges = [tokens * i // tiles for i in range(tiles + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


@dataclass(frozen=True)
class _Place:
    """Where a module has a tensor: among parameters, buffers or plain attributes."""

    module: nn.Module
    name: str

    def hold(self, tensor: Tensor) -> Callable[[], None]:
        """Puts a tensor there, and returns a function that puts back what was there before.

        During forward, FSDP has its tensors among the parameters and the plain attributes alike.
        """
        attributes = vars(self.module)
        kinds: list[dict[str, Any]] = [attributes["_parameters"], attributes["_buffers"], attributes]
        before = [(kind, kind[self.name]) for kind in kinds if self.name in kind]
        for kind, _ in before or [(attributes, None)]:
            kind[self.name] = tensor

        def put_back() -> None:
            for kind, old in before:
                kind[self.name] = old
            if not before:
                del attributes[self.name]

        return put_back


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors, and the head inside its wrappers."""

    head: nn.Module
    places: tuple[_Place, ...]
    """Of the head's trained tensors."""
    temperature: float
    tiles: int
    entropy: bool

    def outputs(self, trained: Sequence[Tensor], hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Computes log-probabilities, and entropies if asked for, of the tokens of one tile.

        ``trained`` take the places of the head's own tensors. The head's hooks do not run: those
        of wrappers have gathered the weights once for all tiles.
        """
        with ExitStack() as stack:
            for place, tensor in zip(self.places, trained, strict=True):
                stack.callback(place.hold(tensor))
            logits = self.head.forward(hidden)
        found = vocab_parallel_logprobs(logits, labels, temperature=self.temperature, entropy=self.entropy)
        return (found.logprobs,) if found.entropy is None else (found.logprobs, found.entropy)


def _in_forward(
    head: nn.Module, hidden: Tensor, labels: Tensor, temperature: float, tiles: int, entropy: bool
) -> Tensor | tuple[Tensor, ...]:
    """Computes the results inside the forward of the head, where its parameters are gathered.

    Its trained tensors are inputs of one autograd node, so their gradients arrive once, complete,
    wherever a wrapper expects those of an ordinary head: at parameters, or at views of a flat one.
    """
    candidates = _tensors_with_gradients(head) if torch.is_grad_enabled() else {}
    call = _Call(head, tuple(candidates), temperature, tiles, entropy)
    first = tiles_of(len(hidden), tiles)[0]
    leaves = _leaves(list(candidates.values()))
    of_first = call.outputs(leaves, hidden[first].detach(), labels[first])
    # A forward may have left attributes behind that depend on gradients, but are not used again.
    used = _used_leaves(of_first, leaves)
    trained = {
        place: tensor for (place, tensor), leaf in zip(candidates.items(), leaves, strict=True) if id(leaf) in used
    }
    for place, tensor in trained.items():
        check_parameter(f"lm_head: its {place.name}", tensor)
    call, of_first = replace(call, places=tuple(trained)), tuple(output.detach() for output in of_first)
    outputs = _TiledLogprobs.apply(call, hidden, labels, of_first, *trained.values())
    return outputs if entropy else outputs[0]  # type: ignore[index, return-value]


def _tensors_with_gradients(head: nn.Module) -> dict[_Place, Tensor]:
    """Returns the tensors of a head and its parts that need gradients.

    Besides parameters these are plain attributes, which FSDP puts in the place of parameters
    during forward. Frozen tensors stay where they are, in whatever form.
    """
    return {
        _Place(part, name): tensor
        for part in head.modules()
        for name, tensor in {**part._parameters, **part._buffers, **vars(part)}.items()
        if isinstance(tensor, Tensor) and tensor.requires_grad
    }


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden: Tensor, labels: Tensor, of_first: tuple[Tensor, ...], *trained: Tensor
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
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        try:
            hidden, labels, *trained = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise RuntimeError(
                "lm_head: a parameter was changed in place after forward, or hidden or labels were, but backward needs "
                "what they were in forward; step the optimizer after backward"
            ) from error
        leaves = _leaves(trained)
        given = [u for u in upstream if u is not None]
        if not given:
            return (None,) * (4 + len(trained))
        live = torch.stack([u != 0 for u in given]).any(0)
        hidden = _without_dead_rows(hidden, live)
        sums: list[Tensor | None] = [None] * len(leaves)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        for tile in tiles_of(len(hidden), call.tiles):
            x = hidden[tile].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                outputs = call.outputs(leaves, x, labels[tile])
            pairs = [(output, u[tile]) for output, u in zip(outputs, upstream, strict=True) if u is not None]
            wanted = leaves if grad_hidden is None else [*leaves, x]
            grads = cast(
                "Sequence[Tensor | None]",
                torch.autograd.grad([output for output, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True),
            )
            for i, grad in enumerate(grads[: len(leaves)]):
                sums[i] = _add(sums[i], grad)
            if grad_hidden is not None and (of_hidden := grads[-1]) is not None:
                grad_hidden[tile] = of_hidden
        unused = next((place.name for place, total in zip(call.places, sums, strict=True) if total is None), None)
        if unused is not None:
            raise RuntimeError(
                f"lm_head: forward used its {unused}, and backward does not; leave the head as it was in forward until "
                "backward is over, its adapters too"
            )
        rounded = (total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True) if total is not None)
        return None, grad_hidden, None, None, *rounded


def _without_dead_rows(hidden: Tensor, live: Tensor) -> Tensor:
    """Replaces rows whose upstream gradients are zero, since 0 times NaN is NaN.

    A live row takes their place, or ones: zeros might be what the head makes NaN of.
    """
    if not len(hidden):
        return hidden
    live_row = hidden[live.to(torch.uint8).argmax(0, keepdim=True)]
    return torch.where(live[:, None], hidden, torch.where(live.any(), live_row, 1.0))


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Adds a tile's gradient to the sum of those before it, in place, in float32 at least."""
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)


def _used_leaves(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> set[int]:
    """Returns the ids of the leaves on which the outputs of a head depend.

    Raises:
        ValueError: There is another leaf than the known ones. Its gradient would be lost.
    """
    allowed, used = {id(tensor) for tensor in known}, set[int]()
    for leaf in (leaf for output in outputs for leaf in leaves_of(output)):
        if id(leaf) not in allowed:
            raise ValueError(
                f"lm_head: when called it uses a {type(leaf).__name__} {list(leaf.shape)} that is no attribute of it "
                "or its parts, so its gradient would be lost; make it a parameter of the head"
            )
        used.add(id(leaf))
    return used
