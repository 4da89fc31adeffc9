# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `./forge CMD`, and `pixi run CMD` for the most frequent commands.

Exit codes:
    0: Success. Also the code if the reader of the output ends early, as `head` does.
    1: A build, test, installation or check failed, or something was refused.
    2: The command line or the configuration is wrong.
    3: Something that was requested could not be attempted.
    75: The time of --stop-after is up.
    130: The command was interrupted.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer import Option
from typer.core import TyperArgument

from forge.cli import building, publishing, stacks, upkeep
from forge.cli.context import Context, ForgeGroup, err
from forge.cli.time_box import NOT_FINISHED, TimeUp
from forge.errors import ForgeError, one_line, redact
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

INTERRUPTED = 130

# The usage line already names the arguments. Typer would also print their Python types.
TyperArgument.display_type_rich = lambda *_, **__: None  # type: ignore[method-assign]
app = typer.Typer(
    cls=ForgeGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (building, stacks, publishing, upkeep):
    app.add_typer(module.app)

Verbose = Annotated[
    bool,
    Option("--verbose", "-v", help="Print the output of builds."),
]
Quiet = Annotated[
    bool,
    Option("--quiet", "-q", help="Print only results and errors."),
]


@app.callback()
def options(
    context: typer.Context,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Build, lock, install and check the strix-forge packages."""
    ctx: Context = context.obj
    ctx.verbosity = int(verbose) - int(quiet)


class Interrupted(BaseException):
    """Raised for Ctrl-C or SIGTERM.

    KeyboardInterrupt is not used for this, because typer would turn it into exit code 1.
    """


def interrupt(*_: object) -> None:
    """Raise Interrupted. This is the signal handler."""
    raise Interrupted


def run() -> int:
    """Run the command line and return the exit code. Expected errors are printed as one message."""
    try:
        _prepare_environment()
        sys.exit(app(prog_name="forge"))
    except SystemExit as stop:
        # click and rich exit with 1 if the reader of the output has closed the pipe.
        is_closed_pipe = isinstance(stop.__context__, BrokenPipeError)
        return 0 if is_closed_pipe else int(stop.code or 0)
    except Interrupted:
        err.print("interrupted; run the same command again to continue")
        return INTERRUPTED
    except TimeUp as error:
        err.print(f"not finished: {error}; run the same command again to continue")
        return NOT_FINISHED
    except ForgeError as error:
        err.print(f"error: {error}")
        return error.exit_code
    except OSError as error:
        # The disk may be full or failing, for example.
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        err.print(f"error: {where}{reason}; fix that and run the command again")
        return 1
    except BaseException as error:
        # This error is unexpected. It may be a Rust panic, which is not an Exception.
        _report_fault(error)
        return 1


def _prepare_environment() -> None:
    """Set or remove environment variables that would make the bindings of rattler fail.

    Raises:
        ForgeError: The user has no home folder, for example in a container with an unknown user id.
    """
    try:
        Path.home()
    except RuntimeError:
        reason = "this user has no home folder, in which rattler and pixi keep files"
        raise ForgeError(f"{reason}: set HOME to a folder that can be written") from None
    # Unlike Python, rattler fails if TMPDIR names a folder that does not exist.
    os.environ["TMPDIR"] = tempfile.gettempdir()
    # rattler panics if TOKIO_WORKER_THREADS is 0.
    os.environ.pop("TOKIO_WORKER_THREADS", None)


def _report_fault(error: BaseException) -> None:
    """Write the traceback of an unexpected error to a file, and print the path of the file."""
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="forge-",
        suffix=".log",
        delete=False,
    ) as log:
        log.write(redact(traceback.format_exc()))
    description = one_line(f"{type(error).__name__}: {error}")
    err.print(f"error: {description}; this is a bug in forge: report it with {log.name}")


def main() -> None:
    """Run the command line and exit with its code: the entry point of `./forge`."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    os.environ[PYPI_SOURCES] = PYPI_URL
    # pixi sets INIT_CWD. A ./forge started by this process would change to that folder.
    os.environ.pop("INIT_CWD", None)
    code = run()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    # py-rattler sometimes aborts while Python shuts down, after the work is done.
    os._exit(code)
