# SPDX-License-Identifier: Apache-2.0
"""What each kind of blocker means, and what to do about it."""

from typing import NamedTuple

from lossgate.gate.verdict import Kind


class Meaning(NamedTuple):
    """A kind of blocker for people who meet it for the first time."""

    short: str
    way_out: str


MEANINGS: dict[Kind, Meaning] = {
    Kind.DISAGREE: Meaning(
        "A kernel disagrees with its reference, and no known failure of the policy excuses it.",
        "Run the replay command to see the disagreement again, and mend the kernel. A known failure that has "
        "expired, has changed or is not in the policy excuses nothing.",
    ),
    Kind.INCONCLUSIVE: Meaning(
        "Nothing wrong was seen, but not enough was seen.",
        "Verify again with more examples, or drop options from supports that the kernel doesn't need.",
    ),
    Kind.MISSING: Meaning(
        "Evidence that the policy requires is not there.",
        "Verify the missing cells, and give the gate the evidence of every part of the matrix.",
    ),
    Kind.UNFINISHED: Meaning(
        "A run was stopped, or its end is not in the evidence.",
        "Let the run come to its end, and give the gate its whole file.",
    ),
    Kind.EMPTY: Meaning(
        "There is no evidence.",
        "Check the paths of the evidence.",
    ),
    Kind.DAMAGED: Meaning(
        "A line of evidence was cut or edited, or can't be read.",
        "Verify again, and carry the file unchanged from the run to the gate.",
    ),
    Kind.CONTRADICTORY: Meaning(
        "Two lines have different results of one cell, or a line contradicts its own numbers.",
        "Use a new file for each commit: remove the evidence that is out of date, or verify the cell again.",
    ),
    Kind.STALE: Meaning(
        "Evidence is older than the policy allows, or is dated in the future.",
        "Verify again; check the clock of the machine if the date is in the future.",
    ),
    Kind.MIXED: Meaning(
        "Evidence is of several commits or versions, or of files that differ from their commit.",
        "Verify everything at one commit, with one set of versions, in a clean checkout.",
    ),
    Kind.WEAK: Meaning(
        "Too few problems were judged, or too large an effect could have stayed hidden.",
        "Verify with more examples, or ask less of these cells in the policy.",
    ),
    Kind.KNOWN_FAILURE: Meaning(
        "A known failure no longer fails.",
        "Remove it from the policy, and from the candidate if that declares it.",
    ),
}
