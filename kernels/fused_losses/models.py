# SPDX-License-Identifier: Apache-2.0
"""Finds the backbone and the lm-head of a causal language model inside its wrappers."""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fused_losses.megatron import MegatronLmHead, is_megatron, megatron_lm_head
from fused_losses.model_check import AFTER_THE_HEAD, CannotRun, check_logits, why_not_alone
from fused_losses.up_to_lm_head import UpToLmHead, innermost

_WRAPPED_IN = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Attributes that hold the wrapped module, also in wrappers of other libraries.

They come from torch.compile, from DistributedDataParallel and DeepSpeed, and from FSDP.
"""

_BACKBONES = ("model", "transformer", "backbone", "gpt_neox", "base_model")

_BESIDE_THE_HEAD = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
}
"""Fields of configurations that change logits outside of the head, and the value without effect.

They are fields of Gemma, RecurrentGemma, Cohere, Granite and FalconH1. Only models that cannot be
run are held to this list, because other models use some of these names with another meaning.
"""

_Parts = tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]

_seen: "weakref.WeakKeyDictionary[nn.Module, tuple[_Parts, bool]]" = weakref.WeakKeyDictionary()
"""For each model: the backbone and the head that were found, and whether a run checked them."""


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the causal language model itself, without its wrappers.

    Wrappers of torch.compile, DistributedDataParallel, FSDP, DeepSpeed engines and PEFT models are
    removed, in any order.
    """
    while True:
        inner = next(
            (found for name in _WRAPPED_IN if isinstance(found := getattr(model, name, None), nn.Module)), None
        )
        if inner is None and callable(getattr(model, "get_base_model", None)):
            base = model.get_base_model()  # pyright: ignore[reportCallIssue]
            inner = base if isinstance(base, nn.Module) and base is not model else None
        if inner is None:
            return model
        model = inner


def backbone_and_lm_head(
    model: nn.Module, *, check: bool | None = None, example: Mapping[str, Any] | None = None
) -> tuple[nn.Module, nn.Module]:
    """Returns the module that computes the last hidden states, and the one that computes logits.

    Call the first, and pass the second to ``tiled_token_logprobs``, or its weight to
    ``linear_logprobs``.

    The head is the result of ``get_output_embeddings()`` if the model has that method, as in
    transformers; else ``lm_head`` or ``output_layer``. It may be a LoRA layer, which is returned as
    a whole. Megatron's is returned as a ``MegatronLmHead``, whose ``split`` says which part of the
    vocabulary this rank has.

    The backbone is the attribute that ``base_model_prefix`` names; else ``model``, ``transformer``,
    ``backbone``, ``gpt_neox`` or ``base_model``. If a model has no such part without the head, as
    Megatron's models, the backbone is an ``UpToLmHead``: it calls the model's own forward with the
    model's arguments, and returns the input of the head.

    The first time, the model runs on a few tokens, to check that its logits are exactly those of
    this head on this backbone. This happens once for a model, even if it is wrapped later.

    Under wrappers that gather weights or reduce gradients, call both modules inside the forward of
    the wrapped model, as ``run_in_forward`` does. There the parameters are whole, and the wrapper
    learns which gradients to expect.

    Args:
        model: a causal language model, wrapped or not.
        check: whether to run the model. None: it runs if this rank can run it alone. It can't if
            the weights are sharded or on the meta device, if forward calls other ranks, as with
            Megatron's tensor parallelism, or if the model does not run on token ids. Then only a
            list of known fields of configurations is checked, with a warning. True: the model must
            run; call this outside of the model's forward, on every rank that shares it. False:
            nothing is checked, for models whose change of logits you compute yourself, and for
            models that cannot run.
        example: arguments of the model's call in the run; by default one row of a few token ids and
            what the signature requires of ``position_ids``, ``attention_mask`` and
            ``decoder_input_ids``.

    Raises:
        ValueError: There is no head; the model does more than call its backbone and its head, for
            example a soft-cap, a scale, or a transform of hidden states, which would be lost; or
            the model cannot be run with ``check=True``.

    Collectives:
        None, except those of the model's forward with ``check=True``.
    """
    inner = unwrap(model)
    lm_head = _lm_head(inner)
    backbone = _backbone(inner, lm_head) or UpToLmHead(inner, lm_head)
    if check is not False and not torch.compiler.is_compiling():
        parts, (before, ran) = _parts(backbone, lm_head), _seen.get(inner, (None, False))
        if before != parts or (check and not ran):
            _seen[inner] = parts, _check(model, inner, backbone, lm_head, check, example)
    return backbone, lm_head


