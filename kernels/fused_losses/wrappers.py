# SPDX-License-Identifier: Apache-2.0
"""Works with modules inside wrappers that gather parameters and reduce gradients.

Such wrappers are DistributedDataParallel, FSDP, FSDP2 (``fully_shard``) and DeepSpeed's ZeRO. They
gather a module's parameters before its forward and put them aside after it, and they prepare there
how the gradients will be reduced. So a kernel must use a parameter inside the forward of the module
that gathers it, and once.

DeepSpeed is recognised by the attributes that it sets, so it is not imported.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPED_IN = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Attributes that hold the wrapped module.

They are those of torch.compile, of DistributedDataParallel and DeepSpeed, and of FSDP.
"""


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Returns the module that a wrapper holds; None for other modules."""
    return next((inner for name in _WRAPPED_IN if (inner := module._modules.get(name)) is not None), None)


def run_in_forward(module: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Calls ``module`` and runs ``function`` in place of the forward inside its wrappers.

    With this, code that is not a module's forward can use its parameters while the wrappers have
    gathered them: ``run_in_forward(model, compute_loss, input_ids, labels)``. The wrappers and the
    module's hooks do what they do in every call.

    Args:
        module: the module, in any wrapper of torch.compile, DistributedDataParallel, FSDP or
            DeepSpeed. FSDP2 and ZeRO act by hooks and need no wrapper.
        function: is called once, as ``function(inner, *inputs)``, where ``inner`` is the module
            without its wrappers. It runs as it is, not compiled. A tensor from outside whose
            gradient is needed must be among ``inputs``, since wrappers must see it. It returns a
            tensor or a tuple of tensors, for the same reason.
        inputs: arguments of ``function``. A wrapper may cast them, as in mixed precision.

    Returns:
        What ``function`` returns, as the wrappers and hooks hand it on.

    Raises:
        RuntimeError: A wrapper did not call the module that it holds.

    An instance's own ``forward``, which accelerate sets for mixed precision, is not run either.
    Under it, enter ``accelerator.autocast()`` yourself.
    """
    inner = module
    while (wrapped := wrapped_module(inner)) is not None:
        inner = wrapped
    own = vars(inner).get("forward")
    calls = list[nn.Module]()

    def restore() -> None:
        if own is None:
            vars(inner).pop("forward", None)
        else:
            inner.forward = own

    def forward(*given: Any) -> Any:
        calls.append(inner)
        restore()  # The function may call the module itself.
        return function(inner, *given)

    # Only what has imported the compiler can have compiled the module, and to import it takes long.
    inner.forward = torch.compiler.disable(forward) if "torch._dynamo" in sys.modules else forward
    try:
        result = module(*inputs)
    finally:
        restore()
    if len(calls) != 1:
        raise RuntimeError(
            f"module {type(module).__name__}: did not call the {type(inner).__name__} that it wraps; "
            "pass the module whose forward gathers the parameters"
        )
    return result


def check_parameter(name: str, tensor: Tensor) -> None:
    """Checks that a parameter that a kernel uses is whole, and that its gradient will be reduced.

    Args:
        name: what the message calls it.
        tensor: the parameter, or what a wrapper has put in its place.

    Raises:
        ValueError: It is a DTensor; or it belongs to FSDP, FSDP2 or ZeRO-3, and this is not the
            forward for which they gather it.
    """
    trained = tensor.requires_grad and torch.is_grad_enabled()
    if _is_dtensor(tensor):
        raise ValueError(
            f"{name} is a DTensor, of which this rank holds a part; with FSDP2 call the kernel inside the forward of "
            "the module that was passed to fully_shard: run_in_forward(module, function, ...); with tensor "
            "parallelism use linear_logprobs with weight.to_local(), vocab_start and tp_group"
        )
    if trained and _idle_in_fsdp2(tensor):
        raise ValueError(
            f"{name} is used outside of the forward for which FSDP2 gathers it, so its gradient might not be reduced; "
            "call the kernel inside the forward of the module that was passed to fully_shard, without unshard(): "
            "run_in_forward(module, function, ...)"
        )
    if (trained and _idle_view(tensor)) or (_is_flattened(tensor) and (trained or _is_piece(name, tensor))):
        raise ValueError(
            f"{name} belongs to FSDP and is used outside of its forward, so its gradient would not be reduced; call "
            "the kernel inside: run_in_forward(model, function, ...), without summon_full_params"
        )
    if _is_partitioned(tensor) and not _is_active(tensor) and (trained or not _is_available(tensor)):
        raise ValueError(
            f"{name} belongs to ZeRO-3 and is used outside of the forward of its module, so it may be put aside before "
            "backward; call the kernel inside, without GatheredParameters: "
            "run_in_forward(lm_head, lambda head, hidden: ..., hidden)"
        )


