# SPDX-License-Identifier: BSD-3-Clause
"""Conda packages and channels: read, check, index and solve. Every other subpackage builds on it.

What is what, in conda's terms:

- A channel is a folder or a server with packages in subdirs and an index of them. Its address is a
  channel URL.
- The output folder is where a checkout's packages go (`Project.output_folder`). It is a channel:
  the local channel (`local.LocalChannel`).
- A published channel is a folder that a web server serves (`forge.channel.PublishedChannel`).
- The base channel has the packages that recipes are built with (`bases.Base.channel_url`).
- A location is a channel that is only read, wherever it is (`location.Location`).
"""
