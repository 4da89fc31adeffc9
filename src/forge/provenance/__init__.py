# SPDX-License-Identifier: BSD-3-Clause
"""What a package was made of: written down when it is built, checked by whoever has the file.

Read in this order: package (what is inside a .conda), statement (the record: an in-toto Statement
with an SLSA provenance predicate), sbom (CycloneDX), records (where both lie), verify (a file
against its record), and compare (two files that should be the same).
"""