def _lm_head(inner: nn.Module) -> nn.Module:
    head = inner.get_output_embeddings() if callable(getattr(inner, "get_output_embeddings", None)) else None  # pyright: ignore[reportCallIssue]
    named = (getattr(inner, name, None) for name in ("lm_head", "output_layer"))
    head = next((found for found in (head, *named) if isinstance(found, nn.Module)), None)
    if head is None:
        raise ValueError(
            f"model {type(inner).__name__}: has no lm-head (get_output_embeddings, lm_head, output_layer); "
            "pass backbone and head to the kernel yourself"
        )
    return megatron_lm_head(inner, head) if is_megatron(head) else head


def _backbone(inner: nn.Module, lm_head: nn.Module) -> nn.Module | None:
    """Returns the part of a model that is everything but its head; None if there is none."""
    for name in (str(getattr(inner, "base_model_prefix", "")), *_BACKBONES):
        backbone = getattr(inner, name, None) if name else None
        if isinstance(backbone, nn.Module) and backbone not in (inner, lm_head):
            # A part that holds the head makes logits itself.
            return None if any(part is lm_head for part in backbone.modules()) else backbone
    return None


def _parts(backbone: nn.Module, lm_head: nn.Module) -> _Parts:
    """Returns references to the innermost modules of a backbone and a head, to know them again."""
    head = innermost(lm_head.output_layer if isinstance(lm_head, MegatronLmHead) else lm_head)
    return weakref.ref(head if isinstance(backbone, UpToLmHead) else innermost(backbone)), weakref.ref(head)


def _check(
    model: nn.Module,
    inner: nn.Module,
    backbone: nn.Module,
    lm_head: nn.Module,
    check: bool | None,
    example: Mapping[str, Any] | None,
) -> bool:
    """Runs the model if it can be run. Else looks for known fields of its configuration.

    Returns:
        Whether it ran.
    """
    name = type(inner).__name__
    together = why_not_alone(inner)
    try:
        if together is not None and not check:
            raise CannotRun(f"{together}; call this before, on the plain model, or with check=True on every rank")
        found = check_logits(inner if together is None else model, inner, backbone, lm_head, example)
    except CannotRun as error:
        unchecked = f"model {name}: not checked that its logits are those of its lm-head alone, since {error}"
        if check:
            raise ValueError(unchecked) from error
        _check_fields(inner)
        warnings.warn(f"{unchecked}; or pass check=False if you know", stacklevel=3)
        return False
    if found:
        fields = "".join(f"{field} {value}, " for field, value in _fields(inner).items())
        raise ValueError(f"model {name}: {fields}its forward {'; it also '.join(found)}")
    return True


def _check_fields(inner: nn.Module) -> None:
    for field, value in _fields(inner).items():
        raise ValueError(
            f"model {type(inner).__name__}: its {field} of {value} changes logits outside of the lm-head and would be "
            f"lost; {AFTER_THE_HEAD}"
        )


def _fields(inner: nn.Module) -> dict[str, Any]:
    """Returns the fields of a model's configuration that may change logits outside of its head."""
    config = getattr(inner, "config", None)
    configs = (config, getattr(config, "text_config", None))
    found = {name: getattr(one, name, None) for one in configs for name in _BESIDE_THE_HEAD if hasattr(one, name)}
    return {name: value for name, value in found.items() if value not in (None, _BESIDE_THE_HEAD[name])}
