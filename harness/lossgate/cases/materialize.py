# SPDX-License-Identifier: Apache-2.0
"""From a problem to all of its tensors: those of every spec, and the fields that its own spec adds."""

from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from lossgate.cases.kinks import unsettled
from lossgate.cases.reference import token_values
from lossgate.dtypes import DTYPES
from lossgate.losses import find_spec
from lossgate.problems.batch import Batch, cotangents, draw
from lossgate.problems.problem import Problem
from lossgate.problems.random_streams import Bits
from lossgate.specs.spec import Draft, Spec

_SIGMAS = 6
"""Standard deviations of rounding that comparisons keep clear of."""

_PROBES = 4
"""Moves of all log-probabilities: up, down, and others at random."""

_ROUNDS = 5
"""Masking a token moves the means over its sequence, and with them other comparisons: it is done again, at most so often."""


def materialize(problem: Problem, settled: bool = True) -> Batch:
    """Make the tensors of ``problem``. The same problem gives the same ones, bit for bit, on every machine.

    settled: mask tokens whose comparisons hang on rounding, which takes most of the time; without, a few more are trained.
    """
    spec, batch = find_spec(problem.spec), draw(problem)
    options = spec.make_options(problem.options)
    if spec.make_fields is not None:
        policy = token_values(batch, spec, options).logprobs if spec.scenario else batch.policy
        scenario = {choice.name: choice.default for choice in spec.scenario} | problem.scenario
        made = spec.make_fields(
            Draft(batch=batch, options=options, bits=Bits(problem.to_json()), scenario=scenario, logprobs=policy)
        )
        exact = {name: value.float().double() if value.is_floating_point() else value for name, value in made.items()}
        batch = _counted(replace(batch, fields={**batch.fields, **exact}, field_dims=spec.fields, policy=policy))
        if settled and spec.kinks and not any(scenario[name] == choice for name, choice in spec.ties.items()):
            batch = _settle(batch, spec, options)
    return replace(batch, cotangents=cotangents(problem, batch.fields, spec.outputs))


def _counted(batch: Batch) -> Batch:
    """With the counts of what is trained brought up to date."""
    fields = dict(batch.fields)
    trained, every = fields["mask"], torch.tensor(len(batch.partition.lengths))
    if (samples := fields.get("sample_mask")) is not None:
        trained = trained & samples[fields["sequence"]]
        every = samples.sum()
    fields["valid_tokens"] = trained.sum()
    if "positive_tokens" in batch.field_dims:
        fields["positive_tokens"] = (trained & (fields["rewards"] > 0)[fields["sequence"]]).sum()
    if "valid_sequences" in batch.field_dims:
        fields["valid_sequences"] = every
    return replace(batch, fields=fields)


def _settle(batch: Batch, spec: Spec, options: object) -> Batch:
    """Mask the tokens at which rounding could change the outcome of a comparison.

    At a kink of the loss either one-sided gradient is right, and no noise tells which one a kernel finds. The loss is
    run with log-probabilities moved by as much as rounding in the problem's dtype may move them; where a clip or a
    comparison comes out otherwise, its token, or all of its sequence, is left out.
    """
    bits, gap = Bits(batch.problem.to_json()), _SIGMAS * _noise(batch, options)
    values = token_values(batch, spec, options)
    for round_ in range(_ROUNDS):
        probes = [values.logprobs + gap, values.logprobs - gap]
        probes += [
            values.logprobs + gap * bits.normal(f"probe {round_} {i}", *values.logprobs.shape).sign()
            for i in range(_PROBES - 2)
        ]
        tokens, sequences = unsettled(spec, options, values, probes, batch)
        close = tokens | sequences[batch.fields["sequence"]]
        if not bool((close & batch.fields["mask"]).any()):
            break
        batch = _counted(replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~close}))
    return batch


def _noise(batch: Batch, options: object) -> Tensor:
    """Standard deviation of a log-probability, were everything rounded to the problem's dtype. At heads without logits it is given exactly."""
    with_logits = "hidden" in batch.leaves or "logits" in batch.leaves
    unit = torch.finfo(DTYPES[batch.problem.dtype] if with_logits else torch.float32).eps / 2
    temperature = float(getattr(options, "temperature", 1.0))
    if "hidden" in batch.leaves:
        logits = batch.leaves["hidden"] @ batch.leaves["weight"].T + batch.leaves.get("bias", 0.0)
    else:
        logits = next(iter(batch.leaves.values()))
    return unit * logits.abs().max().clamp(min=1) / temperature / sqrt(3)
