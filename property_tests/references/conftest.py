# SPDX-License-Identifier: Apache-2.0
"""What tests of the references share."""

import pytest


@pytest.fixture(autouse=True)
def _check_shapes(shape_checks: None) -> None:
    """Every test of a reference has its shapes checked."""
