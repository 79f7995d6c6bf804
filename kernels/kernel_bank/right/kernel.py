# SPDX-License-Identifier: Apache-2.0
"""Builds candidates from their parts: how a loss is written, in which dtypes it is computed, how
the loop over tokens runs, and how the losses of tokens are added up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.columns import Columns
from kernel_bank.right.formats import FINE, Formats
from kernel_bank.right.logprobs import Scores, Way
from kernel_bank.right.loops import WHOLE, Loop
from lossgate.base.names import DTYPES
from lossgate.declaration.candidate import Candidate, Outputs, candidate
from lossgate.declaration.contract import Contract
from lossgate.declaration.supports import ANY
from lossgate.losses import SPECS
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import Spec

Batch = Mapping[str, Any]
"""The fields of a batch, by name; of those that belong to tokens, the entries of some tokens."""

Leaves = tuple[Tensor, ...]
"""The differentiable inputs of a head; of those that belong to tokens, the rows of some tokens."""

Write = Callable[["Call", slice, Leaves], Tensor]
"""Writes the losses of some tokens, ``[tokens]``."""

Total = Callable[[Tensor, Batch, Tensor], Tensor]
"""``(losses of tokens, batch, what divides their sum) -> loss``."""


@dataclass(frozen=True)
class Call:
    """One call of a kernel on one rank."""

    spec: Spec
    head: str
    inputs: Any
    options: Any
    formats: Formats
    group: dist.ProcessGroup | None
    """That of tp, for a kernel that is parallel over the vocabulary."""

    @property
    def leaves(self) -> Leaves:
        own = (getattr(self.inputs, name) for name in HEADS[self.head].leaves)
        return tuple(leaf for leaf in own if leaf is not None)

    @property
    def columns(self) -> int:
        """This rank's columns of the vocabulary, without padding."""
        return self.inputs.vocab_end - self.inputs.vocab_start

    def batch(self, tokens: slice) -> Batch:
        """Returns the fields of some tokens, in the dtype in which they enter the loss."""
        found = dict(vars(self.inputs))
        of_tokens = dict.fromkeys(("labels", "mask", "sequence"), ("token",))
        for name, dims in {**of_tokens, **self.spec.fields}.items():
            found[name] = found[name][tokens] if dims[:1] == ("token",) else found[name]
            found[name] = found[name][:, : self.columns] if "vocab" in dims else found[name]
        return {name: self.to_loss(value) if isinstance(value, Tensor) else value for name, value in found.items()}

    def to_loss(self, value: Tensor) -> Tensor:
        return self.formats.to_loss(value, self.leaves[0].dtype)

    def scores(self, tokens: slice, leaves: Leaves, *, label_apart: bool = False) -> Scores:
        """Returns what there is of some tokens before the loss.

        Args:
            tokens: the tokens.
            leaves: of head "logits" or "hidden".
            label_apart: multiplies the label's logit apart from the others.
        """
        leaves = tuple(self.formats.to_product(leaf) for leaf in leaves)
        logits = _logits(*leaves)
        vocab = Columns(self.inputs.vocab_start, self.inputs.vocab_end, self.inputs.vocab_size, self.group)
        labels = self.inputs.labels[tokens]
        own = self._tempered(_label_apart(leaves, labels)) if label_apart else None
        return Scores(self._tempered(logits[:, : self.columns]), vocab, labels, own)

    def _tempered(self, logits: Tensor) -> Tensor:
        return self.formats.to_softmax(logits, self.leaves[0].dtype) / getattr(self.options, "temperature", 1.0)


