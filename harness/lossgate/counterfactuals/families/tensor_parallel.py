# SPDX-License-Identifier: Apache-2.0
"""Mistakes of reducing a softmax over tp: a reduction is missing, repeated, or over other axes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.families.softmax import largest_logit, rebuilt
from lossgate.counterfactuals.seams import RIGHT_STAGES, picked_logit, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec


def tensor_parallel(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of reducing maxima, sums and gradients over tp."""
    if head not in ("hidden", "logits") or not {"logprobs", "logsumexp", "mean_logprob", "entropy"} & {*spec.uses}:
        return
    yield from _OVER_TP
    if "mean_logprob" in spec.uses:
        for side in ("", " in backward"):
            yield mistake(
                f"mean of the logits by the shard's rows{side}",
                f"the mean of the logits divides by the rows of each tp rank, not of the whole vocabulary{side}",
                split("tp"),
                "divide by the size of the whole vocabulary",
                mean=partial(_mean_by_shard, bool(side)),
            )
    if "logprobs" in spec.uses:
        for axes in _OTHER_AXES:
            over = " and ".join(axes)
            yield mistake(
                f"softmax reduced over {'+'.join(axes)}, too",
                f"the softmax is reduced not only over tp, but also over {over}, where the ranks have other tokens",
                split(*axes),
                "reduce over the group of tp alone",
                padding=True,
                logsumexp=partial(_over_others, axes, True),
                picked=partial(_over_others, axes, False),
            )
            for zeroed, which in ((False, ""), (True, " (logits of masked tokens are 0)")):
                yield mistake(
                    f"sum of exponentials reduced over {'+'.join(axes)}, too{which}",
                    f"the sum of exponentials is reduced not only over tp, but also over {over}, where the ranks have "
                    f"other tokens, and backward rebuilds the softmax with it{which}",
                    split(*axes),
                    "reduce over the group of tp alone",
                    padding=True,
                    logsumexp=partial(rebuilt, partial(_sums_over_others, axes, zeroed)),
                )
    yield from _summed_again(spec)


_STAGES = {
    "logsumexp": ("the logsumexp", "logprobs"),
    "picked": ("the logit of the label", "logprobs"),
    "mean": ("the mean of the logits", "mean_logprob"),
    "entropy": ("the entropy", "entropy"),
}
"""The stages that ranks of tp compute together: in words, and the value per token of each."""


def _summed_again(spec: Spec) -> Iterator[Counterfactual]:
    """Yields the mistakes of a sum over tp that is done twice in backward, or left out."""
    for stage, (words, needed_by) in _STAGES.items():
        if needed_by not in spec.uses:
            continue
        yield mistake(
            f"gradient of {stage} times tp",
            f"the gradient of {words} is summed over tp once too often: it is tp times too large",
            split("tp"),
            "sum over tp in forward, and leave the gradient as it is in backward",
            **_at(stage, partial(_gradient_times, stage, 1)),
        )
        yield mistake(
            f"gradient of {stage} divided by tp",
            f"the gradient of {words} is tp times too small",
            split("tp"),
            **_at(stage, partial(_gradient_times, stage, -1)),
        )
        if stage in ("picked", "mean"):
            yield mistake(
                f"{stage} of the first tp rank alone has a gradient",
                f"{words} has a gradient in the columns of the first tp rank alone",
                split("tp"),
                **_at(stage, partial(_gradient_of_first, stage)),
            )


_OTHER_AXES: tuple[tuple[Axis, ...], ...] = (("dp",), ("cp",), ("dp", "cp"))


def _mean_by_shard(backward_only: bool, setting: Setting, z: Tensor) -> Tensor:
    own = torch.stack([z[:, s.start : s.end].sum(1) / max(s.end - s.start, 1) for s in setting.vocab_shards]).sum(0)
    return with_gradient_of(z.mean(-1), own) if backward_only else own


