# SPDX-License-Identifier: BSD-3-Clause
"""The commands of strix-validate that work without torch, as docs/validate.md states."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT

pytest.importorskip("pydantic", reason="strix-validate's records are pydantic models")

MAIN = """
import sys
sys.modules |= dict.fromkeys(("torch", "ray", "vllm", "numpy"))
from strix_validate.cli import main
sys.argv[0] = "strix-validate"
main()
"""


def validate(words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command without torch. It must end with this exit code and without a traceback."""
    folders = [str(CHECKOUT / "packages/strix-validate/src")]
    folders += [folder for folder in sys.path if folder]
    variables = {"PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words.split()],
        text=True,
        capture_output=True,
        env=os.environ | variables,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output, output
    return done


def test_a_server_elsewhere_is_asked() -> None:
    done = validate("serve --url http://127.0.0.1:1 --model x", 1)
    assert "http://127.0.0.1:1 does not answer" in done.stdout


def test_doctor() -> None:
    document = json.loads(validate("doctor --only doctor/disk --json").stdout)
    assert [finding["id"] for finding in document["findings"]] == ["doctor/disk"]


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="the report is a jinja2 template")
    record = tmp_path / "record.json"
    page = tmp_path / "report.html"
    record.write_text(validate("run --tier doctor --only doctor/disk --json").stdout)
    validate(f"report {record} -o {page}")
    assert "doctor/disk" in page.read_text()


def test_what_is_skipped_is_named(tmp_path: Path) -> None:
    """A skipped check has a reason, even if --only leaves out the check on which it depends."""
    output = validate(f"doctor --root {tmp_path} --only doctor/vllm-memory", 3).stdout
    assert "1 skipped (doctor/vllm-memory): no gfx1151 GPU (see doctor/gpu)" in output


def test_list_says_what_a_check_is_once() -> None:
    done = validate("list --only doctor")
    blocks = done.stdout.split("\ndoctor/")
    assert len(blocks) > 10
    for block in blocks:
        first = block.splitlines()[1].strip().split(". ")[0]
        assert block.count(first[:60]) == 1, block
    serve = validate("list --only serve").stdout
    assert "    catches: What" not in serve
    assert "serve/url-bench" in serve
