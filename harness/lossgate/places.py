# SPDX-License-Identifier: Apache-2.0
"""Where ranks can run and compute.

They are names, so that settings can be read before torch is loaded; ``worlds`` has what they name.
"""

WORLD_NAMES = ("simulated", "gloo", "nccl", "torchrun")
DEVICES = ("cpu", "cuda")
