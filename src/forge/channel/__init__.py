# SPDX-License-Identifier: BSD-3-Clause
"""The published channel, a folder that any web server serves: what others may import."""

from forge.channel.publish import StaticChannel

__all__ = ["StaticChannel"]
