# SPDX-License-Identifier: Apache-2.0
"""The reference, cut into stages. A counterfactual may replace each stage by a wrong function.

A stage gets tensors and returns tensors, and autograd computes the gradients. So a stage that is
wrong in backward alone returns the right values with wrong gradients: see ``with_gradient_of``.
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
"""Relative difference below which two computations in float64 have the same effect."""


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Returns a tensor with the numbers of ``value`` and the gradient of ``other``."""
    difference = torch.where(value == other, 0.0, value - other)  # equal infinities differ by 0
    return other + difference.detach()


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns a tensor with the same numbers, whose gradient is multiplied by a factor."""
    return x if factor == 1.0 else with_gradient_of(x, x * factor)


def same(one: Tensor, other: Tensor, apart: float = _EQUAL) -> bool:
    """Returns whether two tensors are nearly equal. By default only rounding of float64 may differ.

    Args:
        one: a tensor.
        other: a tensor of the same shape.
        apart: the most that entries may differ, relative to the largest entry.
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


def picked_logit(setting: Setting, tempered: Tensor) -> Tensor:
    """Returns the logit of each label, ``[tokens]``."""
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
    """The stages of the reference, in their order. By default each stage is right."""

    fields: Callable[[Setting], Fields] = lambda setting: {}
    """Returns the fields that the kernel takes in place of those of the batch."""
    options: Callable[[Setting], BoundSpec] = lambda setting: setting.bound_spec
    """Returns the spec with the options that the kernel takes."""
    leaves: Callable[[Setting, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda setting, leaves: leaves
    """Gets and returns the differentiable inputs."""
    project: Callable[[Setting, Mapping[str, Tensor]], Tensor] = _project
    """Computes the logits ``[tokens, vocab]`` from the differentiable inputs."""
    cap: Stage = _cap
    """Caps the logits."""
    temper: Stage = _temper
    """Divides the logits by the temperature."""
    logsumexp: Stage = _logsumexp
    """Computes the logsumexp of the tempered logits, ``[tokens]``."""
    picked: Stage = picked_logit
    """Picks the tempered logit of each label, ``[tokens]``."""
    mean: Stage = _mean
    """Computes the mean of the tempered logits of each token, ``[tokens]``."""
    entropy: Callable[[Setting, Tensor, Tensor], Tensor] = _entropy
    """Computes the entropies ``[tokens]`` from the tempered logits and the log-probabilities of the
    whole vocabulary.
    """
    values: Callable[[Setting, TokenValues], TokenValues] = lambda setting, values: values
    """Gets and returns the values per token from which the loss is computed."""
    parts: Callable[[Setting], Sequence[Part]] = lambda setting: [(1.0, {})]
    """Returns the parts that add up to the loss, such as ranks or chunks."""
    loss: Loss = _loss
    """Computes one part of the loss and of the metrics."""
    upstream: Callable[[Setting, str, Tensor], Tensor] = lambda setting, name, gradient: gradient
    """Gets and returns the upstream gradient of an output, given its name."""
    outputs: Callable[[Setting, Outputs], Outputs] = lambda setting, outputs: outputs
    """Gets and returns all outputs, gradients included."""

    @property
    def opens_token_stage(self) -> bool:
        """Whether a stage between the logits and the loss is replaced."""
        right = (_cap, _temper, _logsumexp, picked_logit, _mean, _entropy)
        return (self.cap, self.temper, self.logsumexp, self.picked, self.mean, self.entropy) != right


RIGHT = Seams()
"""The reference itself."""
RIGHT_STAGES: Mapping[str, Callable[..., Tensor]] = {
    "logsumexp": _logsumexp,
    "picked": picked_logit,
    "mean": _mean,
    "entropy": _entropy,
}
"""The right stages that compute a number for each token, by their name in ``Seams``."""
_SPELLED_OUT = frozenset(
    ("logprobs", "entropy", "lowest", "highest", "logsumexp", "mean_logprob", "logits", "unfiltered")
)
"""The values per token that ``_open_values`` computes."""


def spelled_out(setting: Setting) -> bool:
    """Returns whether the stages between logits and loss can be replaced one by one.

    They can if there are logits, and if log-probabilities are those of the labels.
    """
    spec = setting.spec
    of_labels = spec.gathered_ids is None or "logprobs" not in spec.uses
    return setting.head.has_logits and of_labels and _SPELLED_OUT.issuperset(spec.uses)


def run(setting: Setting, seams: Seams = RIGHT) -> Outputs:
    """Returns the outputs of a kernel with these stages: values, metrics, and the gradient of each
    differentiable input.

    Args:
        setting: the problem on its layout.
        seams: the stages.
    """
    spec, leaves = setting.spec, _fresh_leaves(setting)
    outputs = _forward(setting, seams, leaves)
    roots: list[Tensor] = []
    for name, cotangent in _cotangents(setting).items():
        output = outputs.get(spec.output(name), torch.zeros(()))
        finite = torch.where(output.isfinite(), output, 0.0)
        roots.append((finite * seams.upstream(setting, name, cotangent)).sum())
    found = {output: tensor.detach() for output, tensor in outputs.items()}
    found |= zip(setting.head.gradients(leaves).values(), _gradients(roots, leaves), strict=True)
    return seams.outputs(setting, found)


def values_alone(setting: Setting, seams: Seams) -> Outputs:
    """Returns the values and metrics of ``run``, in less time."""
    outputs = _forward(setting, seams, _fresh_leaves(setting))
    return {output: tensor.detach() for output, tensor in outputs.items()}


def _fresh_leaves(setting: Setting) -> dict[str, Tensor]:
    """Returns leaves that require a gradient. Some mistakes look at ``requires_grad``."""
    return {name: leaf.detach().requires_grad_() for name, leaf in setting.batch.leaves.items()}


def _forward(setting: Setting, seams: Seams, leaves: Mapping[str, Tensor]) -> Outputs:
    bound = seams.options(setting)
    fields = {**setting.fields, **seams.fields(setting)}
    values = _values(setting, seams, bound, seams.leaves(setting, leaves), fields)
    values = seams.values(setting, values)
    outputs, spec = Outputs(), bound.spec
    if "logprobs" in spec.outputs:
        outputs[spec.output("logprobs")] = values.logprobs
    if "token_entropy" in spec.outputs and "entropy" in values.given:
        outputs[spec.output("token_entropy")] = values.entropy
    if spec.reference is not None:
        outputs |= _reduced(setting, seams, bound, values, fields)
    return outputs


def _cotangents(setting: Setting) -> Mapping[str, Tensor]:
    """Returns the upstream gradients of outputs.

    If the batch has upstream gradients of tokens, they are 0 for outputs of tokens without one.
    """
    given = setting.batch.cotangents
    if "loss" in given:
        return given
    of_tokens = [name for name in setting.spec.outputs if name != "loss"]
    return {**{name: torch.zeros(setting.tokens, dtype=torch.float64) for name in of_tokens}, **given}


def _gradients(roots: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    total = torch.stack(list(roots)).sum() if roots else torch.zeros(())
    if not total.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
    return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)


def _values(
    setting: Setting, seams: Seams, bound: BoundSpec, leaves: Mapping[str, Tensor], fields: Fields
) -> TokenValues:
    changed = seams.fields(setting)
    opens, projects = seams.opens_token_stage or LOGIT_FILTER in changed, seams.project is not _project
    if not setting.head.has_logits or not (opens or projects):
        return bound.token_values(setting.head.name, leaves, fields)
    logits = seams.project(setting, leaves)
    if not opens:
        return bound.token_values("logits", {"logits": logits}, fields)
    if "labels" in changed:  # one mistake would filter logits by the labels that another mistake changes
        raise ValueError("one mistake changes labels and another a stage of tokens; they can't be computed together")
    return _open_values(setting, seams, bound, logits, fields.get(LOGIT_FILTER))


def _open_values(setting: Setting, seams: Seams, bound: BoundSpec, logits: Tensor, kept: Tensor | None) -> TokenValues:
    """Computes the values per token stage by stage. ``kept`` is the filter of logits, if any."""
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
        elif name == "lowest":
            found[name] = capped.detach().amin(-1)
        elif name == "highest":
            found[name] = capped.detach().amax(-1)
        else:
            found[name] = logsumexp if name == "logsumexp" else tempered
    return TokenValues(**found)


_POOLS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _reduced(setting: Setting, seams: Seams, bound: BoundSpec, values: TokenValues, fields: Fields) -> Outputs:
    """Adds up the parts of the loss and of the metrics."""
    spec, total, found = bound.spec, list[Tensor](), dict[str, Tensor]()
    for weight, changed in seams.parts(setting):
        loss, metrics = seams.loss(bound, values, {**fields, **changed})
        total.append(weight * loss)
        for name, metric in metrics.items():
            reduction = spec.metrics[name].reduction
            own = weight * metric if reduction == "sum" else metric
            found[name] = _POOLS[reduction](found[name], own) if name in found else own
    loss = torch.stack(total).sum()
    return {spec.output("loss"): loss, **{spec.output(name): metric for name, metric in found.items()}}
