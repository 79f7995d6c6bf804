# SPDX-License-Identifier: Apache-2.0
"""A tiny transformer, its data, and what is trained of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB, LENGTH = 8, 67, 12
ROWS = 2
"""Sequences in a microbatch of one rank."""
RANKS = 2

HEADS = ("plain", "tied", "frozen", "LoRA")


class Block(nn.Module):
    """A layer of attention with two heads and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * (WIDTH // 2) ** -0.5).masked_fill(future, -1e4)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Body(nn.Module):
    """All but the lm-head."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.norm(x)


class TinyTransformer(nn.Module):
    """A causal language model with the names of transformers."""

    base_model_prefix = "model"

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = Body(checkpointing)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


def make_model(head: str, dtype: torch.dtype = torch.float32, *, checkpointing: bool = False) -> nn.Module:
    """Returns a model with the same weights in every process, up to the dtype's rounding.

    Args:
        head: one of ``HEADS``.
        dtype: of the parameters. All weights can be written in bfloat16.
        checkpointing: whether the body recomputes its layers in backward.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyTransformer(checkpointing)
        model.requires_grad_(head != "LoRA")
        if head == "tied":
            model.lm_head.weight = model.model.embed_tokens.weight
        if head == "frozen":
            model.lm_head.requires_grad_(requires_grad=False)
        made: nn.Module = _with_lora(model) if head == "LoRA" else model
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape).mul(0.5).add(parameter.dim() == 1).bfloat16())
    return made.to(dtype)


def _with_lora(model: nn.Module) -> nn.Module:
    """Adds adapters to the lm-head and to one matrix of every layer, with peft."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["qkv", "lm_head"]))


@dataclass(frozen=True)
class Batch:
    """One rank's tokens of one microbatch."""

    ids: Tensor
    """``[ROWS, LENGTH]``."""
    keep: Tensor
    """``[ROWS, LENGTH]`` bool: the tokens that reach the head. Others have no label."""
    labels: Tensor
    """``[tokens]``, of those that reach the head."""
    advantages: Tensor
    """``[tokens]``, of those that reach the head."""


def make_batch(rank: int, microbatch: int, *, empty: bool = False) -> Batch:
    """Returns the tokens of a rank, the same in every process.

    Args:
        rank: whose tokens.
        microbatch: its number.
        empty: whether the last rank has no token that reaches the head.
    """
    generator = torch.Generator().manual_seed(10 * microbatch + rank + 1)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    keep = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    keep[0, : 3 + rank] = False
    if empty and rank == RANKS - 1:
        keep[:] = False
    labels = ids[:, 1:][keep]
    return Batch(ids[:, :-1], keep, labels, torch.randn(len(labels), generator=generator).bfloat16().float())


def count(batches: list[Batch]) -> int:
    """Returns the number of tokens that reach the head, the divisor of a mean over all of them."""
    return sum(len(batch.labels) for batch in batches)


def trained(model: nn.Module) -> dict[str, Any]:
    """Returns the parameters that are trained, by names that no wrapper changes."""
    wrappers = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")
    found = dict[str, Any]()
    for name, parameter in model.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        found[name] = parameter
    return found
