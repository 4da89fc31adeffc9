# SPDX-License-Identifier: BSD-3-Clause
"""The published channel, a folder that any web server serves: what others may import."""

from forge.channel.publish import StaticChannel
from forge.channel.revisions import require_current
from forge.channel.verify import channel as verify_channel

__all__ = ["StaticChannel", "require_current", "verify_channel"]
