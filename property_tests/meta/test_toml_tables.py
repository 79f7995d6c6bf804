# SPDX-License-Identifier: Apache-2.0
"""Tests of how tables of TOML are checked against a class."""

import tomllib
from dataclasses import dataclass
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from lossgate.base.errors import UsageError
from lossgate.engine.toml_tables import Expected, each, one_of, read_field, read_table


def even(text: str) -> None:
    if int(text) % 2:
        raise UsageError(f"{text} is odd")


class Inner(Struct, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=1), Expected("a positive whole number")]

    def __post_init__(self) -> None:
        if self.size == 13:
            raise UsageError("13 is no size")


class Outer(Struct, frozen=True, kw_only=True):
    needed: Annotated[str, Meta(examples=["x", "y"]), Expected("a text")]
    colour: Annotated[str, one_of(("red", "green"))] = "red"
    numbers: Annotated[tuple[str, ...], each("a list of even numbers", even)] = ()
    seconds: Annotated[float, Expected("a number")] = 1.0
    inner: Annotated[Inner, Expected("a table")] = Inner(size=1)
    several: Annotated[tuple[Inner, ...], Meta(min_length=1), Expected("at least one table")] = (Inner(size=1),)


def read(text: str) -> Outer:
    return read_table(Outer, tomllib.loads(text), "f.toml: ")


def test_a_table_is_read_as_its_class() -> None:
    found = read("needed = 'x'\nnumbers = ['2', '4']\nseconds = 5\ninner.size = 2\n[[several]]\nsize = 3")
    assert found == Outer(needed="x", numbers=("2", "4"), seconds=5.0, inner=Inner(size=2), several=(Inner(size=3),))
    assert isinstance(found.seconds, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needed is missing; expected a text, such as 'x' or 'y'"),
        ("needed = 1", "needed=1: expected a text, such as 'x' or 'y'"),
        ("need = 'x'", "unknown key 'need'; did you mean 'needed'? (expected one of needed, colour, "),
        ("colour = 'greem'", "colour='greem': did you mean 'green'? (expected one of red, green)"),
        ("colour = 2", "colour=2: expected one of red, green"),
        ("numbers = '2'", "numbers='2': expected a list of even numbers"),
        ("numbers = ['2', '3']", "numbers=['2', '3']: 3 is odd"),
        ("seconds = true", "seconds=True: expected a number"),
        ("inner = 3", "inner=3: expected a table"),
        ("inner.size = 0", "[inner] size=0: expected a positive whole number"),
        ("inner.size = 13", "[inner] 13 is no size"),
        ("several = []", "several=[]: expected at least one table"),
        ("several = [1]", "[[several]] number 1: 1: expected a table"),
        ("several = [{size = 1}, {}]", "[[several]] number 2: size is missing; expected a positive whole number"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_key(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(text)
    assert str(error.value).startswith(f"f.toml: {message}")


def test_fields_without_what_is_expected_are_no_keys() -> None:
    @dataclass
    class Own:
        public: Annotated[int, Expected("a whole number")] = 1
        private: int = 2

    with pytest.raises(UsageError, match=r"^unknown key 'private'; expected one of public$"):
        read_field(Own, "private", 3)
