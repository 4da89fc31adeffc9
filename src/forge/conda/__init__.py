# SPDX-License-Identifier: BSD-3-Clause
"""Conda packages and channels: read, check, index and solve. Every other subpackage builds on it.

The code uses conda's terms:

- A channel is a folder or a server that has packages in subdirs, and an index of them. Its address
  is a channel URL.
- The output folder receives the packages that a checkout builds (`Project.output_folder`). It is a
  channel, called the local channel (`local.LocalChannel`).
- A published channel is a folder that a web server serves (`forge.channel.PublishedChannel`).
- The base channel has the packages that recipes are built with (`bases.Base.channel_url`).
- A location is a channel that is only read. It may be a folder or a URL (`location.Location`).
"""
