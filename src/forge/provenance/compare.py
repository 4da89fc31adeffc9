# SPDX-License-Identifier: BSD-3-Clause
"""Two packages that should be the same: which of their files differ, and how."""

from __future__ import annotations

import difflib
from pathlib import Path

from forge.files import sha256_file
from forge.provenance.package import Package

DIFF_LINES = 8
LINE_WIDTH = 160
TEXT_LIMIT = 1 << 20  # bytes


def compare(original: Path, rebuilt: Path) -> list[str]:
    """What differs, in words; nothing when the two are the same, byte for byte."""
    if sha256_file(original) == sha256_file(rebuilt):
        return []
    lines = []
    for section in ("info", "pkg"):
        one, other = Package(original), Package(rebuilt)
        first, second = one.entries(section), other.entries(section)
        lines += [f"{name}: only in the original" for name in sorted(first.keys() - second.keys())]
        lines += [f"{name}: only in the rebuilt" for name in sorted(second.keys() - first.keys())]
        differ = {name for name in first.keys() & second.keys() if first[name] != second[name]}
        before = one.content(section, differ.__contains__)
        after = other.content(section, differ.__contains__)
        for name in sorted(differ):
            lines.append(f"{name}: differs")
            if before[name] == after[name]:
                lines.append(f"    mode {first[name].mode:o} and {second[name].mode:o}")
            lines += [f"    {line}" for line in _difference(before[name], after[name])]
    return lines or ["every file is the same; the archives differ in order, times or compression"]


def _difference(before: bytes, after: bytes) -> list[str]:
    """A short diff of two texts; of binaries the sizes and the first byte that differs."""
    if max(len(before), len(after)) <= TEXT_LIMIT:
        try:
            texts = [content.decode().splitlines() for content in (before, after)]
        except UnicodeDecodeError:
            pass
        else:
            found = [
                line[:LINE_WIDTH]
                for line in difflib.unified_diff(*texts, n=0, lineterm="")
                if not line.startswith(("---", "+++", "@@"))
            ]
            more = [f"... {len(found) - DIFF_LINES} more lines"] if found[DIFF_LINES:] else []
            return found[:DIFF_LINES] + more
    pairs = zip(before, after, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    return [f"{len(before)} and {len(after)} bytes; the first that differs is number {first}"]
