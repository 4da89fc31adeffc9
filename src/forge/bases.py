# SPDX-License-Identifier: BSD-3-Clause
"""The two bases that recipes are built on: conda-forge and the host base.

The host base has packages of this machine's CPython and compilers, and of PyPI's wheels. A base
consists only of a channel and a variants file. No recipe has a condition on its base; only the
build strings of the packages get the base's prefix.
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
from forge.errors import ForgeError, redact
from forge.project import Project

CONDA_FORGE = "https://conda.anaconda.org/conda-forge"
# Where users get our packages. The manifests of stacks/ name it, because users copy them.
PUBLISHED = "https://repo.prefix.dev/strix-forge"
PROBE_SECONDS = 10
# The variant key whose value contains the digest of a recipe's content; see docs/build.md.
DIGEST_KEY = "content_digest"


class BaseName(StrEnum):
    """The values of --base and FORGE_BASE."""

    AUTO = "auto"
    CONDA_FORGE = "conda-forge"
    HOST = "host"

    @classmethod
    def _missing_(cls, value: object) -> "BaseName":
        # typer checks the value of --base itself.
        raise ForgeError(f"FORGE_BASE={value!r:.40} is not one of {', '.join(cls)}")


@dataclass(frozen=True)
class Base:
    """A base channel with the variant values that belong to it.

    Attributes:
        name: A value of BaseName other than `auto`.
        channel_url: The channel's URL for rattler-build. If pixi's configuration has a mirror for
            the channel, this is the mirror's URL, because the Python bindings do not read the table
            [mirrors].
        folder: The folder of the channel, or None if the channel is on a server.
        variants: The values of each variant key, with `overrides` applied.
        variant_files: The files that `variants` was read from.
        overrides: Values that replace the values in the files.
        base_tag: The prefix of the build strings of packages on this base; may be empty.
    """

    name: str
    channel_url: str
    folder: Path | None
    variants: VariantConfig
    variant_files: list[str]
    overrides: dict[str, list[str]]
    base_tag: str

    def arguments(self, digest: str, number: int | None) -> dict[str, Any]:
        """Return the arguments of build_recipes that must be the same for rendering and building.

        Args:
            digest: The value of DIGEST_KEY.
            number: The build number that replaces the recipe's; None keeps the recipe's.
        """
        return {
            "variant_config": self.variant_files,
            "variant_overrides": self.overrides | {DIGEST_KEY: [digest]},
            "ignore_recipe_variants": True,
            "build_string_prefix": self.base_tag.rstrip("_") or None,
            "build_num": number,
        }


def find_outage() -> str:
    """Return the reason why conda-forge cannot be reached, or an empty string if it answers."""
    url = f"{CONDA_FORGE}/noarch/repodata.json.zst"
    return redact(network.find_outage(url, PROBE_SECONDS))


def choose(name: BaseName, host_bound: bool | None = None) -> tuple[str, str]:
    """Choose the base for a value of --base.

    For `auto`, a channel with packages keeps its base. If the network decided each time, a short
    outage would switch the base, and all packages in the channel would count as not built.

    Args:
        name: The value of --base.
        host_bound: Whether the packages in the channel were built on the host base; None if the
            channel's index is empty or damaged.

    Returns:
        The name of the base, and a line to print with the name and the reason.
    """
    if name is not BaseName.AUTO:
        return name.value, f"base: {name.value} (requested)"
    if host_bound is not None:
        current = BaseName.HOST if host_bound else BaseName.CONDA_FORGE
        origin = "the channel has packages of this base; --base chooses another"
        return current.value, f"base: {current.value} ({origin})"
    reason = find_outage()
    if reason:
        return BaseName.HOST.value, f"base: host (conda-forge does not answer: {reason})"
    return BaseName.CONDA_FORGE.value, "base: conda-forge (the server answers)"


def parse_overrides(pairs: Sequence[str]) -> dict[str, list[str]]:
    """Parse `KEY=VALUE` words into variant values. Raise ForgeError for words of another form."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ForgeError(f"--variant {pair!r} is not KEY=VALUE")
        values.setdefault(key, []).append(value)
    return values


