# SPDX-License-Identifier: BSD-3-Clause
"""Advice to install a missing package names the tool that installed the validator."""

from pathlib import Path

import pytest
from strix_validate import cli, installing, terminal
from strix_validate.installing import suggest_installation
from typer.testing import CliRunner

UV = "home = /usr/bin\nuv = 0.13.9\n"
PLAIN = "home = /usr/bin\n"
#: The environment's folder, its pyvenv.cfg (None for a conda environment), and the advice for
#: strix-emulate and for matplotlib.
PREFIXES = {
    "uvx": (
        ".cache/uv/archive-v0/aFpsqli9",
        UV,
        "uvx --from ./packages/strix-validate --with ./packages/strix-emulate strix-validate ...",
        "uvx --from ./packages/strix-validate --with matplotlib strix-validate ...",
    ),
    "uv tool install": (
        ".local/share/uv/tools/strix-validate",
        UV,
        "uv tool install ./packages/strix-validate --with ./packages/strix-emulate",
        "uv tool install ./packages/strix-validate --with matplotlib",
    ),
    "uv venv": (
        "work/.venv",
        UV,
        "uv pip install ./packages/strix-emulate",
        "uv pip install matplotlib",
    ),
    "uv venv in a folder named tools": (
        "tools/vllm/.venv",
        UV,
        "uv pip install ./packages/strix-emulate",
        "uv pip install matplotlib",
    ),
    "python -m venv": (
        "strix-validate",
        PLAIN,
        "python -m pip install ./packages/strix-emulate",
        "python -m pip install matplotlib",
    ),
    "pipx": (
        ".local/share/pipx/venvs/strix-validate",
        PLAIN,
        "pipx inject strix-validate ./packages/strix-emulate",
        "pipx inject strix-validate matplotlib",
    ),
    "pixi workspace": (
        "work/.pixi/envs/default",
        None,
        "pixi add strix-emulate",
        "pixi add matplotlib-base",
    ),
    "pixi global": (
        ".pixi/envs/strix-validate",
        None,
        "pixi global add --environment strix-validate strix-emulate",
        "pixi global add --environment strix-validate matplotlib-base",
    ),
    "pixi exec": (
        ".cache/rattler/cache/cached-envs-v0/strix-validate-1a2b",
        None,
        "pixi exec --with strix-emulate strix-validate ...",
        "pixi exec --with matplotlib-base strix-validate ...",
    ),
    "conda": (
        "miniforge3/envs/mine",
        None,
        "conda install strix-emulate",
        "conda install matplotlib-base",
    ),
}


def make_environment(home: Path, place: str, config: str | None) -> Path:
    """Make the folder of an environment."""
    prefix = home / place
    (prefix / "conda-meta" if config is None else prefix).mkdir(parents=True)
    if config is not None:
        (prefix / "pyvenv.cfg").write_text(config)
    if "uv/tools" in place:
        (prefix / "uv-receipt.toml").write_text("[tool]\n")
    return prefix


@pytest.mark.parametrize("name", PREFIXES)
def test_advice_fits_the_environment(name, tmp_path, monkeypatch):
    place, config, emulator, matplotlib = PREFIXES[name]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("PIXI_HOME", raising=False)
    prefix = make_environment(tmp_path, place, config)
    assert suggest_installation("strix-emulate", prefix) == emulator
    assert suggest_installation("matplotlib", prefix) == matplotlib


@pytest.mark.parametrize("name", PREFIXES)
def test_no_advice_installs_torch_for_cuda(name, tmp_path, monkeypatch):
    place, config, *_ = PREFIXES[name]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("PIXI_HOME", raising=False)
    advice = suggest_installation("torch", make_environment(tmp_path, place, config))
    if config is None:
        assert advice.endswith(" pytorch") or " pytorch " in advice
    else:
        assert "stable.repo.amd.com" in advice or "packages/strix-validate/README.md" in advice


def test_pixis_home_may_be_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PIXI_HOME", str(tmp_path / "pixi"))
    prefix = make_environment(tmp_path, "pixi/envs/strix-validate", None)
    assert suggest_installation("gguf", prefix).startswith("pixi global add")


def test_an_environment_of_pixi_outside_of_its_workspace(tmp_path, monkeypatch):
    """With pixi's option detached-environments, the environment is outside of the workspace."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    prefix = make_environment(tmp_path, ".cache/rattler/cache/envs/mine-1a2b/envs/default", None)
    assert suggest_installation("strix-emulate", prefix) == "conda install strix-emulate"
    (prefix / "conda-meta/pixi").write_text("{}")
    assert suggest_installation("strix-emulate", prefix) == "pixi add strix-emulate"


@pytest.mark.parametrize("name", ["uvx", "python -m venv", "pixi workspace"])
def test_kernels_without_the_emulator_says_how_to_add_it(name, tmp_path, monkeypatch):
    place, config, emulator, _ = PREFIXES[name]
    prefix = make_environment(tmp_path, place, config)
    monkeypatch.setattr(installing.sys, "prefix", str(prefix))

    def fail(*_):
        raise ModuleNotFoundError(name="strix_emulate")

    monkeypatch.setattr(terminal, "run", fail)
    done = CliRunner().invoke(cli.app, ["kernels"])
    assert done.exit_code == 3
    assert f"strix-emulate is not installed here, so nothing could be checked: {emulator}\n" in (
        done.output
    )
