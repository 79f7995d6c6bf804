# SPDX-License-Identifier: Apache-2.0
"""The options of each spec, as a kernel is given them, such as ``NllOptions``.

``options.pyi`` beside this file holds the same for editors and type checkers. It is written from
the specs: ``python -m lossgate.reports.spec_files``.
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
