# SPDX-License-Identifier: BSD-3-Clause
"""The checks of Triton packages: what is right passes, and each kind of fault is caught."""

import pytest
import torch
from strix_validate.checks import Check, Options, State
from strix_validate.run import run
from strix_validate.tiers import attention, emulated
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.cases import make
from strix_validate.triton_packages import calls, conch

CHECK = Check("x", "", "")


def answer(tensors) -> triton_modes.Answer:
    return triton_modes.Answer(tensors, executed=(triton_modes.Executed("kernel", "0123", 1, 0.0),))


CONCH_SPOILT = {
    "a group's scale": ("w8a16", {"scales": lambda x: x.roll(1, 0)}),
    "the wrong byte first": ("w8a16", {"codes": lambda x: x << 8 | (x >> 24 & 255)}),
    "a zero point left out": ("w8a16-zeros", {"zeros": lambda x: x * 0}),
}


@pytest.mark.parametrize("name", CONCH_SPOILT)
def test_a_layer_with_8_bit_weights_is_unpacked_as_conch_does(name):
    """The answer to expect is that of the packed tensors, and of no others."""
    case, spoil = CONCH_SPOILT[name]
    call, expected = make("seed", conch.COMPUTED[case])

    def product(tensors):
        bytes_ = torch.stack([tensors["codes"].long() >> 8 * i & 255 for i in range(4)], 1)
        centre = tensors["zeros"].repeat_interleave(128, 0) if "zeros" in tensors else 128
        scales = tensors["scales"].repeat_interleave(128, 0)
        weights = (bytes_.flatten(0, 1) - centre).half() * scales
        return {"out": (tensors["x"].float() @ weights.float()).half()}

    wrong = call.tensors | {key: change(call.tensors[key]) for key, change in spoil.items()}
    for tensors, state in ((call.tensors, State.PASSED), (wrong, State.FAILED)):
        for judge in (attention._judge_vllm, emulated.judge):
            assert judge(CHECK, call, expected, answer(product(tensors))).state is state


def test_without_conch_its_checks_are_skipped(monkeypatch):
    monkeypatch.setattr(calls.importlib.util, "find_spec", lambda name: None)
    (check,) = run(["kernels"], Options(), ["kernels/conch-w8a16-decode"]).checks
    assert check.state is State.SKIPPED and check.measured == {"said": "conch is not installed"}
