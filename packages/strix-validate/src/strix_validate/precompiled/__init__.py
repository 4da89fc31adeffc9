# SPDX-License-Identifier: BSD-3-Clause
"""Kernels that are compiled before they are needed, for packages and for this machine.

Its modules, imported where they are needed:

* ``deferred``: `DeferredCall`, a call that is built where it is executed.
* ``flash_calls``: calls of flash-attn whose kernels are shipped or warmed up.
* ``package_calls``: calls of the packages in `triton_packages` whose kernels are shipped.
* ``packages``: a package of kernels: `python -m strix_validate.precompiled.packages` makes one.
* ``vllm_calls``: vLLM's attention as its server launches it, and the sets of calls that are
  shipped.
* ``vllm_layers``: vLLM's linear and latent attention, and sampling, as its server launches them.
* ``warm``: `fill`, which compiles what a model needs, and `count`, what a workload compiles.
* ``workload``: calls of 40 lengths, to count what they compile.
"""

__all__ = [
    "deferred", "flash_calls", "package_calls", "packages", "vllm_calls", "vllm_layers", "warm",
    "workload",
]  # fmt: skip
