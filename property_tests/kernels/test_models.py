# SPDX-License-Identifier: Apache-2.0
"""Tests of ``backbone_and_lm_head``: what it finds, and which models it refuses.

Megatron's models are tested in ``distributed_tests/test_megatron.py``, and wrappers that shard
weights in ``distributed_tests/test_wrappers.py``.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fused_losses import UpToLmHead, backbone_and_lm_head, linear_logprobs, run_in_forward, tiled_token_logprobs
from lossgate.observe import MemoryWatch
from lossgate.worlds import RankContext, SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

WIDTH, VOCAB = 4, 9


class LoraHead(nn.Module):
    """A linear layer with an adapter, as in PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, VOCAB)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCAB, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + 0.5 * self.lora_B(self.lora_A(hidden))


class CausalLM(nn.Module):
    """A causal language model with the names of transformers."""

    base_model_prefix = "model"

    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.lm_head = head or nn.Linear(WIDTH, VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Any:
        return self.after(self.lm_head(self.before(self.model(input_ids))))

    def before(self, hidden: Tensor) -> Tensor:
        return hidden

    def after(self, logits: Tensor) -> Any:
        return logits


# What is found


class Wrapped(nn.Module):
    """A wrapper as in DistributedDataParallel and DeepSpeed engines."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class PeftModel(nn.Module):
    """A PEFT model: its base_model is a tuner, whose model is the causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self) -> nn.Module:
        model = self.base_model.model
        assert isinstance(model, nn.Module)
        return model


@pytest.mark.parametrize("head", [None, LoraHead()], ids=["linear", "LoRA"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        Wrapped,
        PeftModel,
        lambda model: Wrapped(PeftModel(model)),
        lambda model: PeftModel(Wrapped(model)),
        lambda model: Wrapped(torch.compile(model, backend="eager")),
    ],
    ids=["plain", "DDP", "PEFT", "DDP of PEFT", "PEFT of DDP", "DDP of compiled"],
)
def test_backbone_and_head_are_found(wrap: Callable[[nn.Module], nn.Module], head: nn.Module | None) -> None:
    """The backbone is never the causal language model itself, which would compute logits (O5)."""
    model = CausalLM(head)
    backbone, found = backbone_and_lm_head(wrap(model))
    assert backbone is model.model
    assert found is model.lm_head


def test_backbone_and_head_are_found_in_the_real_distributed_data_parallel(make_world: MakeWorld) -> None:
    model = CausalLM()

    def body(context: RankContext) -> bool:
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=context.mesh.get_group("dp"), init_sync=False
        )
        return backbone_and_lm_head(wrapped) == (model.model, model.lm_head)

    assert make_world("single").run(body) == [True]


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="model Linear: has no lm-head"):
        backbone_and_lm_head(nn.Linear(2, 3))


# Models of transformers

TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY = {**LAYERS, **TOKENS, "vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
VISION = {**LAYERS, "image_size": 8, "patch_size": 4, "projection_dim": 16}
IMAGES = {"image_token_index": 31, "mm_tokens_per_image": 4, "boi_token_index": 29, "eoi_token_index": 30}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {**TOKENS, "vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "Mixtral": {**TINY, "num_local_experts": 4},
    "Gemma3": {**IMAGES, "text_config": TINY, "vision_config": VISION},
    "PaliGemma": {
        "image_token_index": 31,
        "text_config": {**TINY, "model_type": "gemma2"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    },
    "FalconH1": {**TINY, **MAMBA, "mamba_n_groups": 1, "lm_head_multiplier": 0.5},
    "RecurrentGemma": {**TINY, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8},
    "MiniCPM3": {**TINY, **LATENT},
    "T5": {**TOKENS, "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "Granite": {**TINY, "logits_scaling": 8.0},
    "Bert": {**TINY, "is_decoder": True},
    "Roberta": {**TINY, "is_decoder": True},
}
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3": "Gemma3ForConditionalGeneration",
    "PaliGemma": "PaliGemmaForConditionalGeneration",
    "T5": "T5ForConditionalGeneration",
    "Bert": "BertLMHeadModel",
}
IDS = torch.tensor([[3, 9, 4, 17, 5, 8], [6, 11, 7, 3, 25, 10]])


def pretrained(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Returns a tiny model of transformers in eval mode, with weights large enough to matter."""
    config = getattr(transformers, f"{name}Config")(**SIZES.get(name, TINY) | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape).mul_(0.3))
    return model.to(dtype).eval()


def own_logprobs(model: nn.Module, labels: Tensor, **inputs: Tensor) -> Tensor:
    """Returns log-probabilities from the logits of the model's own forward."""
    logits = model(**inputs).logits
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2", "GPTNeoX", "Mixtral", "Mamba", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_only_call_their_head_are_found(name: str, dtype: torch.dtype) -> None:
    model = pretrained(name, dtype).train()
    backbone, head = backbone_and_lm_head(model)
    assert (backbone, head) == (model.base_model, model.lm_head)


_LOGITS = r"changes the logits of its lm-head; take the head with check=False, and either wrap it in a module"
_HIDDEN = r"changes the hidden states between .*; take the head with check=False, and UpToLmHead\(model, lm_head\)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gemma2", f"final_logit_softcapping 30.0, its forward {_LOGITS}"),
        ("Cohere", f"logit_scale 0.0625, its forward {_LOGITS}"),
        ("Granite", f"logits_scaling 8.0, its forward {_LOGITS}"),
        ("FalconH1", f"lm_head_multiplier 0.5, its forward {_LOGITS}"),
        ("RecurrentGemma", f"logits_soft_cap 30.0, its forward {_LOGITS}"),
        ("PaliGemma", f"final_logit_softcapping 30.0, its forward {_LOGITS}"),
        ("Bert", f"its forward {_HIDDEN}"),
        ("Roberta", f"its forward {_HIDDEN}"),
        ("MiniCPM3", f"logits_scaling 0.0625, its forward {_HIDDEN}"),
    ],
)
def test_models_that_do_more_are_refused(name: str, message: str) -> None:
    model = pretrained(name)
    with pytest.raises(ValueError, match=f"model {type(model).__name__}: {message}"):
        backbone_and_lm_head(model)
    with pytest.raises(ValueError, match="changes"):  # rounding does not hide it
        backbone_and_lm_head(model.bfloat16())


class Changed(nn.Module):
    """The recipe of kernels.md: a head that does what the model does to its logits."""

    def __init__(self, lm_head: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lm_head, self.change = lm_head, change

    def forward(self, hidden: Tensor) -> Tensor:
        return self.change(self.lm_head(hidden))


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("Gemma2", lambda z: 30 * torch.tanh(z / 30), {"softcap": 30.0}),
        ("RecurrentGemma", lambda z: 30 * torch.tanh(z / 30), {"softcap": 30.0}),
        ("PaliGemma", lambda z: 30 * torch.tanh(z / 30), {"softcap": 30.0}),
        ("Cohere", lambda z: 0.0625 * z, {"temperature": 16.0}),
        ("Granite", lambda z: z / 8, {"temperature": 8.0}),
        ("FalconH1", lambda z: 0.5 * z, {"temperature": 2.0}),
    ],
)
def test_the_ways_out_for_changed_logits_are_right(
    name: str, change: Callable[[Tensor], Tensor], options: dict[str, float]
) -> None:
    model = pretrained(name, torch.float64)
    backbone, head = backbone_and_lm_head(model, check=False)
    hidden = backbone(IDS).last_hidden_state.flatten(0, 1)
    expected = own_logprobs(model, IDS, input_ids=IDS).flatten()
    found = tiled_token_logprobs(Changed(head, change), hidden, IDS.flatten(), tiles=3).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    found = linear_logprobs(hidden, head.weight, IDS.flatten(), **options).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    if "temperature" in options:
        found = tiled_token_logprobs(head, hidden, IDS.flatten(), tiles=3, **options).logprobs
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["Llama", "Bert", "Roberta", "MiniCPM3", "T5"])
def test_a_model_up_to_its_head_gives_its_own_logprobs_and_gradients(name: str) -> None:
    model = pretrained(name, torch.float64)
    head = backbone_and_lm_head(model, check=False)[1]
    given = {"input_ids": IDS, **({"decoder_input_ids": IDS.flip(0)} if name == "T5" else {})}
    hidden = UpToLmHead(model, head)(**given).flatten(0, 1)
    found = tiled_token_logprobs(head, hidden, IDS.flatten(), tiles=3).logprobs
    expected = own_logprobs(model, IDS, **given).flatten()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    factors = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((factors * x).sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        for x in (found, expected)
    ]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_a_model_up_to_its_head_makes_no_logits() -> None:
    model = pretrained("Llama")
    with MemoryWatch() as made:
        hidden = UpToLmHead(model, model.lm_head)(input_ids=IDS)
    assert hidden.shape == (*IDS.shape, 16)
    assert IDS.numel() * 32 not in made.sizes


