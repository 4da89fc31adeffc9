# SPDX-License-Identifier: BSD-3-Clause
"""An emulated HIP device: the server of the stand-in libamdhip64.so.7, whose sources are in hip/.

Modules:

* ``hostcall``: calls of the host from a kernel, such as printf.
* ``launcher``: `execute`, which runs a program on the device.
* ``pool``: the memory that client and server share.
* ``protocol``: the messages between the stand-in runtime and the server.
* ``report``: output of the checks' notes, and of a summary.
* ``server``: the process that executes the kernels.
"""

__all__ = ["hostcall", "launcher", "pool", "protocol", "report", "server"]
