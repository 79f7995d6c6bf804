# SPDX-License-Identifier: Apache-2.0
"""What adapters share: imports of their library, declarations of entry points, and rows."""

import importlib
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lossgate.adapters import LIBRARIES
from lossgate.base.errors import UsageError
from lossgate.declaration.candidate import Candidate, Kernel, candidate
from lossgate.declaration.conventions import Conventions
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import Excluded
from lossgate.worlds.running import current_mesh

IGNORED = -100
"""The label of a token that is not trained."""
ONE_EACH = Excluded("token", because="it takes one advantage for each sequence")
NO_SAMPLES = Excluded("some", because="the spec can mask whole sequences, and it does not")
FULL_RANKS = {"empty": Excluded("rank", because="it takes the mean over the sequences of its rank")}
NO_GRAPH = {"empty": Excluded("rank", because="without a token its results have no graph")}
UNBOUNDED_KL = {"reference": Excluded("far", because="the spec clamps the log-ratio to the reference, and it does not")}
OVERFLOW = {"generation": Excluded("extreme", because="it bounds a weight that overflows, and the spec drops it")}
_WEIGHED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": (2.0, 1.5)}
TIS = _WEIGHED | {"truncated_importance_sampling_type": "tis"} | OVERFLOW
ICEPOP = _WEIGHED | {
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio_min": 0.5,
}
BOTH = {"differentiable": ("logprobs", "token_entropy")}
UPCASTS = {"dtypes": ("float32", "bfloat16")}
"""Of an entry point that computes in float32, whatever the dtype of its inputs is."""
INTERPRETED: dict[str, Any] = {}
"""In ``supports`` of Triton's kernels: what is left out where they are interpreted."""
if not torch.cuda.is_available():
    INTERPRETED["large"] = Excluded("tokens", "sequences", "vocabulary", because="Triton's interpreter takes minutes")


def clamped_at(nats: int) -> dict[str, Excluded]:
    """Returns what ``supports`` says of a loss that clamps log-ratios, as the specs do not."""
    return {"ratios": Excluded("extreme", because=f"it clamps log-ratios at {nats} nats")}


def rounds(*stages: str, grads_in_forward: bool = False, **given: Any) -> dict[str, Any]:
    """Returns what an entry point declares that takes bfloat16, too, and rounds stages to it then.

    Args:
        stages: the names of ``Precision`` that are bfloat16 where the inputs are.
        grads_in_forward: as in ``Precision``.
        given: other arguments of ``Precision`` where the inputs are bfloat16.
    """
    rounded: Any = dict.fromkeys(stages, "bfloat16") | given
    coarser = Precision(grads_in_forward=grads_in_forward, **rounded)
    return UPCASTS | {"precision": {"float32": Precision(grads_in_forward=grads_in_forward), "bfloat16": coarser}}


LOG_SOFTMAX = rounds("logits", "logsumexp", "logprobs", "dlogits", "loss")
"""Of an entry point that calls PyTorch's log_softmax on its logits. On a CPU that keeps the sum of
exponentials in the dtype of its input.
"""
_CONVENTIONS = [field.name for field in fields(Conventions)]


def entry_of(name: str) -> Callable[..., Callable[[Kernel], Candidate]]:
    """Returns the decorator of a library's entry points.

    It is ``candidate`` with a dp axis and float32 by default. Conventions are arguments of their
    own. The candidate's name is the entry point's id, such as "liger.cross_entropy".
    """

    def entry(spec: str, head: str, **declared: Any) -> Callable[[Kernel], Candidate]:
        conventions = Conventions(**{one: declared.pop(one) for one in _CONVENTIONS if one in declared})
        given: dict[str, Any] = {"axes": ("dp",), "dtypes": ("float32",)} | declared

        def declare(kernel: Kernel) -> Candidate:
            called = f"{name}.{getattr(kernel, '__name__', '')}"
            return candidate(spec, head=head, conventions=conventions, name=called, **given)(kernel)

        return declare

    return entry


# Imports


