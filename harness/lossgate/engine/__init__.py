# SPDX-License-Identifier: Apache-2.0
"""From candidates to verdicts: plan, search, run, conclude; and failures to replay."""
