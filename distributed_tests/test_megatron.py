# SPDX-License-Identifier: Apache-2.0
"""Kernels on models of megatron-core, with the vocabulary split over two processes."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_losses import (
    MegatronLmHead,
    UpToLmHead,
    backbone_and_lm_head,
    linear_logprobs,
    tiled_token_logprobs,
)
from lossgate import all_ranks_assert
from lossgate.worlds import RankContext

if importlib.util.find_spec("megatron") is None:
    pytest.skip("there is no megatron-core for this system", allow_module_level=True)

VOCAB, WIDTH, LENGTH, ROWS = 24, 16, 8, 3


class Norm(nn.LayerNorm):
    """A norm as Megatron makes one. Its own for CPU refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)


def make_model(
    mesh: Any, *, tied: bool = False, split: bool = True, sequence_parallel: bool = False, gather_output: bool = False
) -> Any:
    """Returns a tiny GPTModel in float64, with the same weights in every call.

    Args:
        mesh: with two ranks along tp.
        tied: whether the head has the embedding's weight.
        split: whether the model is split over these ranks; else each of them has it all.
        sequence_parallel: whether tokens are split as well.
        gather_output: whether the model's logits are gathered by default.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    initialize_rng_tracker(inference_rng_tracker=True)  # The other one needs a GPU.
    alone = mesh.get_group("dp")
    tp = mesh.get_group("tp") if split else alone
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=tp.size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        init_method_std=0.3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    axes = ("cp", "pp", "dp", "ep", "embd", "pos_embd", "expt_tp", "expt_dp", "tp_ep", "dp_cp")
    groups = ProcessGroupCollection(tp=tp, tp_cp=tp, **dict.fromkeys(axes, alone))
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer, layer], layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        parallel_output=not gather_output,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
        pg_collection=groups,
    )
    return model.double()


@contextmanager
def on_cpu() -> Generator[None]:
    """Makes Megatron allocate its buffers on the CPU. It asks for the current GPU.

    Megatron also sets variables of the environment, and warns of what is not installed.
    """
    device = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    environment = mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")  # it asks for it, once
    with device, environment, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tokens() -> dict[str, Any]:
    """Returns the arguments of a call."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)  # Without it, Megatron makes it on a GPU.
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(ROWS, -1), "attention_mask": future}


def labels() -> Tensor:
    """Returns a label for each token, as Megatron's hidden states lie: ``[LENGTH * ROWS]``."""
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2)).T.flatten()


def own_logprobs(model: nn.Module) -> Tensor:
    """Returns log-probabilities from the model's own logits, gathered."""
    logits = model(**tokens(), runtime_gather_output=True).transpose(0, 1).flatten(0, 1)
    return logits.log_softmax(-1).gather(1, labels()[:, None]).squeeze(1)


def differences(model: nn.Module, found: Tensor, expected: Tensor) -> dict[str, float]:
    """Returns the largest differences in values, and in each parameter's gradient."""
    factors = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    named = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad((factors * x).sum(), list(named.values())) for x in (found, expected))
    assert all(gradient.abs().max() > 1e-3 for gradient in theirs)
    gradients = {name: float((a - b).abs().max()) for name, a, b in zip(named, ours, theirs, strict=True)}
    return {"value": float((found - expected).abs().max()), **gradients}


def linear(backbone: nn.Module, head: MegatronLmHead) -> Tensor:
    hidden = backbone(**tokens())
    assert hidden.shape == (LENGTH // (2 if head.sequence_parallel else 1), ROWS, WIDTH)
    return linear_logprobs(hidden.flatten(0, 1), head.weight, labels(), bias=head.bias, **head.split).logprobs


def tiled(backbone: nn.Module, head: MegatronLmHead) -> Tensor:
    return tiled_token_logprobs(head, backbone(**tokens()).flatten(0, 1), labels(), tiles=3).logprobs


@pytest.mark.slow
@pytest.mark.world(tp=2, timeout=120.0)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (linear, {}),
        (linear, {"sequence_parallel": True}),
        (linear, {"gather_output": True}),
        (tiled, {}),
        (tiled, {"gather_output": True}),
    ],
)
def test_gpt_model(
    rank_context: RankContext, kernel: Callable[..., Tensor], options: dict[str, bool], tied: bool
) -> None:
    with on_cpu():
        model = make_model(rank_context.mesh, tied=tied, **options)
        backbone, head = backbone_and_lm_head(model, check=True, example=tokens())
        assert isinstance(backbone, UpToLmHead)
        assert isinstance(head, MegatronLmHead)
        assert head.weight is (model.embedding.word_embeddings if tied else model.output_layer).weight
        found = differences(model, kernel(backbone, head), own_logprobs(model))
        all_ranks_assert(max(found.values()) < 1e-11, f"{found}")


