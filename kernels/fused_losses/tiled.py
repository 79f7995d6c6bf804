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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused_losses.numerics import check_temperature
from fused_losses.vocab_parallel import vocab_parallel_logprobs
from fused_losses.wrappers import check_lm_head, check_parameter, run_in_forward


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

    The head is called once, in its wrappers if it has any: DistributedDataParallel, FSDP, FSDP2
    (``fully_shard``) and DeepSpeed's ZeRO gather its weights once for all tiles of a pass, and get
    each gradient once, when it is complete. What runs for every tile is the head's ``forward``,
    without hooks of the head itself and not compiled. If a wrapper of the whole model gathers the
    head, call this inside the model's forward; see ``run_in_forward``.

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
        ValueError: A shape or number does not fit; a wrapper has not gathered the head's weights,
            or would gather them for every tile; a hook of the head would be given log-probabilities
            for logits; the head has dropout; or it uses a tensor whose gradient would be lost.
        RuntimeError: In backward: a parameter was changed in place after forward.

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
    gradients: bool
    """Whether gradients are recorded."""

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
    trained = _trained_tensors(head)
    call = _Call(head, tuple(trained), temperature, tiles, entropy, torch.is_grad_enabled())
    outputs = _TiledLogprobs.apply(call, hidden, labels, *trained.values())
    return outputs if entropy else outputs[0]  # type: ignore[index, return-value]


def _trained_tensors(head: nn.Module) -> dict[_Place, Tensor]:
    """Returns the tensors of a head and its parts that need gradients.

    Besides parameters these are plain attributes, which FSDP puts in the place of parameters
    during forward. Frozen tensors stay where they are, in whatever form.

    Raises:
        ValueError: A wrapper has not gathered a tensor.
    """
    found = dict[_Place, Tensor]()
    for path, part in head.named_modules():
        for name, tensor in {**part._parameters, **part._buffers, **vars(part)}.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                check_parameter(f"lm_head: its {path}.{name}" if path else f"lm_head: its {name}", tensor)
                found[_Place(part, name)] = tensor
    return found


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, labels: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        first, *others = tiles_of(len(hidden), call.tiles)
        if call.gradients:
            leaves = _leaves(trained)
            with torch.enable_grad():
                outputs = call.outputs(leaves, hidden[first].detach(), labels[first])
            _check_graph(outputs, leaves)
            parts = [tuple(output.detach() for output in outputs)]
        else:
            parts = [call.outputs(trained, hidden[first], labels[first])]
        parts += [call.outputs(trained, hidden[tile], labels[tile]) for tile in others]
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
        hidden, labels, *trained = ctx.saved_tensors
        call: _Call = ctx.call
        leaves = _leaves(trained)
        live = torch.stack([u != 0 for u in upstream if u is not None]).any(0)
        sums: list[Tensor | None] = [None] * len(leaves)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        for tile in tiles_of(len(hidden), call.tiles):
            x = torch.where(live[tile, None], hidden[tile], 0.0).detach().requires_grad_()
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
        rounded = (None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True))
        return None, grad_hidden, None, *rounded


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Adds a tile's gradient to the sum of those before it, in place, in float32 at least.

    Without one the sum stays as it is: a tensor that the head does not use has no gradient at all.
    """
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)


def _check_graph(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Checks that the outputs of a head depend on no other leaf than the known ones.

    The gradient of another leaf would be lost.

    Raises:
        ValueError: There is another leaf.
    """
    allowed = {id(tensor) for tensor in known}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed:
            raise ValueError(
                f"lm_head: when called it uses a {type(leaf).__name__} {list(leaf.shape)} that is no attribute of it "
                "or its parts, so its gradient would be lost; make it a parameter of the head"
            )
        nodes += [following for following, _ in node.next_functions]
