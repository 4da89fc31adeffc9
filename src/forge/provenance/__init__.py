# SPDX-License-Identifier: BSD-3-Clause
"""What a package was made of: recorded by its build, checked by anyone who has the file."""
