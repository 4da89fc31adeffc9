# SPDX-License-Identifier: BSD-3-Clause
"""What instructions compute: functions on arrays, in tables by mnemonic."""
