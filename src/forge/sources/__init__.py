# SPDX-License-Identifier: BSD-3-Clause
"""What lies on disk and stays: the project's folders, the local channel, fetched sources, bases."""
