# SPDX-License-Identifier: Apache-2.0
"""The gate of these tests."""

from pathlib import Path

import pytest

from property_tests.meta.gate_decisions.decided import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)
