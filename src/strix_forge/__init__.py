# SPDX-License-Identifier: BSD-3-Clause
"""The strix-forge driver: recipes in, channel and locked environments out.

A thin layer over py-rattler-build (render, build, test) and py-rattler (index, solve, lock,
install). Read in this order: project, recipes, sources, build, channel, stacks, embedded, cli.
"""
