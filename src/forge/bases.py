# SPDX-License-Identifier: BSD-3-Clause
"""The two bases that recipes are built on: conda-forge, and packages made from this machine.

A base is a channel and a variants file, nothing else: no recipe knows which one it is built on.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version
from rattler_build import VariantConfig

from forge import network
from forge.conda.local import HOST_BOUND
from forge.conda.location import refuse_credentials
from forge.errors import ForgeError, redacted
from forge.project import Project

CONDA_FORGE = "https://conda.anaconda.org/conda-forge"
# Where users get our packages. The manifests of stacks/ name it, because users copy them.
PUBLISHED = "https://repo.prefix.dev/strix-forge"
PROBE_SECONDS = 10
# The variant that carries the digest of a package's content; see docs/build.md.
DIGEST_KEY = "content_digest"


class BaseName(StrEnum):
    """The values of --base."""

    AUTO = "auto"
    CONDA_FORGE = "conda-forge"
    HOST = "host"

    @classmethod
    def _missing_(cls, value: object) -> "BaseName":
        raise ForgeError(f"base {value!r} is not one of {', '.join(cls)}")


@dataclass(frozen=True)
class Base:
    """A base channel with the variant values that belong to it.

    `channel` is the address for rattler-build, which through its bindings reads no [mirrors].
    """

    name: str
    channel: str
    folder: Path | None
    variants: VariantConfig
    variant_files: list[str]
    overrides: dict[str, list[str]]
    base_tag: str

    def arguments(self, digest: str, number: int | None) -> dict[str, Any]:
        """Return the arguments of build_recipes, to render and to build: both must be the same."""
        return {
            "variant_config": self.variant_files,
            "variant_overrides": self.overrides | {DIGEST_KEY: [digest]},
            "ignore_recipe_variants": True,
            "build_string_prefix": self.base_tag.rstrip("_") or None,
            "build_num": number,
        }


def unanswered() -> str:
    """Return why conda-forge cannot be asked now, or nothing."""
    return redacted(network.unanswered(f"{CONDA_FORGE}/noarch/repodata.json.zst", PROBE_SECONDS))


def choose(name: BaseName, host_bound: bool | None = None) -> tuple[str, str]:
    """Resolve `auto`; returns the base's name and one line that says which and why.

    A channel stays on its base (`host_bound`, None without packages): with conda-forge out of reach
    for a moment, or in reach for once, all that was built would count as not built.
    """
    if name is not BaseName.AUTO:
        return name.value, f"base: {name.value} (requested)"
    if host_bound is not None:
        kept = BaseName.HOST if host_bound else BaseName.CONDA_FORGE
        return kept.value, f"base: {kept.value} (that of the packages in the channel; or --base)"
    if why := unanswered():
        return BaseName.HOST.value, f"base: host (conda-forge does not answer: {why})"
    return BaseName.CONDA_FORGE.value, "base: conda-forge (its repodata answers)"


def parse_overrides(pairs: Sequence[str]) -> dict[str, list[str]]:
    """Parse `KEY=VALUE` words into variant values. Raises ForgeError for another form."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ForgeError(f"--variant {pair!r} is not KEY=VALUE")
        values.setdefault(key, []).append(value)
    return values


def _expand_python(python: str, variants: VariantConfig) -> str:
    """Return a variants file's Python, or any build, for a number such as 3.13; else `python`."""
    if not re.fullmatch(r"\d+\.\d+", python):
        return python
    listed = variants.get("python") or []
    any_build = f"{python}.*"  # the number alone is the release N.M.0
    return next((value for value in listed if value.startswith(any_build)), any_build)


def load(project: Project, name: str, replaced: Mapping[str, list[str]] | None = None) -> Base:
    """Load the base `name` with its variants; `replaced` values stand for those of the files.

    A Python may be named by its number; `python_min` follows. Raises ForgeError if a variants file
    is not readable, `replaced` has a key that none has, or a Python that cannot be had.
    """
    paths = [project.root / "variants.yaml", project.recipes / "bases" / name / "variants.yaml"]
    files, folder, tag = [str(path) for path in paths], None, ""
    try:
        variants = VariantConfig.from_files([*files])
    except Exception as error:
        raise ForgeError(f"{' or '.join(files)} is not readable: {error}") from None
    overrides = dict(replaced or {})
    pythons = [_expand_python(value, variants) for value in overrides.get("python", [])]
    if name == BaseName.HOST.value:
        folder, tag = project.build / "host-base", HOST_BOUND
        # it has exactly one Python: the one that runs this
        major, minor = sys.version_info[:2]
        if pythons:
            why = f"the host base has the Python that runs this, {major}.{minor}"
            raise ForgeError(f"--variant python: {why}; FORGE_PYTHON_BIN names another")
        pythons = [f"{major}.{minor}.* *_cpython"]
    if pythons:  # noarch packages are built and tested with the oldest
        try:
            oldest = min((value.split(".*")[0] for value in pythons), key=Version)
        except ValueError as error:
            raise ForgeError(f"--variant python: {error}; write python=3.13") from None
        overrides = {"python_min": [oldest], **overrides, "python": pythons}
    if unknown := set(replaced or {}) - set(variants):
        raise ForgeError(f"--variant: no variants file has the key {', '.join(sorted(unknown))}")
    overrides = {"base_tag": [tag], **overrides}
    variants = variants.merge(VariantConfig(overrides))
    channel = folder.as_uri() if folder else network.mirrored(CONDA_FORGE)
    refuse_credentials(channel)  # it would be in every package's rendered recipe
    return Base(name, channel, folder, variants, files, overrides, tag)
