# SPDX-License-Identifier: BSD-3-Clause
"""`forge channel verify` finds each planted damage, and the next publish mends index files."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zstandard
from support.conda_packages import file, package
from support.servers import QuietHandler, served
from support.static_channel import BUILD, Source, findings, flip, restored, tree, unzstd

from forge.channel import revisions, verify
from forge.channel.publish import StaticChannel
from forge.conda.local import write_index
from forge.conda.location import Location
from forge.errors import Failed, ForgeError, NotAttempted


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    source = Source(root / "channel")
    source.make("alpha", depends=["beta"], exports={"weak": ["alpha >=1"]})
    source.make("beta", subdir="linux-64")
    StaticChannel(root / "out").publish(source)
    return root / "out"


@pytest.fixture
def damaged(published: Path) -> Iterator[Path]:
    with restored(published):
        yield published


ALPHA = f"noarch/alpha-1.0-{BUILD}.conda"
STATEMENT, BETAS = (f"forge/{name}-1.0-{BUILD}.provenance.json" for name in ("alpha", "beta"))
WRONG = f"{ALPHA}: its provenance:"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def says(name: str, **changes: object) -> Callable[[Path], object]:
    """A form of the index says something else of alpha."""
    return lambda c: edit(c / name, lambda d: d["packages.conda"][ALPHA[7:]].update(changes))


def lacks(key: str) -> Callable[[Path], object]:
    """The index does not say that of alpha."""
    path = "noarch/repodata.json"
    return lambda c: edit(c / path, lambda d: d["packages.conda"][ALPHA[7:]].pop(key))


def repack(path: Path, change: Callable[[dict], object]) -> None:
    data = msgpack.unpackb(unzstd(path.read_bytes()))
    change(data)
    path.write_bytes(zstandard.compress(msgpack.packb(data)))


def compress(path: Path) -> None:
    """Have the compressed form say the same."""
    Path(f"{path}.zst").write_bytes(zstandard.compress(path.read_bytes()))


def shard_of(channel: Path) -> Path:
    """The shard of noarch that the index names."""
    index = msgpack.unpackb(unzstd((channel / "noarch" / verify.SHARDS).read_bytes()))
    (digest,) = index["shards"].values()
    return channel / "noarch/shards" / f"{digest.hex()}.msgpack.zst"


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda c: flip(c / ALPHA, 100), f"{ALPHA}: has sha256"),
    "statement edited": (
        lambda c: edit(
            c / STATEMENT, lambda d: d["predicate"]["runDetails"]["metadata"].update(startedOn="x")
        ),
        f"{WRONG} startedOn: the package has 2026-01-01T00:00:00Z, its provenance x",
    ),
    "statement of another package": (
        lambda c: (c / STATEMENT).write_bytes((c / BETAS).read_bytes()),
        f"{WRONG} name: the package has alpha-",
    ),
    "statement removed": (lambda c: (c / STATEMENT).unlink(), f"{WRONG} there is none"),
    "statement that is none": (
        lambda c: (c / STATEMENT).write_text("{}"),
        "is not the provenance of a package",
    ),
    "truncated": (lambda c: (c / ALPHA).write_bytes(b"PK"), f"{ALPHA}: 2 bytes"),
    "missing": (lambda c: (c / ALPHA).unlink(), f"{ALPHA}: missing"),
    "orphan": (
        lambda c: (c / "noarch/x-1-0.conda").write_bytes(b"x"),
        "noarch/x-1-0.conda: not in the index",
    ),
    "json": (says("noarch/repodata.json", depends=[]), "noarch/repodata.json.zst: disagrees"),
    "no sha256": (lacks("sha256"), f"{ALPHA}: its record has no sha256 or no size"),
    "no size": (lacks("size"), f"{ALPHA}: its record has no sha256 or no size"),
    "json cut": (
        lambda c: (c / "noarch/repodata.json").write_text('{"packages.conda": {'),
        "noarch/repodata.json: missing or damaged",
    ),
    "zst": (lambda c: flip(c / "noarch/repodata.json.zst", 40), "noarch/repodata.json.zst: d"),
    "no zst": (
        lambda c: (c / "noarch/repodata.json.zst").unlink(), "noarch/repodata.json.zst: missing",
    ),
    "shard": (lambda c: flip(shard_of(c)), "damaged (shard of alpha)"),
    "no shard": (lambda c: shard_of(c).unlink(), "missing (shard of alpha)"),
    "shard index": (
        lambda c: (c / "noarch" / verify.SHARDS).write_bytes(
            (c / "linux-64" / verify.SHARDS).read_bytes()
        ),
        "missing (shard of beta)",
    ),
    "shards elsewhere": (
        lambda c: repack(
            c / "noarch" / verify.SHARDS,
            lambda d: d["info"].update(shards_base_url="https://other.invalid/x/"),
        ),
        f"noarch/{verify.SHARDS}: names files elsewhere, at",
    ),
    "shards of another time": (
        lambda c: (c / "noarch" / verify.SHARDS).write_bytes(
            zstandard.compress(msgpack.packb({"info": {}, "shards": {}}))
        ),
        f"noarch/{verify.SHARDS}: disagrees",
    ),
    "run exports": (
        lambda c: edit(c / "noarch/run_exports.json", lambda d: d["packages.conda"].clear()),
        "noarch/run_exports.json: disagrees",
    ),
    "other run exports": (
        says("noarch/run_exports.json", run_exports={"weak": ["beta"]}),
        "noarch/run_exports.json: disagrees",
    ),
    "log": (
        lambda c: (c / "revisions/log.json").write_text(
            revisions.dump(revisions.Log([revisions.Revision(1, added=[ALPHA])]))
        ),
        "revision 1 is not what the index holds",
    ),
    "revision that yanks": (
        lambda c: edit(
            c / "revisions/1/noarch/repodata.json", lambda d: d.update(removed=[ALPHA[7:]])
        ),
        "revisions/1/noarch/repodata.json: lists or removes other packages than that revision",
    ),
    "revision of fewer": (
        lambda c: edit(
            c / "revisions/1/noarch/repodata.json", lambda d: d["packages.conda"].clear()
        ),
        "revisions/1/noarch/repodata.json: lists or removes other packages than that revision",
    ),
    "revision": (
        lambda c: (c / "revisions/1/noarch/repodata.json.zst").unlink(),
        "revisions/1/noarch/repodata.json.zst: missing or damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_verify_finds(case: str, damaged: Path) -> None:
    """Each planted damage."""
    damage, message = DAMAGES[case]
    assert findings(damaged) == []
    damage(damaged)
    assert any(message in line for line in findings(damaged)), findings(damaged)


def test_hostile_package_is_found(tmp_path: Path) -> None:
    """Its record is right; the gate would have refused it."""
    source, out = Source(tmp_path / "channel"), tmp_path / "out"
    bad = package(tmp_path / "bad", [file("../../x")])
    (out / "linux-64").mkdir(parents=True)
    (out / "noarch").mkdir()
    (out / "noarch" / bad.name).write_bytes(bad.read_bytes())
    write_index(out)
    assert any("not a plain path below a prefix" in line for line in findings(out))
    with served(out) as url:
        found = verify.channel(Location(url))[1]
    assert any("not a plain path below a prefix" in line for line in found)
    source.index()
    (out / "noarch" / bad.name).rename(source.folder / "noarch" / bad.name)
    source.index()
    with pytest.raises(ForgeError, match="is not fit to be installed.* not a plain path"):
        StaticChannel(tmp_path / "published").publish(source)


def test_publish_mends_the_index(damaged: Path) -> None:
    """What verify finds in index files is written anew from the packages."""
    forms = ("json", "json cut", "zst", "shard", "no shard", "run exports", "revision")
    for case in ("no sha256", *forms):
        DAMAGES[case][0](damaged)
        assert findings(damaged), case
        assert StaticChannel(damaged).publish(None) is None
        assert findings(damaged) == [], case
    (damaged / ALPHA).unlink()
    with pytest.raises(Failed, match="missing or truncated"):
        StaticChannel(damaged).publish(None)


def test_publish_indexes_no_changed_package(damaged: Path) -> None:
    """A package of the same size does not get the hash of what it has become."""
    flip(damaged / ALPHA, 10)  # a time in the zip archive
    DAMAGES["no zst"][0](damaged)
    before = tree(damaged)
    with pytest.raises(Failed, match=f"{ALPHA} has sha256 .* restore it from a copy"):
        StaticChannel(damaged).publish(None)
    assert {k: v for k, v in tree(damaged).items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


def test_folder_as_a_url(tmp_path: Path) -> None:
    folder = tmp_path / "a channel"
    assert Location(folder.as_uri()).folder == folder == Location(str(folder)).folder


# what an index may say of a package that is not so, while the forms of the index agree
LIES = {
    "depends": [], "constrains": ["beta <1"], "noarch": "python", "license": "GPL-3.0-only",
    "build_number": 7, "python_site_packages_path": "lib/elsewhere", "track_features": "less",
    "timestamp": 7, "md5": "0" * 32, "run_exports": {}, "flags": ["x"],
    "extra_depends": {"x": ["beta <1"]}, "url": "https://x.invalid/",
}  # fmt: skip


@pytest.mark.parametrize("key", LIES)
def test_record_that_is_not_the_package(key: str, damaged: Path) -> None:
    """Edited in repodata.json and its compressed form alike."""
    says("noarch/repodata.json", **{key: LIES[key]})(damaged)
    compress(damaged / "noarch/repodata.json")
    assert any(f"{ALPHA}: {key} is {LIES[key]}" in line for line in findings(damaged))


@pytest.mark.parametrize("key", ["depends", "md5", "run_exports"])
def test_record_that_says_less_than_the_package(key: str, damaged: Path) -> None:
    path = damaged / "noarch/repodata.json"
    edit(path, lambda d: d["packages.conda"][ALPHA[7:]].pop(key))
    compress(path)
    assert any(f"{ALPHA}: {key} is None in its record" in line for line in findings(damaged))


@pytest.mark.parametrize("key", LIES)
def test_shard_that_is_not_the_package(key: str, damaged: Path) -> None:
    """pixi reads shards alone; its digest is right."""
    shard, index = shard_of(damaged), damaged / "noarch" / verify.SHARDS
    repack(shard, lambda d: d["packages.conda"][ALPHA[7:]].update({key: LIES[key]}))
    digest = hashlib.sha256(shard.read_bytes()).digest()
    shard.rename(shard.with_name(f"{digest.hex()}.msgpack.zst"))
    repack(index, lambda d: d["shards"].update(alpha=digest))
    assert any(f"noarch/{verify.SHARDS}: disagrees" in line for line in findings(damaged))


@pytest.mark.parametrize("key", [*LIES, "sha256", "size"])
@pytest.mark.parametrize("form", ["revisions/1/noarch/repodata.json", verify.UNPATCHED])
def test_form_that_is_not_the_package(form: str, key: str, damaged: Path) -> None:
    """A revision is a channel of its own, and the next index is made from the unpatched one."""
    name, lie = form if "/" in form else f"noarch/{form}", LIES.get(key, "0")
    says(name, **{key: lie})(damaged)
    assert any(f"{ALPHA}: {key} is {lie} in {name}, " in line for line in findings(damaged))


def test_a_package_with_two_records(damaged: Path) -> None:
    """Solvers read both tables, and take whichever suits them."""

    def again(data: dict) -> None:
        (name,) = (n for n in data["packages.conda"] if n.startswith("alpha"))
        data["packages"] = {name: data["packages.conda"][name] | {"depends": ["beta <1"]}}

    path, shard = damaged / "noarch/repodata.json", shard_of(damaged)
    repack(shard, again)
    assert any("damaged (shard of alpha)" in line for line in findings(damaged))
    edit(path, again)
    compress(path)
    assert any("repodata.json: missing or damaged" in line for line in findings(damaged))


@pytest.mark.parametrize("elsewhere", ["https://evil.example/c/noarch/", "../../x/noarch/", 7])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noarch/repodata.json", "names files elsewhere"),
        ("revisions/1/noarch/repodata.json", "its base_url does not lead"),
    ],
)
def test_index_that_names_files_elsewhere(
    elsewhere: object, name: str, message: str, damaged: Path
) -> None:
    edit(damaged / name, lambda d: d["info"].update(base_url=elsewhere))
    assert any(message in line for line in findings(damaged))


@pytest.mark.parametrize("key", ["../../x.conda", "/etc/x.conda", "x\n.conda", "x", ""])
def test_key_that_is_no_file_name(key: str, damaged: Path) -> None:
    path = damaged / "noarch/repodata.json"
    edit(path, lambda d: d["packages.conda"].update({key: d["packages.conda"].pop(ALPHA[7:])}))
    assert any("is not the name of a package file" in line for line in findings(damaged))


@pytest.mark.parametrize("name", ["repodata.json.bz2", "current_repodata.json"])
def test_form_that_is_never_published(name: str, damaged: Path) -> None:
    """An old client would read it."""
    (damaged / "noarch" / name).write_bytes(b"")
    assert any(f"noarch/{name}: a form of the index" in line for line in findings(damaged))


def test_verify_over_http(damaged: Path) -> None:
    """As in a folder; a file that no index lists is not seen."""
    with served(damaged) as url:
        assert verify.channel(Location(url))[1] == []
        (damaged / "noarch" / "x-1-0.conda").write_bytes(b"x")
        assert verify.channel(Location(url))[1] == []
        flip(damaged / ALPHA, 100)
        (damaged / "linux-64" / verify.SHARDS).unlink()
        index, shards = sorted(verify.channel(Location(url, retries=0))[1])
    assert "missing" in index and f"{ALPHA}: has sha256" in shards


def test_verify_of_what_fails_midway(damaged: Path) -> None:
    """A server that breaks off or refuses a file is a finding; one that is not there is exit 3."""

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            if self.path.endswith(f"beta-1.0-{BUILD}.conda"):
                self.send_error(503)
            elif self.path.endswith(".conda"):
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.wfile.write(b"PK")
            else:
                super().do_GET()

    with served(damaged, Refusing) as url:
        found = verify.channel(Location(url, retries=0))[1]
        assert len(found) == 2 and "503" in str(found) and ALPHA in str(found)
        with pytest.raises(NotAttempted, match="nothing was checked"):
            verify.channel(Location(f"{url}/elsewhere", retries=0))
    with pytest.raises(NotAttempted, match="cannot be read") as error:
        verify.channel(Location(url, retries=0))
    assert error.value.exit_code == 3
