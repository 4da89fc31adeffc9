# SPDX-License-Identifier: BSD-3-Clause
"""What every patch says of itself, a patch that says it, and the text that it applies to."""

import re
from pathlib import Path

from forge.files import read_text
from forge.recipes.plan import RecipeSet

STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Applies-To", "Remove-When", "Verified", "Last-Update")
NAME, DATE = r"\d{4}-[a-z0-9-]+\.patch", r"\d{4}-\d\d-\d\d"
FORM = r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n"
WORDS_OF_WHY = 15

TEXT = "one\ntwo\nthree\n"
GOOD = """\
From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: strix-forge <strix-forge@users.noreply.github.com>
Date: Sat, 21 Nov 2026 12:00:00 +0000
Subject: [PATCH] Change a word

The word was wrong, which made the reader stop; it was wrong since it was written, so another
one stands there now.

Upstream-Status: Inappropriate (a test)
Applies-To: alpha 1.0
Remove-When: never
Verified: applied by the tests
Last-Update: 2026-11-21
---
--- a/text
+++ b/text
@@ -1,3 +1,3 @@
 one
-two
+zwei
 three
"""


def lint_file(path: Path, text: str) -> list[str]:
    """What is wrong with one patch: its name, its git head, its trailers."""
    head, _, diff = text.partition("\n---\n")
    found = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", head, re.M))
    body = head.partition("\n\n")[2].partition("Upstream-Status")[0]
    status = found.get("Upstream-Status", "").split(" ")[0]
    correct = {
        "not in git format-patch form": re.match(FORM, text),
        "the subject does not start with [PATCH]": found.get("Subject", "").startswith("[PATCH] "),
        f"Upstream-Status is not one of {', '.join(STATUSES)}": status in STATUSES,
        "Last-Update is not a date": re.fullmatch(DATE, found.get("Last-Update", "")),
        "the file name is not NNNN-subject.patch": re.fullmatch(NAME, path.name),
        "the body does not say why": len(body.split()) >= WORDS_OF_WHY,
        "no diff": diff.strip(),
    } | {f"no {name}": name in found for name in ("From", "Date", "Subject", *TRAILERS)}
    return [what for what, holds in correct.items() if not holds]


def lint(recipes: RecipeSet) -> list[str]:
    """Check every patch file: its head, number and version, and that its recipe names it.

    Another recipe may name it too: a package of compiled kernels reads the same source.
    """
    findings: list[str] = []
    for path in sorted((recipes.project.root / "patches").glob("*/*.patch")):
        text, package = read_text(path), path.parent.name
        recipe, wrong = recipes.recipes.get(package), lint_file(path, text)
        named = recipe.local_files().count(path) if recipe else 0
        if named != 1:
            wrong.append("named more than once" if named else f"recipe {package} does not name it")
        elif recipe and f"Applies-To: {package} {recipe.version}\n" not in text:
            wrong.append(f"Applies-To is not {package} {recipe.version}")
        number = 1 + sorted(path.parent.glob("*.patch")).index(path)
        if not path.name.startswith(f"{number:04}-"):
            wrong.append(f"the numbers are not 0001, 0002, ...: this is patch {number}")
        findings += [f"{path.relative_to(recipes.project.root)}: {what}" for what in wrong]
    return findings
