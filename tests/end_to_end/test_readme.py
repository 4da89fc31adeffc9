# SPDX-License-Identifier: BSD-3-Clause
"""README's commands in a copy of the checkout: build-all, status, lock, install and run."""

import json
from pathlib import Path

from support.project import CHECKOUT, forge

from forge.files import sha256_file


def test_build_all_leaves_the_packages(built: Path) -> None:
    rows = json.loads(forge("status", "--json", root=built))["packages"]
    states = {row["name"]: row["state"] for row in rows}
    for name in ("triton", "flash-attn", "strix-validate"):
        assert states[name] == "built"
    assert states["vllm"] == "not built"
    for row in rows:
        if row["file"]:
            file = built / "channel" / row["file"]
            assert (row["sha256"], row["size"]) == (sha256_file(file), file.stat().st_size)
            assert file.name == f"{row['name']}-{row['version']}-{row['build']}.conda"
    assert "built  " not in forge("build-all", root=built), "the second run must build nothing"


def test_attention_is_right_and_the_check_can_fail(attention_stack: Path) -> None:
    words = ("strix-validate", "attention", "--only", "sdpa/flash", "--json")
    report = json.loads(forge("run", "attention", "--", *words, root=attention_stack))
    passed = [check for check in report["checks"] if check["state"] == "passed"]
    assert report["summary"]["failed"] == 0 and len(passed) >= 20
    script = CHECKOUT / "packages" / "strix-validate" / "tests" / "wrong_reference.py"
    command = ["python", str(script), "attention", "--only", passed[0]["id"], "--json"]
    report = json.loads(forge("run", "attention", "--", *command, code=1, root=attention_stack))
    assert report["summary"]["failed"] > 0
