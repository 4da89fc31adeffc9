# SPDX-License-Identifier: BSD-3-Clause
"""Foreign git repositories: no program that they name is run, and only the given commit is used."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.project import commit
from support.servers import QuietHandler, served

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
# Configurations of hostile repositories, by the feature of git that would run a program. COMMAND
# stands for the program, REPOSITORY for the repository and HOOKS for a folder of hooks.
CONFIGURATIONS = {
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
# Configurations whose program the driver once ran. Further tests put these configurations into
# other places, such as an included file.
DANGEROUS = ["a file monitor", "a filter", "a promisor by uploadpack", "a promisor by ssh"]


class Hostile:
    """A hostile repository with a commit, and a program that it may run.

    Attributes:
        canary: The file that the program makes. It shows that the program ran.
        program: The program.
        hooks: A folder with links to the program, which may serve as hooks.
        commit: The commit.
        source: The commit as a source of a recipe.
        cache: The cache to which sources are added.
    """

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
        for hooks in (self.hooks, self.hooks / "hooks", self.git_folder / "hooks"):
            hooks.mkdir(exist_ok=True)
            for name in ("post-checkout", "reference-transaction", "post-index-change"):
                (hooks / name).symlink_to(self.program)

    @property
    def git_folder(self) -> Path:
        return self.repository / ".git"

    def configure(self, text: str, file: Path | None = None) -> None:
        values = {"COMMAND": self.program, "REPOSITORY": self.repository, "HOOKS": self.hooks}
        for name, value in values.items():
            text = text.replace(name, str(value))
        with (file or self.git_folder / "config").open("a") as config:
            config.write(f"{text}\n")

    def lose(self, name: str = "text") -> None:
        """Remove the object of a file, or of the commit. git then fetches it from a promisor."""
        revision = self.commit if name == "commit" else f"{self.commit}:{name}"
        digest = run_git(self.repository, "rev-parse", revision)
        git_object = self.git_folder / "objects" / digest[:2] / digest[2:]
        git_object.chmod(0o644)
        git_object.unlink()

    def require_accepted(self, is_accepted: bool) -> None:
        """Add the repository to the cache and use it, and require that its program never runs.

        Args:
            is_accepted: Whether the cache must accept the repository. Otherwise it must be refused.
        """
        if is_accepted:
            assert self.cache.add(self.repository, [self.source]) == self.source
            assert self.cache.state(self.source) == "whole"
            tree = self.cache.prefill(self.source, self.folder / "src_cache")
            assert (tree / "text").read_text() == "good\n"
        else:
            with pytest.raises(ForgeError):
                self.cache.add(self.repository, [self.source])
            assert not self.cache.path(self.source).exists()
        assert not self.canary.exists(), "no program of the repository may run"


def run_git(folder: Path, *words: str) -> str:
    """Run git without hooks, and return its output."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", folder, *words]
    return subprocess.check_output(command, text=True).strip()


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def test_the_canary_sings(hostile: Hostile) -> None:
    """git itself runs the program that a hostile repository names, and so makes the canary file."""
    hostile.configure(CONFIGURATIONS["a promisor by uploadpack"])
    hostile.lose()
    command = ["git", "-C", hostile.repository, "cat-file", "-p", f"{hostile.commit}:text"]
    subprocess.run(command, capture_output=True)
    assert hostile.canary.exists()


