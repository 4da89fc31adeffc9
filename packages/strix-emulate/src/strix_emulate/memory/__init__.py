# SPDX-License-Identifier: BSD-3-Clause
"""What waves read and write: registers, memory with its shadow, and what may race."""
