# SPDX-License-Identifier: BSD-3-Clause
"""A clone in which tools/night.py sees a mock machine, and helpers for tests of that program."""

import shutil
import tarfile
from pathlib import Path

from support.project import CHECKOUT


class Machine:
    """A clone with tools/night.py, and a machine with a gfx1151 GPU whose device can be opened."""

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
        """Replace a text in tools/night.py, such as the path under which it looks for GPUs."""
        text = self.script.read_text()
        assert old in text
        self.script.write_text(text.replace(old, new))


# `python -c KILLED N SCRIPT WORDS` runs the script, and kills it with SIGKILL before its N-th
# operation that changes a file or starts a process.
KILLED = """
import os, runpy, signal, sys
remaining = int(sys.argv[1])
if "NIGHT_PID" in os.environ:
    open(os.environ["NIGHT_PID"], "w").write(str(os.getpid()))
def hook(event, arguments):
    global remaining
    writes = event == "open" and arguments[1] in ("x", "r+")
    if writes or event in ("os.rename", "os.remove", "subprocess.Popen"):
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def read_archive(folder: Path) -> dict[str, str]:
    """Return the text of each file in the archive that tools/night.py wrote, by the file's name."""
    with tarfile.open(folder / "night.tar.gz") as tar:
        files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file}
