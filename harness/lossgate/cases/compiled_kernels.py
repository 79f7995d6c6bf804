# SPDX-License-Identifier: Apache-2.0
"""Tells torch's compiler that a kernel will meet many shapes: each problem has others.

By itself it gives up after eight, and a kernel that is compiled whole then raises an error.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_SHAPES = 100_000
"""More than any run has problems."""


def many_shapes() -> AbstractContextManager[object]:
    """Allows many shapes in this thread while the context lasts.

    Without the compiler, which takes seconds to load, it does nothing.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return nullcontext()
    limits = ("recompile_limit", "accumulated_recompile_limit")
    return config.patch({limit: max(getattr(config, limit), _SHAPES) for limit in limits})
