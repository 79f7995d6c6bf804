# SPDX-License-Identifier: Apache-2.0
"""The inputs of a kernel on each rank: a class for each spec and head, such as ``NllHidden``.

For example::

    def my_kernel(inputs: lossgate.inputs.NllHidden, options: NllOptions, mesh: DeviceMesh): ...

``inputs.pyi`` holds the same classes for editors and type checkers. The command ``python -m
lossgate.reports.spec_files`` writes it from the specs.
"""

from typing import Any

from lossgate.losses import SPECS
from lossgate.specs.heads import HEADS
from lossgate.specs.packed_batch import Batch

__all__ = ["Batch"]

_CLASSES = {head.inputs.__name__: head.inputs for head in HEADS.values()} | {
    kind.__name__: kind for spec in SPECS.values() for kind in spec.inputs.values()
}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"lossgate.inputs has no {name!r}; there are {', '.join(_CLASSES)}")


def __dir__() -> list[str]:
    return [*__all__, *_CLASSES]