@pytest.mark.parametrize("missing", ["text", "commit"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration(hostile: Hostile, name: str, missing: str) -> None:
    hostile.configure(CONFIGURATIONS[name])
    hostile.lose(missing)
    hostile.require_accepted(False)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_whole_repository_is_taken(hostile: Hostile, name: str) -> None:
    hostile.configure(CONFIGURATIONS[name])
    hostile.require_accepted(True)


@pytest.mark.parametrize("name", DANGEROUS)
def test_configuration_that_is_included(hostile: Hostile, name: str) -> None:
    included = hostile.folder / "included"
    hostile.configure(CONFIGURATIONS[name], included)
    hostile.configure(f"[include]\npath = {included}")
    hostile.lose("commit")
    hostile.require_accepted(False)


@pytest.mark.parametrize("name", DANGEROUS)
def test_configuration_in_the_cache(hostile: Hostile, name: str) -> None:
    """A hostile repository in the cache runs no program.

    The cache has such a repository if somebody copied or changed build/sources.
    """
    hostile.require_accepted(True)
    cached = hostile.cache.path(hostile.source)
    hostile.configure(CONFIGURATIONS[name], cached / "config")
    (cached / "hooks").mkdir(exist_ok=True)
    (cached / "hooks/post-checkout").symlink_to(hostile.program)
    assert hostile.cache.state(hostile.source) == "whole"
    tree = hostile.cache.prefill(hostile.source, hostile.folder / "again")
    assert (tree / "text").read_text() == "good\n" and not hostile.canary.exists()
    for item in filter(Path.is_file, (cached / "objects").rglob("*")):
        item.chmod(0o644)
        item.write_bytes(item.read_bytes()[:-3] + b"bad")
    assert hostile.cache.state(hostile.source) == "changed" and not hostile.canary.exists()


def use_git_file(hostile: Hostile) -> None:
    """Move .git elsewhere, and replace it by a file that names the new path, as in a submodule."""
    hostile.git_folder.rename(hostile.folder / "elsewhere")
    hostile.git_folder.write_text(f"gitdir: {hostile.folder}/elsewhere\n")


def use_commondir(hostile: Hostile) -> None:
    """Move .git elsewhere, and replace it by a folder with only HEAD and commondir."""
    hostile.git_folder.rename(hostile.folder / "elsewhere")
    hostile.git_folder.mkdir()
    (hostile.git_folder / "commondir").write_text(f"{hostile.folder}/elsewhere\n")
    (hostile.git_folder / "HEAD").write_text(f"{hostile.commit}\n")


@pytest.mark.parametrize("change", [use_git_file, use_commondir])
def test_a_repository_that_is_elsewhere(
    hostile: Hostile, change: Callable[[Hostile], None]
) -> None:
    hostile.configure(CONFIGURATIONS["a promisor by uploadpack"])
    hostile.lose()
    change(hostile)
    hostile.require_accepted(False)
    with pytest.raises(NotAttempted, match="name the repository itself, not a worktree"):
        git.fetch(hostile.repository.as_uri(), hostile.commit, hostile.folder / "got")


def test_a_repository_whose_path_git_cannot_read(hostile: Hostile) -> None:
    repository = hostile.repository.rename(hostile.folder / "a\nb")
    with pytest.raises(NotAttempted, match="has a character that cannot be printed"):
        git.fetch(repository.as_uri(), hostile.commit, hostile.folder / "got")


def test_objects_of_another_repository(hostile: Hostile) -> None:
    """A repository may use the objects of another repository, whose configuration is not used.

    This is safe, because a hash identifies each object.
    """
    repository = hostile.folder / "other"
    subprocess.run(["git", "init", "-q", repository], check=True)
    (repository / ".git/objects/info/alternates").write_text(f"{hostile.git_folder}/objects\n")
    hostile.configure(CONFIGURATIONS["other refs"], repository / ".git/config")
    hostile.repository = repository
    hostile.require_accepted(True)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_recipe_that_names_a_folder(hostile: Hostile, name: str) -> None:
    hostile.configure(CONFIGURATIONS[name])
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
    """The user's own filters and hooks are not run either.

    The attributes of a foreign tree could select them.
    """
    config = hostile.folder / "xdg/git/config"
    config.parent.mkdir(parents=True)
    for name in ("a filter", "a hook's folder", "a template", "a file monitor"):
        hostile.configure(CONFIGURATIONS[name], config)
    paths = {
        "REPOSITORY": hostile.repository,
        "CONFIG": config,
        "HOOKS": hostile.hooks,
        "XDG": config.parent.parent,
    }
    for name, value in variables.items():
        for word, path in paths.items():
            value = value.replace(word, str(path))
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(hostile.repository)
    hostile.require_accepted(True)
    tree = hostile.folder / "tree"
    tree.mkdir()
    (tree / "text").write_text("good\n")
    (tree / ".gitattributes").write_text("* filter=x\n")
    patch = hostile.folder / "0001-a.patch"
    patch.write_text(PATCH)
    assert patching.apply(tree, [patch]) == "" and not hostile.canary.exists()


def test_a_moved_branch_changes_nothing(hostile: Hostile) -> None:
    """Even if the cache's branch points to another commit, the recipe's commit is used."""
    hostile.require_accepted(True)
    cached = hostile.cache.path(hostile.source)
    done = subprocess.run(["git", "-C", cached, "mktree"], input=b"", capture_output=True)
    tree = done.stdout.decode().strip()
    author = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    other_commit = run_git(cached, *author, "commit-tree", "-m", "other", tree)
    run_git(cached, "update-ref", git.BRANCH, other_commit)
    assert hostile.cache.state(hostile.source) == "whole"
    tree = hostile.cache.prefill(hostile.source, hostile.folder / "again")
    assert (tree / "text").read_text() == "good\n"
    assert run_git(tree, "rev-parse", "HEAD") == hostile.commit
    assert (tree / ".git/HEAD").read_text().strip() == hostile.commit


def test_a_damaged_object_in_the_cache(hostile: Hostile) -> None:
    """An object whose content is that of another file makes the source unusable."""
    hostile.require_accepted(True)
    cached = hostile.cache.path(hostile.source)
    digests = [
        run_git(cached, "rev-parse", f"{hostile.commit}:{n}") for n in ("text", ".gitmodules")
    ]
    text, other = (cached / "objects" / digest[:2] / digest[2:] for digest in digests)
    text.chmod(0o644)
    text.write_bytes(other.read_bytes())
    assert hostile.cache.state(hostile.source) == "changed"
    with pytest.raises(ForgeError, match="was changed or removed since it was fetched"):
        hostile.cache.prefill(hostile.source, hostile.folder / "again")


def test_what_is_no_commit(hostile: Hostile) -> None:
    """A hash of a tag or of a tree is refused."""
    run_git(hostile.repository, "-c", "user.name=a", "-c", "user.email=a@b", "tag", "-m", "x", "v")
    for name in ("v", "HEAD^{tree}"):
        digest = run_git(hostile.repository, "rev-parse", name)
        assert not git.has_commit(hostile.repository, digest)
        with pytest.raises(NotAttempted, match="is not a commit"):
            git.fetch(hostile.repository.as_uri(), digest, hostile.folder / "got")


def test_a_server(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """git follows a mirror in the user's configuration over HTTP, but not over other protocols."""
    bare = hostile.folder / "www/demo.git"
    run_git(hostile.repository, "tag", "v1")
    subprocess.run(["git", "clone", "-q", "--bare", hostile.repository, bare], check=True)
    run_git(bare, "update-server-info")
    with served(bare.parent) as url:
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{url}/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://upstream.invalid/")
        assert git.list_tags(URL) == ["v1"]
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{bare.parent}/.insteadOf")
        with pytest.raises(NotAttempted, match="transport 'file' not allowed"):
            git.list_tags(URL)


def test_git_does_not_ask_for_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, git would wait for an answer on the terminal."""

    class Private(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()

    monkeypatch.setenv("LC_ALL", "C")
    with served(tmp_path, Private) as url, pytest.raises(NotAttempted, match="prompts disabled"):
        git.list_tags(url)


def test_every_value_of_a_mirror_counts(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mirror may replace several addresses. As in git, a setting without a value is true."""
    file = hostile.folder / "user's configuration"
    file.write_text(
        '[url "http://mirror.invalid/"]\n'
        "insteadOf = https://upstream.invalid/\ninsteadOf = git://upstream.invalid/\n"
        "[http]\nsslVerify\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(file))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(NotAttempted, match=r"mirror\.invalid"):
        git.list_tags(URL)
    assert ("http.sslverify", "true") in git._network_settings()
