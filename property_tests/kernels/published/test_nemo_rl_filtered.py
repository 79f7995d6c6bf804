# SPDX-License-Identifier: Apache-2.0
"""``filtered_tokens="zero"`` gives NeMo-RL's numbers where top-k or top-p filters labels out.

There (NVIDIA-NeMo/RL, ``mask_out_neg_inf_logprobs``), such a token has the log-probability 0 and
stays in the mask and in all counts. ``nemo_rl_rows.py`` has the whole loss on rows, and the counts
that divide its metrics (``metric_normalizations``).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dense_losses
from fused_losses import ClippedPGConfig, Metrics, Pack, clipped_pg_loss, vocab_parallel_logprobs
from lossgate import Layout
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import starts
from property_tests.kernels.published.clipped_pg_by_hand import GSPO, WEIGHTED, truncated
from property_tests.kernels.published.comparison import assert_agrees
from property_tests.kernels.published.nemo_rl_rows import clipped_pg_on_rows, normalisations, without_filtered

MakeWorld = Callable[..., SimulatedWorld]

PUBLISHED = 1e-5
NEMO: dict[str, Any] = {"epsilon": 1e-8, "positive_nll_normaliser": "local", "filtered_tokens": "zero"}
"""What NeMo-RL does, in the words of our options."""
LENGTHS, WIDTH, VOCAB = (9, 5, 7), 9, 24
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 8, "top_p": 0.9}

CONFIGS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "means over sequences": {"token_level_loss": False},
    "dual clip": {"ratio_clip_c": 1.5},
    "REINFORCE": {"disable_ppo_ratio": True},
    "CISPO": {"use_cispo": True, **WEIGHTED},
    "on policy": {"force_on_policy_ratio": True, "use_on_policy_kl_approximation": True},
    "TIS": truncated("tis", 2.0),
    "ICE-POP": truncated("icepop", 5.0, 0.5),
    "sequence masks": {**truncated("seq-mask-tis", 4.0, 0.2), "reference_policy_kl_type": "k2"},
    "VAPO": {"positive_example_nll_weight": 0.3},
    "GSPO": GSPO,
    "GSPO, TIS": {**GSPO, **truncated("tis", 2.0)},
}


class Batch:
    """Rows ``[3, 9]`` as NeMo-RL has them, whose policies filter out some of the labels.

    It filters tokens of the current policy alone, of the previous one alone, of both, and outside
    of the mask.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(28)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logits = 2 * normal(len(LENGTHS), WIDTH, VOCAB)
        likely = torch.randint(10, (len(LENGTHS), WIDTH, 1), generator=generator)
        self.ids = self.logits.topk(10).indices.gather(2, likely).squeeze(2).roll(1, 1)
        of_prev = self.logits + 0.3 * normal(*self.logits.shape)
        self.data = {
            "advantages": normal(*self.ids.shape),
            "prev_logprobs": F.pad(self.logprobs_of(of_prev, **SAMPLING), (1, 0)),
            "generation_logprobs": -3 * normal(*self.ids.shape).abs(),
            "reference_policy_logprobs": F.pad(self.logprobs_of(of_prev, temperature=0.8), (1, 0)),
            "token_mask": ((torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]) & (torch.arange(WIDTH) > 1)).double(),
            "sample_mask": torch.ones(len(LENGTHS), dtype=torch.float64),
            "rewards": torch.tensor([1.0, -0.5, 0.5], dtype=torch.float64),
        }
        self.tokens, self.sequences = 2 * float(self.data["token_mask"].sum()), 6.0

    def logprobs_of(self, logits: Tensor, **options: Any) -> Tensor:
        """Computes log-probabilities of next ids, ``[3, 8]``."""
        rows, labels = logits[:, :-1].reshape(-1, VOCAB), self.ids[:, 1:].flatten()
        return dense_losses.filtered_token_logprobs(rows, labels, **options).view(len(LENGTHS), -1)

    def expected(self, config: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns loss, gradient of logits and metrics on rows."""
        logits = self.logits.detach().requires_grad_()
        c, u = self.logprobs_of(logits, **SAMPLING), self.logprobs_of(logits, temperature=0.8)
        loss, metrics = clipped_pg_on_rows(c, {**self.data, "u": u}, self.tokens, self.sequences, config)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient, metrics


def test_the_batch_filters_in_every_way() -> None:
    batch = Batch()
    c, p, kept = (
        batch.logprobs_of(batch.logits, **SAMPLING).isinf(),
        batch.data["prev_logprobs"][:, 1:].isinf(),
        batch.data["token_mask"][:, 1:].bool(),
    )
    assert all(bool(where.any()) for where in (c & p & kept, c & ~p & kept, ~c & p & kept, ~c & ~p & kept, c & ~kept))


def of_pack(
    batch: Batch, config: dict[str, Any], context: RankContext, gradients: Tensor | None = None, **own: Any
) -> tuple[Tensor, Tensor, Metrics]:
    """Computes this rank's loss, the gradient of its logits, and the metrics of all ranks.

    The gradient is compared with that of rows, if that is given.
    """
    tp_group, cp_group = context.mesh.get_group("tp"), context.mesh.get_group("cp")
    pack = Pack.of(starts(list(LENGTHS)), starts([12, 8, 8]), cp_group=cp_group)
    width = VOCAB // tp_group.size()
    columns = slice(width * tp_group.rank(), width * (tp_group.rank() + 1))
    logits = pack.from_rows(batch.logits, shift=0)[:, columns].detach().requires_grad_()
    found = vocab_parallel_logprobs(
        logits, pack.labels(batch.ids), vocab_start=columns.start, tp_group=tp_group, unfiltered=True, **SAMPLING
    )
    data = {**batch.data, **own}
    loss, metrics = clipped_pg_loss(
        found.logprobs,
        unfiltered_logprobs=found.unfiltered_logprobs,
        prev_logprobs=pack.from_rows(data["prev_logprobs"], shift=1),
        generation_logprobs=pack.from_rows(data["generation_logprobs"], shift=1),
        reference_logprobs=pack.from_rows(data["reference_policy_logprobs"], shift=1),
        advantages=pack.from_rows(data["advantages"], shift=1),
        mask=pack.from_rows(data["token_mask"], shift=1),
        sequence=pack.sequence,
        sample_mask=data["sample_mask"],
        rewards=data["rewards"],
        valid_tokens=batch.tokens,
        valid_sequences=batch.sequences,
        config=ClippedPGConfig(**{**NEMO, **config}),
        cp_group=cp_group,
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    if gradients is not None:
        assert_agrees(gradient, pack.from_rows(gradients, shift=0)[:, columns], PUBLISHED)
    return loss.detach(), gradient, metrics.reduce(cp_group)


@pytest.mark.parametrize("layout", ["single", "cp=2,tp=2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_filtered_tokens_count_as_in_nemo_rl(make_world: MakeWorld, name: str, layout: str) -> None:
    batch, config = Batch(), CONFIGS[name]
    loss, gradients, expected = batch.expected(config)
    results = make_world(layout).run(lambda context: of_pack(batch, config, context, gradients))
    of_one_tp_rank = results[:: Layout.parse(layout).tp]
    assert_agrees(torch.stack([own for own, _, _ in of_one_tp_rank]).sum(), loss, PUBLISHED)
    for _, _, metrics in results:
        found = {name: metrics[name] for name in expected}
        assert metrics.keys() - found.keys() == {"js_divergence_error"}
        assert metrics.normalisers == {name: f"valid_{count}" for name, count in normalisations(config).items()}
        if config.get("sequence_level_importance_ratios"):
            # Theirs is too large by the number of sequences in the call.
            found["sampling_importance_ratio"] = len(LENGTHS) * found["sampling_importance_ratio"]
        assert_agrees(found, expected, PUBLISHED)


@pytest.mark.parametrize("name", CONFIGS)
def test_by_default_filtered_tokens_do_not_count(make_world: MakeWorld, name: str) -> None:
    """The option changes the loss. Previous log-probabilities may have -inf or NeMo-RL's 0."""
    batch = Batch()
    zeros = without_filtered(batch.data["prev_logprobs"])
    runs = [
        ({**CONFIGS[name], "filtered_tokens": "left_out"}, {}),
        (CONFIGS[name], {}),
        (CONFIGS[name], {"prev_logprobs": zeros}),
    ]
    left_out, kept, given_zeros = (
        make_world("single").run(lambda context, run=run: of_pack(batch, run[0], context, **run[1]))[0] for run in runs
    )
    # REINFORCE has c in place of a ratio, so 0 adds nothing.
    assert (abs(left_out[0] - kept[0]) > 1e-3) != (name == "REINFORCE")
    assert torch.equal(given_zeros[0], kept[0])
    assert torch.equal(given_zeros[1], kept[1])


def test_ratios_of_filtered_tokens_by_hand() -> None:
    """exp(-p), exp(c) and 1; the importance weight is exp(-g) if p is filtered out."""
    inf = torch.inf
    c = torch.tensor([-inf, -2.0, -inf], dtype=torch.float64).requires_grad_()
    loss, metrics = clipped_pg_loss(
        c,
        prev_logprobs=torch.tensor([-1.0, -inf, -inf], dtype=torch.float64),
        generation_logprobs=torch.tensor([-0.5, -0.25, -0.75], dtype=torch.float64),
        advantages=torch.tensor([-1.0, -2.0, 3.0], dtype=torch.float64),
        mask=torch.ones(3),
        sequence=torch.zeros(3, dtype=torch.long),
        sample_mask=torch.ones(1),
        valid_tokens=3,
        valid_sequences=1,
        config=ClippedPGConfig(
            filtered_tokens="zero",
            ratio_clip_min=1.0,
            ratio_clip_max=9.0,
            use_importance_sampling_correction=True,
            reference_policy_kl_penalty=0,
        ),
    )
    e = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64).exp()  # the ratios
    w = torch.tensor([-1 + 0.5, 0.25, 0.75], dtype=torch.float64).exp()
    assert_agrees(loss, (w * torch.tensor([1.0, 2.0, -3.0]) * e).sum() / 3, PUBLISHED)
    assert_agrees(metrics["probs_ratio_max"], e.max(), PUBLISHED)
    (gradient,) = torch.autograd.grad(loss, c)
    assert_agrees(gradient, torch.stack([0 * e[0], 2 * w[1] * e[1] / 3, 0 * e[2]]), PUBLISHED)
