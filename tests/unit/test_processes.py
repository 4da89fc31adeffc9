# SPDX-License-Identifier: BSD-3-Clause
"""What a killed build left behind is ended, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forge.processes import SESSION, kill_leftovers


@pytest.mark.parametrize("linked", [False, True])
def test_only_processes_of_a_job_are_killed(tmp_path: Path, linked: bool) -> None:
    """A person's shell in the staging folder stays; the folder may be behind a link."""
    staging = tmp_path / "staging"
    (staging / "pkg").mkdir(parents=True)
    sleep = ["sleep", "60"]
    job = subprocess.Popen(sleep, cwd=staging / "pkg", start_new_session=True)
    shell = subprocess.Popen(sleep, cwd=staging / "pkg", start_new_session=True)
    (staging / "pkg" / SESSION).write_text(str(job.pid))
    if linked:
        (tmp_path / "link").symlink_to(staging)
        staging = tmp_path / "link"
    try:
        kill_leftovers(staging)
        assert job.wait(10) == -9
        assert shell.poll() is None
    finally:
        for child in (job, shell):
            child.kill()
            child.wait()
