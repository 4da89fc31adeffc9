# SPDX-License-Identifier: BSD-3-Clause
"""Each package has provenance, and a file that differs from it is found out."""

import copy
import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.conda_packages import file, repacked, tarball
from support.project import MiniProject

from forge.cli.publishing import verify_one
from forge.conda import provenance
from forge.conda.package import Package
from forge.conda.provenance import statement as statement_of
from forge.conda.provenance import verify
from forge.errors import ForgeError
from forge.files import sha256_file

URL = "http://upstream.invalid/demo-1.0.tar.gz"
PATCH_NAME = "patches/alpha/0001-more.patch"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
Subject: [PATCH] say more

Upstream-Status: Backport https://upstream.invalid/pull/1
Applies-To: alpha 1.0
---
--- a/text
+++ b/text
@@ -1 +1 @@
-upstream
+patched
"""
SCRIPT = """\
mkdir -p "$PREFIX/share/{name}"
cp text own "$PREFIX/share/{name}/"
ln -s text "$PREFIX/share/{name}/link"
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """alpha 1.0, from an archive, a patch and a folder of the repository; beta needs it."""
    project = MiniProject(tmp_path_factory.mktemp("app"))
    archive = project.root / "demo-1.0.tar.gz"
    archive.write_bytes(tarball(file("demo-1.0/text", b"upstream\n")))
    for name, text in ((PATCH_NAME, PATCH), ("src/alpha/own", "own\n")):
        (project.root / name).parent.mkdir(parents=True)
        (project.root / name).write_text(text)
    source = [
        {"url": URL, "sha256": sha256_file(archive), "patches": [f"../../{PATCH_NAME}"]},
        {"path": "../../src/alpha"},
    ]
    folder = project.recipe("alpha", script=SCRIPT, source=json.dumps(source))
    recipe = (folder / "recipe.yaml").read_text()
    recipe = recipe.replace("  noarch: generic\n", "")  # noarch packages must not hold links
    recipe = recipe.replace("  run: []", '  host: [packaging]\n  run: ["packaging >=20"]')
    (folder / "recipe.yaml").write_text(recipe)
    project.recipe("beta", run=["alpha"])
    (project.root / "build" / "sources").unlink()
    project.forge("sources", "add", str(archive))
    project.forge("build-all", "--strict")
    return project


@pytest.fixture(scope="module")
def package(app: MiniProject) -> Path:
    (built,) = app.channel.glob("*/alpha-*.conda")
    return built


@pytest.fixture(scope="module")
def stated(package: Path) -> dict[str, Any]:
    return provenance.read(provenance.beside(package)[1])


