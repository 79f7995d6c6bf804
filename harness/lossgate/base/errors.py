# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause and mend.

Each message names the argument, its value, what was expected and the way out.
"""


class LossgateError(Exception):
    """Base of every error that lossgate raises on purpose."""


class UsageError(LossgateError):
    """Bad input: a wrong name, value, file or declaration.

    The command line turns it into one line and exit code 2.
    """


class CandidateError(UsageError):
    """The candidate broke its declared interface: wrong type, shape or dtype, or a loss without a
    graph.
    """
