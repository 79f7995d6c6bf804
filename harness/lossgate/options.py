# SPDX-License-Identifier: Apache-2.0
"""The options that a kernel is given: a class for each spec, such as ``NllOptions``.

``options.pyi`` holds the same classes for editors and type checkers. The command ``python -m
lossgate.reports.spec_files`` writes it from the specs.
"""

from typing import Any

from lossgate.losses import SPECS

_CLASSES = {spec.options_type.__name__: spec.options_type for spec in SPECS.values()}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"lossgate.options has no {name!r}; there are {', '.join(_CLASSES)}")


def __dir__() -> list[str]:
    return [*_CLASSES]
