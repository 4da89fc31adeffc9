# SPDX-License-Identifier: BSD-3-Clause
"""Call rattler-build's `build_recipes` to render and to build. No other module calls it.

The function is deprecated. It also writes the rendered recipe to file descriptor 1 instead of
sys.stdout. But py-rattler-build lacks two functions that could replace it:

- a function that renders with build_num and build_string_prefix, and returns the outputs
- a function that builds all outputs, and runs the script of a staging output only once;
  `run_build`, the announced successor, runs that script once per output (version 0.73)

Once both exist, this module can be removed, together with the limit on py-rattler-build's version.
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
    """Call rattler-build's `build_recipes` without its deprecation warning.

    If the dependencies do not resolve, the call is repeated once. The reason is that if two
    processes unpack the same package into an empty cache, rattler fails in one of them.
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
        base: The base, for its variants.
        digest: The value of the variant `content_digest`.
        number: The build number; None for the recipe's. If an output pins another one exactly, the
            hash in its build string depends on this number.

    Returns:
        A mapping for each output, with the rendered `recipe` and the `build_configuration`.

    Raises:
        ForgeError: The recipe does not render.
    """
    with _captured_output() as capture:
        try:
            # Render with Stage0Recipe first: its errors name the invalid place in the recipe.
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
    """Redirect standard output of this process into a file while the block runs; yield the file.

    Standard error is discarded, because a Rust panic would print its message there.
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
