# SPDX-License-Identifier: BSD-3-Clause
"""The commands of `./forge`, one module per subject. Each has an `app` that main.py joins."""
