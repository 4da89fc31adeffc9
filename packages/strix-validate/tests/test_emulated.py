# SPDX-License-Identifier: BSD-3-Clause
"""The tier `emulated` against stand-ins for strix-emulate: right, wrong, silent and broken."""

import json
import sys

import pytest
from strix_validate.checks import Options, State
from strix_validate.run import run
from strix_validate.tiers import emulated

CASES = """
from collections import namedtuple
def cases():
    return [namedtuple("Case", "name")(name) for name in ("one", "two")]
"""


def answer(name: str, error: float = 1e-4, fault: str = "", kernels: int = 2) -> dict:
    return {
        "case": {"name": name},
        "errors": {"out": [error, 1e-3], "dq": [1e-4, 1e-3]},
        "kernels": [["attn", "0123abcd", 1000, 0.5]] * kernels,
        "fault": fault,
    }


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Installs a strix_emulate that prints `answers`, or `text`, and exits with `code`."""

    def install(answers=(), text=None, code=0, said=""):
        package = tmp_path / "strix_emulate"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "attention.py").write_text(CASES)
        out = json.dumps(list(answers)) if text is None else text
        (package / "__main__.py").write_text(
            f"import sys; print({out!r}); print({said!r}, file=sys.stderr); sys.exit({code})"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        for name in ("strix_emulate", "strix_emulate.attention"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return run(["emulated"], Options()).checks

    return install


def test_right(stand_in):
    found = stand_in([answer("one"), answer("two")])
    assert [check.state for check in found] == [State.PASSED] * 2
    assert found[0].id == "emulated/one" and found[0].measured["out"]["bound"] == 1e-3


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (answer("one", error=1e-2), "out: 1.00e-02 > 1.00e-03"),
        (answer("one", error=float("nan")), "out: nan"),
        (answer("one", fault="race at 0x10"), "race at 0x10"),
        (answer("one", kernels=0), "no kernel was executed"),
    ],
)
def test_wrong(stand_in, spoilt, reason):
    found = {check.id: check for check in stand_in([spoilt, answer("two")], code=1)}
    assert found["emulated/one"].state is State.FAILED and reason in found["emulated/one"].reason
    assert found["emulated/two"].state is State.PASSED


def test_silent_about_a_case(stand_in):
    found = {check.id: check.state for check in stand_in([answer("one")])}
    assert found == {"emulated/one": State.PASSED, "emulated/two": State.FAILED}


def test_broken(stand_in):
    found = stand_in(text="Traceback", code=1, said="Error: gone")
    assert {check.state for check in found} == {State.FAILED} and "gone" in found[0].reason


def test_no_disassembler(stand_in):
    found = stand_in(text="", code=3, said="no libLLVM 22")
    assert {check.state for check in found} == {State.SKIPPED}
    unexpected = stand_in(text="", code=3, said="no idea")
    assert {check.state for check in unexpected} == {State.FAILED}


def test_not_installed(monkeypatch):
    monkeypatch.setattr(emulated, "_installed", lambda: False)
    (found,) = run(["emulated"], Options()).checks
    assert found.state is State.SKIPPED and found.id == "emulated"
