# SPDX-License-Identifier: BSD-3-Clause
"""What leaves this machine: the gate in front of it, where it goes, and how that is checked later.

Read in this order: gate (what may go), static (a folder that any web server serves), revisions (its
history), uploads (prefix.dev and anaconda.org), verify (a channel held against its own records).
`places` reads a channel from a folder or over HTTP.
"""
