# SPDX-License-Identifier: Apache-2.0
"""Tests of packs: one call of a kernel and a loss for a pack equals one call for each sequence.

They also cover the defects that NeMo-RL's fused sequence packing has had.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fused_losses import ClippedPGConfig, Pack, clipped_pg_loss, dpo_loss, linear_cross_entropy, linear_logprobs
from lossgate import Layout
from lossgate.problems.partition import Partition
from lossgate.worlds import RankContext, SimulatedWorld
from property_tests.kernels.packs import FakeGroup, starts

MakeWorld = Callable[..., SimulatedWorld]
WIDTH, VOCAB = 5, 11


class Rows:
    """Rows ``[sequences, width]`` as a trainer has them.

    Ids, the token mask, advantages and log-probabilities belong to a token, not to the prediction
    of the next one. The first entry of log-probabilities is unused; NeMo-RL has a 0 there.
    """

    def __init__(self, lengths: list[int], width: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = len(lengths)
        self.lengths = lengths
        self.ids = torch.randint(VOCAB, (count, width), generator=generator)
        inside = torch.arange(width) < torch.tensor(lengths)[:, None]
        self.mask = (torch.rand(count, width, generator=generator) < 0.7) & inside
        self.advantages, *self.others = torch.randn(4, count, width, generator=generator, dtype=torch.float64)
        self.rewards = torch.randn(count, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)

    def hidden(self, pack: Pack) -> Tensor:
        """Returns hidden states of the pack's tokens, with arbitrary values at padding."""
        return self.embedding[pack.from_rows(self.ids, shift=0)] * (1 + pack.position[:, None])

    @property
    def counted(self) -> Tensor:
        """``[sequences]``: number of trained labels; the first token of a sequence is no label."""
        return self.mask[:, 1:].sum(1)


