# SPDX-License-Identifier: Apache-2.0
"""The random numbers that a kernel draws: others on each problem, and the same in each run.

They follow from the problem alone. So a kernel that is wrong now and then is wrong on some
problems, on these it is wrong again in a replay, and two calls with one problem can be compared bit
by bit. All ranks start with the same numbers.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import string_at
from typing import Any
from zlib import crc32

import numpy
import torch

from lossgate.problems.problem import Problem

_series, _drawn = 0, False


@contextmanager
def other_numbers(series: int) -> Generator[None]:
    """Makes each problem give other random numbers in the block. Outside it, the series is 0."""
    global _series
    _series = series
    try:
        yield
    finally:
        _series = 0


def seed_of(problem: Problem) -> int:
    """Returns the seed of a kernel's random numbers on a problem."""
    return crc32(problem.to_json().encode(), _series)


def seed(number: int) -> None:
    """Seeds the generators of torch on the CPU, of Python, and of NumPy."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


@contextmanager
def seeded(number: int) -> Generator[None]:
    """Seeds the generators, and notes whether the code in the block draws from them."""
    global _drawn
    seed(number)
    try:
        yield
    finally:
        at_end = _positions()
        seed(number)
        _drawn = _drawn or at_end != _positions()
        seed(number)  # ranks that are threads share two of them, and another may not have ended


def _positions() -> tuple[bytes, float, float]:
    """Returns values that differ if the generators are at other positions."""
    state = torch.default_generator.get_state()
    of_torch = string_at(state.data_ptr(), state.nbytes)  # without an operation of torch, which a mode could catch
    return of_torch, random.random(), numpy.random.random()


def has_drawn() -> bool:
    """Returns whether kernels have drawn random numbers in this process."""
    return _drawn


@contextmanager
def put_back() -> Generator[None]:
    """Puts the generators back to where they were before the block."""
    states: tuple[Any, ...] = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
