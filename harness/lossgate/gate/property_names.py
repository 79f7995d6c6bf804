# SPDX-License-Identifier: Apache-2.0
"""Which names of properties a policy may have in ``keeps``."""

from collections.abc import Iterator

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.evidence.gather import Gathered
from lossgate.gate.policy_text import shown
from lossgate.gate.rules import Policy, Rule

BUILT_IN = (
    "agreement",
    "bad-inputs",
    "same-call-twice",
    "after-another-shape",
    "gradients-add-up",
    "second-backward",
    "checkpointing",
    "device",
    "sequence-order",
    "vocabulary-order",
    "temperature",
    "extreme-logits",
    "suppressed-ids",
    "hopeless-labels",
    "frozen-inputs",
    "no-grad",
    "inputs-kept",
    "strided-inputs",
    "int32-ids",
    "masked-values",
    "masked-nan",
    "masked-ids",
    "autocast",
    "microbatches",
    "other-padding",
    "reduction-order",
    "idle-rank",
    "budgets",
    "nothing-trained",
    "few-tokens",
    "upstream-scaled",
    "upstream-one",
    "upstream-zero",
)
"""The properties of lossgate. Their registry would know them, and needs torch; a gate does not."""


def check_property_names(policy: Policy, evidence: Gathered) -> None:
    """Checks the names of properties that rules have in ``keeps``.

    Users register properties of their own, and a gate does not load their files. It knows those
    that evidence names. A cell that disagrees names none, because it is held to nothing further: so
    a rule is only checked if one of its cells agrees.

    Raises:
        UsageError: for the first name that is neither built in nor in the evidence.
    """
    known = dict.fromkeys([*BUILT_IN, *_named_by(evidence)])
    for rule in policy.require:
        for name, line in zip(rule.keeps, rule.lines_of_keeps, strict=True):
            if name not in known and _agrees_somewhere(rule, evidence):
                raise UsageError(
                    f"{policy.file}:{line}: {shown(name)} in require.keeps: there is no such property in lossgate, "
                    f"and the evidence has none; {nearest(name, known)}"
                )


def _named_by(evidence: Gathered) -> Iterator[str]:
    for run in evidence.runs.values():
        named = run.settings.get("properties")
        yield from (str(name) for name in (named if isinstance(named, list | tuple) else ()))
    for key, results in evidence.cells.items():
        yield key.property
        for cell in results:
            yield from cell.properties


def _agrees_somewhere(rule: Rule, evidence: Gathered) -> bool:
    """Returns whether a cell that a rule asks for agrees."""
    return any(cell.verdict == "AGREE" and rule.matches(key) for key, cell in evidence.newest.items())
