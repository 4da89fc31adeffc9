# SPDX-License-Identifier: BSD-3-Clause
"""`forge rebuild --check`: a reproducible package is identical, another is explained by file."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject

from forge.files import digest_tree, sha256_file
from forge.provenance.package import compare

SAME = """\
mkdir -p "$PREFIX/share/{name}"
cat own > "$PREFIX/share/{name}/text"
ls >> "$PREFIX/share/{name}/text"
"""
OTHER = """\
mkdir -p "$PREFIX/share/{name}"
date +%N > "$PREFIX/share/{name}/now"
head -c 200 /dev/urandom > "$PREFIX/share/{name}/noise"
echo same > "$PREFIX/share/{name}/same"
touch "$PREFIX/share/{name}/$(date +%N)"
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """alpha, of a file of PyPI and a folder of the repository; beta, of clock and noise."""
    project = MiniProject(tmp_path_factory.mktemp("app"))
    theirs = (CHECKOUT / "recipes/model-hosting-container-standards/recipe.yaml").read_text()
    (sha256,) = re.findall(r"sha256: (\S+)", theirs)
    version = re.findall(r'  version: "([\d.]+)"', theirs)[0]
    file = f"model_hosting_container_standards-{version}.tar.gz"
    (project.root / "src" / "alpha").mkdir(parents=True)
    (project.root / "src" / "alpha" / "own").write_text("own\n")
    url = '${{ env.get("PYPI_SOURCES") }}/' + file
    source = [{"url": url, "sha256": sha256}, {"path": "../../src/alpha"}]
    folder = project.recipe("alpha", script=SAME, source=json.dumps(source))
    purl = f"pkg:pypi/model-hosting-container-standards@{version}?file_name={file}"
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write(f"extra: {{purls: ['{purl}']}}\n")
    project.recipe("beta", script=OTHER)
    never = {"url": "http://upstream.invalid/a.tar.gz", "sha256": "0" * 64}
    project.recipe("never", source=json.dumps([never]))
    archive = project.root / "demo-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("demo-1.0/text"))
    by_hand = {"url": "http://upstream.invalid/demo-1.0.tar.gz", "sha256": sha256_file(archive)}
    project.recipe("delta", source=json.dumps([by_hand]))
    (project.root / "build" / "sources").unlink()  # delta's source is no other test's business
    project.forge("sources", "add", str(archive))
    flag = project.root / "flag"
    flag.touch()
    project.recipe(
        "gamma", script=f"test -f {flag}\nmkdir -p $PREFIX/share\ntouch $PREFIX/share/c\n"
    )
    project.forge("build-all")
    return project


def test_identical(app: MiniProject) -> None:
    """Built again indeed, and neither the channel nor the plan knows of it."""
    before = digest_tree(app.channel / "noarch")
    (package,) = app.channel.glob("noarch/alpha-*.conda")
    staging = app.root / "build" / "staging" / "alpha"
    staging.mkdir()
    # what a check leaves that was killed while it compared
    (staging / f"{package.stem}-rebuilt-20260101-000000.conda").touch()
    said = app.forge("rebuild", "--check", "alpha").stdout
    shutil.rmtree(staging)
    assert "alpha-1.0" in said and "identical" in said
    log = (app.root / "build" / "logs" / "alpha.rebuild.log").read_text()
    assert "cat own" in log
    assert digest_tree(app.channel / "noarch") == before and app.to_build() == set()
    assert not (app.root / "build" / "rebuilt").exists()
    assert not list((app.root / "build" / "staging").glob("alpha"))


def test_different(app: MiniProject) -> None:
    """Exit 1; each file that differs is named, a text with a diff, and the rebuilt one is kept."""
    before = digest_tree(app.channel / "noarch")
    said = app.forge("rebuild", "--check", "beta", code=1).stdout
    (package,) = app.channel.glob("noarch/beta-*.conda")
    kept = app.root / "build" / "rebuilt" / package.name
    assert f"{package.name} differs from its rebuild, kept at {kept}" in said
    assert "share/beta/now: original has" in said and "share/beta/noise: original has" in said
    assert f"diffoscope {package} " in said
    assert "rebuilt nothing" in said and "original has nothing" in said
    assert "info/paths.json: original has" in said and "share/beta/same" not in said
    assert kept.exists() and compare(package, kept)
    assert digest_tree(app.channel / "noarch") == before and "failed" in said


def test_what_cannot_be_rebuilt_here(app: MiniProject, tmp_path: Path) -> None:
    """Nothing was built; a host is gone; or it was built elsewhere, where a rebuild would write."""
    error = app.forge("rebuild", "--check", "never", code=3).stderr
    assert "not in the channel; run: forge build never" in error
    error = app.forge("rebuild", "--check", "delta", code=3).stderr
    assert "cannot reach one of http://upstream.invalid/demo-1.0.tar.gz" in error
    moved = MiniProject(tmp_path)
    for name in ("recipes", "src", "channel"):
        shutil.copytree(app.root / name, tmp_path / name, dirs_exist_ok=True)
    before = digest_tree(app.root / "build" / "logs")
    error = moved.forge("rebuild", "--check", "alpha", code=3).stderr
    assert f"was built in {app.root}/build/staging/alpha" in error
    assert digest_tree(app.root / "build" / "logs") == before


def test_failed_rebuild(app: MiniProject) -> None:
    """The last lines of its log, and its work folder stays, as with a build."""
    (app.root / "flag").unlink()
    said = app.forge("rebuild", "--check", "gamma", code=1).stdout
    assert "rebuild failed; the last lines of" in said and "gamma.rebuild.log" in said
    assert "+ test -f" in said and (app.root / "build" / "staging" / "gamma").exists()
