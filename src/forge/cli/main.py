# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `./forge CMD`, and `pixi run CMD` for what people type daily.

Exit codes: 0 everything wanted exists, 1 a build, test or installation failed, 2 usage or
configuration, 3 something wanted could not be attempted, 75 the time of --stop-after is up, 130
interrupted. Whoever closes the output early, as `head` does, has read enough.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from typing import Annotated

import typer
from typer import Option
from typer.core import TyperArgument

from forge.building.display import Display
from forge.cli import building, publishing, stacks, upkeep
from forge.cli.context import Context, err, takes_context
from forge.cli.time_box import NOT_FINISHED, TimeUp
from forge.errors import ForgeError, one_line, redacted
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

INTERRUPTED = 130

# the usage line names the arguments; typer adds their types in Python
TyperArgument.display_type_rich = lambda *_, **__: None  # type: ignore[method-assign]
app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
for part in (building, stacks, publishing, upkeep):
    app.add_typer(part.app)

Verbose = Annotated[bool, Option("--verbose", "-v", help="Print what builds print.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print results and errors alone.")]


@app.callback()
@takes_context
def options(ctx: Context, verbose: Verbose = False, quiet: Quiet = False) -> None:
    """Build, lock, install and check the strix-forge packages."""
    Display.verbosity = verbose - quiet


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not KeyboardInterrupt, which typer would turn into exit code 1."""


def interrupt(*_: object) -> None:
    """Raise Interrupted, as a handler of signals."""
    raise Interrupted


def run() -> int:
    """Run the command line; every foreseen error is one message and an exit code."""
    try:
        # one that exists: unlike Python, rattler fails where TMPDIR names none
        os.environ["TMPDIR"] = tempfile.gettempdir()
        os.environ.setdefault("RUST_BACKTRACE", "0")  # a panic is a line of ours
        os.environ.pop("TOKIO_WORKER_THREADS", None)  # at 0 rattler panics
        sys.exit(app(prog_name="forge"))
    except SystemExit as stop:
        closed = isinstance(stop.__context__, BrokenPipeError)  # click and rich make 1 of it
        return 0 if closed else int(stop.code or 0)
    except Interrupted:
        err.print("interrupted; run the same command again to go on")
        return INTERRUPTED
    except TimeUp as reason:
        err.print(f"not finished: {reason}; run the same command again to go on")
        return NOT_FINISHED
    except ForgeError as error:
        err.print(f"error: {error}")
        return error.exit_code
    except OSError as error:  # a full or failing disk, wherever it shows first
        where = f"{error.filename}: " if error.filename else ""
        err.print(f"error: {where}{error.strerror or error}; fix that and run the command again")
        return 1
    except BaseException as error:  # what nobody foresaw; a panic of Rust is no Exception
        with tempfile.NamedTemporaryFile("w", prefix="forge-", suffix=".log", delete=False) as log:
            log.write(redacted(traceback.format_exc()))
        says = one_line(f"{type(error).__name__}: {error}")
        err.print(f"error: {says}; a fault of forge: report it with {log.name}")
        return 1


def main() -> None:
    """Run the command line and exit with its code: the entry point of `./forge`."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    os.environ[PYPI_SOURCES] = PYPI_URL
    os.environ.pop("INIT_CWD", None)  # pixi's; a ./forge that this starts would go there
    code = run()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    # py-rattler sometimes aborts while Python shuts down, after the work is done
    os._exit(code)
