# SPDX-License-Identifier: BSD-3-Clause
"""The driver's only calls of rattler-build's `build_recipes`, to render and to build.

The function is deprecated, and prints what it renders to file descriptor 1, past sys.stdout. Two
functions are missing in py-rattler-build that could replace it: a render that takes build_num and
build_string_prefix and returns the outputs, and a build that runs the script of a staging output
once. `run_build`, the announced successor, runs that script once per output (0.73). Once both
exist, this module goes, and so does the limit on py-rattler-build's version.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rattler_build import Stage0Recipe, cli_api

from forge.bases import Base
from forge.errors import ForgeError

STDOUT = 1
STDERR = 2


def build_recipes(recipes: list[str | Path], **arguments: Any) -> None:
    """Call rattler-build's function of this name, without its warning.

    It is called again if dependencies do not resolve: of two processes that unpack the same package
    into a cold cache, rattler fails in one, and states no reason.
    """
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            cli_api.build_recipes(recipes, **arguments)
        except Exception as error:
            if str(error) != "Failed to resolve dependencies":
                raise
            cli_api.build_recipes(recipes, **arguments)


def render(
    path: Path,
    base: Base,
    digest: str,
    number: int | None = None,
) -> list[dict[str, Any]]:
    """Render the outputs of a recipe in every variant, as rattler-build would build them.

    Args:
        path: The recipe.yaml.
        base: Has the variants.
        digest: The value of the content_digest variant.
        number: Replaces the recipe's build number. It is part of the hash in the build string of an
            output that another output pins exactly.

    Returns:
        A mapping per output: `recipe`, rendered, and `build_configuration`.

    Raises:
        ForgeError: The recipe does not render.
    """
    with _captured_output() as capture:
        try:
            # This states where and why a recipe is invalid, which build_recipes does not.
            Stage0Recipe.from_file(path).render(base.variants)
            build_recipes(
                [path],
                **base.arguments(digest, number),
                render_only=True,
            )
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            if not isinstance(error, Exception) and not is_panic:
                raise
            raise ForgeError(f"{path} does not render: {error!s:.1000}") from None
        capture.seek(0)
        outputs: list[dict[str, Any]] = json.load(capture)
        return outputs


@contextlib.contextmanager
def _captured_output() -> Iterator[IO[bytes]]:
    """Yield a file that gets what this process writes to its standard output meanwhile.

    What it writes to standard error is dropped: a panic of Rust prints its stack there.
    """
    sys.stdout.flush()
    with (
        tempfile.TemporaryFile() as capture,
        tempfile.TemporaryFile() as dropped,
    ):
        saved = {
            STDOUT: os.dup(STDOUT),
            STDERR: os.dup(STDERR),
        }
        os.dup2(capture.fileno(), STDOUT)
        os.dup2(dropped.fileno(), STDERR)
        try:
            yield capture
        finally:
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
