# SPDX-License-Identifier: Apache-2.0
"""What candidates are run on: problems, their split over ranks, their tensors."""
