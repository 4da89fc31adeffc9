# SPDX-License-Identifier: BSD-3-Clause
"""The strix-forge driver: recipes in, channel and locked environments out.

A thin layer over py-rattler-build (render, build, test) and py-rattler (index, solve, lock,
install). From the ground up: errors, files, locks, processes, project and network; conda and
sources; bases and recipes; envs; channel; hostbase; building; versions; and cli on top.
"""
