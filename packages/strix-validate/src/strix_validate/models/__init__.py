# SPDX-License-Identifier: BSD-3-Clause
"""Which models run: what vLLM chooses for a config.json on gfx1151, how far that is proven.

Its modules, imported where they are needed:

* ``choose``: what vLLM's own code chooses for a model, in a process of its own.
* ``command``: the command `strix-validate models`.
* ``diffusion``: a model in diffusers' layout: what runs it, and in how much memory.
* ``docs_page``: docs/models.md, printed from the table.
* ``model_memory``: bytes of a model's weights, and of each token that its server keeps.
* ``table``: the rows of table.toml: what runs a model, and how far that is proven.
"""

__all__ = ["choose", "command", "diffusion", "docs_page", "model_memory", "table"]
