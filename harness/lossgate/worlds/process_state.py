# SPDX-License-Identifier: Apache-2.0
"""State of a process that a task may leave changed: captures it, describes changes, restores it.

A world captures a ``ProcessState`` before each task and restores it afterwards. Ranks that are
threads of one process have a ``ThreadState`` each, and exchange a ``SharedState`` whenever another
rank goes on.

Two things stay as a task leaves them: random numbers of GPUs, and variables that compilers add to
the environment.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

_C: Any = torch._C
_OF_COMPILERS = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_DUPLICATE_LIB_OK", "CUDA_HOME")
"""Variables that torch.compile adds to the environment, and reads again later."""
_environment: dict[Any, Any] = getattr(os.environ, "_data")  # noqa: B009  undecoded, so that it compares quickly
_numpy: Any = numpy.random
_numpy_of_tasks = numpy.random.MT19937()
"""NumPy's generator while tasks run. To exchange it is quicker than to read and restore a state."""
_entered: list[Any] = []
"""Guards that restored inference mode. Each is kept, because a dropped guard ends its mode."""


class _Setting(NamedTuple):
    name: str
    """The expression that reads it, as a user writes it."""
    get: Callable[[], Any]
    set: Callable[[Any], object]


@dataclass(frozen=True, eq=False)
class SharedState:
    """State that all threads of a process share: torch's settings, the environment, random numbers,
    and how DTensor computes operators.
    """

    settings: tuple[Any, ...]
    """The values of ``_SHARED``."""
    environment: dict[Any, Any]
    random: Tensor
    """The state of torch's generator on the CPU. ``changes`` does not report it."""
    operators: dict[Any, Any]
    """The operators for which DTensor has functions of its own. The context ``loss_parallel`` adds
    some. Empty if DTensor is not loaded. ``changes`` does not report it."""

    @classmethod
    def capture(cls) -> "SharedState":
        return cls(_values(_SHARED), dict(_environment), torch.default_generator.get_state(), dict(_operators()))

    def changes(self) -> list[str]:
        """Returns the changes since the capture, in words."""
        variables = [] if self.environment == _environment else _environment_changes(self.environment)
        return [*_changes(_SHARED, self.settings), *variables]

    def restore(self) -> "SharedState":
        """Restores this state, and returns the state that it replaces."""
        same_environment = self.environment == _environment  # then no copy is needed
        environment = self.environment if same_environment else dict(_environment)
        operators = _operators()
        replaced = SharedState(_values(_SHARED), environment, torch.default_generator.get_state(), dict(operators))
        if not same_environment:
            _restore_environment(self.environment)
        if replaced.settings != self.settings:
            _restore(_SHARED, self.settings)
        torch.default_generator.set_state(self.random)
        if self.operators and operators != self.operators:
            operators.clear()
            operators.update(self.operators)
        return replaced


@dataclass(frozen=True, eq=False)
class ThreadState:
    """State that each thread has of its own, such as whether gradients are recorded.

    Capture, compare and restore it in the same thread.
    """

    settings: tuple[Any, ...]
    """The values of ``_OF_THREAD``."""

    @classmethod
    def capture(cls) -> "ThreadState":
        return cls(_values(_OF_THREAD))

    def changes(self) -> list[str]:
        """Returns the changes since the capture, in words."""
        return list(_changes(_OF_THREAD, self.settings))

    def restore(self) -> None:
        """Restores this state."""
        _restore(_OF_THREAD, self.settings)


@dataclass(frozen=True, eq=False)
class ProcessState:
    """All state of the process, and of the thread that captures it."""

    shared: SharedState
    of_thread: ThreadState
    random: tuple[Any, ...]
    """The state of Python's generator. Ranks that are threads share it, and NumPy's, because
    exchanging it is slow."""
    numpy: Any
    """NumPy's own generator. Tasks draw from another, which is exchanged for it."""

    @classmethod
    def capture(cls) -> "ProcessState":
        state = cls(SharedState.capture(), ThreadState.capture(), random.getstate(), _numpy.get_bit_generator())
        _numpy.set_bit_generator(_numpy_of_tasks)
        return state

    def changes(self) -> list[str]:
        """Returns the changes since the capture, in words. Random numbers do not count.

        Each text fits after "left", such as ``torch.get_default_dtype() at torch.float64 (it was
        torch.float32)``.
        """
        return [*self.shared.changes(), *self.of_thread.changes()]

    def restore(self) -> None:
        """Restores this state. Call this in the thread that captured it."""
        self.shared.restore()
        self.of_thread.restore()
        random.setstate(self.random)
        _numpy.set_bit_generator(self.numpy)


def _values(settings: Sequence[_Setting]) -> tuple[Any, ...]:
    return tuple([get() for _, get, _ in settings])


def _changes(settings: Sequence[_Setting], old: tuple[Any, ...]) -> Iterator[str]:
    for setting, was in zip(settings, old, strict=True):
        if (now := setting.get()) != was:
            yield f"{setting.name} at {now!r} (it was {was!r})"


