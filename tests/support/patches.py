# SPDX-License-Identifier: BSD-3-Clause
"""A patch that lint accepts, and the text that it applies to."""

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
