# SPDX-License-Identifier: Apache-2.0
"""Measures what a call of a kernel uses: memory on each rank, and traffic between ranks."""

from lossgate.observe.call import Use, observe
from lossgate.observe.memory import MadeTensor, MemoryWatch, Phase
from lossgate.observe.traffic import Collective

__all__ = ["Collective", "MadeTensor", "MemoryWatch", "Phase", "Use", "observe"]