def nll(
    rows: Rows, pack: Pack, hidden: Tensor, weight: Tensor, cp_group: Any = None, **tp: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = pack.from_rows(rows.mask, shift=1)
    return linear_cross_entropy(
        hidden, weight, pack.labels(rows.ids), mask=mask, valid_tokens=rows.counted.sum(), chunk=3, **tp
    ), {}


def dpo(
    rows: Rows, pack: Pack, hidden: Tensor, weight: Tensor, cp_group: Any = None, **tp: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return dpo_loss(
        linear_logprobs(hidden, weight, pack.labels(rows.ids), chunk=3, **tp).logprobs,
        pack.from_rows(rows.others[0], shift=1),
        mask=pack.from_rows(rows.mask, shift=1),
        sequence=pack.sequence,
        sample_mask=torch.arange(pack.sequences + pack.sequences % 2) < len(rows.lengths),
        valid_sequences=6,
        reference_policy_kl_penalty=0.3,
        sft_loss_weight=0.5,
        cp_group=cp_group,
    )


CONFIGS = {
    "default": ClippedPGConfig(),
    "positive examples": ClippedPGConfig(positive_example_nll_weight=0.1),
    "gspo": ClippedPGConfig(
        token_level_loss=False, sequence_level_importance_ratios=True, use_importance_sampling_correction=True
    ),
    "seq-mask-tis": ClippedPGConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.5,
        truncated_importance_sampling_ratio_min=0.5,
    ),
}


def clipped_pg(config: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    def loss(
        rows: Rows, pack: Pack, hidden: Tensor, weight: Tensor, cp_group: Any = None, **tp: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sample_mask = torch.arange(pack.sequences) < len(rows.lengths)
        given = dict(zip(("prev_logprobs", "generation_logprobs", "reference_logprobs"), rows.others, strict=True)) | {
            "advantages": rows.advantages
        }
        fields = {name: pack.from_rows(values, shift=1) for name, values in given.items()}
        rewards = torch.zeros(pack.sequences, dtype=torch.float64)
        rewards[: len(rows.rewards)] = rows.rewards
        return clipped_pg_loss(
            linear_logprobs(hidden, weight, pack.labels(rows.ids), chunk=3, **tp).logprobs,
            **fields,
            mask=pack.from_rows(rows.mask, shift=1),
            sequence=pack.sequence,
            sample_mask=sample_mask,
            valid_tokens=20,
            valid_sequences=6,
            rewards=rewards,
            positive_tokens=20,
            config=CONFIGS[config],
            cp_group=cp_group,
        )

    return loss


LOSSES = {"nll": nll, "dpo": dpo, **{f"clipped_pg, {name}": clipped_pg(name) for name in CONFIGS}}


def one_by_one(loss: Any, rows: Rows, group_size: int = 1) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
    """Computes the loss of each group of ``group_size`` sequences in tensors of its own.

    Returns:
        The sum of the losses, its gradient of the weight, and each group's metrics by name.
    """
    weight, total, parts = (
        rows.weight.clone().requires_grad_(),
        torch.zeros((), dtype=torch.float64),
        dict[str, list[Tensor]](),
    )
    valid = rows.counted.sum()
    for first in range(0, len(rows.lengths), group_size):
        own = Rows(rows.lengths[first : first + group_size], rows.ids.shape[1])
        for name, value in vars(rows).items():
            if isinstance(value, Tensor) and len(value) == len(rows.lengths):
                setattr(own, name, value[first : first + group_size])
        own.others = [other[first : first + group_size] for other in rows.others]
        own.weight, own.embedding = rows.weight, rows.embedding
        pack = Pack.of(starts(own.lengths))
        value, metrics = loss(own, pack, own.hidden(pack), weight)
        if loss is nll:  # It divides by the number of trained labels of the rows it gets.
            value = value * own.counted.sum() / valid
        total = total + value
        for name, metric in metrics.items():
            parts.setdefault(name, []).append(metric)
    total.backward()
    assert weight.grad is not None
    return total.detach(), weight.grad, parts


def whole(name: str, parts: list[Tensor]) -> Tensor:
    """Reduces the parts of a metric."""
    stacked = torch.stack(parts)
    return stacked.amin() if name.endswith("_min") else stacked.amax() if name.endswith("_max") else stacked.sum()


@pytest.mark.parametrize("name", LOSSES)
def test_a_pack_equals_its_sequences(name: str) -> None:
    """Value, gradient and every metric equal those of single sequences.

    The pack has padding, an empty sequence, an inflated last one (which once crashed NeMo-RL) and a
    tail without a row. The gradient must not be zero: a packing that cuts the graph goes unnoticed
    otherwise. The NLL of positive examples is divided by the count of the whole batch; in NeMo-RL a
    microbatch's own count made a pack differ from its sequences.
    """
    rows, loss = Rows([4, 1, 7, 2, 0, 5], 7), LOSSES[name]
    pack = Pack.of(starts([*rows.lengths, 0, 0]), starts([4, 2, 8, 2, 0, 13, 3, 0]), tail=2)
    weight = rows.weight.clone().requires_grad_()
    hidden = rows.hidden(pack).masked_fill(~pack.real[:, None], float("nan")).requires_grad_()
    value, metrics = loss(rows, pack, hidden, weight)
    value.backward()
    expected, gradient, parts = one_by_one(loss, rows, group_size=2 if name == "dpo" else 1)
    torch.testing.assert_close(value.detach(), expected)
    assert weight.grad is not None
    assert gradient.abs().max() > 0  # Two graphs that are both cut would agree.
    torch.testing.assert_close(weight.grad, gradient)
    for metric, found in metrics.items():
        torch.testing.assert_close(found, whole(metric, parts[metric]))


@pytest.mark.parametrize("name", LOSSES)
def test_padded_lengths_may_be_given_as_the_true_ones(name: str) -> None:
    """Masks alone exclude padding then, and rows are shorter than the last sequence.

    NeMo-RL passes lengths in this way in production.
    """
    rows, loss = Rows([4, 1, 7, 2], 7), LOSSES[name]
    results = []
    for pack in (Pack.of(starts(rows.lengths), starts([4, 2, 8, 12])), Pack.of(starts([4, 2, 8, 12]), row_width=7)):
        weight = rows.weight.clone().requires_grad_()
        value, _ = loss(rows, pack, rows.hidden(pack), weight)
        value.backward()
        results.append((value.detach(), weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("layout", ["cp=2", "tp=2", "cp=2,tp=2", "cp=3"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_pack_over_ranks_equals_its_sequences(make_world: MakeWorld, name: str, layout: str) -> None:
    """Value, gradients and metrics on several ranks equal those of single sequences, in scale too.

    A split that rounds lengths down, as NeMo-RL's does without a check, would lose tokens.
    """
    rows, loss, cp = Rows([4, 1, 7, 2, 0, 5], 7), LOSSES[name], Layout.parse(layout).cp
    padded = [-(-length // (2 * cp)) * 2 * cp for length in rows.lengths]
    padded[-1] += 4 * cp

    def body(context: RankContext) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        tp_group, cp_group = context.mesh.get_group("tp"), context.mesh.get_group("cp")
        pack = Pack.of(starts(rows.lengths), starts(padded), cp_group=cp_group)
        start, end = (VOCAB * r // tp_group.size() for r in (tp_group.rank(), tp_group.rank() + 1))
        weight = rows.weight[start:end].clone().requires_grad_()
        value, metrics = loss(
            rows, pack, rows.hidden(pack), weight, cp_group=cp_group, vocab_start=start, tp_group=tp_group
        )
        value.backward()
        assert weight.grad is not None
        return value.detach(), weight.grad, metrics

    world = make_world(layout)
    results = world.run(body)
    expected, gradient, parts = one_by_one(loss, rows, group_size=2 if name == "dpo" else 1)
    ranks = [Layout.parse(layout).coordinate(rank) for rank in range(Layout.parse(layout).ranks)]
    first = [r for r, at in zip(results, ranks, strict=True) if at["tp"] == 0]
    torch.testing.assert_close(first[0][0] if name == "dpo" else sum(r[0] for r in first), expected)
    grads = [
        sum(r[1] for r, at in zip(results, ranks, strict=True) if at["tp"] == tp)
        for tp in range(Layout.parse(layout).tp)
    ]
    torch.testing.assert_close(torch.cat([torch.as_tensor(g) for g in grads]), gradient)
    for metric in parts:
        torch.testing.assert_close(whole(metric, [r[2][metric] for r in first]), whole(metric, parts[metric]))


@pytest.mark.parametrize("name", LOSSES)
def test_collectives_do_not_grow_with_sequences(make_world: MakeWorld, name: str) -> None:
    """The number of collectives over cp depends on the options alone; most losses have none."""

    def collectives(lengths: list[int]) -> list[str]:
        rows = Rows(lengths, max(lengths))
        world = make_world("cp=2,tp=2")

        def body(context: RankContext) -> None:
            pack = Pack.of(
                starts(lengths), starts([-(-n // 4) * 4 for n in lengths]), cp_group=context.mesh.get_group("cp")
            )
            tp_group = context.mesh.get_group("tp")
            weight = (
                rows.weight[5 * tp_group.rank() : 5 * tp_group.rank() + 5 + tp_group.rank()].clone().requires_grad_()
            )
            given: Any = {
                "cp_group": context.mesh.get_group("cp"),
                "vocab_start": 5 * tp_group.rank(),
                "tp_group": tp_group,
            }
            LOSSES[name](rows, pack, rows.hidden(pack).requires_grad_(), weight, **given)[0].backward()

        world.run(body)
        return [logged.collective for logged in world.log if logged.rank == 0]

    few, many = collectives([8, 8]), collectives([4, 3, 2, 1, 4, 2])
    assert few == many
    over_cp = {"dpo": 1, "clipped_pg, gspo": 2, "clipped_pg, seq-mask-tis": 1}.get(name, 0)
    assert len(few) == 3 + over_cp


@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3))
def test_the_split_is_the_zigzag(lengths: list[int], cp: int, multiple: int) -> None:
    """The split equals lossgate's partition of problems, an independent implementation."""
    partition = Partition(Layout(cp=cp), tuple(lengths), vocab=7, pad_to_multiple=multiple)
    for rank in range(cp):
        group = FakeGroup(cp, rank)
        pack = Pack.of(starts(lengths), torch.tensor(partition.starts), cp_group=group)  # type: ignore[arg-type]
        assert torch.equal(pack.index, partition.token_shards[0, rank])
        assert torch.equal(pack.sequence, partition.sequence_of_token[pack.index])
        assert torch.equal(pack.real, torch.isin(pack.index, partition.real_tokens))


def test_filtered_tokens_do_not_contribute() -> None:
    """A token that top-k or top-p leaves out has log-probability -inf and does not contribute.

    In NeMo-RL it contributes -A to the loss, with an importance weight of 1 / p_generation.
    """
    fields = {name: torch.full((4,), -1.0) for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs")}
    rest: dict[str, Any] = {
        "advantages": torch.ones(4),
        "sequence": torch.zeros(4, dtype=torch.long),
        "sample_mask": torch.ones(1).bool(),
    }
    config = ClippedPGConfig(use_importance_sampling_correction=True, reference_policy_kl_penalty=0.0)
    results = []
    for filtered in (True, False):
        mask = torch.ones(4, dtype=torch.bool)
        c = torch.full((4,), -1.0)
        c[2] = fields["prev_logprobs"][2] = -torch.inf if filtered else -1.0
        mask[2] = filtered  # In the other run, the token is masked.
        given = {**fields, **rest, "mask": mask}
        results.append(clipped_pg_loss(c, **given, valid_tokens=4, valid_sequences=1, config=config))
    torch.testing.assert_close(results[0], results[1])
