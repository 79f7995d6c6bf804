# SPDX-License-Identifier: Apache-2.0
from lossgate.cli.app import app


@app.command
def diff(a: str, b: str) -> int:
    return 0
