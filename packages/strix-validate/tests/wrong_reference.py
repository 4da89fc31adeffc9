# SPDX-License-Identifier: BSD-3-Clause
"""Run strix-validate with a reference that is wrong on purpose, so that checks must fail.

Usage: python wrong_reference.py ARGUMENT...
The arguments are those of strix-validate.
"""

from strix_validate import cli
from strix_validate.numerics import reference

attention = reference.attention


def scaled(q, k, v, grad_out, **options):
    """Return attention with a softmax scale that is 1 % too large."""
    return attention(q * 1.01, k, v, grad_out, **options)


if __name__ == "__main__":
    reference.attention = scaled
    cli.main()
