# SPDX-License-Identifier: BSD-3-Clause
"""Foreign git repositories: nothing that they name is run, and only their commit is taken."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.project import commit
from support.servers import served

from forge.errors import ForgeError, NotAttempted
from forge.project import Project
from forge.sources import git, patching
from forge.sources.cache import Source, SourceCache

URL = "https://upstream.invalid/demo.git"
PROMISOR = """
[core]
    repositoryformatversion = 1
[extensions]
    partialClone = origin
[protocol]
    allow = always
[protocol "ext"]
    allow = always
[remote "origin"]
    promisor = true
    partialclonefilter = blob:none
"""
# Configuration of the repository, by what it names: COMMAND is a program, REPOSITORY the folder.
CONFIGURED = {
    "a file monitor": "[core]\nfsmonitor = COMMAND",
    "a hook's folder": "[core]\nhooksPath = HOOKS",
    "a worktree": "[core]\nworktree = HOOKS",
    "a template": "[init]\ntemplateDir = HOOKS",
    "a pager": "[core]\npager = COMMAND\neditor = COMMAND\naskPass = COMMAND",
    "a hook of upload-pack": "[uploadpack]\npackObjectsHook = COMMAND",
    "other refs": "[core]\nalternateRefsCommand = COMMAND",
    "an alias": '[alias]\ncat-file = "!COMMAND"\nfetch = "!COMMAND"\nfsck = "!COMMAND"',
    "a signature": "[gpg]\nprogram = COMMAND\n[log]\nshowSignature = true",
    "a diff": '[diff]\nexternal = COMMAND\n[diff "x"]\ntextconv = COMMAND',
    "a filter": '[filter "x"]\nsmudge = COMMAND\nclean = COMMAND\nprocess = COMMAND\nrequired',
    "a submodule": '[submodule "x"]\nupdate = "!COMMAND"\n[submodule]\nrecurse = true',
    "maintenance": "[gc]\nauto = 1\nautoDetach = false\nrecentObjectsHook = COMMAND",
    "a promisor by uploadpack": f"{PROMISOR}url = file://REPOSITORY\nuploadpack = COMMAND",
    "a promisor by ext": f"{PROMISOR}url = ext::COMMAND",
    "a promisor by ssh": f"{PROMISOR}url = ssh://h.invalid/x\n[core]\nsshCommand = COMMAND",
    "a promisor by a proxy": f"{PROMISOR}url = git://h.invalid/x\n[core]\ngitProxy = COMMAND",
    "a promisor by a helper": f"{PROMISOR}url = https://127.0.0.1:9/x\nvcs = ext",
    "a promisor of a URL": f'{PROMISOR}url = x:y\n[url "ext::COMMAND "]\ninsteadOf = x:',
    "a promisor's password": (
        f'{PROMISOR}url = http://127.0.0.1:9/x\n[credential]\nhelper = "!COMMAND"'
    ),
}


PATCH = """\
--- a/text
+++ b/text
@@ -1 +1 @@
-good
+better
--- a/.gitattributes
+++ b/.gitattributes
@@ -1 +1,2 @@
 * filter=x
+# more
"""
# Those that ran before, by another way in.
RAN = ["a file monitor", "a filter", "a promisor by uploadpack", "a promisor by ssh"]


class Hostile:
    """A repository with a commit, and a program that leaves a file where it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repository = folder, folder / "demo"
        self.canary = folder / "canary"
        self.program = folder / "program"
        self.program.write_text(f'#!/bin/sh\ntouch {self.canary}\nexec git-upload-pack "$@"\n')
        self.program.chmod(0o755)
        self.hooks = folder / "hooks"
        self.repository.mkdir()
        (self.repository / "text").write_text("good\n")
        (self.repository / ".gitattributes").write_text("* filter=x diff=x\n")
        (self.repository / ".gitmodules").write_text('[submodule "x"]\npath = x\nurl = ./x\n')
        self.commit = commit(self.repository)
        self.source = Source(URL, "", commit=self.commit)
        self.cache = SourceCache(Project(folder, folder / "channel", folder / "build"))
        for place in (self.hooks, self.hooks / "hooks", self.inside / "hooks"):
            place.mkdir(exist_ok=True)
            for name in ("post-checkout", "reference-transaction", "post-index-change"):
                (place / name).symlink_to(self.program)

    @property
    def inside(self) -> Path:
        return self.repository / ".git"

    def configure(self, text: str, file: Path | None = None) -> None:
        values = {"COMMAND": self.program, "REPOSITORY": self.repository, "HOOKS": self.hooks}
        for name, value in values.items():
            text = text.replace(name, str(value))
        with (file or self.inside / "config").open("a") as config:
            config.write(f"{text}\n")

    def lose(self, name: str = "text") -> None:
        """Take away a file of the commit, or the commit, which a promisor would fetch."""
        which = self.commit if name == "commit" else f"{self.commit}:{name}"
        digest = git_says(self.repository, "rev-parse", which)
        lost = self.inside / "objects" / digest[:2] / digest[2:]
        lost.chmod(0o644)
        lost.unlink()

    def is_taken(self, expected: bool) -> None:
        """Add it, and do all that follows; in each step nothing of it runs."""
        if expected:
            assert self.cache.add(self.repository, [self.source]) == self.source
            assert self.cache.state(self.source) == "whole"
            tree = self.cache.prefill(self.source, self.folder / "src_cache")
            assert (tree / "text").read_text() == "good\n"
        else:
            with pytest.raises(ForgeError):
                self.cache.add(self.repository, [self.source])
            assert not self.cache.path(self.source).exists()
        assert not self.canary.exists(), "a command of the repository ran"


