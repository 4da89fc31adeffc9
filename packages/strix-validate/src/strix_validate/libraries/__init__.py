# SPDX-License-Identifier: BSD-3-Clause
"""What lies below attention: the checks of the tier libraries, each in its own process.

Its modules, imported where they are needed:

* ``convolution``: convolutions of MIOpen, in each way that torch can ask for them.
* ``factors``: factorisations of `torch.linalg`.
* ``gemm``: matrix products, through each of torch's two libraries.
* ``gradients``: the gradient of an embedding.
* ``host_memory``: host memory that a GPU kernel reads and writes.
* ``inductor``: a kernel that `torch.compile` generates.
"""

__all__ = ["convolution", "factors", "gemm", "gradients", "host_memory", "inductor"]
