# SPDX-License-Identifier: Apache-2.0
"""The names of dtypes, worlds and devices.

This module does not load torch, so that settings can be checked before torch is loaded.
``numerics.float_formats`` has torch's own dtypes, and ``worlds`` makes the worlds.
"""

from collections.abc import Iterable
from typing import Any

from lossgate.base.spelling import nearest, shown

DTYPES = ("float32", "bfloat16", "float16")

_OF_REFERENCE = "that is the dtype of the reference, and of no kernel"
_OTHER_NAMES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_KNOWN_AS = {
    **dict.fromkeys(("float64", "double"), _OF_REFERENCE),
    **{name: f"did you mean {one!r}?" for name, one in _OTHER_NAMES.items()},
}
"""Hints about other names that users may try."""


def named(given: Any) -> Any:
    """Returns the name of a dtype of torch, and anything else as it is: ``torch.bfloat16`` is
    "bfloat16".
    """
    is_torchs = (type(given).__module__, type(given).__name__) == ("torch", "dtype")
    return str(given).removeprefix("torch.") if is_torchs else given


def nearest_dtype(given: object, known: Iterable[str] = DTYPES) -> str:
    """Returns the end of a message about an unknown dtype."""
    name = given if isinstance(given, str) else shown(given)
    return nearest(name, known, _KNOWN_AS.get(name.lower().removeprefix("torch."), ""))


WORLD_NAMES = ("simulated", "gloo", "nccl", "torchrun")
DEVICES = ("cpu", "cuda")
