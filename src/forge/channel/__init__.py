# SPDX-License-Identifier: BSD-3-Clause
"""Channels: the local one that builds go to, and the published one that users install from.

Read in this order: local, gate (what may be published), publish (a static folder) with revisions
(its history), uploads (prefix.dev and anaconda.org), verify. `location` reads a channel from a
folder or a URL.
"""