def load(
    project: Project,
    name: str,
    replaced: Mapping[str, list[str]] | None = None,
) -> Base:
    """Load a base with its variants.

    Args:
        project: The checkout.
        name: The name of the base.
        replaced: Values that replace those in the variants files. A value of `python` may be a
            number such as 3.13. If `python` is replaced, `python_min` becomes the oldest of these
            Pythons, unless it is replaced too. On the host base, `replaced` must not contain
            `python`: its value there is the Python that runs forge, as is that of `python_min`
            unless it is replaced.

    Raises:
        ForgeError: A variants file is not readable, a key of `replaced` is in no variants file, a
            value of `python` does not begin with a version, `replaced` contains `python` on the
            host base, or the channel's URL carries a credential.
    """
    replaced = dict(replaced or {})
    files = [
        str(project.root / "variants.yaml"),
        str(project.recipes / "bases" / name / "variants.yaml"),
    ]
    try:
        variants = VariantConfig.from_files([*files])
    except Exception as error:
        raise ForgeError(f"{' or '.join(files)} is not readable: {error}") from None
    is_host = name == BaseName.HOST.value
    pythons = _choose_pythons(replaced.get("python", []), variants, is_host)
    overrides = dict(replaced)
    if pythons:
        oldest = _find_oldest(pythons)
        overrides = {"python_min": [oldest], **overrides, "python": pythons}
    unknown = replaced.keys() - set(variants)
    if unknown:
        raise ForgeError(f"--variant: no variants file has the key {', '.join(sorted(unknown))}")
    tag = HOST_BOUND if is_host else ""
    overrides = {"base_tag": [tag], **overrides}
    folder = project.build / "host-base" if is_host else None
    url = folder.as_uri() if folder else network.mirrored(CONDA_FORGE)
    # rattler-build writes the URL into each package's rendered recipe.
    refuse_credentials(url)
    return Base(
        name=name,
        channel_url=url,
        folder=folder,
        variants=variants.merge(VariantConfig(overrides)),
        variant_files=files,
        overrides=overrides,
        base_tag=tag,
    )


def _choose_pythons(requested: list[str], variants: VariantConfig, is_host: bool) -> list[str]:
    """Return the values of the variant `python` that replace those in the variants files.

    Args:
        requested: The values of --variant python. Without them, the result is empty on conda-forge.
        variants: The content of the variants files.
        is_host: Whether the base is the host base. Its only Python is the running interpreter.
    """
    if not is_host:
        return [_expand_python(value, variants) for value in requested]
    major, minor = sys.version_info[:2]
    if requested:
        reason = f"the host base has only the Python that runs forge, {major}.{minor}"
        advice = "to use another one, set FORGE_NO_PIXI=1, and FORGE_PYTHON_BIN to its executable"
        raise ForgeError(f"--variant python: {reason}; {advice}")
    return [f"{major}.{minor}.* *_cpython"]


def _expand_python(python: str, variants: VariantConfig) -> str:
    """Turn a number such as 3.13 into a value of the variant `python`.

    The value is the first one in the variants files that begins with "3.13.*". If there is none, it
    is "3.13.*", which allows any build. A text that is not such a number is returned as it is.
    """
    if not re.fullmatch(r"\d+\.\d+", python):
        return python
    # A spec without ".*" would mean only the release N.M.0.
    any_build = f"{python}.*"
    for value in variants.get("python") or []:
        if value.startswith(any_build):
            return value
    return any_build


def _find_oldest(pythons: list[str]) -> str:
    """Return the number of the oldest Python in a list, which builds and tests noarch packages."""
    numbers = [value.split(".*")[0] for value in pythons]
    try:
        return min(numbers, key=Version)
    except ValueError as error:
        raise ForgeError(f"--variant python: {error}; write python=3.13") from None
