# SPDX-License-Identifier: BSD-3-Clause
"""Downloads by pip's own HTTP session and finder of files, as pip is configured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.utils import parse_wheel_filename
from pip._internal.cli import cmdoptions
from pip._internal.commands.download import DownloadCommand
from pip._internal.exceptions import PipError
from pip._internal.models.link import Link

from forge.errors import ForgeError, NotAttempted

# pip warns of every configured wheel folder that lacks a project; that is no news here
logging.getLogger("pip").setLevel(logging.ERROR)

CONNECT_SECONDS = 10
CHUNK = 1 << 20
# What pip's session raises: requests' own errors are OSErrors, and pip 26 puts its own around them.
UNREACHABLE = (OSError, PipError)

Progress = Callable[[str, int, int | None], None]
"""Called with (file name, bytes so far, bytes in all or None)."""


@contextlib.contextmanager
def pip_session(arguments: Sequence[str] = ()) -> Iterator[tuple[Any, Any]]:
    """pip's HTTP session (its proxies, certificates, credentials) and finder of files.

    `pip download` would do for wheels, but for an sdist it runs setup.py to learn the metadata,
    and flash-attn's imports torch. So the two pip objects that find and get files are used as
    they are; their names have not changed between pip 20 and 26.
    """
    command = DownloadCommand("download", "")
    options, _ = command.parse_args(
        ["--retries", "2", "--timeout", str(CONNECT_SECONDS), "--no-cache-dir", "-qqq", *arguments,
         "-d", ".", "unused"]
    )  # fmt: skip
    with command.main_context():
        session = command.get_default_session(options)
        target = cmdoptions.make_target_python(options)
        yield session, command._build_package_finder(options, session, target_python=target)


@contextlib.contextmanager
def link_to(url: str, purl: PackageURL | None) -> Iterator[tuple[Any, Link]]:
    """A session, and the link to a file: its URL, or what pip's index has for a package URL.

    Raises NotAttempted when the index does not offer the file.
    """
    arguments, name = [], url.rsplit("/", 1)[1]
    if name.endswith(".whl"):
        tags = sorted(parse_wheel_filename(name)[3], key=str)
        arguments += ["--only-binary", ":all:", "--no-deps", "--abi", tags[0].abi]
        if tags[0].interpreter.startswith("cp"):
            version = f"{tags[0].interpreter[2]}.{tags[0].interpreter[3:]}"
            arguments += ["--implementation", "cp", "--python-version", version]
        for tag in tags:
            arguments += ["--platform", tag.platform]
    with pip_session(arguments) as (session, finder):
        if purl is None:
            yield session, Link(url)
            return
        for candidate in finder.find_all_candidates(purl.name):
            if candidate.link.filename == name:
                yield session, candidate.link
                return
        raise NotAttempted("pip's index does not offer it")


def download(session: Any, url: str, partial: Path, progress: Progress) -> None:
    """Get a file, from where `partial` ends. Raises NotAttempted with the host's reason."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    name = partial.name.removesuffix(".partial")
    try:
        with session.get(url, stream=True, headers=headers) as response:
            if response.status_code == 416:  # everything is here already
                return
            if response.status_code >= 400:
                raise NotAttempted(f"HTTP {response.status_code}")
            resumed = response.status_code == 206
            have = have if resumed else 0
            length = response.headers.get("content-length")
            total = have + int(length) if length else None
            with partial.open("ab" if resumed else "wb") as out:
                for chunk in response.iter_content(CHUNK):
                    out.write(chunk)
                    have += len(chunk)
                    progress(name, have, total)
            if total is not None and have < total:
                raise NotAttempted(f"it ended after {have} of {total} bytes")
    except NotAttempted:
        raise
    except UNREACHABLE as error:
        if getattr(error, "errno", None) is not None:
            raise ForgeError(f"cannot write {partial}: {error.strerror}") from None
        raise NotAttempted(reason_of(error)) from None


def reason_of(error: Exception) -> str:
    """Why a host could not be reached, without the layers that requests and pip put around it."""
    if isinstance(error, PipError):
        error = error.__context__ or error
    reason = getattr(error.args[0], "reason", error) if error.args else error
    return str(reason).rsplit(": ", 1)[-1]
