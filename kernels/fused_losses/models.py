# SPDX-License-Identifier: Apache-2.0
"""Finds the backbone and the lm-head of a causal language model inside its wrappers."""

from torch import nn

_WRAPPED_IN = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Attributes that hold the wrapped module, also in wrappers of other libraries.

They are those of torch.compile, of DistributedDataParallel and DeepSpeed, and of FSDP.
"""

_BACKBONES = ("model", "transformer", "backbone", "gpt_neox", "base_model")

_AFTER_THE_HEAD = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Fields of configurations that change logits after the head, and the value without effect.

They are those of Gemma 2, Cohere and Granite.
"""


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


def backbone_and_lm_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Returns the module that computes the last hidden states, and the one that computes logits.

    Call the first, and pass the second to ``tiled_token_logprobs``.

    The head is the result of ``get_output_embeddings()`` if the model has that method, as in
    transformers; else ``lm_head`` or ``output_layer``. It may be a LoRA layer, which is returned as
    a whole. The backbone is the attribute that ``base_model_prefix`` names; else ``model``,
    ``transformer``, ``backbone``, ``gpt_neox`` or ``base_model``.

    Under wrappers that gather weights or reduce gradients, call both inside the forward of the
    wrapped model, as ``run_in_forward`` does. There the parameters are whole, and the wrapper
    learns which gradients to expect.

    Args:
        model: a causal language model, wrapped or not.

    Raises:
        ValueError: There is no head or no backbone; the backbone holds the head, so it would
            compute logits itself; or the model changes logits after its head
            (``final_logit_softcapping``, ``logit_scale``, ``logits_scaling``), which would be lost.
    """
    inner = unwrap(model)
    head = inner.get_output_embeddings() if callable(getattr(inner, "get_output_embeddings", None)) else None  # pyright: ignore[reportCallIssue]
    if head is None:
        head = next(
            (
                found
                for name in ("lm_head", "output_layer")
                if isinstance(found := getattr(inner, name, None), nn.Module)
            ),
            None,
        )
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"model {type(inner).__name__}: has no lm-head (get_output_embeddings, lm_head, output_layer); "
            "pass backbone and head to the kernel yourself"
        )
    config = getattr(inner, "config", None)
    for name, nothing in _AFTER_THE_HEAD.items():
        value = getattr(config, name, None)
        if value not in (None, nothing):
            raise ValueError(
                f"model {type(inner).__name__}: its {name} of {value} comes after the lm-head and would be lost; "
                f"pass the kernel a head that applies {name} itself"
            )
    names = (str(getattr(inner, "base_model_prefix", "")), *_BACKBONES)
    for name in names:
        backbone = getattr(inner, name, None) if name else None
        if isinstance(backbone, nn.Module) and backbone not in (inner, head):
            if any(part is head for part in backbone.modules()):
                raise ValueError(
                    f"model {type(inner).__name__}: its {name} holds the lm-head, so it makes logits; "
                    "pass backbone and head to the kernel yourself"
                )
            return backbone, head
    raise ValueError(
        f"model {type(inner).__name__}: has no backbone ({', '.join(dict.fromkeys(filter(None, names)))}); "
        "pass backbone and head to the kernel yourself"
    )
