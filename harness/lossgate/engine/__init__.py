# SPDX-License-Identifier: Apache-2.0
"""From candidates to verdicts: plan, search, examine, conclude; and failures to replay."""
