# SPDX-License-Identifier: Apache-2.0
"""Checks that the logits of a model are those of its lm-head on its backbone's hidden states.

The model runs once, on a few tokens. Hooks look at the output of its backbone and at the input of
its head. They replace the head's logits by known logits, which the model must return unchanged. All
is compared within one run, so dropout, random routing and rounding make no difference.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_losses.megatron import MegatronLmHead, is_megatron, ranks_of
from fused_losses.up_to_lm_head import UpToLmHead, call_inside
from fused_losses.wrappers import _is_a, _is_dtensor, _is_flattened, _is_partitioned, _views

_TOKENS = 4
"""Tokens of the run, on each of the ranks that split a sequence."""

_KEPT_BUFFERS = 2**20
"""Numbers in the largest buffer that is put back after the run.

Counts and averages of a forward are smaller. Larger buffers are packed weights and caches, and a
copy of them might not fit into memory.
"""


AFTER_THE_HEAD = (
    "take the head with check=False, and either wrap it in a module that does the same to its logits, for "
    "tiled_token_logprobs, or pass softcap or temperature to linear_logprobs: see 'Models that do more' in "
    "docs/reference/kernels.md"
)
_BEFORE_THE_HEAD = "take the head with check=False, and UpToLmHead(model, lm_head) for the backbone"
_YOURSELF = "pass hidden states and head to the kernel yourself, with check=False"


class CannotRun(Exception):
    """A model cannot be run on a few tokens. The message gives the reason and the way out."""


def why_not_alone(model: nn.Module) -> str | None:
    """Returns why a rank cannot run a model by itself, without other ranks; None if it can.

    Args:
        model: the model without its wrappers.
    """
    if any(_is_shared_out(parameter) for parameter in model.parameters()) or any(_views(model)):
        return "its weights are sharded"
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    if any(_is_a(part, wrapper) for part in model.modules() for wrapper in wrappers):
        return "a part of it is in a wrapper that calls other ranks"
    return "its forward calls other ranks" if ranks_of(model) > 1 else None


def _is_shared_out(tensor: Tensor) -> bool:
    """Returns whether a wrapper has split a parameter over ranks, also while it is gathered."""
    flat = _is_flattened(tensor) or _is_flattened(tensor._base)
    return flat or _is_dtensor(tensor) or _is_partitioned(tensor)


def check_logits(
    model: nn.Module, inner: nn.Module, backbone: nn.Module, lm_head: nn.Module, example: Mapping[str, Any] | None
) -> list[str]:
    """Runs a model once, and compares its logits with those of its head on its backbone.

    The run is in eval mode and without gradients. Training flags, random number generators and
    small buffers are as before afterwards.

    Args:
        model: the model to call, in its wrappers if they gather its weights.
        inner: the model without wrappers.
        backbone: its part, or ``UpToLmHead``.
        lm_head: its head.
        example: arguments of the call; by default a few token ids and what the signature asks for.

    Returns:
        Everything that the model does in addition to calling its backbone and then its head. Each
        is a clause about its forward, with the way out.

    Raises:
        CannotRun: The model did not run, or returned no logits.
    """
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise CannotRun("its weights are on the meta device; load them first")
    seen = _Seen()
    head = lm_head.output_layer if isinstance(lm_head, MegatronLmHead) else lm_head
    with ExitStack() as stack:
        stack.enter_context(_left_as_it_is(inner))
        if not isinstance(backbone, UpToLmHead):
            hook = backbone.register_forward_hook(seen.after_backbone, with_kwargs=True)
            stack.callback(hook.remove)
        stack.callback(head.register_forward_hook(seen.after_head, with_kwargs=True).remove)
        try:
            returned = call_inside(model)(**(example or _few_tokens(inner)))
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(
                f"it could not be run on a few tokens ({type(error).__name__}: {error}); "
                "pass example={...} with arguments of its call"
            ) from error
    return seen.differences(_logits(returned), None if isinstance(backbone, UpToLmHead) else backbone)


@dataclass
class _Seen:
    """What hooks saw in a run."""

    hidden: list[Tensor | None] = field(default_factory=list)
    """Output of the backbone, call by call; None for a call that returned no tensor."""
    given: list[Tensor] = field(default_factory=list)
    """Input of the head, call by call."""
    logits: Tensor | None = None
    """The known logits that the head returned instead of its own."""

    def after_backbone(self, module: nn.Module, args: Any, options: Any, output: Any) -> None:
        hidden = _first_tensor(output, "last_hidden_state")
        # Copied, because the model may change it in place later.
        self.hidden.append(None if hidden is None else hidden.clone())

    def after_head(self, module: nn.Module, args: Any, options: Any, output: Any) -> Any:
        """Notes the head's input, and returns known logits in the form of the head's output.

        The logits are far from zero, so that a scale or a cap changes them, whatever the weights.
        """
        self.given.append(next(x for x in (*args, *options.values()) if isinstance(x, Tensor)).clone())
        logits = output[0] if isinstance(output, tuple) else output
        generator = torch.Generator().manual_seed(len(self.given))
        known = torch.randn(logits.shape, generator=generator).mul_(10).to(logits)
        bias = output[1] if isinstance(output, tuple) and is_megatron(module) else None
        self.logits = known.clone() if bias is None else known + bias
        return (known, *output[1:]) if isinstance(output, tuple) else known

    def differences(self, logits: Tensor, backbone: nn.Module | None) -> list[str]:
        """Returns what the model did in addition to its backbone and its head, as clauses."""
        if len(self.given) != 1 or self.logits is None:
            return [f"calls its lm-head {len(self.given)} times, not once; {_YOURSELF}"]
        found = list[str]()
        if not _ends_with(self.logits, logits):
            found.append(f"changes the logits of its lm-head; {AFTER_THE_HEAD}")
        if backbone is None:
            return found
        hidden = self.hidden[-1] if self.hidden else None
        if hidden is None or not _ends_with(hidden, self.given[0]):
            found.append(f"changes the hidden states between backbone and lm-head; {_BEFORE_THE_HEAD}")
        return found


def _ends_with(whole: Tensor, part: Tensor) -> bool:
    """Returns whether ``part`` is ``whole``, or its last tokens, in any dtype and layout.

    A model may compute logits of its last tokens only, flatten rows, or change ``[S, B, V]`` to
    ``[B, S, V]`` as Megatron does.
    """
    if not part.numel():
        return False
    layouts = [whole, whole.transpose(0, 1)] if whole.dim() == 3 else [whole]
    ends = [x[..., -part.shape[-2] :, :] if x.dim() == part.dim() else x for x in layouts if part.dim() > 1]
    same = (x.reshape(part.shape) for x in ends if x.numel() == part.numel() and x.shape[-1] == part.shape[-1])
    return any(torch.allclose(x.to(part), part, rtol=0, atol=0, equal_nan=True) for x in same)


def _first_tensor(output: Any, name: str) -> Tensor | None:
    """Returns the tensor of this name in a module's output, or else the first tensor of a tuple."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if isinstance(output, Tensor):
        found = output
    elif found is None and isinstance(output, tuple) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


