# SPDX-License-Identifier: BSD-3-Clause
"""A device without a GPU: the server behind the stand-in libamdhip64.so.7 of hip/.

Its modules, imported where they are needed:

* ``hostcall``: calls of the host from a kernel: printf.
* ``launcher``: `execute`, which runs a program on the device.
* ``pool``: the memory that client and server share.
* ``protocol``: what the stand-in runtime and the server say to each other.
* ``report``: what a device has to say of checks.
* ``server``: the process that owns the emulator.
"""

__all__ = ["hostcall", "launcher", "pool", "protocol", "report", "server"]
