# SPDX-License-Identifier: BSD-3-Clause
"""The channels of a pixi environment, in pixi's order of priority."""

import json
from pathlib import Path

import pytest
from strix_validate.doctor import workspace

OURS = "https://repo.prefix.dev/strix-forge"
FEATURE = f'[feature.amd]\nchannels = ["{OURS}"]\n[feature.plain]\n'
MANIFESTS = {
    "in the order of the list": ('channels = ["conda-forge", "a"]', "", ["conda-forge", "a"]),
    "a higher priority first": (
        f'channels = ["conda-forge", {{ channel = "{OURS}", priority = 1 }}]',
        "",
        [OURS, "conda-forge"],
    ),
    "a lower priority last": (
        'channels = [{ channel = "a", priority = -1 }, { channel = "conda-forge" }]',
        "",
        ["conda-forge", "a"],
    ),
    "a feature's before the workspace's": (
        'channels = ["conda-forge"]',
        f'{FEATURE}[environments]\nmine = ["amd"]\n',
        [OURS, "conda-forge"],
    ),
    "a feature without channels has the workspace's": (
        'channels = ["conda-forge"]',
        f'{FEATURE}[environments]\nmine = {{ features = ["plain", "amd"] }}\n',
        ["conda-forge", OURS],
    ),
    "another environment's feature": (
        'channels = ["conda-forge"]',
        f'{FEATURE}[environments]\nother = ["amd"]\n',
        ["conda-forge"],
    ),
    "a value that is not a list": ('channels = "conda-forge"', "[environments]\nmine = 1\n", []),
    "a priority that is not a number": (
        'channels = [{ channel = "a", priority = "high" }, 7]',
        "",
        ["a", "7"],
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_channels_of_an_environment(name, tmp_path):
    channels, tables, expected = MANIFESTS[name]
    (tmp_path / "pixi.toml").write_text(f"[workspace]\n{channels}\n{tables}")
    assert workspace.read_channels(tmp_path / ".pixi/envs/mine") == expected


def test_channels_of_a_pyproject(tmp_path):
    text = FEATURE.replace("[feature", "[tool.pixi.feature")
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pixi.workspace]\nchannels = ["conda-forge"]\n{text}'
        '[tool.pixi.environments]\nmine = ["amd"]\n'
    )
    assert workspace.read_channels(tmp_path / ".pixi/envs/mine") == [OURS, "conda-forge"]
    for prefix in (tmp_path / "venv", Path("/venv"), Path("/")):
        assert workspace.read_channels(prefix) == []


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"environment_name": "mine"}, [OURS, "conda-forge"]),
        ({"environment_name": "default"}, ["conda-forge"]),
        ({"environment_name": "mine", "manifest_path": "/nonexistent/pixi.toml"}, []),
        ({"manifest_path": 1}, []),
    ],
)
def test_channels_of_a_detached_environment(record, expected, tmp_path):
    manifest = tmp_path / "work/pixi.toml"
    manifest.parent.mkdir()
    manifest.write_text(
        f'[workspace]\nchannels = ["conda-forge"]\n{FEATURE}[environments]\nmine = ["amd"]\n'
    )
    prefix = tmp_path / "cache/work-1234/envs/other"
    (prefix / "conda-meta").mkdir(parents=True)
    record = {"manifest_path": str(manifest)} | record
    (prefix / "conda-meta/pixi").write_text(json.dumps(record))
    assert workspace.read_channels(prefix) == expected
