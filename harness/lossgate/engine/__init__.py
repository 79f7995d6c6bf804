# SPDX-License-Identifier: Apache-2.0
"""Plans the cells of candidates, runs them and concludes their verdicts. Also replays failures."""