def _logits(rows: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    logits = rows if weight is None else rows @ weight.T
    return logits if bias is None else logits + bias


def _label_apart(leaves: Leaves, labels: Tensor) -> Tensor:
    hidden, weight, *bias = leaves
    logits = (hidden * weight[labels]).sum(-1)
    return logits + bias[0][labels] if bias else logits


# Ways to add the losses of tokens up


def where_sum(losses: Tensor, batch: Batch, count: Tensor) -> Tensor:
    return torch.where(batch["mask"], losses, 0.0).sum() / count


def selected_sum(losses: Tensor, batch: Batch, count: Tensor) -> Tensor:
    return losses[batch["mask"]].sum() / count


def scaled_sum(losses: Tensor, batch: Batch, count: Tensor) -> Tensor:
    """Each token is divided before it is added."""
    return (losses[batch["mask"]] / count).sum()


def sum_of_sequences(losses: Tensor, batch: Batch, count: Tensor) -> Tensor:
    """Sequences are summed first, and then added up."""
    return by_index_add(torch.where(batch["mask"], losses, 0.0), batch).sum() / count


def by_index_add(x: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of each sequence. By itself ``index_add`` rounds each partial sum."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return exact.new_zeros(len(batch["cu_seqlens"]) - 1).index_add(0, batch["sequence"], exact).to(x.dtype)


# Candidates


def of_tokens(
    name: str,
    spec: str,
    head: str,
    write: Write,
    *,
    formats: Formats = FINE,
    loop: Loop = WHOLE,
    total: Total = where_sum,
    parallel: bool = False,
    supports: Mapping[str, Any] | None = None,
    declares: Mapping[str, str | int | bool] | None = None,
    exempt: Mapping[str, str] | None = None,
) -> Candidate:
    """Returns a candidate whose loss is a mean over tokens, or their sum.

    Args:
        name: of the way in which it is written.
        spec: the name of its spec.
        head: where it starts.
        write: writes the losses of some tokens.
        formats: the dtypes of its stages.
        loop: how it goes over its tokens.
        total: how it adds the losses of tokens up.
        parallel: over the vocabulary, too.
        supports: the options that it supports, beside the temperature.
        declares: what it declares of ``Precision`` beside that of the formats.
        exempt: the properties that it does not keep, and why.
    """

    def kernel(call: Call) -> Outputs:
        count = call.inputs.valid_tokens.clamp(min=1)
        if getattr(call.options, "reduction", "mean") == "sum":
            count = torch.ones_like(count)

        def part(tokens: slice, *leaves: Tensor) -> Tensor:
            return total(write(call, tokens, leaves), call.batch(tokens), count)

        return Outputs(loss=loop.run(part, *call.leaves))

    changes = {**loop.declares, **(declares or {})}
    own: dict[str, Any] = {"formats": formats, "parallel": parallel, "supports": supports, "exempt": exempt}
    return declared(name, spec, head, kernel, declares=changes, **own)


def declared(
    name: str,
    spec: str,
    head: str,
    kernel: Callable[[Call], Outputs],
    *,
    formats: Formats = FINE,
    parallel: bool = False,
    supports: Mapping[str, Any] | None = None,
    axes: tuple[Any, ...] = ("dp", "cp"),
    differentiable: tuple[str, ...] | None = None,
    declares: Mapping[str, str | int | bool] | None = None,
    exempt: Mapping[str, str] | None = None,
) -> Candidate:
    """Returns a candidate of a function of a call; see ``of_tokens``."""
    own, start = SPECS[spec], HEADS[head]
    known = {option.name for option in own.options}
    able = dict(supports or {}) | ({"temperature": ANY} if start.has_logits and "temperature" in known else {})
    able |= {"bias": ANY} if head == "hidden" else {}
    able |= {"vocab_split": ANY} if parallel else {}
    declare = candidate(
        own,
        head=head,
        axes=(*axes, "tp") if parallel else axes,
        dtypes=DTYPES,
        precision=formats.precision(declares or {}),
        contract=Contract(grads={"hidden": {"tp": "sum"}}) if parallel and head == "hidden" else None,
        supports=able,
        differentiable=differentiable,
        exempt=exempt,
        name=f"{spec}_{head}_{name}_{formats.name}",
    )

    def of_call(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
        group = mesh.get_group("tp") if parallel else None
        found = kernel(Call(own, head, inputs, options, formats, group))
        values = (found.loss, found.logprobs, found.token_entropy)
        loss, logprobs, entropy = (None if value is None else formats.to_output(value) for value in values)
        return Outputs(loss=loss, logprobs=logprobs, token_entropy=entropy)

    return declare(of_call)


# Ways to write losses


def through(way: Way, loss: Callable[[Tensor, Batch, Any], Tensor], *, label_apart: bool = False) -> Write:
    """Returns how losses are written from values per token, such as log-probabilities."""

    def write(call: Call, tokens: slice, leaves: Leaves) -> Tensor:
        values = call.to_loss(way(call.scores(tokens, leaves, label_apart=label_apart)))
        return loss(values, call.batch(tokens), call.options)

    return write


def of_scores(loss: Callable[[Scores, Batch, Any], Tensor]) -> Write:
    """Returns how losses are written from logits."""
    return lambda call, tokens, leaves: loss(call.scores(tokens, leaves), call.batch(tokens), call.options)


def of_values(loss: Callable[[Tensor, Batch, Any], Tensor]) -> Write:
    """Returns how losses are written at a head without logits."""
    return lambda call, tokens, leaves: loss(call.to_loss(leaves[0]), call.batch(tokens), call.options)