def git_says(folder: Path, *words: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", folder, *words]
    return subprocess.check_output(command, text=True).strip()


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def test_the_canary_sings(hostile: Hostile) -> None:
    """What shows that a command ran: git itself, in such a repository, runs it."""
    hostile.configure(CONFIGURED["a promisor by uploadpack"])
    hostile.lose()
    command = ["git", "-C", hostile.repository, "cat-file", "-p", f"{hostile.commit}:text"]
    subprocess.run(command, capture_output=True)
    assert hostile.canary.exists()


@pytest.mark.parametrize("lost", ["text", "commit"])
@pytest.mark.parametrize("name", CONFIGURED)
def test_configuration(hostile: Hostile, name: str, lost: str) -> None:
    hostile.configure(CONFIGURED[name])
    hostile.lose(lost)
    hostile.is_taken(False)


@pytest.mark.parametrize("name", RAN)
def test_a_whole_repository_is_taken(hostile: Hostile, name: str) -> None:
    hostile.configure(CONFIGURED[name])
    hostile.is_taken(True)


@pytest.mark.parametrize("name", RAN)
def test_configuration_that_is_included(hostile: Hostile, name: str) -> None:
    other = hostile.folder / "included"
    hostile.configure(CONFIGURED[name], other)
    hostile.configure(f"[include]\npath = {other}")
    hostile.lose("commit")
    hostile.is_taken(False)


@pytest.mark.parametrize("name", RAN)
def test_configuration_in_the_cache(hostile: Hostile, name: str) -> None:
    """Of a copy of build/sources, or of one that somebody changed."""
    hostile.is_taken(True)
    kept = hostile.cache.path(hostile.source)
    hostile.configure(CONFIGURED[name], kept / "config")
    (kept / "hooks").mkdir(exist_ok=True)
    (kept / "hooks/post-checkout").symlink_to(hostile.program)
    assert hostile.cache.state(hostile.source) == "whole"
    tree = hostile.cache.prefill(hostile.source, hostile.folder / "again")
    assert (tree / "text").read_text() == "good\n" and not hostile.canary.exists()
    for item in filter(Path.is_file, (kept / "objects").rglob("*")):
        item.chmod(0o644)
        item.write_bytes(item.read_bytes()[:-3] + b"bad")
    assert hostile.cache.state(hostile.source) == "changed" and not hostile.canary.exists()


def by_a_file(hostile: Hostile) -> None:
    """A .git file that points elsewhere, as a submodule's does."""
    hostile.inside.rename(hostile.folder / "elsewhere")
    hostile.inside.write_text(f"gitdir: {hostile.folder}/elsewhere\n")


def by_a_worktree(hostile: Hostile) -> None:
    """A repository whose folder has only a HEAD and a commondir."""
    hostile.inside.rename(hostile.folder / "elsewhere")
    hostile.inside.mkdir()
    (hostile.inside / "commondir").write_text(f"{hostile.folder}/elsewhere\n")
    (hostile.inside / "HEAD").write_text(f"{hostile.commit}\n")


@pytest.mark.parametrize("change", [by_a_file, by_a_worktree])
def test_a_repository_that_is_elsewhere(
    hostile: Hostile, change: Callable[[Hostile], None]
) -> None:
    hostile.configure(CONFIGURED["a promisor by uploadpack"])
    hostile.lose()
    change(hostile)
    hostile.is_taken(False)
    with pytest.raises(NotAttempted, match="name a repository itself, not a worktree"):
        git.fetch(hostile.repository.as_uri(), hostile.commit, hostile.folder / "got")


def test_objects_of_another_repository(hostile: Hostile) -> None:
    """They are objects like others: hashes say which. Its configuration does not count."""
    other = hostile.folder / "other"
    subprocess.run(["git", "init", "-q", other], check=True)
    (other / ".git/objects/info/alternates").write_text(f"{hostile.inside}/objects\n")
    hostile.configure(CONFIGURED["other refs"], other / ".git/config")
    hostile.repository = other
    hostile.is_taken(True)


@pytest.mark.parametrize("name", RAN)
def test_a_recipe_that_names_a_folder(hostile: Hostile, name: str) -> None:
    hostile.configure(CONFIGURED[name])
    hostile.lose()
    source = Source(hostile.repository.as_uri(), "", commit=hostile.commit)
    with pytest.raises(NotAttempted):
        hostile.cache.fetch(source, lambda *_: None)
    assert not hostile.canary.exists()


@pytest.mark.parametrize(
    "url", ["ext::COMMAND", "ssh://x.invalid/a", "-u./a", "git://127.0.0.1:9/"]
)
def test_a_url_of_another_kind(hostile: Hostile, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_SSH_COMMAND", str(hostile.program))
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "ext:ssh:git:file")
    address = url.replace("COMMAND", str(hostile.program))
    with pytest.raises(NotAttempted):
        git.fetch(address, hostile.commit, hostile.folder / "got")
    with pytest.raises(NotAttempted):
        git.list_tags(address)
    assert not hostile.canary.exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"GIT_DIR": "REPOSITORY/.git"},
        {"GIT_CONFIG_GLOBAL": "CONFIG"},
        {"GIT_CONFIG_SYSTEM": "CONFIG"},
        {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "include.path",
            "GIT_CONFIG_VALUE_0": "CONFIG",
        },
        {"GIT_TEMPLATE_DIR": "HOOKS"},
        {"XDG_CONFIG_HOME": "XDG"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_the_environment(
    hostile: Hostile, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's filters and hooks are not run either: a tree's attributes choose among them."""
    config = hostile.folder / "xdg/git/config"
    config.parent.mkdir(parents=True)
    for name in ("a filter", "a hook's folder", "a template", "a file monitor"):
        hostile.configure(CONFIGURED[name], config)
    places = {
        "REPOSITORY": hostile.repository,
        "CONFIG": config,
        "HOOKS": hostile.hooks,
        "XDG": config.parent.parent,
    }
    for name, value in variables.items():
        for word, place in places.items():
            value = value.replace(word, str(place))
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(hostile.repository)
    hostile.is_taken(True)
    (tree := hostile.folder / "tree").mkdir()
    (tree / "text").write_text("good\n")
    (tree / ".gitattributes").write_text("* filter=x\n")
    patch = hostile.folder / "0001-a.patch"
    patch.write_text(PATCH)
    assert patching.apply(tree, [patch]) == "" and not hostile.canary.exists()


def test_a_moved_branch_changes_nothing(hostile: Hostile) -> None:
    """The cache's branch leads to another commit: the tree is that of the recipe's."""
    hostile.is_taken(True)
    kept = hostile.cache.path(hostile.source)
    other = subprocess.run(["git", "-C", kept, "mktree"], input=b"", capture_output=True)
    tree = other.stdout.decode().strip()
    who = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    moved = git_says(kept, *who, "commit-tree", "-m", "other", tree)
    git_says(kept, "update-ref", git.BRANCH, moved)
    assert hostile.cache.state(hostile.source) == "whole"
    again = hostile.cache.prefill(hostile.source, hostile.folder / "again")
    assert (again / "text").read_text() == "good\n"
    assert git_says(again, "rev-parse", "HEAD") == hostile.commit
    assert (again / ".git/HEAD").read_text().strip() == hostile.commit


def test_a_damaged_object_in_the_cache(hostile: Hostile) -> None:
    """It is another file's content under the hash of the recipe's: nothing is built from it."""
    hostile.is_taken(True)
    kept = hostile.cache.path(hostile.source)
    digests = [
        git_says(kept, "rev-parse", f"{hostile.commit}:{n}") for n in ("text", ".gitmodules")
    ]
    text, other = (kept / "objects" / digest[:2] / digest[2:] for digest in digests)
    text.chmod(0o644)
    text.write_bytes(other.read_bytes())
    assert hostile.cache.state(hostile.source) == "changed"
    with pytest.raises(ForgeError, match="was changed since it was fetched"):
        hostile.cache.prefill(hostile.source, hostile.folder / "again")


def test_what_is_no_commit(hostile: Hostile) -> None:
    """A tag or a tree of that hash is not taken for one."""
    git_says(hostile.repository, "-c", "user.name=a", "-c", "user.email=a@b", "tag", "-m", "x", "v")
    for name in ("v", "HEAD^{tree}"):
        digest = git_says(hostile.repository, "rev-parse", name)
        assert not git.has_commit(hostile.repository, digest)
        with pytest.raises(NotAttempted, match="is not a commit"):
            git.fetch(hostile.repository.as_uri(), digest, hostile.folder / "got")


def test_a_server(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, with what a person set for it: here a mirror."""
    bare = hostile.folder / "www/demo.git"
    git_says(hostile.repository, "tag", "v1")
    subprocess.run(["git", "clone", "-q", "--bare", hostile.repository, bare], check=True)
    git_says(bare, "update-server-info")
    with served(bare.parent) as url:
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{url}/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://upstream.invalid/")
        assert git.list_tags(URL) == ["v1"]
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{bare.parent}/.insteadOf")
        with pytest.raises(NotAttempted, match="transport 'file' not allowed"):
            git.list_tags(URL)
