# SPDX-License-Identifier: Apache-2.0
"""Temperature, soft-cap, softmax and label: forward and backward."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split, tempered
from lossgate.counterfactuals.families.options import with_values
from lossgate.counterfactuals.seams import RIGHT_STAGES, Outputs, Stage, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.layout import Axis
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def temperatures(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the temperature."""
    if spec.temperature is None or head not in ("hidden", "logits"):
        return
    powers = {"ignored": 0, "applied twice": 2, "multiplied in place of divided": -1}
    for what, power in powers.items():
        both = partial(_to_power, power)
        yield mistake(f"temperature {what}", f"the temperature is {what}", "temperature", tempered, temper=both)
        yield mistake(
            f"temperature {what} in backward",
            f"the temperature is {what} in backward",
            "temperature",
            tempered,
            temper=partial(_backward_power, power),
        )
        yield mistake(
            f"temperature {what} in forward",
            f"the temperature is {what} in forward, and right in backward",
            "temperature",
            tempered,
            temper=partial(_forward_power, power),
        )
    for what, whole in (("rounded", round), ("cut", int)):
        yield mistake(
            f"temperature {what} to a whole number",
            f"the temperature is {what} to a whole number",
            "temperature",
            partial(_is_broken, whole),
            "keep it as a float",
            temper=partial(_whole_temperature, whole),
        )
    if spec.reference is not None:
        for what, power in _FACTORS.items():
            yield mistake(
                f"outputs {what}",
                f"{{outputs}}: {what}",
                "temperature",
                tempered,
                outputs=partial(_times_power, power),
            )
    for name in ("logprobs", "entropy", "logsumexp"):
        if name in spec.uses:
            yield mistake(
                f"{name} divided by the temperature",
                f"{name} is divided by the temperature, which belongs to the logits",
                "temperature",
                tempered,
                values=partial(_divided_values, name),
            )
            yield mistake(
                f"{name} divided by the temperature in place of the logits",
                f"{name} is divided by the temperature, and the logits are not",
                "temperature",
                tempered,
                temper=lambda setting, z: z,
                values=partial(_divided_values, name),
            )


_FACTORS: Mapping[str, int] = {
    "multiplied by the temperature squared": 2,
    "divided by the temperature squared": -2,
}


def _times_power(power: int, setting: Setting, outputs: Outputs) -> Outputs:
    factor = setting.temperature**power
    return {output: x if output.kind == "metric" else factor * x for output, x in outputs.items()}


def _is_broken(whole: Callable[[float], int], setting: Setting) -> bool:
    """Returns whether a temperature is another one as a whole number, and that is not 0."""
    return setting.head.has_logits and whole(setting.temperature) not in (0, setting.temperature)


def _whole_temperature(whole: Callable[[float], int], setting: Setting, z: Tensor) -> Tensor:
    return z / whole(setting.temperature)


def _to_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return z / setting.temperature**power


def _backward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature, z / setting.temperature**power)


def _forward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature**power, z / setting.temperature)


