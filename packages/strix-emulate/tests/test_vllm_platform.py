# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's plugin loader finds the emulated device by an entry point of the package."""

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import strix_emulate
from strix_emulate.device import launcher

GROUP = "vllm.platform_plugins"


def find_entry_point() -> EntryPoint:
    """Return the entry point of the installed package, or of its source folder."""
    installed = entry_points(group=GROUP, name="strix_emulate")
    if installed:
        return next(iter(installed))
    text = (Path(strix_emulate.__file__).parents[2] / "pyproject.toml").read_text()
    ((name, value),) = tomllib.loads(text)["project"]["entry-points"][GROUP].items()
    return EntryPoint(name, value, GROUP)


def test_only_a_program_on_the_device_is_told_of_rocm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    platform = find_entry_point().load()
    monkeypatch.delenv("STRIX_EMULATE_PYTHON", raising=False)
    assert platform() is None
    (tmp_path / f"{launcher.NAME}.7").touch()
    monkeypatch.setenv(launcher.VARIABLE, str(tmp_path))
    for name, value in launcher.environment({}).items():
        monkeypatch.setenv(name, value)
    assert platform() == "vllm.platforms.rocm.RocmPlatform"
