# SPDX-License-Identifier: BSD-3-Clause
"""The strix-forge driver: it builds recipes into a channel and installs locked environments.

It is a thin layer over py-rattler-build (render, build, test) and py-rattler (index, solve, lock,
install). A module imports only from its own layer and from earlier layers. The layers are: errors,
limits, files, processes, project and network; conda and sources; bases and recipes; envs; channel;
hostbase; building; dependencies, generated, versions and demo; cli.
"""
