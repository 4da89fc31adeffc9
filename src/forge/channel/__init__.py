# SPDX-License-Identifier: BSD-3-Clause
"""The published channel: a folder that any static web server serves.

This is its public face; nothing outside imports its parts.
"""

from forge.channel.publish import StaticChannel
from forge.channel.revisions import require_current
from forge.channel.verify import channel as verify_channel

__all__ = ["StaticChannel", "require_current", "verify_channel"]
