# SPDX-License-Identifier: BSD-3-Clause
"""Package test of libaotriton_v2: its name, what it needs, its version string, its neighbours."""

import os
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile


def main() -> None:
    version, prefix = sys.argv[1], Path(os.environ["PREFIX"])
    path = prefix / "lib" / f"libaotriton_v2.so.{version}"
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
        comment = elf.get_section_by_name(".comment").data()
    assert [t.soname for t in dynamic if t.entry.d_tag == "DT_SONAME"] == [path.name]
    needed = {t.needed for t in dynamic if t.entry.d_tag == "DT_NEEDED"}
    assert {"libamdhip64.so.7", "liblzma.so.5"} <= needed, needed
    paths = [t.rpath if t.entry.d_tag == "DT_RPATH" else t.runpath
             for t in dynamic if t.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]  # fmt: skip
    folders = ":".join(paths).split(":")
    assert "$ORIGIN/../opt/rocm/lib" in {f.rstrip("/") for f in folders}, folders
    assert all(f.startswith("$ORIGIN") for f in folders), folders
    assert f"AOTriton {version}".encode() in comment, comment
    # it opens the images beside the file that the loader mapped
    assert list((prefix / "lib/aotriton.images").glob("*/flash/attn_fwd/*.aks2"))
    print(path.name, sorted(needed), folders)


if __name__ == "__main__":
    main()
