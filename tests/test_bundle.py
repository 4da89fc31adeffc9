# SPDX-License-Identifier: BSD-3-Clause
"""Bundles: one file per locked environment, installed with no network, refused when damaged."""

from __future__ import annotations

import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from conftest import CHECKOUT, MiniProject, served

from forge_store.project import BuildFailed, ForgeError, digest_tree, sha256_file
from pixi_workspace import Workspace
from pixi_workspace import bundle as bundles

MANIFEST = """\
[workspace]
name = "app"
channels = ["../../channel"]
platforms = ["linux-64"]

[dependencies]
alpha = "1.0.*"

[feature.more.dependencies]
beta = "*"

[environments]
more = ["more"]
"""
SCRIPT = """\
mkdir -p "$PREFIX/etc/conda/activate.d" "$PREFIX/bin" "$PREFIX/share"
echo "export ALPHA=on" > "$PREFIX/etc/conda/activate.d/alpha.sh"
printf '#!/bin/sh\\necho "%s $ALPHA"\\n' "$PREFIX" > "$PREFIX/bin/where"
chmod +x "$PREFIX/bin/where"
head -c 3000 /dev/urandom > "$PREFIX/share/noise"
"""
CUT = ["unshare", "--map-root-user", "--net"]


def no_namespace() -> bool:
    return subprocess.run([*CUT, "true"], capture_output=True, check=False).returncode != 0


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """The stack app of alpha, and beta with alpha in the environment more, locked."""
    project = MiniProject(tmp_path_factory.mktemp("app"))
    project.recipe("alpha", script=SCRIPT)
    project.recipe("beta", run=["alpha"])
    project.forge("build-all")
    (project.root / "stacks" / "app").mkdir(parents=True)
    (project.root / "stacks" / "app" / "pixi.toml").write_text(MANIFEST)
    project.forge("lock", "app")
    return project


def workspace(project: MiniProject) -> Workspace:
    folder = project.root / "build" / "stacks" / "app"
    return Workspace.load(project.root / "stacks" / "app" / "pixi.toml", folder, {})


@pytest.fixture(scope="module")
def bundle(app: MiniProject) -> Path:
    file = app.root / "app.tar"
    said = app.forge("bundle", "app", "-e", "more", "-o", str(file)).stdout
    assert "2 packages" in said and sha256_file(file) in said and "made for the machine" in said
    return file