def used(stated: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    entries = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    return [entry for entry in entries if entry["annotations"]["kind"] == kind]


def test_statement(app: MiniProject, package: Path, stated: dict[str, Any]) -> None:
    """in-toto Statement v1, SLSA provenance v1: the required fields, and what they must say."""
    assert stated["_type"] == "https://in-toto.io/Statement/v1"
    assert stated["predicateType"] == "https://slsa.dev/provenance/v1"
    assert stated["subject"] == [{"name": package.name, "digest": {"sha256": sha256_file(package)}}]
    definition = stated["predicate"]["buildDefinition"]
    recipe = app.root / "recipes" / "alpha" / "recipe.yaml"
    assert definition["buildType"].startswith("urn:")
    parameters = definition["externalParameters"]
    assert parameters["recipe"]["name"] == "recipes/alpha/recipe.yaml"
    assert used(stated, "recipe")[1]["digest"]["sha256"] == sha256_file(recipe)
    assert parameters["base"] == "host" and parameters["packageFormat"] == "conda:3"
    assert parameters["variant"]["content_digest"].startswith("host-")
    assert [entry["name"] for entry in used(stated, "recipe")] == [
        "recipes/alpha/build.sh", "recipes/alpha/recipe.yaml",
    ]  # fmt: skip
    archive, folder = used(stated, "source")
    assert archive["uri"] == URL
    assert archive["digest"]["sha256"] == sha256_file(app.root / "demo-1.0.tar.gz")
    assert folder["name"] == "src/alpha"
    line = f"{hashlib.sha256(b'own' + bytes([10])).hexdigest()}  own\n"
    assert folder["digest"]["dirHash"] == hashlib.sha256(line.encode()).hexdigest()
    (patch,) = used(stated, "patch")
    assert patch["digest"]["sha256"] == hashlib.sha256(PATCH.encode()).hexdigest()
    assert patch["annotations"]["upstreamStatus"] == "Backport https://upstream.invalid/pull/1"
    host = {entry["uri"]: entry["digest"]["sha256"] for entry in used(stated, "host")}
    (packaging,) = (app.root / "build" / "host-base").glob("*/packaging-*.conda")
    (uri,) = [uri for uri in host if uri.startswith("pkg:conda/packaging@")]
    assert host[uri] == sha256_file(packaging)
    details = stated["predicate"]["runDetails"]
    assert details["builder"]["version"]["py-rattler-build"] == version("py-rattler-build")
    assert details["metadata"]["startedOn"].endswith("Z")
    assert str(app.root) not in json.dumps(stated), "a path of this machine"


def test_writing_again_gives_the_same_bytes(app: MiniProject, package: Path) -> None:
    statement = app.channel / "forge" / f"{package.stem}{provenance.SUFFIX}"
    before = statement.read_bytes()
    recipe = app.root / "recipes" / "alpha" / "recipe.yaml"
    provenance.write(app.channel, package, recipe, app.root, "host")
    assert statement.read_bytes() == before


def test_without_git_a_statement_names_no_commit(
    app: MiniProject, package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = app.root / "recipes" / "alpha" / "recipe.yaml"
    assert used(statement_of(Package(package), recipe, app.root, "host"), "repository") == []


def test_commands(app: MiniProject, package: Path) -> None:
    said = app.forge("verify", *map(str, app.channel.glob("*/*.conda"))).stdout
    assert "alpha-1.0" in said and "beta-1.0" in said and said.count(": as stated") == 2
    assert "3 files" in said and "2 x recipe" in said and "2 x source" in said
    assert "by the statement's own word: " in said and "patch patches/alpha/0001-more.patch" in said


def test_no_provenance(
    app: MiniProject, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 3, and what was checked nevertheless; 1 for a file that differs from its own list."""
    other = tmp_path / package.name
    shutil.copy(package, other)
    said = app.forge("verify", str(other), code=3).stdout
    assert "no provenance at" in said and "checked: 3 files" in said and "sha256" not in said
    repacked(package, other, lambda where, _, old: b"evil" if where == "pkg-" else old)
    assert verify_one(other, []) == 1
    assert "info/paths.json" in capsys.readouterr().out
    other.write_bytes(b"")
    assert verify_one(other, []) == 1
    assert "checked: nothing" in capsys.readouterr().out


def test_repacked_without_change_is_whole(package: Path, tmp_path: Path) -> None:
    assert verify(repacked(package, tmp_path / package.name, lambda *a: a[2]), None).wrong == []


@pytest.mark.parametrize(
    ("section", "name", "content", "message"),
    [
        ("pkg-", "share/alpha/text", b"evil", "share/alpha/text: the package has"),
        ("pkg-", "share/alpha/text", None, "share/alpha/text: the package has nothing"),
        (
            "info",
            "info/paths.json",
            b'{"paths": [], "paths_version": 1}',
            "info/paths.json nothing",
        ),
        ("info", "info/paths.json", b"{", "info/paths.json is not a list"),
        ("info", "info/recipe/build.sh", b"evil", "recipe recipes/alpha/build.sh: the package has"),
        (
            "info",
            "info/recipe/recipe.yaml",
            b"evil",
            "alpha/recipe.yaml: the package has",
        ),
        ("info", "info/recipe/build.sh", None, "build.sh: the package has nothing"),
    ],
)
def test_changed_content_is_found(
    package: Path, stated: dict[str, Any], tmp_path: Path, section: str, name: str,
    content: bytes | None, message: str,
) -> None:  # fmt: skip
    """Also by a statement whose sha256 was made to fit the changed file."""
    changed = repacked(
        package, tmp_path / package.name,
        lambda where, n, old: content if (where, n) == (section, name) else old,
    )  # fmt: skip
    forged = copy.deepcopy(stated)
    forged["subject"][0]["digest"]["sha256"] = sha256_file(changed)
    wrong = verify(changed, forged).wrong
    assert any(message in line for line in wrong), wrong
    assert verify(package, stated).wrong == []


@pytest.mark.parametrize("change", ["source", "host", "recipe", "patch", "variant", "subject"])
def test_changed_statement_is_found(package: Path, stated: dict[str, Any], change: str) -> None:
    """One line that names what differs."""
    forged = copy.deepcopy(stated)
    definition = forged["predicate"]["buildDefinition"]
    if change == "variant":
        definition["externalParameters"]["variant"]["content_digest"] = "host-0"
    elif change == "subject":
        forged["subject"][0]["name"] = "other-1.0-0.conda"
    elif change == "patch":
        definition["resolvedDependencies"].remove(used(forged, "patch")[0])
    else:
        used(forged, change)[0]["digest"]["sha256"] = "0" * 64
    (wrong,) = verify(package, forged).wrong
    assert {"subject": "other-1.0-0.conda", "patch": "its provenance nothing"}.get(
        change, change
    ) in wrong


MORE: dict[str, dict[str, Any]] = {
    "another commit": {"name": "other", "digest": {"gitCommit": "0" * 40}, "kind": "repository"},
    "another patch": {
        "name": "patches/more.patch",
        "digest": {"sha256": "0" * 64},
        "kind": "patch",
    },
    "another local source": {"name": "src/more", "digest": {"dirHash": "0" * 64}, "kind": "source"},
    "another package": {"uri": "pkg:conda/x@1", "digest": {"sha256": "0" * 64}, "kind": "host"},
}


@pytest.mark.parametrize("more", MORE)
def test_statement_that_says_more_is_found(
    package: Path, stated: dict[str, Any], more: str
) -> None:
    forged, entry = copy.deepcopy(stated), dict(MORE[more])
    entry["annotations"] = {"kind": entry.pop("kind")}
    forged["predicate"]["buildDefinition"]["resolvedDependencies"].append(entry)
    (wrong,) = verify(package, forged).wrong
    assert entry.get("uri", entry.get("name")) in wrong and "the package has nothing" in wrong


@pytest.mark.parametrize(
    "where",
    [
        "", "subject/0", "subject/0/digest", "predicate", "predicate/buildDefinition",
        "predicate/buildDefinition/externalParameters/recipe", "predicate/runDetails/builder",
        "predicate/buildDefinition/resolvedDependencies/0", "predicate/runDetails",
    ],
)  # fmt: skip
def test_statement_with_an_unknown_key(package: Path, stated: dict[str, Any], where: str) -> None:
    forged: Any = copy.deepcopy(stated)
    table = forged
    for part in filter(None, where.split("/")):
        table = table[int(part) if part.isdigit() else part]
    table["byproducts"] = {"sha256": "0" * 64}
    (wrong,) = verify(package, forged).wrong
    assert "byproducts" in wrong


def test_statement_with_two_digests_of_one_thing(package: Path, stated: dict[str, Any]) -> None:
    """Whichever comes first."""
    forged = copy.deepcopy(stated)
    entry = copy.deepcopy(used(forged, "host")[0])
    entry["digest"]["sha256"] = "0" * 64
    entries = forged["predicate"]["buildDefinition"]["resolvedDependencies"]
    for place in (0, len(entries)):
        entries.insert(place, entry)
        assert any("two digests" in line for line in verify(package, forged).wrong)
        del entries[place]


@pytest.mark.parametrize(
    "change", [('"_type"', '"_type": 1, "_type"'), ('"subject": [', '"subject": [NaN, ')]
)
def test_text_that_readers_take_differently(
    package: Path, change: tuple[str, str], tmp_path: Path
) -> None:
    text = provenance.beside(package)[1].read_text()
    wrong = text.replace(*change, 1)
    assert wrong != text
    (tmp_path / "x.provenance.json").write_text(wrong)
    with pytest.raises(ForgeError, match=r"is not the provenance|says"):
        provenance.read(tmp_path / "x.provenance.json")


def test_swapped_statement(app: MiniProject, package: Path) -> None:
    """unit/test_package_safety.py has a renamed file."""
    (beta,) = app.channel.glob("*/beta-*.conda")
    wrong = verify(beta, provenance.read(provenance.beside(package)[1])).wrong
    assert any(line.startswith("sha256: ") for line in wrong)
    assert any(line.startswith("name: ") for line in wrong)
