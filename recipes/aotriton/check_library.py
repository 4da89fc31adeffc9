# SPDX-License-Identifier: BSD-3-Clause
"""Package test: check libaotriton_v2's SONAME, dependencies, RPATH, version string and images.

check_library.py VERSION

VERSION is the version of AOTriton that the library must report.
"""

import os
import sys
from pathlib import Path

from checks import elf
from checks.verdict import require


def main() -> None:
    version = sys.argv[1]
    prefix = Path(os.environ["PREFIX"])
    path = prefix / "lib" / f"libaotriton_v2.so.{version}"
    dynamic = elf.dynamic(path)
    comment = elf.section(path, ".comment")
    require(dynamic.soname == path.name, f"SONAME is {dynamic.soname!r}, expected {path.name}")
    missing = {"libamdhip64.so.7", "liblzma.so.5"} - set(dynamic.needed)
    require(not missing, f"{sorted(missing)} missing from DT_NEEDED: {dynamic.needed}")
    folders = [entry.rstrip("/") for entry in dynamic.search_path]
    require("$ORIGIN/../opt/rocm/lib" in folders, f"the ROCm SDK is not in RPATH: {folders}")
    absolute = [entry for entry in folders if not entry.startswith("$ORIGIN")]
    require(not absolute, f"RPATH entries that are not relative to $ORIGIN: {absolute}")
    require(f"AOTriton {version}".encode() in comment, f"the version in .comment is {comment!r}")
    # At run time, the library looks for the images in its own folder.
    images = prefix / "lib/aotriton.images"
    require(any(images.glob("*/flash/attn_fwd/*.aks2")), f"no image of attn_fwd in {images}")
    print(path.name, dynamic.needed, folders)


if __name__ == "__main__":
    main()
