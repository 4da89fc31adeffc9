# SPDX-License-Identifier: BSD-3-Clause
"""What opens every package that the suite builds finds what a recipe's `files` do not say."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.contents import faults_of


@pytest.mark.parametrize(
    ("build", "held", "fault"),
    [
        ({"files": ["lib/*.so"]}, "lib/a.so", ""),
        ({"files": ["lib/*.so"]}, "bin/a", "bin/a is not among its `files`"),
        ({"files": {"include": ["lib/"], "exclude": ["lib/*.h"]}}, "lib/a.so", ""),
        ({"files": {"include": ["lib/"], "exclude": ["lib/*.h"]}}, "lib/a.h", "lib/a.h is not"),
        # without `include` it is all but what is left out
        ({"files": {"exclude": ["**/csrc/**"]}}, "x/a.py", ""),
        ({"files": {"exclude": ["**/csrc/**"]}}, "x/csrc/a.c", "x/csrc/a.c is not"),
        ({"noarch": "python"}, "lib/python3.12/site-packages/a.py", "is one Python's"),
        ({"script": ""}, "bin/a", "nothing makes its 1 files, such as bin/a"),
    ],
)
def test_files(build: dict[str, Any], held: str, fault: str) -> None:
    package: Any = SimpleNamespace(info=())
    found = faults_of(package, {"build": {"script": "make"} | build}, {held})
    assert fault in "".join(found) and bool(fault) == bool(found)
