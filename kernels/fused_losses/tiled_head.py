# SPDX-License-Identifier: Apache-2.0
"""Calls an lm-head that is any module tile by tile, inside its wrappers.

``tiled_token_logprobs`` and ``tiled_loss`` are made of this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fused_losses.arguments import check_integer, check_label_dtype, check_labels, unchecked_values
from fused_losses.filtering import LogitFilter
from fused_losses.lm_head import is_marked_as_shard
from fused_losses.megatron import MegatronLmHead
from fused_losses.numerics import check_temperature
from fused_losses.passes import check_not_transformed
from fused_losses.softmax import TokenLogprobs
from fused_losses.vocab_parallel import vocab_parallel_logprobs
from fused_losses.wrappers import check_lm_head, leaves_of

_TILE = 256
"""Tokens of a tile by default."""
_PIECES = 16
"""The number of pieces into which a gradient is cut to convert it to another dtype."""


def check_tiled_call(
    lm_head: nn.Module, hidden: Tensor, labels: Tensor, tiles: int | None, *, runs_again: bool
) -> None:
    """Checks the arguments of kernels that call a head tile by tile, except their shapes.

    ``runs_again`` is as for ``check_lm_head``.

    Raises:
        ValueError: A dtype or number does not fit, a transform of ``torch.func`` is at work, or
            ``check_lm_head`` refuses the head; the message names the argument.
    """
    if not isinstance(lm_head, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"lm_head is a {type(lm_head).__name__}: expected a module; for a weight, use linear_logprobs")
    parameters: dict[str, Tensor] = {f"lm_head: its {name}": x for name, x in lm_head.named_parameters()}
    gathers = any(isinstance(part, MegatronLmHead) for part in lm_head.modules())
    shard = next((name for name, x in parameters.items() if is_marked_as_shard(x) and not gathers), None)
    if shard is not None:
        raise ValueError(
            f"{shard} is marked as a shard of tensor parallelism (tensor_model_parallel), but a tiled head needs the "
            "whole vocabulary; use linear_logprobs with tp_group, or the head of backbone_and_lm_head, which gathers"
        )
    check_not_transformed(hidden=hidden, labels=labels, **parameters)
    check_label_dtype(labels)
    if tiles is not None:
        check_integer("tiles", tiles, least=1, otherwise="or None to choose one")
    check_lm_head(lm_head, runs_again=runs_again)


def tiles_of(tokens: int, tiles: int | None) -> list[slice]:
    """Cuts a number of tokens into ``tiles`` slices; by default into one for every 256 tokens.

    Their sizes differ by one at most. Some are empty if there are fewer tokens than tiles.
    """
    number = tiles or max(1, -(-tokens // _TILE))
    edges = [tokens * i // number for i in range(number + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


@dataclass(frozen=True)
class Place:
    """Where a module has a tensor: among parameters, buffers or plain attributes."""

    module: nn.Module
    name: str

    def hold(self, tensor: Tensor) -> Callable[[], None]:
        """Puts a tensor there, and returns a function that puts back what was there before.

        During forward, FSDP has its tensors both among the parameters and the plain attributes.
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


def tensors_with_gradients(head: nn.Module) -> dict[Place, Tensor]:
    """Returns the tensors of a head and its parts that need gradients; none under ``no_grad``.

    They include plain attributes, which FSDP puts in the place of parameters during forward. Frozen
    tensors are left out, in whatever form.
    """
    if not torch.is_grad_enabled():
        return {}
    return {
        Place(part, name): tensor
        for part in head.modules()
        for name, tensor in {**part._parameters, **part._buffers, **vars(part)}.items()
        if isinstance(tensor, Tensor) and tensor.requires_grad
    }


