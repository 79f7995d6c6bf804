# SPDX-License-Identifier: Apache-2.0
"""What the ranks of tp reduce of a softmax: too little, too often, over other ranks as well."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.families.softmax import largest_logit, picked_logit, rebuilt
from lossgate.counterfactuals.seams import RIGHT_STAGES, scaled_gradient, with_gradient_of
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
                f"the mean of the logits is divided by the rows of each tp rank's vocabulary, not by all{side}",
                split("tp"),
                "divide by the size of the whole vocabulary",
                mean=partial(_mean_by_shard, bool(side)),
            )
    if "logprobs" in spec.uses:
        for axes in _OTHER_AXES:
            over = " and ".join(axes)
            yield mistake(
                f"softmax reduced over {'+'.join(axes)}, too",
                f"the softmax is reduced over {over}, too, where ranks have other tokens",
                split(*axes),
                "reduce over the group of tp alone",
                padding=True,
                logsumexp=partial(_over_others, axes, True),
                picked=partial(_over_others, axes, False),
            )
            for zeroed, which in ((False, ""), (True, " (logits of masked tokens are 0)")):
                yield mistake(
                    f"sum of exponentials reduced over {'+'.join(axes)}, too{which}",
                    f"the sum of exponentials alone is reduced over {over}, too, where ranks have other tokens, and "
                    f"backward rebuilds the softmax with it{which}",
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
"""The stages that ranks of tp compute together: in words, and what needs them."""


def _summed_again(spec: Spec) -> Iterator[Counterfactual]:
    """Yields what comes of one sum over tp too many, or of one that is left out, in backward."""
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
    """Yields the tokens of each rank, and those of all ranks of some axes that add up with it.

    Raises:
        ValueError: if they hold different numbers of tokens.
    """
    token_axes: tuple[Axis, ...] = ("dp", "cp")
    others: list[Axis] = [axis for axis in token_axes if axis not in axes]
    shards = setting.token_shards
    for rank, tokens in enumerate(shards):
        group = [shards[other] for other in setting.group_of(rank, others)]
        if any(len(held) != len(tokens) for held in group):
            raise ValueError("ranks that hold different numbers of tokens cannot add up")
        yield tokens, group


def _over_others(axes: tuple[Axis, ...], sums: bool, setting: Setting, z: Tensor) -> Tensor:
    """Adds up what the ranks of some axes have at the same place: sums of exponentials, or logits
    of labels, less the largest logit of all. Each token's gradient is its own.
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
    """Adds up what the ranks of some axes have at the same place: sums of exponentials,
    each less its own largest logit.
    """
    largest = largest_logit(z)[:, 0]
    own, value = z.detach().logsumexp(-1) - largest, torch.empty_like(largest)
    if zeroed:
        own = torch.where(setting.fields["mask"], own, torch.zeros_like(z).logsumexp(-1))
    for tokens, group in _at_one_place(axes, setting):
        value[tokens] = torch.stack([own[of] for of in group]).logsumexp(0) + largest[tokens]
    return value


def _at(stage: str, seam: Any) -> dict[str, Any]:
    return {stage: seam}


def _gradient_times(stage: str, power: int, setting: Setting, *x: Tensor) -> Tensor:
    return scaled_gradient(RIGHT_STAGES[stage](setting, *x), float(setting.size("tp")) ** power)


def _gradient_of_first(stage: str, setting: Setting, x: Tensor) -> Tensor:
    end = setting.vocab_shards[0].end
    return RIGHT_STAGES[stage](setting, torch.cat([x[:, :end], x[:, end:].detach()], 1))


def _of_label_rank(setting: Setting, z: Tensor) -> Tensor:
    """Gives gradients to the columns of the rank that has the label."""
    labels, columns = setting.fields["labels"][:, None], torch.arange(z.shape[1])
    own = torch.zeros(z.shape, dtype=torch.bool)
    for shard in setting.vocab_shards:
        has_label = (labels >= shard.start) & (labels < shard.end)
        own |= has_label & (columns >= shard.start) & (columns < shard.end)
    return torch.where(own, z, z.detach()).logsumexp(-1)


def _own_parts(setting: Setting, z: Tensor) -> list[Tensor]:
    """Returns the columns of each rank."""
    return [z[:, rows] for rows in setting.vocab_rows]


def _sums_of_own_shift(setting: Setting, z: Tensor) -> Tensor:
    """Shifts each rank's sum by its own largest logit, and adds the sums up."""
    parts = ((part - largest_logit(part)).exp().sum(1) for part in _own_parts(setting, z))
    return torch.stack([*parts]).sum(0).log()


def _added_back(setting: Setting, z: Tensor) -> Tensor:
    return _sums_of_own_shift(setting, z) + largest_logit(z)[:, 0]


def _label_of_own_shift(setting: Setting, z: Tensor) -> Tensor:
    """Shifts the logit of the label by the largest of the rank that has it."""
    return picked_logit(setting, torch.cat([part - largest_logit(part) for part in _own_parts(setting, z)], 1))


def _own_softmax(setting: Setting, z: Tensor) -> Tensor:
    """Gives backward the softmax of each rank's own columns."""
    own = torch.stack([part.logsumexp(1) for part in _own_parts(setting, z)]).sum(0)
    return with_gradient_of(z.logsumexp(-1), own)


def _log_tp(setting: Setting) -> Tensor:
    return torch.tensor(float(setting.size("tp")), dtype=torch.float64).log()


_TP = split("tp")
_OVER_TP = (
    mistake(
        "largest logit not reduced over tp, nor for the label",
        "each tp rank subtracts its own largest logit, and sums of different shifts are added up",
        _TP,
        "take the largest logit over all tp ranks before you subtract it",
        logsumexp=_sums_of_own_shift,
        picked=_label_of_own_shift,
    ),
    mistake(
        "largest logit not reduced over tp",
        "each tp rank shifts its sum of exponentials by its own largest logit, and the sums are added up as they are",
        _TP,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=_added_back,
    ),
    mistake(
        "largest logit not reduced over tp, softmax rebuilt",
        "each tp rank shifts its sum of exponentials by its own largest logit, the sums are added up as they are, and "
        "backward rebuilds the softmax with that sum",
        _TP,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=partial(rebuilt, _added_back),
    ),
    mistake(
        "softmax of the label's rank alone in backward",
        "the gradient of the logits has the softmax on the tp rank of the label alone",
        _TP,
        "subtract the normaliser on every rank, and sum the label's logit alone",
        logsumexp=_of_label_rank,
    ),
    mistake(
        "logsumexp counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is added up over tp once more: log(tp) too much",
        _TP,
        logsumexp=lambda s, z: z.logsumexp(-1) + _log_tp(s),
    ),
    mistake(
        "logsumexp and softmax counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is added up over tp once more, and divides the softmax, too",
        _TP,
        logsumexp=lambda s, z: with_gradient_of(z.logsumexp(-1) + _log_tp(s), z.logsumexp(-1) / s.size("tp")),
    ),
    mistake(
        "softmax of the own columns in backward",
        "backward takes the softmax over each tp rank's own columns, not over the whole vocabulary",
        _TP,
        logsumexp=_own_softmax,
    ),
)
"""Maxima and sums that are not reduced over tp, or too often."""
