# SPDX-License-Identifier: Apache-2.0
"""The base of modes that see each operation that torch dispatches, and the names of operations."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):
    """The base of modes that see each operation, in forward and in backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes seconds and is of no use here."""
        return False


def unobserved() -> AbstractContextManager[Any]:
    """Turns off all modes, so that they do not take lossgate's own operations for the kernel's."""
    return _disable_current_modes()


@cache
def base_name(operation: Any) -> str:
    """Returns the plain name of an operation, also of one in place: ``add`` for
    ``aten::add_.Tensor``.
    """
    return operation._schema.name.removeprefix("aten::").rstrip("_")


@cache
def argument_names(operation: Any) -> tuple[str, ...]:
    """Returns the names of an operation's arguments, in order."""
    return tuple(argument.name for argument in operation._schema.arguments)


def arguments_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with the defaults of those that are not given."""
    names = argument_names(operation)
    return {**_defaults(operation), **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _defaults(operation: Any) -> dict[str, Any]:
    arguments = operation._schema.arguments
    return {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