def _restore(settings: Sequence[_Setting], values: tuple[Any, ...]) -> None:
    for setting, value in zip(settings, values, strict=True):
        if setting.get() != value:  # read only now, because one setting can change others
            setting.set(value)


def _different_variables(old: dict[Any, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yields the name, the old value and the present value of each variable that has changed."""
    for key in old | _environment:
        name, was, now = os.fsdecode(key), _decoded(old.get(key)), _decoded(_environment.get(key))
        added_by_compiler = was is None and name.startswith(_OF_COMPILERS)
        if was != now and not added_by_compiler:
            yield name, was, now


def _operators() -> dict[Any, Any]:
    """Returns the functions of DTensor for single operators, as it reads them; empty if it is not
    loaded.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor._op_dispatcher._custom_op_handlers if dtensor is not None else {}


def _decoded(value: Any) -> str | None:
    return None if value is None else os.fsdecode(value)


def _environment_changes(old: dict[Any, Any]) -> Iterator[str]:
    for name, was, now in _different_variables(old):
        yield f"os.environ.get({name!r}) at {now!r} (it was {was!r})"


def _restore_environment(old: dict[Any, Any]) -> None:
    for name, was, _ in list(_different_variables(old)):
        if was is None:
            del os.environ[name]
        else:
            os.environ[name] = was


def _set_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


class MixedPrecision(NamedTuple):
    """The precisions of float32 products, if a kernel has set one of them by its new name.

    Torch then refuses to read ``torch.get_float32_matmul_precision()``.
    """

    all: str
    cuda: str
    mkldnn: str


_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"))
"""The backend and the operator of each field of ``MixedPrecision``. ``all`` must be set first,
because it sets the others too."""


def _matmul_precision() -> str | MixedPrecision:
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:
        return MixedPrecision(*[_C._get_fp32_precision_getter(*operator) for operator in _PRECISIONS])


def _set_matmul_precision(value: str | MixedPrecision) -> None:
    by_new_names = value if isinstance(value, MixedPrecision) else MixedPrecision("none", "none", "none")  # unset
    for operator, precision in zip(_PRECISIONS, by_new_names, strict=True):
        _C._set_fp32_precision_setter(*operator, precision)
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)


def _cudnn_tf32() -> bool | None:
    try:
        return _C._get_cudnn_allow_tf32()
    except RuntimeError:  # a kernel has set convolutions and recurrent layers differently, by their new names
        return None


def _set_cudnn_tf32(allow: bool | None) -> None:
    if allow is not None:
        _C._set_cudnn_allow_tf32(allow)


def _reduced(name: str, get: Callable[[], tuple[bool, bool]], set_: Callable[[bool, bool], object]) -> _Setting:
    """Returns a setting of two flags. Torch's getter returns a tuple, and its setter takes two
    arguments.
    """
    return _Setting(name, get, lambda values: set_(*values))


def _set_inference_mode(enabled: bool) -> None:
    guard = _C._InferenceMode(enabled)
    guard.__enter__()
    _entered.append(guard)


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device if context is not None else None


def _autocast(device: str) -> tuple[_Setting, _Setting]:
    return (
        _Setting(
            f"torch.is_autocast_enabled({device!r})",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        ),
        _Setting(
            f"torch.get_autocast_dtype({device!r})",
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        ),
    )


_SHARED = (
    _Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.are_deterministic_algorithms_enabled()", _C._get_deterministic_algorithms, _set_deterministic),
    _Setting(
        "torch.is_deterministic_algorithms_warn_only_enabled()",
        _C._get_deterministic_algorithms_warn_only,
        _set_warn_only,
    ),
    _Setting("torch.get_float32_matmul_precision()", _matmul_precision, _set_matmul_precision),
    _reduced(
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _C._set_cublas_allow_bf16_reduced_precision_reduction,
    ),
    _reduced(
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _C._set_cublas_allow_fp16_reduced_precision_reduction,
    ),
    _Setting("torch.backends.cudnn.allow_tf32", _cudnn_tf32, _set_cudnn_tf32),
    _Setting("torch.backends.cudnn.enabled", _C._get_cudnn_enabled, _C._set_cudnn_enabled),
    _Setting("torch.backends.cudnn.benchmark", _C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    _Setting("torch.backends.cudnn.deterministic", _C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    _Setting("torch.backends.mkldnn.enabled", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
)

_OF_THREAD = (
    _Setting("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled, _set_inference_mode),
    _Setting(
        "torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled
    ),  # after inference mode, which sets it
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting("torch.is_autocast_cache_enabled()", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    _Setting("torch.get_default_device()", _default_device, torch.set_default_device),
    _Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch.autograd.set_multithreading_enabled", _C._is_multithreading_enabled, _C._set_multithreading_enabled
    ),
)
