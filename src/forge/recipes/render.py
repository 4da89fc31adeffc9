# SPDX-License-Identifier: BSD-3-Clause
"""The one way to rattler-build's `build_recipes`, for rendering and for building.

It is deprecated, and prints what it renders to file descriptor 1, past sys.stdout. py-rattler-build
still lacks a render that takes build_num and build_string_prefix and returns the outputs, and a
build that runs the script of a staging output once: `run_build`, the announced successor, runs it
once per output (0.73). With both, this module goes, and the limit on py-rattler-build's version.
"""

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
    """Call rattler-build's function without its warning; twice where nothing resolves.

    Of two processes that unpack one package into a cold cache rattler fails in one, with no reason.
    """
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            cli_api.build_recipes(recipes, **arguments)
        except Exception as error:
            if str(error) != "Failed to resolve dependencies":
                raise
            cli_api.build_recipes(recipes, **arguments)


def render(path: Path, base: Base, digest: str, number: int | None = None) -> list[dict[str, Any]]:
    """Render the outputs of one recipe.yaml in every variant, as rattler-build would build them.

    Returns mappings with `recipe` (rendered) and `build_configuration`. `number` overrides the
    recipe's build number, which an exact pin between outputs hashes too. Raises ForgeError.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile() as capture, tempfile.TemporaryFile() as noise:
        saved = {1: os.dup(1), 2: os.dup(2)}
        os.dup2(capture.fileno(), 1)
        os.dup2(noise.fileno(), 2)  # a panic of Rust prints its stack
        try:
            # says where and why a recipe is invalid; build_recipes does not
            Stage0Recipe.from_file(path).render(base.variants)
            build_recipes([path], **base.arguments(digest, number), render_only=True)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ForgeError(f"{path} does not render: {error!s:.1000}") from None
        finally:
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
        capture.seek(0)
        return json.load(capture)
