# SPDX-License-Identifier: BSD-3-Clause
"""The published channel, a folder that any web server can serve."""

from forge.channel.gate import read_validated, require_untested_name
from forge.channel.publish import PublishedChannel

__all__ = ["PublishedChannel", "read_validated", "require_untested_name"]
