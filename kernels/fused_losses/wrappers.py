# SPDX-License-Identifier: Apache-2.0
"""Works with modules inside wrappers that gather parameters and reduce gradients.

Such wrappers are DistributedDataParallel, FSDP, FSDP2 (``fully_shard``) and DeepSpeed's ZeRO. They
gather a module's parameters before its forward and put them aside after it, and during forward they
prepare the reduction of the gradients. So a kernel must use a parameter once, inside the forward of
the module that gathers it.

DeepSpeed is recognised by the attributes that it sets, so it is not imported.
"""

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPERS = {"DistributedDataParallel": "module", "FullyShardedDataParallel": "_fsdp_wrapped_module"}
"""Torch's wrappers, and the attribute of each that holds the wrapped module."""

_running: ContextVar[tuple[nn.Module, ...]] = ContextVar("_running", default=())
"""The modules in whose forward a function of ``run_in_forward`` runs now."""


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Returns the module that a wrapper of torch or DeepSpeed holds; None for other modules.

    Wrappers are recognised by their classes, because a head may have a part called ``module``.
    """
    for name, attribute in (*_WRAPPERS.items(), ("OptimizedModule", "_orig_mod")):
        if _is_a(module, name):
            return module._modules.get(attribute)
    if any(one.__module__.startswith("deepspeed.") for one in type(module).__mro__):
        return module._modules.get("module")
    return None


def run_in_forward(module: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Calls ``module`` and runs ``function`` in place of the forward inside its wrappers.

    With this, code outside of a module's forward can use the module's parameters while the wrappers
    have gathered them: ``run_in_forward(model, compute_loss, input_ids, labels)``. The wrappers and
    the module's hooks do what they do in every call, and the hooks get the function's results.

    Args:
        module: the module, in any wrapper of torch.compile, DistributedDataParallel, FSDP or
            DeepSpeed. FSDP2 and ZeRO act by hooks and need no wrapper.
        function: is called once, as ``function(inner, *inputs)``, where ``inner`` is the module
            without its wrappers. It runs as it is, not compiled. A tensor from outside whose
            gradient is needed must be among ``inputs``, because wrappers must see it. For the same
            reason the function returns a tensor or a tuple of tensors: gradients through a tensor
            that leaves it in another way may be wrong.
        inputs: arguments of ``function``. A wrapper may cast them, as in mixed precision.

    Returns:
        The result of ``function``, as the wrappers and hooks hand it on.

    Raises:
        RuntimeError: A wrapper did not call the module that it holds.

    In a model that was compiled with ``fullgraph=True``, torch may refuse to run other code. If an
    instance has its own ``forward``, which accelerate sets for mixed precision, that does not run
    either. With accelerate, enter ``accelerator.autocast()`` yourself.
    """
    leave_compiled_code()
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

    def forward(*given: Any, **options: Any) -> Any:
        calls.append(inner)
        restore()  # The function may call the module itself.
        token = _running.set((*_running.get(), inner))
        try:
            return function(inner, *given, **options)
        finally:
            _running.reset(token)

    inner.forward = _not_compiled(forward)
    try:
        result = _not_compiled(lambda: module(*inputs))()  # torch 2.11 compiles what follows a graph break
    finally:
        restore()
    if len(calls) != 1:
        raise RuntimeError(
            f"module {type(module).__name__}: did not call the {type(inner).__name__} that it wraps; "
            "pass the module whose forward gathers the parameters"
        )
    return result


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch from compiling a function. Only if the compiler is imported can it do so, and
    importing it takes long.
    """
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


def leave_compiled_code() -> None:
    """Lets the caller run uncompiled if torch compiles the code around it.

    With ``fullgraph=True`` torch cannot do so, and raises an error that gives the reason.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="fused_losses runs code in the forward of a module as it is, not compiled; call run_in_forward and "
            "tiled_* functions outside of what is compiled with fullgraph=True, or use linear_logprobs"
        )


def check_parameter(name: str, tensor: Tensor, *, piece: bool = False) -> None:
    """Checks that a parameter that a kernel uses is whole, and that its gradient will be reduced.

    Args:
        name: what the message calls the parameter.
        tensor: the parameter, or the tensor that a wrapper has put in its place, or a tensor that
            was computed from it.
        piece: whether a parameter that FSDP has flattened can only be a piece of the whole.

    Raises:
        ValueError: The parameter is a DTensor; or it belongs to FSDP, FSDP2 or ZeRO-3, and this is
            not the forward for which they gather it. Nothing is checked while torch compiles,
            because it can't trace these checks.
    """
    if torch.compiler.is_compiling():
        return
    if _is_dtensor(tensor):
        raise ValueError(
            f"{name} is a DTensor, of which this rank holds a part; with FSDP2 call the kernel inside the forward of "
            "the module that was passed to fully_shard: run_in_forward(module, function, ...); with tensor "
            "parallelism use linear_logprobs with weight.to_local(), vocab_start and tp_group"
        )
    trained = tensor.requires_grad and torch.is_grad_enabled()
    for source in _sources(tensor) if trained else (tensor,):
        _check_source(name, source, trained=trained, piece=piece)