def check_lm_head(lm_head: nn.Module) -> None:
    """Checks that calling an lm-head once gathers all that its forward needs.

    Raises:
        ValueError: It does not; the head has hooks that take its output for logits; or it has
            dropout, which backward would compute with other random numbers.
    """
    inner, wrapped_by_fsdp = lm_head, False
    while (wrapped := wrapped_module(inner)) is not None:
        wrapped_by_fsdp |= _is_a(inner, "FullyShardedDataParallel")
        inner = wrapped
    for name, part in inner.named_modules():
        if name and (_is_a(part, "FSDPModule") or wrapped_module(part) is not None):
            raise ValueError(
                f"lm_head: its {name} is a {type(part).__name__} of its own, which would gather and reduce for every "
                "tile; wrap the whole head, or leave it to the wrapper of the model"
            )
        if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p and torch.is_grad_enabled():
            raise ValueError(
                f"lm_head: its {name} drops out with probability {part.p}, with other random numbers in backward than "
                "in forward; build the head without dropout (lora_dropout=0), or call eval() on that part"
            )
    gathers_itself = wrapped_by_fsdp or _is_a(inner, "FSDPModule")
    for name, parameter in inner.named_parameters():
        if not _is_partitioned(parameter):
            if not gathers_itself:
                check_parameter(f"lm_head: its {name}", parameter)
        elif "." in name and not getattr(inner, "_z3_leaf", False):
            raise ValueError(
                f"lm_head: ZeRO-3 gathers its {name} when a part of the head is called, so for every tile; "
                "call deepspeed.utils.set_z3_leaf_module(lm_head, True) before deepspeed.initialize"
            )
    _check_hooks(inner)


def _check_hooks(head: nn.Module) -> None:
    """Refuses hooks that would be given log-probabilities for logits, or their gradients."""
    hooks = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks)
    for hook in (hook for kind in hooks for hook in kind.values()):
        plain = _plain_function(hook)
        if not str(getattr(plain, "__module__", "")).startswith(("torch.", "deepspeed.")):
            raise ValueError(
                f"lm_head: its hook {getattr(plain, '__qualname__', plain)} would be given log-probabilities in place "
                "of logits; compute in the head's forward what the hook computes, or remove it"
            )


def _plain_function(hook: Any) -> Any:
    """Returns the function inside partial functions and decorators."""
    while True:
        inner = hook.func if isinstance(hook, partial) else getattr(hook, "__wrapped__", None)
        if inner is None:
            return hook
        hook = inner


def _is_a(module: nn.Module, name: str) -> bool:
    """Returns whether a class of torch's FSDP is among the module's classes.

    By name, since importing FSDP takes long and most programs do not use it.
    """
    return any(one.__name__ == name and one.__module__.startswith("torch.") for one in type(module).__mro__)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _is_flattened(tensor: Tensor) -> bool:
    """Returns whether FSDP has made a parameter a part of a flat one.

    In forward, the module has a view of the flat parameter in the parameter's place.
    """
    return tensor.is_leaf and getattr(tensor, "_fsdp_flattened", False)


def _is_piece(name: str, parameter: Tensor) -> bool:
    """Returns whether this is FSDP's piece of a weight, which it has flattened and sharded."""
    return parameter.dim() == 1 and "bias" not in name


def _idle_view(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view of FSDP's flat parameter, but no backward will reduce it.

    FSDP's forward sets these attributes, and backward removes them.
    """
    flat = tensor._base
    ready = ("_post_backward_hook_handle", "_post_backward_hook_state")
    return getattr(flat, "_fsdp_flattened", False) and not any(hasattr(flat, name) for name in ready)


def _is_partitioned(tensor: Tensor) -> bool:
    """Returns whether ZeRO-3 owns a parameter."""
    return hasattr(tensor, "ds_active_sub_modules")


def _is_active(tensor: Tensor) -> bool:
    """Returns whether a parameter of ZeRO-3 is gathered for a module whose forward runs."""
    return bool(getattr(tensor, "ds_active_sub_modules", None))


def _is_available(tensor: Tensor) -> bool:
    """Returns whether ZeRO-3 has gathered a parameter of its own."""
    return getattr(getattr(tensor, "ds_status", None), "name", "") == "AVAILABLE"


def _idle_in_fsdp2(tensor: Tensor) -> bool:
    """Returns whether FSDP2 has gathered a parameter, but not for a forward or backward."""
    return any(
        getattr(parameter, "_unsharded_param", None) is tensor and group._training_state.name == "IDLE"
        for group in _fsdp2_groups()
        for parameter in group.fsdp_params
    )


def _fsdp2_groups() -> Iterator[Any]:
    """Yields the parameter groups of all modules that were passed to ``fully_shard``.

    Torch has no public list of them. Without FSDP2 there are none.
    """
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return
    states = sys.modules["torch.distributed._composable_state"]._module_state_mapping
    for reference in list(states.values()):
        state = reference()
        yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", 0)])
