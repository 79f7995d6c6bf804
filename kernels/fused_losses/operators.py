# SPDX-License-Identifier: Apache-2.0
"""Functions that ``torch.compile`` puts into its graph as one operator, without a look inside.

It would unroll a loop over chunks of tokens, and so compile anew for each number of tokens.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import unchecked_values
from fused_losses.ranks import alone

Form = tuple[Sequence[int], torch.dtype]
"""The shape and the dtype of a tensor."""
Function = Callable[..., Sequence[Tensor | None]]
"""From a ``call``, the arguments that are no tensors, and tensors to tensors."""


def operator(
    name: str, tensors: str, options: str, call_of: Callable[..., Any], forms: Callable[..., Sequence[Form | None]]
) -> Callable[[Function], Function]:
    """Makes a function an operator of the code that ``torch.compile`` compiles.

    Elsewhere the function runs as it is. As in all compiled code, no values are checked.

    Args:
        name: the name of the operator.
        tensors: types and names of the function's arguments, as ``torch.library`` writes them. They
            come after its first one, a ``call`` with arguments of other types.
        options: the same of what ``call.options`` returns.
        call_of: makes a ``call`` from these options.
        forms: takes the arguments of the function, and returns the forms of its results: None for a
            result that is None. Results are new tensors on the device of the first tensor.
    """
    number = tensors.count(",") + 1

    def decorate(function: Function) -> Function:
        def run(*given: Any) -> list[Tensor]:
            call, arguments = call_of(*given[number:]), given[:number]
            device = arguments[0].device.type
            with torch.no_grad(), torch.autocast(device, enabled=False), unchecked_values():
                return [x.contiguous() for x in function(call, *arguments) if x is not None]

        def fake(*given: Any) -> list[Tensor]:
            call, arguments = call_of(*given[number:]), given[:number]
            found = (form for form in forms(call, *arguments) if form is not None)
            return [arguments[0].new_empty(shape, dtype=dtype) for shape, dtype in found]

        run_as_operator = torch.library.custom_op(
            f"fused_losses::{name}", run, mutates_args=(), schema=f"({tensors}, {options}) -> Tensor[]"
        )
        run_as_operator.register_fake(fake)

        @wraps(function)
        def called(call: Any, *arguments: Any) -> Sequence[Tensor | None]:
            if not torch.compiler.is_compiling():
                return function(call, *arguments)
            found = iter(run_as_operator(*arguments, *call.options))
            return [None if form is None else next(found) for form in forms(call, *arguments)]

        return called

    return decorate


def name_of(group: dist.ProcessGroup | None) -> str | None:
    """Returns the name of a group, which an operator can take; None if no other rank is in it."""
    return None if group is None or alone(group) else group.group_name


def group_of(name: str | None) -> dist.ProcessGroup | None:
    """Returns the group of a name."""
    resolve: Any = None if name is None else getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
    return resolve and resolve(name)