def said_of(*given: Any, **options: Any) -> str:
    """Returns the error or the warnings of ``backbone_and_lm_head``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backbone_and_lm_head(*given, **options)
        except ValueError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def scale_logits(model: Any) -> None:
    """Makes a model do something after its head."""
    own = model._postprocess
    model._postprocess = lambda **given: 0.5 * own(**given)


@pytest.mark.slow
@pytest.mark.world(tp=2, timeout=120.0)
@pytest.mark.parametrize(
    ("split", "check", "unscaled", "scaled"),
    [
        (True, True, "", "model GPTModel: its forward changes the logits"),
        (True, None, "since its forward calls other ranks; call this before", "since its forward calls other ranks"),
        (True, False, "", ""),
        (False, None, "", "model GPTModel: its forward changes the logits"),
    ],
)
def test_gpt_models_that_do_more_are_refused(
    rank_context: RankContext, split: bool, check: bool | None, unscaled: str, scaled: str
) -> None:
    with on_cpu():
        for change, expected in ((lambda _: None, unscaled), (scale_logits, scaled)):
            model = make_model(rank_context.mesh, split=split)
            change(model)
            said = said_of(model, check=check, example=tokens())
            all_ranks_assert(expected in said if expected else not said, f"{said}")


def gathered(rows: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(parts, rows, group=group)
    return torch.cat(parts)


@pytest.mark.world(tp=2, timeout=120.0)
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_heads_with_a_bias(rank_context: RankContext, split: bool, skip_bias_add: bool) -> None:
    """Megatron's layers return a bias that they do not add."""
    with on_cpu():
        from megatron.core.tensor_parallel import ColumnParallelLinear

        model = make_model(rank_context.mesh, split=split)
        layer = ColumnParallelLinear(
            WIDTH,
            VOCAB,
            config=model.config,
            init_method=nn.init.normal_,
            skip_bias_add=skip_bias_add,
            tp_group=model.output_layer.tp_group,
        ).double()
        nn.init.normal_(layer.bias)
        model.output_layer = layer
        backbone, head = backbone_and_lm_head(model, check=False)
        hidden = backbone(**tokens()).flatten(0, 1).detach()
        weight, bias = (gathered(x.detach(), layer.tp_group) for x in (layer.weight, layer.bias))
        expected = (hidden @ weight.T + bias).log_softmax(-1).gather(1, labels()[:, None]).squeeze(1)
        found = linear_logprobs(hidden, head.weight, labels(), bias=head.bias, **head.split).logprobs
        all_ranks_assert(float((found - expected).abs().max()) < 1e-12, "linear_logprobs")
        if split and skip_bias_add:
            with pytest.raises(ValueError, match=r"this rank's part of its bias .*; use linear_logprobs\(.*bias=head"):
                head(hidden)
        else:
            found = tiled_token_logprobs(head, hidden, labels(), tiles=2).logprobs
            all_ranks_assert(float((found - expected).abs().max()) < 1e-12, "tiled_token_logprobs")


@pytest.mark.world(tp=2, timeout=120.0)
def test_a_head_that_gathers_tokens_is_not_tiled(rank_context: RankContext) -> None:
    with on_cpu():
        model = make_model(rank_context.mesh, sequence_parallel=True)
        backbone, head = backbone_and_lm_head(model, check=False)
        hidden = backbone(**tokens()).flatten(0, 1)
        with pytest.raises(ValueError, match=r"gathers the tokens of all ranks .*use linear_logprobs\(hidden, head"):
            tiled_token_logprobs(head, hidden, labels()[: len(hidden)])