def test_models_whose_backbone_is_no_part_are_run_up_to_their_head() -> None:
    model = pretrained("T5", torch.float64)
    backbone, head = backbone_and_lm_head(model)
    assert isinstance(backbone, UpToLmHead)
    assert head is model.lm_head


# The run on a few tokens


class Scaled(CausalLM):
    def after(self, logits: Tensor) -> Tensor:
        return 0.5 * logits


class ScaledInPlace(CausalLM):
    def after(self, logits: Tensor) -> Tensor:
        return logits.mul_(0.5)


class Cut(CausalLM):
    """Its vocabulary is padded, and the padding does not reach the softmax."""

    def after(self, logits: Tensor) -> Tensor:
        return logits[..., :-1]


class Biased(CausalLM):
    """Its bias is far below the rounding of the logits themselves."""

    def after(self, logits: Tensor) -> Tensor:
        return logits + torch.linspace(0, 1e-4, VOCAB)


class Multiplied(CausalLM):
    def before(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


class Both(Scaled, Multiplied):
    pass


class Uncalled(CausalLM):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids) @ self.lm_head.weight.T


class CalledTwice(CausalLM):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids)) + 0 * self.lm_head(self.model(input_ids))


class OtherBackbone(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.embedding(input_ids))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Scaled, "its forward changes the logits"),
        (ScaledInPlace, "its forward changes the logits"),
        (Cut, "its forward changes the logits"),
        (Biased, "its forward changes the logits"),
        (Multiplied, "its forward changes the hidden states"),
        (Both, "its forward changes the logits .*; it also changes the hidden states"),
        (Uncalled, "its forward calls its lm-head 0 times, not once; pass hidden states and head"),
        (CalledTwice, "its forward calls its lm-head 2 times, not once"),
        (OtherBackbone, "its forward changes the hidden states"),
    ],
)
def test_what_a_model_does_besides_is_found(kind: type[CausalLM], message: str) -> None:
    model = kind()
    with pytest.raises(ValueError, match=f"model {kind.__name__}: {message}"):
        backbone_and_lm_head(model)
    assert backbone_and_lm_head(model, check=False) == (model.model, model.lm_head)


def test_a_head_of_zeros_hides_nothing() -> None:
    model = Scaled()
    nn.init.zeros_(model.lm_head.weight)
    nn.init.zeros_(model.lm_head.bias)
    with pytest.raises(ValueError, match="changes the logits"):
        backbone_and_lm_head(model)


class Float(CausalLM):
    def after(self, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits.float()}


class Last(CausalLM):
    def before(self, hidden: Tensor) -> Tensor:
        return hidden[:, -1:]


class SequenceFirst(CausalLM):
    """It keeps ``[S, B, ...]``, as Megatron does, and returns ``[B, S, V]``."""

    def before(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1)

    def after(self, logits: Tensor) -> Tensor:
        return logits.transpose(0, 1).contiguous()


class Flat(CausalLM):
    def before(self, hidden: Tensor) -> Tensor:
        return hidden.flatten(0, 1)


