# SPDX-License-Identifier: Apache-2.0
"""Messages for arguments under names that they do not have here, but elsewhere."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_HERE: dict[str, tuple[str, ...]] = {
    "beta": ("reference_policy_kl_penalty",),
    "cfg": ("config",),
    "chunk_size": ("chunk", "tiles"),
    "context_parallel_group": ("cp_group",),
    "generation_logprobs": ("vllm_logprobs",),
    "global_valid_seqs": ("valid_sequences",),
    "global_valid_toks": ("valid_tokens",),
    "hidden_states": ("hidden",),
    "loss_denom": ("valid_tokens",),
    "loss_mask": ("mask",),
    "num_items_in_batch": ("valid_tokens", "valid_sequences"),
    "old_logprobs": ("prev_logprobs",),
    "prev_logprobs": ("old_logprobs",),
    "ref_logprobs": ("reference_logprobs",),
    "reference_policy_logprobs": ("reference_logprobs",),
    "response_mask": ("mask",),
    "rho_weights": ("rho",),
    "selected_token_ids": ("labels",),
    "shards": ("tiles",),
    "target": ("labels",),
    "tensor_parallel_group": ("tp_group",),
    "token_mask": ("mask",),
    "total_loss_weight": ("valid_tokens",),
    "vllm_logprobs": ("generation_logprobs",),
    "vocab_parallel_group": ("tp_group",),
    "vocab_start_index": ("vocab_start",),
}
"""Names in NeMo-RL, open-instruct, AReaL and transformers, and what they are called here."""


def named(function: Callable[P, R], *, also: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Makes a function say which argument is meant by a name that it does not know.

    Args:
        function: the function.
        also: another function, to which it hands on what is not its own.

    Raises:
        TypeError: In a call: it has an argument of an unknown name. Without this, Python would
            raise the same error and name the first such argument alone.
    """
    known = [*_names(function), *(_names(also) if also else ())]

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in known:
                raise TypeError(_message(function.__qualname__, [name for name in given if name not in known], known))
        return function(*args, **given)

    return call


def named_options(made: C) -> C:
    """Does the same for the arguments from which a class is made."""
    setattr(made, "__init__", named(getattr(made, "__init__")))  # noqa: B009, B010
    return made


def _names(function: Callable[..., Any]) -> list[str]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [name for name, one in signature(function).parameters.items() if one.kind in kinds and name != "self"]


def _message(function: str, unknown: list[str], known: list[str]) -> str:
    function = function.removesuffix(".__init__")
    parts, others = list[str](), list[str]()
    for name in unknown:
        here = next((one for one in _HERE.get(name, ()) if one in known), None)
        if here:
            parts.append(f"{name!r} is {here} here")
        elif like := get_close_matches(name, known, 1, cutoff=0.75):
            parts.append(f"{name!r} may be {like[0]}")
        else:
            others.append(repr(name))
    if others:
        parts.append(f"leave out {', '.join(others)}, such as options of the trainer")
    return f"{function} has no argument {', '.join(map(repr, unknown))}: {'; '.join(parts)}; it has {', '.join(known)}"