def load(library: str, module: str, *names: str, absent: str = "", bare: str = "") -> Any:
    """Imports a module of a library.

    Args:
        library: the name of the adapter.
        module: the module's dotted name.
        names: what is wanted of it.
        absent: modules, with spaces between them, that it imports on the way and that no loss
            needs. Something that takes any use stands in for them, so they need not be installed.
        bare: packages whose ``__init__.py`` is not run, because it imports what no loss needs.

    Returns:
        The module; or what ``names`` says, the thing itself or a tuple.

    Raises:
        UsageError: if the library is not installed or too old, or has no such module or name.
    """
    known = LIBRARIES[library]
    known.check()
    if not torch.cuda.is_available():  # Triton decides when it is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        with _importing(absent.split(), bare.split()):
            found = _as_written(importlib.import_module(module))
        wanted = tuple(getattr(found, name) for name in names)
    except Exception as error:  # whatever ends an import
        raise UsageError(
            f"lossgate.adapters.{library}: {known.package} {known.installed} has no {module} as it is known "
            f"({error}); known is {' or '.join(known.known)}"
        ) from error
    return wanted[0] if len(wanted) == 1 else wanted or found


def _as_written(module: ModuleType) -> ModuleType:
    """Takes ``torch.compile`` off the functions of a module: on a CPU it takes minutes, and what is
    judged is what they say.
    """
    for name, value in [*vars(module).items()]:
        if (written := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            setattr(module, name, written)
    return module


class _Any(ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Any):
    """Takes any use: it has every attribute, decorates, and can be a base."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and not named and callable(given[0]) else super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __init_subclass__(cls, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return type(self)(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _StandIn(ModuleType):
    """A package without its ``__init__.py``. What it lacks is a submodule, or takes any use."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__path__:
            try:
                return importlib.import_module(f"{self.__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{self.__name__}.{name}":
                    raise
        setattr(self, name, type(name, (Anything,), {}))
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, absent: Sequence[str], bare: Sequence[str]) -> None:
        self._absent, self._bare = absent, bare

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self._bare:
            found = PathFinder.find_spec(name, path)
            if found is None:
                return None
            spec = ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = found.submodule_search_locations
            return spec
        is_absent = any(f"{name}.".startswith(f"{one}.") for one in self._absent)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _importing(absent: Sequence[str], bare: Sequence[str]) -> Generator[None]:
    """Has stand-ins found by the imports in its body, and forgets those of other libraries."""
    finder = _Finder(absent, bare)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in [*sys.modules.items()]:
            if isinstance(module, _StandIn) and not module.__path__:
                del sys.modules[name]


# Inputs


def ignoring(x: Any, ids: Tensor | None = None) -> Tensor:
    """Returns the labels, or other ids, with -100 where nothing is trained."""
    return (x.labels if ids is None else ids).masked_fill(~x.mask, IGNORED)


def rows(x: Any, names: str) -> Any:
    """Returns fields, named with spaces between them, in rows: ``[B, S]`` each. Masks are floats,
    as in frameworks.
    """
    given = [getattr(x, name) for name in names.split()]
    return tuple(x.to_rows(one.float() if one.dtype == torch.bool else one) for one in given)


def rows_of_labels(x: Any) -> Tensor:
    """Returns ``[B, S]`` labels, with -100 where nothing is trained."""
    return x.to_rows(ignoring(x), fill=IGNORED)


def pair_sums(x: Any, *names: str) -> tuple[Tensor, ...]:
    """Returns for each field its sum over the trained tokens of chosen responses, ``[pairs]``, and
    that of the rejected ones.
    """
    sums = [x.to_rows(getattr(x, name).where(x.mask, 0.0)).sum(1) for name in names]
    return tuple(half for one in sums for half in (one[0::2], one[1::2]))


def chosen_first(rows_of_pairs: Tensor) -> Tensor:
    """Returns ``[B, ...]`` with all chosen responses before all rejected ones."""
    return torch.cat([rows_of_pairs[0::2], rows_of_pairs[1::2]])


def mean(x: Any, losses: Tensor) -> Tensor:
    """Returns the mean over the trained tokens of the whole batch, as a trainer takes it of the
    losses of tokens, ``[T]``, or of their sum.
    """
    total = losses.where(x.mask, 0.0).sum() if losses.ndim else losses
    return total / x.valid_tokens.clamp(min=1)


def current_group(axis: str) -> Callable[[], Any]:
    """Returns a function that gives the group of the rank that runs: for libraries that keep their
    groups in variables of a module.
    """
    return lambda: current_mesh().get_group(axis)