@dataclass(frozen=True)
class Statistics:
    """What to compute from each token's logits: options of ``vocab_parallel_logprobs``.

    Raises:
        ValueError: A setting does not fit; the message names it.
    """

    temperature: float = 1.0
    entropy: bool = False
    logit_range: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    unfiltered: bool = False
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        LogitFilter(self.top_k, self.top_p)

    def of(self, logits: Tensor, labels: Tensor) -> TokenLogprobs:
        """Computes the statistics of a tile. ``check`` looks at the labels later."""
        with unchecked_values():
            return vocab_parallel_logprobs(logits, labels, **asdict(self))

    def check(self, labels: Tensor, vocab: int) -> None:
        """Checks the labels of all tiles, with one wait for the device.

        Raises:
            ValueError: A label is neither in the vocabulary nor ``ignore_index``.
        """
        way_out = "give tokens that do not count the label ignore_index"
        check_labels(labels, labels != self.ignore_index, vocab, way_out=way_out)

    def named(self, outputs: Iterable[Tensor]) -> TokenLogprobs:
        """Names the statistics that ``given`` has returned."""
        values = iter(outputs)
        asked_for = (True, self.entropy, self.logit_range, self.logit_range, self.unfiltered)
        return TokenLogprobs(*(next(values) if asked else None for asked in asked_for))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TiledHead:
    """An lm-head inside its wrappers."""

    module: nn.Module
    places: tuple[Place, ...] = ()
    """The places of the tensors that ``logits`` is given."""

    def only(self, places: Iterable[Place]) -> "TiledHead":
        """Returns the same head, with ``logits`` given the tensors of these places alone."""
        return replace(self, places=tuple(places))

    def logits(self, tensors: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Computes the logits of a tile by the head's own forward.

        The head's hooks do not run: wrappers have gathered the weights once for all tiles.

        Args:
            tensors: tensors that take the places of the head's own.
            hidden: ``[n, hidden]``.

        Raises:
            ValueError: The head returned something else; or its forward failed, and its weights
                have another dtype than hidden.
        """
        with ExitStack() as stack:
            for place, tensor in zip(self.places, tensors, strict=True):
                stack.callback(place.hold(tensor))
            try:
                logits = self.module.forward(hidden)
            except RuntimeError as error:
                others = {str(p.dtype) for p in self.module.parameters() if p.is_floating_point()}
                if str(hidden.dtype) in others:
                    raise
                raise ValueError(
                    f"hidden is {hidden.dtype} and lm_head {', '.join(sorted(others))}: its forward failed; cast one "
                    "of them, or enter torch.autocast"
                ) from error
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shown = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"lm_head returned {shown}: expected logits [{len(hidden)}, vocab]; pass a module that returns them "
                "alone, such as the head of backbone_and_lm_head(model) for Megatron"
            )
        return logits


def given(found: TokenLogprobs) -> tuple[Tensor, ...]:
    """Returns the statistics that were asked for."""
    return tuple(tensor for tensor in found if tensor is not None)


def leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns new leaves with the same numbers. The gradients of one tile end there."""
    return [tensor.detach().requires_grad_() for tensor in tensors]


def used_leaves(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> set[int]:
    """Returns the ids of the leaves on which the outputs of a head depend.

    Raises:
        ValueError: The outputs depend on a leaf that is not known. Its gradient would be lost.
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


def without_dead_rows(hidden: Tensor, live: Tensor) -> Tensor:
    """Replaces the hidden states of tokens that have no gradients, because 0 times NaN is NaN.

    A live row takes their place, or ones if there is none: a head might make NaN of zeros.

    Args:
        hidden: ``[n, hidden]``.
        live: ``[n]`` bool.
    """
    if not len(hidden):
        return hidden
    live_row = hidden[live.to(torch.uint8).argmax(0, keepdim=True)]
    return torch.where(live[:, None], hidden, torch.where(live.any(), live_row, 1.0))


class GradientSums:
    """Sums of gradients over tiles, in float32 at least, whatever the dtype of the gradients."""

    def __init__(self, number: int) -> None:
        self.sums: list[Tensor | None] = [None] * number
        """The sum of each tensor's gradients; None if no tile had one."""

    def add(self, gradients: Sequence[Tensor | None], unit: Tensor | None = None) -> None:
        """Adds the gradients of a tile, multiplied by ``unit`` ``[1]``."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if (total := self.sums[i]) is None:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                total = self.sums[i] = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
            _add(total, gradient, unit)


def _add(total: Tensor, gradient: Tensor, unit: Tensor | None) -> None:
    """Adds a gradient to a sum. If dtypes differ, it does so piece by piece, to convert little at a
    time.
    """
    if gradient.dtype == total.dtype and unit is None:
        total.add_(gradient)
        return
    for into, piece in _pieces(total, gradient):
        into.add_(piece if unit is None else piece * unit)


def multiplied(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of a gradient and a factor ``[1]``, rounded once, in another dtype."""
    if gradient.dtype == dtype == factor.dtype:
        return gradient * factor
    product = torch.empty_like(gradient, dtype=dtype)
    for into, piece in _pieces(product, gradient):
        into.copy_(piece * factor)
    return product


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of one shape into small pieces, and yields the pieces that belong together."""
    return zip(*(tensor.chunk(_PIECES) if tensor.dim() else [tensor] for tensor in tensors), strict=True)
