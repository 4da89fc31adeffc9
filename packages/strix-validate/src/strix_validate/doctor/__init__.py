# SPDX-License-Identifier: BSD-3-Clause
"""Is this machine ready for gfx1151: its hardware, kernel, packages and memory. Needs no torch.

Its modules, imported where they are needed:

* ``cluster_machine``: one machine's half of a cluster: its network, limits, and a hash of its
  packages.
* ``environment``: checks of variables, libraries, packages, caches and space.
* ``hardware``: checks of the GPU, the kernel, the firmware, devices and memory.
* ``host``: the machine, the device and the packages, as a record describes them.
* ``installed``: whose torch and triton an environment has: the channel's, conda-forge's or
  PyPI's.
* ``kernel_lists``: the compiled kernels that packages installed into an environment.
* ``tree``: `Tree`, which reads /proc, /sys, /etc and /dev of this machine or of a copy.
* ``virtual_packages``: `detected`, the virtual packages that pixi's solver sees.
* ``vllm_memory``: `memory_of`, the memory that vLLM may use, and the flags that fit it.
"""

__all__ = [
    "cluster_machine",
    "environment",
    "hardware",
    "host",
    "installed",
    "kernel_lists",
    "tree",
    "virtual_packages",
    "vllm_memory",
]
