# SPDX-License-Identifier: Apache-2.0
"""The dtypes that inputs can have and stages can be rounded to, by name."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
