# SPDX-License-Identifier: BSD-3-Clause
raise ImportError("only the modules with kernels are imported")
