# SPDX-License-Identifier: Apache-2.0
"""What several losses share: sequences that count, and the log-probabilities of other policies."""
