# SPDX-License-Identifier: BSD-3-Clause
"""An emulated device: the server behind the stand-in libamdhip64.so.7 of hip/.

Its modules, imported where they are needed:

* ``hostcall``: calls of the host from a kernel, such as printf.
* ``launcher``: `execute`, which runs a program on the device.
* ``pool``: the memory that client and server share.
* ``protocol``: the messages between the stand-in runtime and the server.
* ``report``: notes and a summary of the checks.
* ``server``: the process that executes the kernels.
"""

__all__ = ["hostcall", "launcher", "pool", "protocol", "report", "server"]
