# SPDX-License-Identifier: BSD-3-Clause
"""strix-validate with a reference that is wrong on purpose: its checks must then fail.

Usage: python wrong_reference.py scale|window|causal|heads ARGUMENT...
where ARGUMENT... are those of strix-validate.
"""

import sys

from strix_validate import cli
from strix_validate.numerics import reference

right = reference.attention


def scale(q, k, v, grad_out, **options):
    """The softmax scale is 1 % too large."""
    return right(q * 1.01, k, v, grad_out, **options)


def window(q, k, v, grad_out, **options):
    """The window is ignored."""
    return right(q, k, v, grad_out, **options | {"window": (-1, -1)})


def causal(q, k, v, grad_out, **options):
    """Top-left and bottom-right are mixed up."""
    other = {None: None, "top-left": "bottom-right", "bottom-right": "top-left"}
    return right(q, k, v, grad_out, **options | {"causal": other[options.get("causal")]})


def heads(q, k, v, grad_out, **options):
    """Query heads read the key/value heads in reverse order."""
    found = right(q, k.flip(1), v.flip(1), grad_out, **options)
    return found | {"dk": found["dk"].flip(1), "dv": found["dv"].flip(1)}


WRONG = {function.__name__: function for function in (scale, window, causal, heads)}

if __name__ == "__main__":
    reference.attention = WRONG[sys.argv.pop(1)]
    cli.main()
