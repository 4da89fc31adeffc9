# SPDX-License-Identifier: BSD-3-Clause
"""The strix-forge driver: recipes in, channel and locked environments out.

A thin layer over py-rattler-build (render, build, test) and py-rattler (index, solve, lock,
install). Read in this order: forge_store, then recipes, build, session and cli here;
embedded_base and pixi_workspace stand in for conda-forge and pixi where these are out of reach.
"""
