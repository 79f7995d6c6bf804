# SPDX-License-Identifier: Apache-2.0
"""Finding the backbone and the lm-head of a causal language model, through whatever it is wrapped in."""

from torch import nn

_WRAPPED_IN = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""What torch.compile, DistributedDataParallel and DeepSpeed, and FSDP call the module that they wrap."""

_BACKBONES = ("model", "transformer", "backbone", "gpt_neox", "base_model")


_AFTER_THE_HEAD = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Fields of configurations (Gemma 2, Cohere, Granite), and the value at which they do nothing."""


def unwrap(model: nn.Module) -> nn.Module:
    """The causal language model itself, out of torch.compile, DistributedDataParallel, FSDP, DeepSpeed engines and PEFT models, in any order."""
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
    """What makes the last hidden states, and what makes logits of them: call the one, and give the other to ``tiled_token_logprobs``.

    The head is ``get_output_embeddings()`` where there is such a method (transformers), else ``lm_head`` or ``output_layer``; it may be a
    LoRA layer, which is left whole. The backbone is the attribute that ``base_model_prefix`` names, else ``model``, ``transformer``, ``backbone``,
    ``gpt_neox`` or ``base_model``.

    Gradients of data-parallel wrappers are reduced by hooks on parameters, which fire however the parameters are used; but a wrapper that
    prepares anything when it is called (DistributedDataParallel's bucket order, FSDP's root) must still be: call both inside the
    forward of the module that is wrapped.

    Raises ``ValueError`` where either is not found, where the backbone holds the head, and so would make logits itself, and where the model does
    something to logits after its head (``final_logit_softcapping``, ``logit_scale``, ``logits_scaling``), which would be lost.
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
            f"model {type(inner).__name__}: has no lm-head (get_output_embeddings, lm_head, output_layer); pass the modules yourself"
        )
    config = getattr(inner, "config", None)
    for name, nothing in _AFTER_THE_HEAD.items():
        value = getattr(config, name, None)
        if value not in (None, nothing):
            raise ValueError(
                f"model {type(inner).__name__}: its {name} of {value} comes after the lm-head; pass the modules yourself, and what it does"
            )
    names = (str(getattr(inner, "base_model_prefix", "")), *_BACKBONES)
    for name in names:
        backbone = getattr(inner, name, None) if name else None
        if isinstance(backbone, nn.Module) and backbone not in (inner, head):
            if any(part is head for part in backbone.modules()):
                raise ValueError(
                    f"model {type(inner).__name__}: its {name} holds the lm-head, so it makes logits; pass the modules yourself"
                )
            return backbone, head
    raise ValueError(
        f"model {type(inner).__name__}: has no backbone ({', '.join(dict.fromkeys(filter(None, names)))}); pass the modules yourself"
    )
