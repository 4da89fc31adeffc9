# SPDX-License-Identifier: BSD-3-Clause
"""The check of the tier backend that looks for environment variables that harm ROCm."""

import pytest
import torch
from strix_validate.checks import RunOptions, Severity, State
from strix_validate.tiers import backend


@pytest.mark.parametrize(
    ("value", "hip", "state", "severity"),
    [
        ("", "7.14", State.PASSED, None),
        ("11.0.0", "7.14", State.FAILED, Severity.ERROR),
        ("11.0.0", None, State.PASSED, Severity.WARNING),
    ],
)
def test_only_rocm_fails(
    value: str,
    hip: str | None,
    state: State,
    severity: Severity | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in backend.HARMFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", value)
    monkeypatch.setattr(torch.version, "hip", hip)
    result = backend.environment(RunOptions())
    assert (result.state, result.severity) == (state, severity)
    assert ("HSA_OVERRIDE_GFX_VERSION" in result.reason) == bool(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HSA_OVERRIDE_GFX_VERSION", "11.5.1"),
        ("AMD_SERIALIZE_KERNEL", "0"),
        ("TORCH_ROCM_FA_PREFER_CK", "0"),
        ("PYTORCH_NO_HIP_MEMORY_CACHING", "0"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0"),
    ],
)
def test_a_value_that_changes_nothing_passes(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check doctor/environment accepts these values too."""
    for other in backend.HARMFUL:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", "7.14")
    result = backend.environment(RunOptions())
    assert (result.state, result.reason) == (State.PASSED, "")
    assert result.measured.get(name, value) == value


@pytest.mark.parametrize(
    "name", ["PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING"]
)
def test_both_names_turn_the_cache_of_memory_off(name: str, monkeypatch: pytest.MonkeyPatch):
    """torch reads both names, whether it is built for ROCm or for CUDA."""
    for other in backend.HARMFUL:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    assert f"{name}: makes torch allocate" in backend.environment(RunOptions()).reason
