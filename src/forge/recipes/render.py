# SPDX-License-Identifier: BSD-3-Clause
"""The one way to rattler-build's `build_recipes`, for rendering and for building.

It prints what it renders, and it is deprecated. Waited for upstream, in py-rattler-build:
1. a render that takes build_num and build_string_prefix and returns the outputs;
2. a build that runs the script of a staging output once, not once per output, as `run_build`,
   the announced successor, does in 0.73.
With both, this module goes and the pin on py-rattler-build's version with it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rattler_build import Stage0Recipe, cli_api

from forge.bases import Base
from forge.errors import ForgeError


def build_recipes(recipes: list[str | Path], **arguments: Any) -> None:
    """rattler-build's function without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        cli_api.build_recipes(recipes, **arguments)


def render(path: Path, base: Base, digest: str, number: int | None = None) -> list[dict[str, Any]]:
    """The outputs of one recipe.yaml in every variant, as rattler-build would build them.

    Returns mappings with `recipe` (rendered) and `build_configuration`. `number` overrides the
    recipe's build number, which an exact pin between outputs hashes too. Raises ForgeError.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    # rattler-build prints past sys.stdout, so the file descriptor itself is redirected
    with tempfile.TemporaryFile() as capture:
        os.dup2(capture.fileno(), 1)
        try:
            build_recipes([path], **base.arguments(digest, number), render_only=True)
        except Exception as error:
            raise ForgeError(f"{path} does not render: {_parse_error(path) or error}") from None
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        capture.seek(0)
        outputs: list[dict[str, Any]] = json.load(capture)
        return outputs


def _parse_error(path: Path) -> str:
    """The parse error of an invalid recipe: build_recipes says only that it failed to parse."""
    try:
        Stage0Recipe.from_file(path)
    except Exception as error:
        return str(error)
    return ""
