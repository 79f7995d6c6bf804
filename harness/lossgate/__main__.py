# SPDX-License-Identifier: Apache-2.0
"""``python -m lossgate``."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the working folder: a candidate file torch.py there is not torch

from lossgate.cli import main

main()
