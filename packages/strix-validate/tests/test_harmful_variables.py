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
