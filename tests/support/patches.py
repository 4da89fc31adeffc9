# SPDX-License-Identifier: BSD-3-Clause
"""The rules for the head of every patch, and an example: a good patch and the text it changes."""

import re
from pathlib import Path

from forge.files import read_text
from forge.recipes.plan import RecipeSet

STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Applies-To", "Remove-When", "Verified", "Last-Update")
NAME, DATE = r"\d{4}-[a-z0-9-]+\.patch", r"\d{4}-\d\d-\d\d"
FORM = r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n"
# The minimum number of words in the body of a patch, which has to give the reason for the patch.
MIN_WORDS = 15

TEXT = "one\ntwo\nthree\n"
GOOD = """\
From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: strix-forge <strix-forge@users.noreply.github.com>
Date: Sat, 21 Nov 2026 12:00:00 +0000
Subject: [PATCH] Change a word

The word was wrong, and a reader would stop at it. It was wrong in every release so far, so
the patch replaces it.

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
    """Return the faults in the file name and the head of one patch."""
    head, _, diff = text.partition("\n---\n")
    fields = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", head, re.M))
    body = head.partition("\n\n")[2].partition("Upstream-Status")[0]
    subject = fields.get("Subject", "")
    status = fields.get("Upstream-Status", "").split(" ")[0]
    # Each rule is true if the patch follows it. The key is the message for a patch that does not.
    rules = {
        "not in git format-patch form": re.match(FORM, text),
        "the subject does not start with [PATCH]": subject.startswith("[PATCH] "),
        f"Upstream-Status is not one of {', '.join(STATUSES)}": status in STATUSES,
        "Last-Update is not a date": re.fullmatch(DATE, fields.get("Last-Update", "")),
        "the file name is not NNNN-subject.patch": re.fullmatch(NAME, path.name),
        f"the body has fewer than {MIN_WORDS} words": len(body.split()) >= MIN_WORDS,
        "no diff": diff.strip(),
    }
    for name in ("From", "Date", "Subject", *TRAILERS):
        rules[f"no {name}"] = name in fields
    return [message for message, holds in rules.items() if not holds]


def lint(recipes: RecipeSet) -> list[str]:
    """Return the faults of all patch files.

    Besides the head of a patch, this checks the number and the version. The recipe of the patch's
    folder must name the patch exactly once. Other recipes may name it too: a package of compiled
    kernels has the same source as the package that it is for.
    """
    findings: list[str] = []
    for path in sorted((recipes.project.root / "patches").glob("*/*.patch")):
        text = read_text(path)
        package = path.parent.name
        recipe = recipes.recipes.get(package)
        faults = lint_file(path, text)
        count = recipe.local_files().count(path) if recipe else 0
        if count == 0:
            faults.append(f"recipe {package} does not name it")
        elif count > 1:
            faults.append("named more than once")
        elif recipe and f"Applies-To: {package} {recipe.version}\n" not in text:
            faults.append(f"Applies-To is not {package} {recipe.version}")
        number = 1 + sorted(path.parent.glob("*.patch")).index(path)
        if not path.name.startswith(f"{number:04}-"):
            faults.append(f"the numbers are not 0001, 0002, ...: this is patch {number}")
        findings += [f"{path.relative_to(recipes.project.root)}: {fault}" for fault in faults]
    return findings