def _at_one_place(axes: tuple[Axis, ...], setting: Setting) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yields the tokens of each rank, with the tokens of all ranks in its group over some axes.

    Raises:
        ValueError: if ranks of a group hold different numbers of tokens.
    """
    token_axes: tuple[Axis, ...] = ("dp", "cp")
    others: list[Axis] = [axis for axis in token_axes if axis not in axes]
    shards = setting.token_shards
    for rank, tokens in enumerate(shards):
        group = [shards[other] for other in setting.group_of(rank, others)]
        if any(len(held) != len(tokens) for held in group):
            raise ValueError("ranks that hold different numbers of tokens cannot add up")
        yield tokens, group


def _at(stage: str, wrong: Any) -> dict[str, Any]:
    """Returns a wrong stage as a keyword argument of ``mistake``."""
    return {stage: wrong}


def _over_others(axes: tuple[Axis, ...], sums: bool, setting: Setting, z: Tensor) -> Tensor:
    """Returns a stage that is summed over the ranks of some axes, though their tokens differ.

    The largest logit of these ranks is subtracted. Gradients come from a token's own logits alone.

    Args:
        axes: the axes.
        sums: True for the logarithm of the sum of exponentials, False for the logit of the label.
        setting: the problem.
        z: tempered logits ``[tokens, vocab]``.
    """
    own, largest = z.logsumexp(-1) if sums else picked_logit(setting, z), largest_logit(z)[:, 0]
    value, share = torch.empty_like(largest), torch.ones_like(largest)
    for tokens, group in _at_one_place(axes, setting):
        held = torch.stack([own[of] for of in group]).detach()
        peak = torch.stack([largest[of] for of in group]).amax(0)
        value[tokens] = held.logsumexp(0) - peak if sums else (held - peak).sum(0)
        if sums:
            share[tokens] = (own[tokens].detach() - held.logsumexp(0)).exp()
    return with_gradient_of(value, own * share)


def _sums_over_others(axes: tuple[Axis, ...], zeroed: bool, setting: Setting, z: Tensor) -> Tensor:
    """Returns the logsumexp with sums of exponentials that are summed over the ranks of some axes.

    Each rank has subtracted its own largest logit. With ``zeroed``, logits of masked tokens are 0.
    """
    largest = largest_logit(z)[:, 0]
    own, value = z.detach().logsumexp(-1) - largest, torch.empty_like(largest)
    if zeroed:
        own = torch.where(setting.fields["mask"], own, torch.zeros_like(z).logsumexp(-1))
    for tokens, group in _at_one_place(axes, setting):
        value[tokens] = torch.stack([own[of] for of in group]).logsumexp(0) + largest[tokens]
    return value


def _gradient_times(stage: str, power: int, setting: Setting, *x: Tensor) -> Tensor:
    return scaled_gradient(RIGHT_STAGES[stage](setting, *x), float(setting.size("tp")) ** power)


def _gradient_of_first(stage: str, setting: Setting, x: Tensor) -> Tensor:
    end = setting.vocab_shards[0].end
    return RIGHT_STAGES[stage](setting, torch.cat([x[:, :end], x[:, end:].detach()], 1))


def _of_label_rank(setting: Setting, z: Tensor) -> Tensor:
    """Returns the logsumexp, with a gradient on the tp rank of the label alone."""
    labels, columns = setting.fields["labels"][:, None], torch.arange(z.shape[1])
    own = torch.zeros(z.shape, dtype=torch.bool)
    for shard in setting.vocab_shards:
        has_label = (labels >= shard.start) & (labels < shard.end)
        own |= has_label & (columns >= shard.start) & (columns < shard.end)
    return torch.where(own, z, z.detach()).logsumexp(-1)


def _own_parts(setting: Setting, z: Tensor) -> list[Tensor]:
    """Returns the columns of the logits on each tp rank."""
    return [z[:, rows] for rows in setting.vocab_rows]


def _sums_of_own_shift(setting: Setting, z: Tensor) -> Tensor:
    """Returns the logarithm of the sum of exponentials. Each tp rank subtracts its own largest
    logit.
    """
    parts = ((part - largest_logit(part)).exp().sum(1) for part in _own_parts(setting, z))
    return torch.stack([*parts]).sum(0).log()


def _added_back(setting: Setting, z: Tensor) -> Tensor:
    return _sums_of_own_shift(setting, z) + largest_logit(z)[:, 0]


def _label_of_own_shift(setting: Setting, z: Tensor) -> Tensor:
    """Returns the logit of the label, less the largest logit of the tp rank of the label."""
    return picked_logit(setting, torch.cat([part - largest_logit(part) for part in _own_parts(setting, z)], 1))


def _own_softmax(setting: Setting, z: Tensor) -> Tensor:
    """Returns the logsumexp, with the softmax over each tp rank's own columns as its gradient."""
    own = torch.stack([part.logsumexp(1) for part in _own_parts(setting, z)]).sum(0)
    return with_gradient_of(z.logsumexp(-1), own)


def _log_tp(setting: Setting) -> Tensor:
    return torch.tensor(float(setting.size("tp")), dtype=torch.float64).log()


_TP = split("tp")
_OVER_TP = (
    mistake(
        "largest logit not reduced over tp, nor for the label",
        "each tp rank subtracts its own largest logit, from the logit of the label, too, and the sums of exponentials "
        "are added up as they are",
        _TP,
        "take the largest logit over all tp ranks before you subtract it",
        logsumexp=_sums_of_own_shift,
        picked=_label_of_own_shift,
    ),
    mistake(
        "largest logit not reduced over tp",
        "each tp rank subtracts its own largest logit, and the sums of exponentials are added up as they are",
        _TP,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=_added_back,
    ),
    mistake(
        "largest logit not reduced over tp, softmax rebuilt",
        "each tp rank subtracts its own largest logit, the sums of exponentials are added up as they are, and backward "
        "rebuilds the softmax with that sum",
        _TP,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=partial(rebuilt, _added_back),
    ),
    mistake(
        "softmax of the label's rank alone in backward",
        "the gradient of the logits has the softmax on the tp rank of the label alone",
        _TP,
        "sum only the logit of the label over tp, and subtract the logsumexp after this sum",
        logsumexp=_of_label_rank,
    ),
    mistake(
        "logsumexp counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is summed over tp once more: the logsumexp is log(tp) too "
        "large",
        _TP,
        "sum it over tp once",
        logsumexp=lambda s, z: z.logsumexp(-1) + _log_tp(s),
    ),
    mistake(
        "logsumexp and softmax counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is summed over tp once more, and divides the softmax, too",
        _TP,
        "sum it over tp once",
        logsumexp=lambda s, z: with_gradient_of(z.logsumexp(-1) + _log_tp(s), z.logsumexp(-1) / s.size("tp")),
    ),
    mistake(
        "softmax of the own columns in backward",
        "backward takes the softmax over each tp rank's own columns, not over the whole vocabulary",
        _TP,
        logsumexp=_own_softmax,
    ),
)
"""The mistakes of maxima and sums that are not reduced over tp, or reduced twice."""