def test_installs_without_a_network(app: MiniProject, bundle: Path, tmp_path: Path) -> None:
    """By the command line, in a network namespace that has no interface up."""
    if no_namespace():
        pytest.skip("not attempted: this machine lets nobody make a network namespace")
    folder = tmp_path / "there"
    done = subprocess.run(
        [*CUT, *app.command("unbundle", str(bundle), str(folder))],
        env=app.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        text=True, capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 packages of app, more" in done.stdout and "made for the machine" in done.stdout
    assert sorted(p.name for p in folder.iterdir()) == ["activate.sh", "env"]
    line = f"source {folder}/activate.sh && where && echo $PATH"
    ran = subprocess.run(
        ["bash", "-c", line], env={"PATH": "/usr/bin:/bin"}, text=True, capture_output=True,
        check=True
    )  # fmt: skip
    assert ran.stdout == f"{folder}/env on\n{folder}/env/bin:/usr/bin:/bin\n"
    assert (folder / "env" / "share" / "beta" / "text").read_text() == "beta\n"


def test_layout_is_that_of_pixi_pack(bundle: Path) -> None:
    with tarfile.open(bundle) as tar:
        names = tar.getnames()
        index = json.load(tar.extractfile("channel/noarch/repodata.json"))
        metadata = json.load(tar.extractfile("pixi-pack.json"))
        environment = tar.extractfile("environment.yml").read().decode()
        for member in tar:
            assert (member.mtime, member.uid, member.uname) == (0, 0, "")
    (alpha, beta) = sorted(index["packages.conda"])
    assert names == [
        "channel/linux-64/repodata.json", f"channel/noarch/{alpha}", f"channel/noarch/{beta}",
        "channel/noarch/repodata.json", "environment.yml", "pixi-pack.json"
    ]  # fmt: skip
    assert (metadata["version"], metadata["platform"]) == ("1", "linux-64")
    assert metadata["strix-forge"]["host-bound"] == ["alpha", "beta"]
    assert environment.startswith("channels:\n  - ./channel\n  - nodefaults\ndependencies:\n")
    record = index["packages.conda"][alpha]
    assert f"  - alpha=1.0={record['build']}\n" in environment
    assert metadata["strix-forge"]["sha256"][f"channel/noarch/{alpha}"] == record["sha256"]
    assert record["subdir"] == "noarch" and "url" not in record


def test_one_lock_gives_one_file(app: MiniProject, bundle: Path, tmp_path: Path) -> None:
    bundles.write(workspace(app), "more", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == bundle.read_bytes()


def test_a_remote_channel_gives_the_same_packages(
    app: MiniProject, bundle: Path, tmp_path: Path
) -> None:
    """Fetched by http and checked; a changed file on the server is refused."""
    site = tmp_path / "site"
    shutil.copytree(app.channel, site)
    with served(site) as url:
        manifest = app.root / "stacks" / "app" / "pixi.toml"
        space = Workspace.load(manifest, tmp_path, {str(app.channel.resolve()): url})
        space.lock(lambda _: False)
        made = bundles.write(space, "more", tmp_path / "remote.tar")
        assert made.packages == 2 and url in space.lock_file.read_text()
        (package,) = site.glob("noarch/beta-*.conda")
        package.write_bytes(package.read_bytes()[:-1] + b"x")
        with pytest.raises(BuildFailed, match=f"{package.name} has sha256"):
            bundles.write(space, "more", tmp_path / "bad.tar")
        package.unlink()
        with pytest.raises(BuildFailed, match=f"cannot fetch .*{package.name}"):
            bundles.write(space, "more", tmp_path / "bad.tar")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pixi.lock", "remote.tar", "site"]
    with tarfile.open(bundle) as one, tarfile.open(tmp_path / "remote.tar") as other:
        for name in one.getnames():
            if name.endswith(".conda"):
                assert one.extractfile(name).read() == other.extractfile(name).read()


def test_changed_or_missing_package_is_not_bundled(app: MiniProject, tmp_path: Path) -> None:
    (package,) = app.channel.glob("noarch/beta-*.conda")
    content = package.read_bytes()
    try:
        package.write_bytes(content + b"x")
        said = app.forge("bundle", "app", "-e", "more", "-o", str(tmp_path / "b.tar"), code=1)
        assert package.name in said.stderr and "sha256" in said.stderr
        package.unlink()
        with pytest.raises(BuildFailed, match="locked but missing"):
            bundles.write(workspace(app), "more", tmp_path / "b.tar")
    finally:
        package.write_bytes(content)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ForgeError, match="no environment 'x'"):
        bundles.write(workspace(app), "x", tmp_path / "b.tar")
    with pytest.raises(BuildFailed, match="No such file"):
        bundles.write(workspace(app), "more", tmp_path / "nowhere" / "b.tar")


def test_every_flipped_byte_is_refused_or_without_effect(bundle: Path, tmp_path: Path) -> None:
    """Bytes that mean nothing (padding, a header's owner) may change; nothing else."""
    content, where = bundle.read_bytes(), random.Random(5)
    damaged, refused = tmp_path / "damaged.tar", 0
    bundles.install(bundle, tmp_path / "good")
    good = digest_tree(tmp_path / "good" / "env" / "share")
    with tarfile.open(bundle) as tar:
        members = tar.getmembers()
    inside = [m.offset_data + where.randrange(m.size) for m in members for _ in range(10)]
    for position in inside + [where.randrange(len(content)) for _ in range(20)]:
        changed = bytearray(content)
        changed[position] ^= 1 << where.randrange(8)
        damaged.write_bytes(changed)
        try:
            bundles.install(damaged, tmp_path / "x")
        except ForgeError as error:
            refused += 1
            assert str(damaged) in str(error) and not (tmp_path / "x").exists()
        else:
            assert position not in inside, f"byte {position} of a member"
            assert digest_tree(tmp_path / "x" / "env" / "share") == good
            shutil.rmtree(tmp_path / "x")
    assert refused >= len(inside)


def test_cut_off_anywhere_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Also where a member ends, which tar readers take for the end of the archive."""
    with tarfile.open(bundle) as tar:
        ends = [member.offset for member in tar] + [m.offset_data + 7 for m in tar.getmembers()]
    content, file = bundle.read_bytes(), tmp_path / "cut.tar"
    for end in ends:
        file.write_bytes(content[:end])
        with pytest.raises(BuildFailed, match="damaged or cut off"):
            bundles.install(file, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["../evil", "/nowhere/evil", "channel/noarch/extra.conda"])
def test_foreign_member_is_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "b.tar"
    shutil.copy(bundle, file)
    with tarfile.open(file, "a") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(BuildFailed, match="refused|differs"):
        bundles.install(file, tmp_path / "x")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "x").exists()


def test_packed_again_by_tar_is_refused(bundle: Path, tmp_path: Path) -> None:
    """tar writes ./NAME, folders, and its own order."""
    subprocess.run(["tar", "-xf", bundle, "--one-top-level=all"], cwd=tmp_path, check=True)
    subprocess.run(["tar", "-cf", "b.tar", "-C", "all", "."], cwd=tmp_path, check=True)
    with pytest.raises(BuildFailed, match="is no bundle"):
        bundles.install(tmp_path / "b.tar", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_existing_environment_is_kept(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine").touch()
    with pytest.raises(ForgeError, match="exists"):
        bundles.install(bundle, tmp_path)
    assert (tmp_path / "env" / "mine").exists()


def test_a_path_with_a_space_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="path with a space"):
        bundles.install(bundle, tmp_path / "a b")
    assert not (tmp_path / "a b").exists()


def test_a_file_where_the_folder_should_be_is_named(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BuildFailed, match=rf"into {tmp_path}/file: File exists. Mend that"):
        bundles.install(bundle, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_killed_while_installing_is_done_again(bundle: Path, tmp_path: Path) -> None:
    """The kill comes with the environment on its way, as soon as the installer is called."""
    code = (
        "import os, sys; from pathlib import Path; from pixi_workspace import bundle\n"
        "def install(records, prefix, **_):\n"
        "    prefix.mkdir(); (prefix / 'half').touch(); os.kill(os.getpid(), 9)\n"
        "bundle.rattler.install = install\n"
        "bundle.install(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, bundle, tmp_path]
    killed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(CHECKOUT / "src")})
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "env" / "half").exists()
    bundles.install(bundle, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"env", "activate.sh"}
    assert not (tmp_path / "env" / "half").exists()
    with pytest.raises(ForgeError, match="exists"):
        bundles.install(bundle, tmp_path)


def test_killed_while_writing_leaves_no_half_bundle(app: MiniProject, tmp_path: Path) -> None:
    """The older bundle stays until the new one is whole."""
    file = tmp_path / "b.tar"
    file.write_text("older")
    os.mkfifo(tmp_path / "never-answers")
    code = (
        "import sys; from pathlib import Path; from pixi_workspace import Workspace, bundle\n"
        "bundle.sha256_file = lambda path: open(sys.argv[2]).read()\n"
        "space = Workspace.load(Path(sys.argv[1]), Path(sys.argv[3]), {})\n"
        "bundle.write(space, 'more', Path(sys.argv[4]))\n"
    )
    space = workspace(app)
    child = subprocess.Popen(
        [app.command()[0], "-c", code, space.manifest.path, tmp_path / "never-answers", space.folder,
         file], env=app.environment
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (tmp_path / ".partial-b.tar").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert file.read_text() == "older"
    bundles.write(space, "more", file)
    assert tarfile.is_tarfile(file) and not (tmp_path / ".partial-b.tar").exists()


@pytest.mark.usefixtures("built")
def test_validator_from_a_bundle(project: MiniProject, tmp_path: Path) -> None:
    """The real validator with all that it needs, installed and started without a network."""
    if no_namespace():
        pytest.skip("not attempted: this machine lets nobody make a network namespace")
    manifest, file = tmp_path / "check" / "pixi.toml", tmp_path / "check.tar"
    manifest.parent.mkdir()
    channels = json.dumps([str(CHECKOUT / "channel"), "conda-forge"])
    manifest.write_text(
        f"[workspace]\nchannels = {channels}\nplatforms = ['linux-64']\n"
        "[dependencies]\nstrix-validate = '*'\n"
    )
    base = (CHECKOUT / "build" / "embedded").resolve().as_uri()
    space = Workspace.load(manifest, tmp_path, {"conda-forge": base})
    space.lock(lambda _: False)
    assert bundles.write(space, "default", file).packages > 10
    line = (
        f"{shlex.join(project.command('unbundle', str(file), str(tmp_path / 'there')))} && "
        f"unset PYTHONPATH && source {tmp_path}/there/activate.sh && strix-validate list"
    )
    done = subprocess.run(
        [*CUT, "bash", "-c", line],
        env=project.environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention" in done.stdout.split("activate.sh")[1]
