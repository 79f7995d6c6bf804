# SPDX-License-Identifier: Apache-2.0
"""The command line: ``lossgate init | verify | replay | audit | list | spec | gate | report |
diff | findings``.

Exit codes: 0 agree, 1 disagree, 2 wrong use or configuration, 3 inconclusive (nothing wrong was
seen, but not enough was seen), 4 a fault of lossgate itself.
"""

from lossgate.cli.app import Exit, app, main
from lossgate.cli.audit import audit
from lossgate.cli.check_spec import check
from lossgate.cli.diff import diff
from lossgate.cli.findings import findings
from lossgate.cli.gate import gate
from lossgate.cli.list_and_init import init, list_
from lossgate.cli.replay_file import replay
from lossgate.cli.report import report
from lossgate.cli.verify import verify

__all__ = [
    "Exit",
    "app",
    "audit",
    "check",
    "diff",
    "findings",
    "gate",
    "init",
    "list_",
    "main",
    "replay",
    "report",
    "verify",
]
