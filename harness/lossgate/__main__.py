# SPDX-License-Identifier: Apache-2.0
"""``python -m lossgate``."""

from lossgate.cli import main

main()