class AlwaysRandom(nn.Sequential):
    """It has another result in every call, in eval mode too."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5, training=True)


class RandomBackbone(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.model = AlwaysRandom(self.model, nn.BatchNorm1d(4), nn.Dropout())


@pytest.mark.parametrize("example", [None, {"input_ids": torch.tensor([[1, 2, 3, 4], [4, 0, 2, 1]])}])
@pytest.mark.parametrize("kind", [Float, Last, SequenceFirst, Flat, RandomBackbone])
def test_what_changes_no_logprob_is_let_through(kind: type[CausalLM], example: dict[str, Tensor] | None) -> None:
    model = kind().bfloat16()
    assert backbone_and_lm_head(model, example=example) == (model.model, model.lm_head)


class Reversed(CausalLM):
    """Its logits are those of other tokens."""

    def after(self, logits: Tensor) -> Tensor:
        return logits.flip(1)


def test_logits_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="changes the logits"):
        backbone_and_lm_head(Reversed())


class Counts(RandomBackbone):
    """It counts its calls in a buffer, and replaces another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", None)

    def before(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.last = hidden
        return hidden


def test_the_run_leaves_no_trace() -> None:
    model = Counts()
    model.model[2].eval()
    model.model[0].requires_grad_(requires_grad=False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    flags = [part.training for part in model.modules()]
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    assert backbone_and_lm_head(model)
    torch.testing.assert_close(torch.rand(3), expected)
    torch.testing.assert_close(dict(model.named_buffers()), before)
    assert [part.training for part in model.modules()] == flags
    assert not any(part._forward_hooks for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Heard(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.runs = list[torch.Size]()

    def before(self, hidden: Tensor) -> Tensor:
        self.runs.append(hidden.shape)
        return hidden


def test_a_model_runs_once() -> None:
    """Also if it is wrapped later. Another head, as with adapters, is checked again."""
    model = Heard()
    backbone_and_lm_head(model)
    backbone_and_lm_head(Wrapped(model))
    backbone_and_lm_head(model, check=True)
    assert model.runs == [(1, 4, WIDTH)]
    model.lm_head = LoraHead()
    backbone_and_lm_head(model)
    backbone_and_lm_head(model)
    assert len(model.runs) == 2


def test_it_runs_in_the_forward_of_the_model_too() -> None:
    model = Heard()
    found = run_in_forward(
        model, lambda inner, ids: backbone_and_lm_head(inner)[1](model.model(ids)), torch.tensor([[1, 2]])
    )
    assert found.requires_grad
    assert model.runs == [(1, 4, WIDTH)]


def test_nothing_is_compiled_for_the_run() -> None:
    """A compiled part would be compiled for few tokens, and then again for others."""
    compiled = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    model = CausalLM()
    model.model[1] = torch.compile(model.model[1], backend=backend)
    model.lm_head = torch.compile(model.lm_head, backend=backend)
    backbone, head = backbone_and_lm_head(model)
    assert not compiled
    assert head is model.lm_head
    with torch.no_grad():
        head(backbone(torch.tensor([[1, 2]])))
    assert len(compiled) == 2


# Models that cannot be run on a few tokens


class NeedsPixels(CausalLM):
    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        return super().forward(input_ids) + 0 * pixels


class Fails(CausalLM):
    def forward(self, input_ids: Tensor) -> Tensor:
        raise KeyError("pixels")


class Returns(CausalLM):
    def after(self, logits: Tensor) -> float:
        return 1.0


class Abstract(CausalLM):
    forward = nn.Module.forward


UNCHECKED = [
    (NeedsPixels, r"since its forward needs pixels; pass example=\{...\} with arguments of its call"),
    (Fails, r"since it could not be run on a few tokens \(KeyError: 'pixels'\); pass example"),
    (Returns, r"since it returned no logits but float; pass example"),
    (Abstract, r"since it has no forward of its own that takes token ids"),
    (lambda: CausalLM().to("meta"), r"since its weights are on the meta device; load them first"),
]


@pytest.mark.parametrize(("make", "reason"), UNCHECKED)
def test_what_was_not_checked_is_said_once(make: Callable[[], nn.Module], reason: str) -> None:
    model = make()
    message = f"not checked that its logits are those of its lm-head alone, {reason}"
    with pytest.warns(UserWarning, match=f"{message}.*; or pass check=False if you know"):
        found = backbone_and_lm_head(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backbone_and_lm_head(model) == found
        backbone_and_lm_head(make(), check=False)
    with pytest.raises(ValueError, match=message):
        backbone_and_lm_head(model, check=True)


@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        ("config", "final_logit_softcapping", 30.0),
        ("config", "logits_soft_cap", 30.0),
        ("config", "lm_head_multiplier", 0.5),
        ("text_config", "logit_scale", 0.0625),
        ("text_config", "logits_scaling", 8.0),
    ],
)
def test_known_fields_are_refused_where_a_model_cannot_be_run(owner: str, field: str, value: float) -> None:
    model = CausalLM().to("meta")
    fields = type("Config", (), {field: value})()
    model.config = fields if owner == "config" else type("Config", (), {"text_config": fields})()
    with pytest.raises(ValueError, match=f"its {field} of {value} changes logits .* take the head with check=False"):
        backbone_and_lm_head(model)
    backbone_and_lm_head(model, check=False)


def test_an_example_makes_a_model_run() -> None:
    example = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "pixels": torch.zeros(1)}
    assert backbone_and_lm_head(NeedsPixels(), example=example)

    class Scales(NeedsPixels, Scaled):
        pass

    with pytest.raises(ValueError, match="changes the logits"):
        backbone_and_lm_head(Scales(), check=True, example=example)


def test_a_head_that_is_not_called_once_has_no_hidden_states() -> None:
    for kind, calls in ((Uncalled, 0), (CalledTwice, 2)):
        model = kind()
        with pytest.raises(RuntimeError, match=f"called its lm-head {calls} times, expected once"):
            UpToLmHead(model, model.lm_head)(torch.tensor([[1]]))
        assert "forward" not in vars(model.lm_head)
