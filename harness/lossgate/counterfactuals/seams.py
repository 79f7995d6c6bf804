# SPDX-License-Identifier: Apache-2.0
"""The reference with its seams open: each stage is a function that a counterfactual may replace.

A stage gets tensors and returns tensors, and autograd carries the rest. So a stage that is wrong in
backward alone returns the right value with the gradient of another: ``with_gradient_of``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.cases.reference import Part as Part
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.outputs import Output
from lossgate.specs.token_values import TokenValues

Outputs = dict[Output, Tensor]
Stage = Callable[[Setting, Tensor], Tensor]

Reduced = tuple[Tensor, dict[str, Tensor]]
"""A loss, and its metrics by name."""
Loss = Callable[[BoundSpec, TokenValues, Fields], Reduced]
_EQUAL = 1e-6
"""Relative difference below which two computations in float64 have one effect."""


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Returns a tensor that has one's value and the other's gradient."""
    return other + torch.where(value == other, 0.0, value - other).detach()


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns the same values, through which gradients come back multiplied by a factor."""
    return x if factor == 1.0 else with_gradient_of(x, x * factor)


def same(one: Tensor, other: Tensor, apart: float = _EQUAL) -> bool:
    """Returns whether two tensors are equal but for the rounding of float64, or further apart.

    Args:
        one: a tensor.
        other: of its shape.
        apart: the most that entries may differ, relative to the largest.
    """
    finite = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (torch.where(finite, x, 0.0) for x in (one, other))
    size = float(torch.maximum(one.abs(), other.abs()).max()) if one.numel() else 0.0
    return not size or float((one - other).abs().max()) <= apart * size


def _project(setting: Setting, leaves: Mapping[str, Tensor]) -> Tensor:
    return setting.head.logits(leaves)


def _cap(setting: Setting, logits: Tensor) -> Tensor:
    return setting.bound_spec.capped(logits)


def _temper(setting: Setting, logits: Tensor) -> Tensor:
    return logits / setting.temperature


def _logsumexp(setting: Setting, tempered: Tensor) -> Tensor:
    return tempered.logsumexp(-1)


def _picked(setting: Setting, tempered: Tensor) -> Tensor:
    return tempered.gather(-1, setting.fields["labels"][:, None]).squeeze(-1)


def _mean(setting: Setting, tempered: Tensor) -> Tensor:
    return tempered.mean(-1)


def _entropy(setting: Setting, tempered: Tensor, logprobs: Tensor) -> Tensor:
    return entropy_of(logprobs)


def entropy_of(logprobs: Tensor) -> Tensor:
    """Returns the entropies ``[tokens]`` of log-probabilities ``[tokens, vocab]``."""
    return -(logprobs.exp() * torch.where(logprobs > -torch.inf, logprobs, 0.0)).sum(-1)


def _loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    return bound.loss(values, fields)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """The stages of the reference, in their order. As they stand they are right."""

    fields: Callable[[Setting], Fields] = lambda setting: {}
    """What the kernel takes in place of some of the batch's fields."""
    options: Callable[[Setting], BoundSpec] = lambda setting: setting.bound_spec
    """The options with which it computes."""
    leaves: Callable[[Setting, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda setting, leaves: leaves
    """Its differentiable inputs."""
    project: Callable[[Setting, Mapping[str, Tensor]], Tensor] = _project
    """From them to the logits ``[tokens, vocab]``."""
    cap: Stage = _cap
    """The soft-cap."""
    temper: Stage = _temper
    """Divides by the temperature."""
    logsumexp: Stage = _logsumexp
    """Of the tempered logits, ``[tokens]``."""
    picked: Stage = _picked
    """The tempered logit of each label, ``[tokens]``."""
    mean: Stage = _mean
    """The mean of the tempered logits of each token, ``[tokens]``."""
    entropy: Callable[[Setting, Tensor, Tensor], Tensor] = _entropy
    """From the tempered logits and the log-probabilities of the whole vocabulary, ``[tokens]``."""
    values: Callable[[Setting, TokenValues], TokenValues] = lambda setting, values: values
    """All that the loss is given of each token."""
    parts: Callable[[Setting], Sequence[Part]] = lambda setting: [(1.0, {})]
    """How the loss is put together: rank by rank, or chunk by chunk."""
    loss: Loss = _loss
    """One part of the loss and the metrics."""
    upstream: Callable[[Setting, str, Tensor], Tensor] = lambda setting, name, gradient: gradient
    """The upstream gradient of an output."""
    outputs: Callable[[Setting, Outputs], Outputs] = lambda setting, outputs: outputs
    """All that is returned, and the gradients."""

    @property
    def opens_token_stage(self) -> bool:
        """Whether a stage between the logits and the loss is replaced."""
        right = (_cap, _temper, _logsumexp, _picked, _mean, _entropy)
        return (self.cap, self.temper, self.logsumexp, self.picked, self.mean, self.entropy) != right


RIGHT = Seams()
"""The reference itself."""
RIGHT_STAGES: Mapping[str, Callable[..., Tensor]] = {
    "logsumexp": _logsumexp,
    "picked": _picked,
    "mean": _mean,
    "entropy": _entropy,
}
"""The stages that give a number for each token, by their name in ``Seams``."""
_SPELLED_OUT = frozenset(
    ("logprobs", "entropy", "lowest", "highest", "logsumexp", "mean_logprob", "logits", "unfiltered")
)
"""The values per token that ``_open_values`` computes."""


def spelled_out(setting: Setting) -> bool:
    """Returns whether the stages between logits and loss can be opened: there are logits, and
    log-probabilities are those of the labels.
    """
    spec = setting.spec
    of_labels = spec.gathered_ids is None or "logprobs" not in spec.uses
    return setting.head.has_logits and of_labels and _SPELLED_OUT.issuperset(spec.uses)


def run(setting: Setting, seams: Seams = RIGHT) -> Outputs:
    """Returns what a kernel with these stages gives: values, metrics, and the gradient of each
    differentiable input.

    Args:
        setting: the problem on its layout.
        seams: the stages.
    """
    spec, held = setting.spec, _fresh_leaves(setting)
    outputs = _forward(setting, seams, held)
    roots: list[Tensor] = []
    for name, cotangent in _cotangents(setting).items():
        root = outputs.get(spec.output(name), torch.zeros(()))
        roots.append((torch.where(root.isfinite(), root, 0.0) * seams.upstream(setting, name, cotangent)).sum())
    gradients = _gradients(roots, held)
    found = {output: tensor.detach() for output, tensor in outputs.items()}
    return seams.outputs(setting, {**found, **dict(zip(setting.head.gradients(held).values(), gradients, strict=True))})


def values_alone(setting: Setting, seams: Seams) -> Outputs:
    """Returns what ``run`` returns, without gradients and in less time."""
    return {output: tensor.detach() for output, tensor in _forward(setting, seams, _fresh_leaves(setting)).items()}


def _fresh_leaves(setting: Setting) -> dict[str, Tensor]:
    """Returns leaves that require a gradient, which some mistakes look for."""
    return {name: leaf.detach().requires_grad_() for name, leaf in setting.batch.leaves.items()}


def _forward(setting: Setting, seams: Seams, leaves: Mapping[str, Tensor]) -> Outputs:
    bound = seams.options(setting)
    fields = {**setting.fields, **seams.fields(setting)}
    values = seams.values(setting, _values(setting, seams, bound, seams.leaves(setting, leaves), fields))
    outputs, spec = Outputs(), bound.spec
    if "logprobs" in spec.outputs:
        outputs[spec.output("logprobs")] = values.logprobs
    if "token_entropy" in spec.outputs and "entropy" in values.given:
        outputs[spec.output("token_entropy")] = values.entropy
    if spec.reference is not None:
        outputs |= _reduced(setting, seams, bound, values, fields)
    return outputs


def _cotangents(setting: Setting) -> Mapping[str, Tensor]:
    """Returns the upstream gradients, 0 for an output of tokens that has none where another has."""
    given = setting.batch.cotangents
    beside = [name for name in setting.spec.outputs if name != "loss" and "loss" not in given]
    return {**{name: torch.zeros(setting.tokens, dtype=torch.float64) for name in beside}, **given}


def _gradients(roots: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    total = torch.stack(list(roots)).sum() if roots else torch.zeros(())
    if not total.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
    return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)


def _values(
    setting: Setting, seams: Seams, bound: BoundSpec, leaves: Mapping[str, Tensor], fields: Fields
) -> TokenValues:
    changed = seams.fields(setting)
    opens = seams.opens_token_stage or LOGIT_FILTER in changed
    if not setting.head.has_logits or not (opens or seams.project is not _project):
        return bound.token_values(setting.head.name, leaves, fields)
    logits = seams.project(setting, leaves)
    if not opens:
        return bound.token_values("logits", {"logits": logits}, fields)
    if "labels" in changed:  # two mistakes at once: the filter of one would be asked for the labels of the other
        raise ValueError("labels change beside the stage of tokens; the two can't be computed together")
    return _open_values(setting, seams, bound, logits, fields.get(LOGIT_FILTER))


def _open_values(setting: Setting, seams: Seams, bound: BoundSpec, logits: Tensor, kept: Tensor | None) -> TokenValues:
    capped = seams.cap(setting, logits)
    whole = seams.temper(setting, capped)
    tempered = whole if kept is None else torch.where(kept, whole, -torch.inf)
    logsumexp, found = seams.logsumexp(setting, tempered), dict[str, Tensor]()
    for name in bound.spec.uses:
        if name == "logprobs":
            found[name] = seams.picked(setting, tempered) - logsumexp
        elif name == "unfiltered":
            if kept is not None:
                found[name] = seams.picked(setting, whole) - seams.logsumexp(setting, whole)
        elif name == "entropy":
            found[name] = seams.entropy(setting, tempered, tempered - logsumexp[:, None])
        elif name == "mean_logprob":
            found[name] = seams.mean(setting, tempered) - logsumexp
        elif name in ("lowest", "highest"):
            found[name] = capped.detach().amin(-1) if name == "lowest" else capped.detach().amax(-1)
        else:
            found[name] = logsumexp if name == "logsumexp" else tempered
    return TokenValues(**found)


def _reduced(setting: Setting, seams: Seams, bound: BoundSpec, values: TokenValues, fields: Fields) -> Outputs:
    """Adds up the parts of the loss and of the metrics."""
    spec, total, found = bound.spec, list[Tensor](), dict[str, Tensor]()
    for weight, changed in seams.parts(setting):
        loss, metrics = seams.loss(bound, values, {**fields, **changed})
        total.append(weight * loss)
        for name, metric in metrics.items():
            pool = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[spec.metrics[name].reduction]
            own = weight * metric if spec.metrics[name].reduction == "sum" else metric
            found[name] = pool(found[name], own) if name in found else own
    loss = torch.stack(total).sum()
    return {spec.output("loss"): loss, **{spec.output(name): metric for name, metric in found.items()}}