def _check_source(name: str, tensor: Tensor, *, trained: bool, piece: bool) -> None:
    """Checks one of the leaves from which a parameter is computed."""
    if trained and _idle_in_fsdp2(tensor):
        raise ValueError(
            f"{name} is used outside of the forward for which FSDP2 gathers it, so its gradient might not be reduced; "
            "call the kernel inside the forward of the module that was passed to fully_shard, without unshard(): "
            "run_in_forward(module, function, ...)"
        )
    if _idle_in_fsdp(tensor) and (trained or piece):
        raise ValueError(
            f"{name} belongs to FSDP and is used outside of its forward, so its gradient might not be reduced; call "
            "the kernel inside the forward of the module that FSDP wraps: run_in_forward(module, function, ...), "
            "without summon_full_params"
        )
    if _is_partitioned(tensor) and not _is_active(tensor) and (trained or not _is_available(tensor)):
        raise ValueError(
            f"{name} belongs to ZeRO-3 and is used outside of the forward of its module, so it may be freed before "
            "backward; call the kernel inside, without GatheredParameters: "
            "run_in_forward(lm_head, lambda head, hidden: ..., hidden); for a parameter of a part of the head, call "
            "deepspeed.utils.set_z3_leaf_module(lm_head, True) before deepspeed.initialize"
        )


def _sources(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the leaves from which a parameter is computed.

    A view of FSDP's flat parameter is yielded itself, because torch may refuse to name its source.
    """
    if _is_flattened(tensor._base):
        yield tensor
    else:
        yield from leaves_of(tensor)


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the leaves that need a gradient and from which a tensor is computed."""
    if tensor.is_leaf and tensor.requires_grad:
        yield tensor
    nodes: list[Any] = [tensor.grad_fn]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def check_lm_head(lm_head: nn.Module, *, runs_again: bool) -> None:
    """Checks that calling an lm-head once gathers all that its forward needs.

    Args:
        lm_head: the head.
        runs_again: whether the head's forward runs a second time, in backward.

    Raises:
        ValueError: One call does not gather all; the head has hooks that expect logits; or it has
            dropout and runs again, with other random numbers.
    """
    again = runs_again and torch.is_grad_enabled()
    inner, wrapped_by_fsdp = lm_head, False
    while (wrapped := wrapped_module(inner)) is not None:
        wrapped_by_fsdp |= _is_a(inner, "FullyShardedDataParallel")
        inner = wrapped
    for name, part in inner.named_modules():
        if name and any(_is_a(part, wrapper) for wrapper in (*_WRAPPERS, "FSDPModule")):
            raise ValueError(
                f"lm_head: its {name} has a wrapper of its own ({type(part).__name__}), which would gather and reduce "
                "for every tile; wrap the whole head, or leave it to the wrapper of the model"
            )
        if again and part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
            raise ValueError(
                f"lm_head: its {name} drops out with probability {part.p}, with other random numbers in backward than "
                "in forward; build the head without dropout (lora_dropout=0), call eval() on that part, or use "
                "tiled_loss or tiled_grpo_loss, which run the head once for each token (if rho averages over "
                "sequences, with old_logprobs)"
            )
    gathers_itself = wrapped_by_fsdp or _is_a(inner, "FSDPModule")
    parameters = [*inner.named_parameters(), *_views(inner)]
    pieces = all(parameter.dim() < 2 for _, parameter in parameters)
    for name, parameter in parameters:
        if not _is_partitioned(parameter):
            if not gathers_itself:
                check_parameter(f"lm_head: its {name}", parameter, piece=pieces)
        elif "." in name and not getattr(inner, "_z3_leaf", False):
            raise ValueError(
                f"lm_head: ZeRO-3 gathers its {name} when a part of the head is called, so for every tile; "
                "call deepspeed.utils.set_z3_leaf_module(lm_head, True) before deepspeed.initialize"
            )
    _check_hooks(inner)


def _views(head: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the views that FSDP has put in the place of a head's parameters."""
    for path, part in head.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and _is_flattened(value._base):
                yield f"{path}.{name}" if path else name, value


def _check_hooks(head: nn.Module) -> None:
    """Refuses hooks that would get log-probabilities instead of logits, or their gradients.

    Hooks of wrappers are allowed, because they look at no values.
    """
    everywhere = nn.modules.module
    hooks = (
        *(head._forward_hooks, head._backward_hooks, head._backward_pre_hooks),
        *(everywhere._global_forward_hooks, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks),
    )
    for hook in (hook for kind in hooks for hook in kind.values()):
        plain = _plain_function(hook)
        if not str(getattr(plain, "__module__", "")).startswith(("torch.distributed.", "deepspeed.")):
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
    """Returns whether a class of torch with this name is among the module's classes.

    The name is compared, because importing FSDP takes long and most programs do not use it.
    """
    return any(one.__name__ == name and one.__module__.startswith("torch.") for one in type(module).__mro__)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _is_flattened(tensor: Tensor | None) -> bool:
    """Returns whether a tensor is FSDP's flat parameter, or has become a part of it."""
    return getattr(tensor, "_fsdp_flattened", False)


def _idle_in_fsdp(tensor: Tensor) -> bool:
    """Returns whether a tensor belongs to FSDP, but no backward will reduce its gradient.

    In forward, the module has a view of the flat parameter in place of the parameter, and the flat
    parameter has hooks until backward is over.
    """
    owner = tensor if tensor._base is None else tensor._base
    ready = ("_post_backward_hook_handle", "_post_backward_hook_state")
    return _is_flattened(owner) and not any(hasattr(owner, name) for name in ready)


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
    """Returns whether FSDP2 has gathered a parameter, but not for a forward or backward.

    A function that runs in a module's forward may call that module. FSDP2 then believes that the
    forward is over, but still reduces the gradient.
    """
    running = _running.get()
    return any(
        getattr(parameter, "_unsharded_param", None) is tensor
        and group._training_state.name == "IDLE"
        and not any(module in running for module in group.modules)
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