def _divided_values(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(**{name: values.given[name] / setting.temperature})


def softmaxes(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of softmax, label and soft-cap."""
    if head not in ("hidden", "logits"):
        return
    if spec.softcap is not None:
        capped = _has_cap
        yield mistake("soft-cap ignored", "the soft-cap is ignored", "softcap", capped, cap=lambda s, z: z)
        yield mistake(
            "soft-cap straight through",
            "the gradient lacks the factor 1 - tanh^2 of the soft-cap",
            "softcap",
            capped,
            cap=lambda s, z: with_gradient_of(s.bound_spec.capped(z), z),
        )
        yield mistake(
            "soft-cap twice",
            "the soft-cap is applied twice",
            "softcap",
            capped,
            cap=lambda s, z: s.bound_spec.capped(s.bound_spec.capped(z)),
        )
        yield mistake(
            "soft-cap's slope of capped logits",
            "backward takes the slope of the soft-cap at logits that are capped already",
            "softcap",
            capped,
            "take the slope from tanh as forward has it: 1 - (capped / cap)^2",
            cap=_slope_of_capped,
        )
        yield mistake(
            "soft-cap z tanh(z / cap)",
            "the soft-cap is z tanh(z / cap), not cap tanh(z / cap)",
            "softcap",
            capped,
            cap=lambda s, z: z * torch.tanh(z / (s.bound_spec.softcap or 1.0)),
        )
    seen = {"logprobs", "logsumexp", "mean_logprob", "entropy"} & {*spec.uses}
    if not seen:
        return
    yield mistake(
        "largest logit not subtracted",
        "exponentials are taken of the logits as they are: they overflow above 88.7, and sum to 0 below -103",
        "softmax",
        _overflows,
        "subtract the largest logit, over all tp ranks, before you take exponentials",
        logsumexp=_in_float32,
    )
    yield mistake(
        "largest logit not added back",
        "the largest logit is subtracted before the sum of exponentials, and is not added to its logarithm",
        "softmax",
        todo="subtract it from the logit of the label, too, or add it to the logarithm",
        logsumexp=lambda s, z: z.logsumexp(-1) - _largest(z)[:, 0],
    )
    yield mistake(
        "softmax missing in backward",
        "the gradient of the logits lacks the softmax: only the one-hot row of the label is left",
        "softmax",
        logsumexp=lambda s, z: z.logsumexp(-1).detach(),
    )
    if "logprobs" in spec.uses:
        yield mistake(
            "one-hot missing in backward",
            "the gradient of the logits lacks the one-hot row of the label: only the softmax is left",
            "softmax",
            picked=lambda s, z: _picked(s, z).detach(),
        )
        yield mistake(
            "logits in place of log-probabilities",
            "the logit of the label stands in place of its log-probability",
            "softmax",
            logsumexp=lambda s, z: torch.zeros_like(z[:, 0]),
        )
        yield mistake(
            "largest logit subtracted from the label's alone",
            "the largest logit is subtracted from the logit of the label, and the logsumexp has it",
            "softmax",
            picked=lambda s, z: _picked(s, z) - _largest(z)[:, 0],
        )
        yield from _label_edges()
    if "entropy" in spec.uses and "token_entropy" in spec.outputs:
        yield mistake(
            "entropy detached", "the entropy has no gradient", "entropy", entropy=lambda s, z, lp: _entropy(lp).detach()
        )
        yield mistake(
            "entropy with the other sign in backward",
            "the gradient of the entropy has the other sign",
            "entropy",
            entropy=lambda s, z, lp: scaled_gradient(_entropy(lp), -1.0),
        )
        for what, power in (("without the temperature", 1), ("with the temperature twice", -1)):
            yield mistake(
                f"entropy {what}",
                f"the entropy is that of logits {what}",
                "temperature",
                tempered,
                entropy=partial(_entropy_at, power),
            )
        for centre, instead in ((0.0, "nothing"), (1.0, "1")):
            yield mistake(
                f"entropy centred by {instead} in backward",
                f"the gradient of the entropy is -p (log p + H), with {instead} in place of H",
                "entropy",
                entropy=partial(_centred_by, centre),
            )
        yield mistake(
            "entropy of each shard in backward",
            "the gradient of the entropy has the part of it that a tp rank's own rows give, not the whole",
            "entropy",
            split("tp"),
            "sum the entropy over tp before you keep it for backward",
            entropy=_of_shards_in_backward,
        )
    if {"logprobs", "logsumexp"} <= {*spec.uses}:
        yield mistake(
            "one-hot in the gradient of logsumexp",
            "what weighs logsumexp in the loss multiplies softmax minus one-hot in backward, not the softmax alone",
            "softmax",
            todo="add it to what multiplies the softmax, and leave the one-hot entry as it is",
            values=_like_loss,
        )
    yield from _over_tp()
    if "mean_logprob" in spec.uses:
        for option in (option for option in spec.options if isinstance(option.default, float)):
            yield mistake(
                f"{option.name} over the other classes",
                f"{option.name} is spread over the classes other than the label: V / (V - 1) times too much",
                "option",
                partial(_is_given, option.name),
                f"give each of the V classes {option.name} / V, the label too",
                options=partial(_over_others_than_label, option.name),
            )
        for side in ("", " in backward"):
            yield mistake(
                f"mean of the logits by the shard's rows{side}",
                f"the mean of the logits is divided by the rows of each tp rank's vocabulary, not by all{side}",
                "vocabulary",
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
                "vocabulary",
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
                    "vocabulary",
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
            "vocabulary",
            split("tp"),
            "sum over tp in forward, and leave the gradient as it is in backward",
            **_at(stage, partial(_gradient_times, stage, 1)),
        )
        yield mistake(
            f"gradient of {stage} divided by tp",
            f"the gradient of {words} is tp times too small",
            "vocabulary",
            split("tp"),
            **_at(stage, partial(_gradient_times, stage, -1)),
        )
        if stage in ("picked", "mean"):
            yield mistake(
                f"{stage} of the first tp rank alone has a gradient",
                f"{words} has a gradient in the columns of the first tp rank alone",
                "vocabulary",
                split("tp"),
                **_at(stage, partial(_gradient_of_first, stage)),
            )


_OTHER_AXES: tuple[tuple[Axis, ...], ...] = (("dp",), ("cp",), ("dp", "cp"))


def _is_given(option: str, setting: Setting) -> bool:
    return bool(getattr(setting.bound_spec.options, option))


def _over_others_than_label(option: str, setting: Setting) -> BoundSpec:
    vocab = setting.bound.problem.vocab
    return with_values(setting, {option: getattr(setting.bound_spec.options, option) * vocab / max(vocab - 1, 1)})


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
    own, largest = z.logsumexp(-1) if sums else _picked(setting, z), _largest(z)[:, 0]
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
    largest = _largest(z)[:, 0]
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


def _slope_of_capped(setting: Setting, z: Tensor) -> Tensor:
    capped, cap = setting.bound_spec.capped(z), setting.bound_spec.softcap or 1.0
    return with_gradient_of(capped, z * (1 - torch.tanh(capped / cap) ** 2).detach())


def _like_loss(setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(logsumexp=with_gradient_of(values.given["logsumexp"], -values.logprobs))


def _has_cap(setting: Setting) -> bool:
    return setting.bound_spec.softcap is not None


def _picked(setting: Setting, z: Tensor) -> Tensor:
    return z.gather(-1, setting.fields["labels"][:, None]).squeeze(-1)


def _centred_by(centre: float, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    p, finite = logprobs.detach().exp(), torch.where(z.isfinite(), z, 0.0)
    centred = torch.where(p > 0, logprobs.detach() + centre, 0.0)
    return with_gradient_of(_entropy(logprobs), -(p * centred * finite).sum(-1))


def _entropy_at(power: int, setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    return _entropy((z * setting.temperature**power).log_softmax(-1))


def _of_shards_in_backward(setting: Setting, z: Tensor, logprobs: Tensor) -> Tensor:
    """Gives a logit -p (log p + H of its own rows) in backward, where H should be the whole."""
    whole, p = _entropy(logprobs), logprobs.detach().exp()
    also, finite = whole, torch.where(z.isfinite(), z, 0.0)
    for shard in setting.vocab_shards:
        rows = slice(shard.start, shard.end)
        own = _entropy(logprobs[:, rows])
        also = also + (whole - own).detach() * (p[:, rows] * finite[:, rows]).sum(1)
    return with_gradient_of(whole, also)


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * torch.where(logprobs > -torch.inf, logprobs, 0.0)).sum(-1)


def _over_tp() -> Iterator[Counterfactual]:
    tp = split("tp")

    def largest_local(setting: Setting, z: Tensor) -> Tensor:
        """Shifts each rank's sum by its own largest logit, and adds the sums up."""
        parts = [z[:, s.start : s.end] for s in setting.vocab_shards if s.end > s.start]
        return torch.stack([(part - _largest(part)).exp().sum(1) for part in parts]).sum(0).log()

    def shifted_label(setting: Setting, z: Tensor) -> Tensor:
        """Shifts the logit of the label by the largest of the rank that has it."""
        shards = [s for s in setting.vocab_shards if s.end > s.start]
        return _picked(setting, torch.cat([z[:, s.start : s.end] - _largest(z[:, s.start : s.end]) for s in shards], 1))

    yield mistake(
        "largest logit not reduced over tp, nor for the label",
        "each tp rank subtracts its own largest logit, and sums of different shifts are added up",
        "vocabulary",
        tp,
        "take the largest logit over all tp ranks before you subtract it",
        logsumexp=largest_local,
        picked=shifted_label,
    )
    yield mistake(
        "largest logit not reduced over tp",
        "each tp rank shifts its sum of exponentials by its own largest logit, and the sums are added up as they are",
        "vocabulary",
        tp,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=lambda s, z: largest_local(s, z) + _largest(z)[:, 0],
    )
    yield mistake(
        "largest logit not reduced over tp, softmax rebuilt",
        "each tp rank shifts its sum of exponentials by its own largest logit, the sums are added up as they are, and "
        "backward rebuilds the softmax with that sum",
        "vocabulary",
        tp,
        "take the largest logit over all tp ranks before the sum",
        logsumexp=partial(rebuilt, lambda s, z: largest_local(s, z) + _largest(z)[:, 0]),
    )
    yield mistake(
        "softmax of the label's rank alone in backward",
        "the gradient of the logits has the softmax on the tp rank of the label alone",
        "vocabulary",
        tp,
        "subtract the normaliser on every rank, and sum the label's logit alone",
        logsumexp=_of_label_rank,
    )
    yield mistake(
        "logsumexp counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is added up over tp once more: log(tp) too much",
        "vocabulary",
        tp,
        logsumexp=lambda s, z: z.logsumexp(-1) + _log_tp(s),
    )
    yield mistake(
        "logsumexp and softmax counted by every tp rank",
        "the sum of exponentials of the whole vocabulary is added up over tp once more, and divides the softmax, too",
        "vocabulary",
        tp,
        logsumexp=lambda s, z: with_gradient_of(z.logsumexp(-1) + _log_tp(s), z.logsumexp(-1) / s.size("tp")),
    )

    def own_softmax(setting: Setting, z: Tensor) -> Tensor:
        """Gives backward the softmax of each rank's own columns."""
        parts = [z[:, s.start : s.end] for s in setting.vocab_shards if s.end > s.start]
        return with_gradient_of(z.logsumexp(-1), torch.stack([part.logsumexp(1) for part in parts]).sum(0))

    yield mistake(
        "softmax of the own columns in backward",
        "backward takes the softmax over each tp rank's own columns, not over the whole vocabulary",
        "vocabulary",
        tp,
        logsumexp=own_softmax,
    )


def rebuilt(combine: Stage, setting: Setting, z: Tensor) -> Tensor:
    """Gives backward exp(z - logsumexp), which adds up to 1 only if the logsumexp is right."""
    value = combine(setting, z).detach()
    shares = (z.detach() - value[:, None]).exp()
    return with_gradient_of(value, (shares * torch.where(z.isfinite(), z, 0.0)).sum(1))


def _overflows(setting: Setting) -> bool:
    return setting.once("overflows", lambda: bool(_without_shift(setting).isinf().any()))


def _without_shift(setting: Setting) -> Tensor:
    """Returns the logarithm of a float32 sum of exponentials of the tempered logits."""
    with torch.no_grad():
        logits = setting.head.logits(setting.batch.leaves)
        return _in_float32(setting, setting.bound_spec.capped(logits) / setting.temperature)


def _in_float32(setting: Setting, z: Tensor) -> Tensor:
    return _Unshifted.apply(z)


class _Unshifted(torch.autograd.Function):
    """A logsumexp in float32 without a shift: what it overflows to has a gradient of NaN or 0."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        exponentials = z.float().exp()
        total = exponentials.sum(-1)
        ctx.save_for_backward(z, exponentials, total)
        exact = z.logsumexp(-1)
        return torch.where((total > 0) & total.isfinite(), exact, total.double().log().to(z.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        z, exponentials, total = ctx.saved_tensors
        sure = ((total > 0) & total.isfinite())[:, None]
        shares = torch.where(sure, z.softmax(-1), (exponentials / total[:, None]).to(z.dtype))
        return shares * upstream[:, None]


def _largest(z: Tensor) -> Tensor:
    return z.detach().amax(1, keepdim=True)


def _of_label_rank(setting: Setting, z: Tensor) -> Tensor:
    """Gives gradients to the columns of the rank that has the label."""
    labels, columns = setting.fields["labels"][:, None], torch.arange(z.shape[1])
    own = torch.zeros(z.shape, dtype=torch.bool)
    for shard in setting.vocab_shards:
        has_label = (labels >= shard.start) & (labels < shard.end)
        own |= has_label & (columns >= shard.start) & (columns < shard.end)
    return torch.where(own, z, z.detach()).logsumexp(-1)


def _log_tp(setting: Setting) -> Tensor:
    return torch.tensor(float(setting.size("tp")), dtype=torch.float64).log()


def _label_edges() -> Iterator[Counterfactual]:
    tp = split("tp")
    for row in ("first", "last"):
        for side in ("", " in backward"):
            yield mistake(
                f"label on a shard's {row} row lost{side}",
                f"a label on the {row} row of a tp rank's vocabulary is not found{side}: its logit counts as 0",
                "vocabulary",
                tp,
                "compare with start <= label < end of the shard",
                picked=partial(_lost, row, bool(side)),
            )
    axes: tuple[Axis, ...] = ("dp", "cp")
    for axis in axes:
        yield mistake(
            f"label found on the first rank of {axis} alone",
            f"labels are found on the first rank of {axis} alone: on others the logit of the label counts as 0",
            "vocabulary",
            split("tp", axis),
            "take the rank within the group of tp, not the global rank, for the rows that a rank has",
            picked=partial(_found_on_first, axis),
        )
    yield mistake(
        "label at the end of a shard found twice",
        "a label on the first row of a tp rank's vocabulary is also taken by the rank before it, as its last row",
        "vocabulary",
        tp,
        "compare with start <= label < end of the shard",
        picked=_found_twice,
    )
    yield mistake(
        "label at the end of a shard found twice, below the largest",
        "a label on the first row of a tp rank's vocabulary is also taken by the rank before it, as its last row "
        "(in logits from which the largest was subtracted)",
        "vocabulary",
        tp,
        "compare with start <= label < end of the shard",
        picked=partial(_found_twice, below_largest=True),
    )


def _found_on_first(axis: Axis, setting: Setting, z: Tensor) -> Tensor:
    cp = setting.size("cp")
    first = [own for rank, own in enumerate(setting.token_shards) if (rank // cp if axis == "dp" else rank % cp) == 0]
    return torch.where(setting.mask_of(torch.cat(first)), _picked(setting, z), 0.0)


def _lost(row: str, backward_only: bool, setting: Setting, z: Tensor) -> Tensor:
    edges = [s.start if row == "first" else s.end - 1 for s in setting.vocab_shards if s.end > s.start]
    lost = torch.isin(setting.fields["labels"], torch.tensor(edges))
    picked = _picked(setting, z)
    gone = torch.where(lost, 0.0, picked)
    return with_gradient_of(picked, gone) if backward_only else gone


def _found_twice(setting: Setting, z: Tensor, *, below_largest: bool = False) -> Tensor:
    labels, picked = setting.fields["labels"], _picked(setting, z)
    starts = [s.start for s in setting.vocab_shards if s.end > s.start and s.start]
    twice = torch.isin(labels, torch.tensor(starts, dtype=torch.long))
    before = z.gather(-1, (labels - 1).clamp(min=0)[:, None]).squeeze(-1)
    if below_largest:
        before = before - z.detach().amax(-1)
    return picked + torch.where(twice, before, 0.0)
