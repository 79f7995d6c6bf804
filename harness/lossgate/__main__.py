# SPDX-License-Identifier: Apache-2.0
"""``python -m lossgate``."""

import sys

if not sys.flags.safe_path:
    # The working folder comes last, so that a user's file torch.py does not hide torch.
    sys.path.append(sys.path.pop(0))

from lossgate.cli import main

main()
