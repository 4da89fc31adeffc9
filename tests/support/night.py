# SPDX-License-Identifier: BSD-3-Clause
"""A clone with docs/night.py that finds a mock machine, and what a night packed."""

import shutil
import tarfile
from pathlib import Path

from support.project import CHECKOUT


class Machine:
    """ROOT/clone with the script; a kernel that is new enough, and one open gfx1151 GPU."""

    def __init__(self, root: Path) -> None:
        self.clone, self.gpus, self.device = root / "clone", root / "kfd", root / "device"
        self.script = self.clone / "docs/night.py"
        self.script.parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / "docs/night.py", self.script)
        (self.gpus / "1").mkdir(parents=True)
        (self.gpus / "1/properties").write_text("gfx_target_version 110501\n")
        self.device.touch()
        self.replace("(6, 18, 4)", "(1, 0, 0)")  # tests may run on an older kernel
        self.replace("/sys/class/kfd/kfd/topology/nodes", str(self.gpus))
        self.replace("/dev/kfd", str(self.device))

    def replace(self, old: str, new: str) -> None:
        """Have the script find another machine."""
        text = self.script.read_text()
        assert old in text
        self.script.write_text(text.replace(old, new))


def archived(folder: Path) -> dict[str, str]:
    """The text of each file that a night in `folder` packed."""
    with tarfile.open(folder / "night.tar.gz") as tar:
        files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file}
