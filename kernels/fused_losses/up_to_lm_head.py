# SPDX-License-Identifier: Apache-2.0
"""The hidden states of any model: the input that its forward passes to its lm-head."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fused_losses.megatron import MegatronLmHead, is_megatron
from fused_losses.wrappers import _running, wrapped_module


class UpToLmHead(nn.Module):
    """A backbone made from a whole model: it returns the input of the lm-head.

    It runs the model's own forward with the head's forward replaced, so it also does what the model
    does between its parts. Hidden states have the shape that the head gets, ``[S, B, H]`` with
    Megatron. Logits are not computed. Pass no labels.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module) -> None:
        """Takes a model and its head.

        Args:
            model: the model without its wrappers. Call this object inside of the wrappers'
                forward: see ``run_in_forward``.
            lm_head: its head, which its forward calls once.
        """
        super().__init__()
        self.model = model
        self.lm_head = lm_head.output_layer if isinstance(lm_head, MegatronLmHead) else lm_head

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Calls the model with the same arguments, and returns the input of its head.

        Raises:
            RuntimeError: The model did not call its head, or more than once.
        """
        taken = list[Tensor]()

        def take(hidden: Tensor, *_: Any, **__: Any) -> Any:
            taken.append(hidden)
            # The model goes on with a cheap stand-in of the right type, without a gradient.
            nothing = hidden.detach()
            return (nothing, None) if is_megatron(self.lm_head) else nothing

        with _replaced_forward(innermost(self.lm_head), take):
            call_inside(self.model)(*args, **options)
        if len(taken) != 1:
            raise RuntimeError(
                f"model {type(self.model).__name__}: its forward called its lm-head {len(taken)} times, expected once; "
                "pass the kernel the hidden states yourself"
            )
        return taken[0]


def call_inside(model: nn.Module) -> Callable[..., Any]:
    """Returns a function that calls a model: without its hooks if its forward runs already."""
    return model.forward if model in _running.get() else model


def innermost(module: nn.Module) -> nn.Module:
    """Returns a module without the wrappers of torch and DeepSpeed."""
    while (wrapped := wrapped_module(module)) is not None:
        module = wrapped
    return module


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Replaces a module's forward for a while. An instance's own forward is put back."""
    own = vars(module).get("forward")
    # The module can only be compiled if the compiler is imported, and importing it takes long.
    module.forward = torch.compiler.disable(forward) if "torch._dynamo" in sys.modules else forward
    try:
        yield
    finally:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own