def _logits(returned: Any) -> Tensor:
    logits = _first_tensor(returned, "logits")
    if logits is None or logits.dim() < 2:
        raise CannotRun(
            f"it returned no logits but {type(returned).__name__}; pass example={{...}}, arguments for which it does"
        )
    return logits


def _few_tokens(model: nn.Module) -> dict[str, Any]:
    """Returns arguments of a call with one row of a few tokens.

    Raises:
        CannotRun: The signature asks for something else.
    """
    signature = inspect.signature(model.forward).parameters
    named = {name: p for name, p in signature.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not named or type(model).forward is nn.Module.forward:
        raise CannotRun("it has no forward of its own that takes token ids; pass example={...} or call its parts")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.arange(_TOKENS * ranks_of(model), device=device)[None]
    known = {"position_ids": ids, "attention_mask": None}
    given: dict[str, Any] = {"input_ids" if "input_ids" in named else next(iter(named)): ids}
    for name, parameter in named.items():
        if name in given or parameter.default is not parameter.empty:
            continue
        if name not in known:
            raise CannotRun(f"its forward needs {name}; pass example={{...}} with arguments of its call")
        given[name] = known[name]
    if "use_cache" in named:
        given["use_cache"] = False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    return given


@contextmanager
def _left_as_it_is(model: nn.Module) -> Generator[None]:
    """Runs a model in eval mode, not compiled and without gradients, and leaves no trace.

    Flags are set one by one: ``eval()`` of an adapter may merge its weights.
    """
    modules = list(model.modules())
    flags = [module.training for module in modules]
    buffers = [(module, name, b) for module in modules for name, b in module._buffers.items()]
    copies = [b.clone() if b is not None and b.numel() <= _KEPT_BUFFERS else None for _, _, b in buffers]
    with ExitStack() as stack:
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        kinds = {device.type for device in devices} or {"cuda"}
        for kind in kinds:
            own = [device for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(own, device_type=kind))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(cast("Callable[..., Any]", torch.compiler.set_stance)("force_eager"))
        stack.enter_context(torch.no_grad())
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag
            for (module, name, buffer), copy in zip(buffers, copies, strict=True):
                module._buffers[name] = buffer
                if copy is not None and buffer is not None:
                    buffer.copy_(copy)
