# SPDX-License-Identifier: Apache-2.0
"""The dtypes that inputs can have and stages can be rounded to.

They are names, so that settings can be read before torch is loaded; ``numerics.float_formats`` has
torch's own.
"""

DTYPES = ("float32", "bfloat16", "float16")
