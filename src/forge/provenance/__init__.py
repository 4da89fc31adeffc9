# SPDX-License-Identifier: BSD-3-Clause
"""What a package was made of: recorded by its build, checked by anyone who has the file.

Read in this order: package (the inside of a .conda), statement (its record: an in-toto Statement
with SLSA provenance), records (its file, and verification).
"""
