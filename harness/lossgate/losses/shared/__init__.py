# SPDX-License-Identifier: Apache-2.0
"""What several losses share: masks of sequences, other policies' log-probabilities, the sides of a
clip.
"""
