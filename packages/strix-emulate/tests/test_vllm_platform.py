# SPDX-License-Identifier: BSD-3-Clause
"""vLLM finds the emulated device by an entry point of the package, as its plugin loader does."""

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import strix_emulate
from strix_emulate.device import launcher

GROUP = "vllm.platform_plugins"


def declared() -> EntryPoint:
    """What the installed package declares, or its source folder."""
    if installed := entry_points(group=GROUP, name="strix_emulate"):
        return next(iter(installed))
    text = (Path(strix_emulate.__file__).parents[2] / "pyproject.toml").read_text()
    ((name, value),) = tomllib.loads(text)["project"]["entry-points"][GROUP].items()
    return EntryPoint(name, value, GROUP)


def test_only_a_program_on_the_device_is_told_of_rocm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    platform = declared().load()
    monkeypatch.delenv("STRIX_EMULATE_PYTHON", raising=False)
    assert platform() is None
    (tmp_path / f"{launcher.NAME}.7").touch()
    monkeypatch.setenv(launcher.VARIABLE, str(tmp_path))
    for name, value in launcher.environment({}).items():
        monkeypatch.setenv(name, value)
    assert platform() == "vllm.platforms.rocm.RocmPlatform"
