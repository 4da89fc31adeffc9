# SPDX-License-Identifier: BSD-3-Clause
"""strix-validate with a reference that is wrong on purpose: its checks must then fail.

Usage: python wrong_reference.py ARGUMENT...
where ARGUMENT... are those of strix-validate.
"""

from strix_validate import cli
from strix_validate.numerics import reference

right = reference.attention


def scaled(q, k, v, grad_out, **options):
    """The softmax scale is 1 % too large."""
    return right(q * 1.01, k, v, grad_out, **options)


if __name__ == "__main__":
    reference.attention = scaled
    cli.main()
