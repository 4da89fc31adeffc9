# SPDX-License-Identifier: BSD-3-Clause
"""A mock of `gh release`. The folder $RELEASES/TAG has the files of the release TAG.

The mock knows the commands that our workflows use, and fails for any other command. As gh does, it
downloads all files that match a pattern, and fails if the upload of such a file was never finished.

A test can stop the mock with a file in the folder $HOLD. The file `list` stops it before it lists
the releases. The file `upload` stops it in the middle of an upload, so that an unfinished file
remains.
"""

import fnmatch
import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

STARTED = ".started"  # the suffix of an unfinished file
UPLOADED = '.assets[] | select(.state == "uploaded").name'


def main() -> int:
    """Run one command, and return its exit code."""
    parser = ArgumentParser(prog="gh")
    parser.add_argument("group", choices=["release"])
    subparsers = parser.add_subparsers(dest="command", required=True)
    parsers = {}
    for name in ("list", "view", "create", "upload", "download", "verify-asset"):
        parsers[name] = subparsers.add_parser(name)
        if name != "list":
            parsers[name].add_argument("tag")
        parsers[name].add_argument("--repo")
    for name in ("list", "view"):
        parsers[name].add_argument("--json", required=True)
        parsers[name].add_argument("--jq", required=True)
    parsers["list"].add_argument("--limit")
    parsers["create"].add_argument("--prerelease", action="store_true")
    for name in ("--title", "--notes"):
        parsers["create"].add_argument(name, required=True)
    for name in ("upload", "verify-asset"):
        parsers[name].add_argument("files", nargs="+", type=Path)
    for name in ("upload", "download"):
        parsers[name].add_argument("--clobber", action="store_true")
    for name in ("--dir", "--output"):
        parsers["download"].add_argument(name)
    parsers["download"].add_argument("--pattern", action="append", default=[])
    words = parser.parse_args()
    assert os.environ["GH_TOKEN"], "gh needs a token"
    assert words.repo or os.environ["GH_REPO"], "gh needs a repository"
    releases = Path(os.environ["RELEASES"])
    if words.command == "list":
        assert (words.json, words.jq) == ("tagName", ".[].tagName")
        wait_at("list")
        for notes in sorted(releases.rglob(".notes")):
            print(notes.parent.relative_to(releases))
        return 0
    folder = releases / words.tag
    if words.command == "create":
        folder.mkdir(parents=True)
        (folder / ".notes").write_text(f"{words.title}\n{words.notes}")
        return 0
    if not (folder / ".notes").exists():
        print("release not found", file=sys.stderr)
        return 1
    commands = {"view": view, "upload": upload, "download": download, "verify-asset": verify}
    return commands[words.command](words, folder)


def view(words: Namespace, folder: Path) -> int:
    """Print the names of the completely uploaded files of a release."""
    assert (words.json, words.jq) == ("assets", UPLOADED)
    for path in sorted(folder.glob("[!.]*")):
        if not path.name.endswith(STARTED):
            print(path.name)
    return 0


def upload(words: Namespace, folder: Path) -> int:
    """Upload files. If a file exists already, --clobber replaces it; otherwise this is an error."""
    for file in words.files:
        target, started = folder / file.name, folder / (file.name + STARTED)
        if target.exists() and not words.clobber:
            print(f"asset under the same name already exists: {file.name}", file=sys.stderr)
            return 1
        target.unlink(missing_ok=True)
        started.touch()
        wait_at("upload")
        shutil.copy(file, started)
        started.rename(target)
    return 0


def download(words: Namespace, folder: Path) -> int:
    """Copy files into a folder, or one file to standard output."""
    assets = [path.name.removesuffix(STARTED) for path in folder.glob("[!.]*")]
    patterns = words.pattern or ["*"]
    names = [a for a in assets if any(fnmatch.fnmatchcase(a, pattern) for pattern in patterns)]
    unfinished = [name for name in names if not (folder / name).exists()]
    if unfinished:
        print(f"HTTP 404: Not Found: {unfinished[0]}", file=sys.stderr)
        return 1
    if not names:
        print("no assets match the file pattern", file=sys.stderr)
        return 1
    if words.output == "-":
        sys.stdout.buffer.write((folder / names[0]).read_bytes())
        return 0
    target = Path(words.dir)
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (target / name).exists() and not words.clobber:
            print(f"already exists: {name}", file=sys.stderr)
            return 1
        shutil.copy(folder / name, target / name)
    return 0


def verify(words: Namespace, folder: Path) -> int:
    """Return 0 if the files are equal to those of the release, else 1."""
    return int(any(f.read_bytes() != (folder / f.name).read_bytes() for f in words.files))


def wait_at(point: str) -> None:
    """Wait to be killed, if the folder $HOLD has a file with the name of this point."""
    hold = Path(os.environ["HOLD"], point)
    if hold.exists():
        hold.with_name(f"{point}.reached").touch()
        time.sleep(600)


if __name__ == "__main__":
    sys.exit(main())
