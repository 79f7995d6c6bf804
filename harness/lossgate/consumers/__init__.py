# SPDX-License-Identifier: Apache-2.0
"""Those who listen to a run: failure files, evidence, the terminal. The engine knows none of them."""

from collections.abc import Callable

from lossgate.engine.run import Event

Consumer = Callable[[Event], None]
