# SPDX-License-Identifier: BSD-3-Clause
"""The commands of `./forge`, in one module per subject. main.py joins the modules' `app`s."""
