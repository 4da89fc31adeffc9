# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `./forge CMD` or `pixi run CMD`.

Exit codes: 0 everything wanted exists, 1 a build, test or installation failed, 2 usage or
configuration, 3 something wanted could not be attempted, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from forge.bases import BaseName
from forge.cli import building, provenance, publishing, stacks, upkeep
from forge.cli.context import err, session
from forge.errors import ForgeError
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

INTERRUPTED = 130
GLOBAL_OPTIONS = ("--base", "--output", "--variant")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for part in (building, stacks, publishing, provenance, upkeep):
    app.add_typer(part.app)


@app.callback()
def options(
    base: Annotated[BaseName, typer.Option(envvar="FORGE_BASE", help="Build on.")] = BaseName.AUTO,
    output: Annotated[Path | None, typer.Option(help="Channel folder, if not channel/.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE instead of what variants.yaml says.")
    ] = None,
    root: Annotated[Path, typer.Option(envvar="FORGE_ROOT", hidden=True)] = Path(),
) -> None:
    """Build, lock, install and check the strix-forge packages.

    --base, --output and --variant may stand before or after the command.
    """
    session.root, session.wanted_base, session.output = root, base, output
    session.variants = variant or []


def globals_first(arguments: list[str]) -> list[str]:
    """Options that typer takes before the command only, moved there from anywhere before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first, rest, todo = [], [], arguments[:end]
    while todo:
        word = todo.pop(0)
        if word.startswith(tuple(f"{name}=" for name in GLOBAL_OPTIONS)):
            first.append(word)
        elif word in GLOBAL_OPTIONS:
            first += [word, *todo[:1]]
            del todo[:1]
        else:
            rest.append(word)
    return first + rest + arguments[end:]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not KeyboardInterrupt, which typer would turn into exit code 1."""


def interrupt(*_: object) -> None:
    raise Interrupted


def main() -> None:
    """Run the command line; every foreseen error is one message and an exit code."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    os.environ[PYPI_SOURCES] = PYPI_URL
    code = 0
    try:
        app(globals_first(sys.argv[1:]), prog_name="forge")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except Interrupted:
        err.print("interrupted; run the same command again to go on")
        code = INTERRUPTED
    except ForgeError as error:
        err.print(f"error: {error}", highlight=False, markup=False)
        code = error.exit_code
    except OSError as error:  # a full or failing disk, wherever it shows first
        where = error.filename or session.project.build
        err.print(f"error: {where}: {error.strerror}; mend that and run the same command again")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # py-rattler sometimes aborts while Python shuts down, after the work is done
    os._exit(code)
