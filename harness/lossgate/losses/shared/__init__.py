# SPDX-License-Identifier: Apache-2.0
"""What several losses share: masks of sequences, pairs of them, other policies' log-probabilities,
the sides of a clip.
"""
