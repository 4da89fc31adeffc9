# SPDX-License-Identifier: BSD-3-Clause
"""A clone with tools/night.py that finds a mock machine, and what a night packed."""

import shutil
import tarfile
from pathlib import Path

from support.project import CHECKOUT


class Machine:
    """ROOT/clone with the script, and one open gfx1151 GPU."""

    def __init__(self, root: Path) -> None:
        self.clone, self.gpus, self.device = root / "clone", root / "kfd", root / "device"
        self.script = self.clone / "tools/night.py"
        self.script.parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / "tools/night.py", self.script)
        (self.clone / "src").symlink_to(CHECKOUT / "src")
        (self.gpus / "1").mkdir(parents=True)
        (self.gpus / "1/properties").write_text("gfx_target_version 110501\n")
        self.device.touch()
        self.replace("/sys/class/kfd/kfd/topology/nodes", str(self.gpus))
        self.replace("/dev/kfd", str(self.device))

    def replace(self, old: str, new: str) -> None:
        """Have the script find another machine."""
        text = self.script.read_text()
        assert old in text
        self.script.write_text(text.replace(old, new))


# `python -c KILLED N SCRIPT WORDS`: SIGKILL before the N-th of what the script changes or begins
KILLED = """
import os, runpy, signal, sys
left = int(sys.argv[1])
if "NIGHT_PID" in os.environ:
    open(os.environ["NIGHT_PID"], "w").write(str(os.getpid()))
def hook(event, arguments):
    global left
    writes = event == "open" and arguments[1] in ("x", "r+")
    if writes or event in ("os.rename", "os.remove", "subprocess.Popen"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def archived(folder: Path) -> dict[str, str]:
    """Read the text of each file that a night in `folder` packed."""
    with tarfile.open(folder / "night.tar.gz") as tar:
        files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file}
