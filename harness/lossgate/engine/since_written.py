# SPDX-License-Identifier: Apache-2.0
"""How the outcome of a replay compares with what its failure file says, in words."""

from collections.abc import Collection

from lossgate.base.spelling import in_a_row
from lossgate.engine.failure_files import FailureFile, versions


def since_written(failure: FailureFile, symptoms: Collection[str], *, exact: bool, other: bool) -> str:
    """Returns what is known of a failure since its file was written; "" if nothing is.

    Args:
        failure: what the file holds.
        symptoms: in what the candidate disagrees now; empty if it agrees.
        exact: every statistic is the one in the file.
        other: another candidate was replayed than the one that the file names.
    """
    if exact and symptoms:
        return "it fails exactly as when the file was written"
    if other:
        return ""
    if not failure.is_as_written():
        return "the problem is not known to be the one with which the file was written, so nothing is compared"
    if not symptoms:
        return _mended(failure)
    was, now = (listed(names) for names in (_symptoms_in(failure), symptoms))
    if not is_as_it_was(failure, symptoms):
        return f"it disagrees otherwise than when the file was written: then in {was}, now in {now}{_and(failure)}"
    return f"it still disagrees in {now}, with other numbers than in the file{_and(failure) or _POSSIBLE}"


def is_as_it_was(failure: FailureFile, symptoms: Collection[str]) -> bool:
    """Returns whether the problems of a file are as they were written, and show the same today.

    Args:
        failure: what the file holds.
        symptoms: in what a candidate disagrees now; empty if it agrees.
    """
    return bool(symptoms) and failure.is_as_written() and {*symptoms} == {*_symptoms_in(failure)}


_POSSIBLE = ": the kernel, its spec or the machine is another one"


def _mended(failure: FailureFile) -> str:
    if changed := _changed(failure):
        return f"the failure is gone: the kernel agrees on this problem now; but {changed} since the file was written"
    return "the failure is mended: the kernel agrees on this problem now"


def _symptoms_in(failure: FailureFile) -> Collection[str]:
    """Returns in what the candidate disagreed on the problems of the file."""
    if failure.pooled:
        return failure.symptoms
    return {symptom for frozen in failure.examples for symptom in frozen.symptoms}


def _and(failure: FailureFile) -> str:
    changed = _changed(failure)
    return changed and f"; {changed} since the file was written"


def _changed(failure: FailureFile) -> str:
    """Returns which versions are others than in the file, in words; "" if none is."""
    now = versions()
    changed = [
        f"{name} went from {failure.versions[name]} to {now[name]}"
        for name in now
        if name in failure.versions and failure.versions[name] != now[name]
    ]
    return ", ".join(changed)


def listed(names: Collection[str]) -> str:
    """Returns names in words, each once."""
    return in_a_row(sorted(set(names)))
