# SPDX-License-Identifier: BSD-3-Clause
"""A project, its channels and a stack, for tests that kill commands or make the disk fail."""

import re
import shutil
from pathlib import Path

from support.faults import Ended, Forks, library
from support.project import CHECKOUT, NOARCH, SCRIPT
from support.small_channel import MANIFEST
from support.static_channel import Source, view
from support.static_channel import require_whole as require_whole_channel

from forge.channel.publish import PublishedChannel

ALPHA = "alpha-1.0-h1234567_0"
COMMANDS = {
    "publish": ["publish", "--to", "{}/public"],
    "withdraw": ["publish", "--to", "{}/public", "--withdraw", ALPHA, "--reason", "broken"],
    "lock": ["lock", "app", "--channel", "{}/public"],
    "install": ["install", "app"],
    "build": ["build", "beta"],
    "stop": ["build", "beta", "--stop-after", "5h"],
    "clean": ["clean"],
}


class World:
    """A project with a local channel, a published channel, a locked stack and a home folder.

    Attributes:
        root: The folder that contains the project, both channels, the stack and the home folder.
        template: A copy of `root` with the locked stack, made before any further command.
        public: The published channel.
        forks: Runs the driver.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.template = folder / "world", folder / "template"
        self.public = self.root / "public"
        self._make()
        root = str(self.root)
        variables = {"FORGE_ROOT": root, "FORGE_BASE": "conda-forge", "FORGE_NO_PIXI": "1"}
        variables |= {"HOME": f"{root}/home", "TMPDIR": f"{root}/tmp", "COLUMNS": "500"}
        variables |= {"RATTLER_CACHE_DIR": f"{root}/cache"}
        self.forks = Forks(library(folder), variables)
        assert self.run("lock").code == 0
        shutil.copytree(self.root, self.template)

    def _make(self) -> None:
        self.root.mkdir()
        shutil.copy(CHECKOUT / "variants.yaml", self.root)
        shutil.copytree(CHECKOUT / "recipes/bases", self.root / "recipes/bases")
        for name in ("recipes/alpha", "home", "tmp", "stacks/app"):
            (self.root / name).mkdir(parents=True)
        recipe = NOARCH.format(name="alpha", run=[], test=["true"], source=[])
        (self.root / "recipes/alpha/recipe.yaml").write_text(recipe)
        (self.root / "recipes/alpha/build.sh").write_text(SCRIPT.format(name="alpha"))
        # An older pixi does not accept the platform of MANIFEST.
        text = re.sub("(?m)^platforms = .*", 'platforms = ["linux-64"]', MANIFEST)
        text = text.replace(', "conda-forge"', "")
        (self.root / "stacks/app/pixi.toml").write_text(text)
        source = Source(self.root / "channel")
        for name in ("alpha", "beta"):
            source.make(name)
        PublishedChannel(self.public).publish(source)
        source.make("gamma")

    def run(self, command: str, fault: str = "", **environment: str) -> Ended:
        words = (word.format(self.root) for word in COMMANDS[command])
        return self.forks(*words, fault=fault, **environment)

    def require_whole(self) -> None:
        """Require what has to hold after each command, even if it was killed or failed.

        The published channel is complete. The lock and the local packages are unchanged.
        """
        assert view(self.public.as_uri()) >= 1
        for name in ("build/stacks/app/pixi.lock", "channel/noarch/*.conda"):
            for file in self.template.glob(name):
                copy = self.root / file.relative_to(self.template)
                assert copy.read_bytes() == file.read_bytes()

    def require_done(self, command: str, **environment: str) -> None:
        """Require that the same command succeeds now, with its usual result and without leftovers.

        Args:
            command: A key of COMMANDS.
            environment: Further environment variables of the command.
        """
        done = self.run(command, **environment)
        assert done.code == 0, done.output
        require_whole_channel(self.public)
        if command == "publish":
            assert (self.public / "noarch/gamma-1.0-h1234567_0.conda").exists()
        if command == "withdraw":
            assert not (self.public / f"noarch/{ALPHA}.conda").exists()
            assert (self.root / f"public-withdrawn/noarch/{ALPHA}.conda").exists()
        if command == "install":
            prefix = self.root / "build/stacks/app/.pixi/envs/default"
            assert [(prefix / name).read_text() for name in ("alpha", "beta")] == ["alpha", "beta"]
        for name in (".partial-*", ".forge-*"):
            assert list(self.root.rglob(name)) == []
        assert list((self.root / "tmp").iterdir()) == []
