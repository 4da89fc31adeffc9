# SPDX-License-Identifier: BSD-3-Clause
"""Patches apply to their sources, without fuzz."""

import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

from forge.errors import ForgeError, NotAttempted
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import patched, patches_of, prepare, source_of
from forge.sources.cache import SourceCache
from forge.sources.download import Progress

# the outcome for one recipe's patches: `state` is applies, fails or not attempted
Applied = namedtuple("Applied", "package count state detail")


def check(recipes: RecipeSet, progress: Progress) -> Iterator[Applied]:
    """Apply each recipe's patches to its fetched source, by the code that a build runs first."""
    cache = SourceCache(recipes.project)
    for name, recipe in recipes.recipes.items():
        for data in (data for data in recipe.sources if patches_of(recipe, data)):
            state, detail = "fails", ""
            try:
                if "path" not in (changed := patched(recipe, data)):
                    cache.fetch(source_of(recipe, changed), progress)
                with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
                    detail = prepare(recipe, data, cache, Path(folder), whole=False)
            except NotAttempted as error:
                state, detail = "not attempted", str(error)
            except (ForgeError, OSError) as error:
                detail = str(error)
            count = len(patches_of(recipe, data))
            yield Applied(name, count, state if detail else "applies", detail)
