# SPDX-License-Identifier: BSD-3-Clause
"""Whole kernels that Triton compiles during the tests, and faults planted in these kernels."""

import fixtures
import mutate
import numpy as np
import pytest
from strix_emulate import Options
from strix_emulate.statistics import describe_launch
from test_targets import DIFFERENT


@pytest.mark.parametrize("gpu", DIFFERENT)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 100])
def test_attention(causal, size, gpu):
    case = fixtures.attention_case(causal, size, heads=2)
    (out, lse), _ = fixtures.run_attention(causal, case, arch=gpu)
    floor = np.abs(case[1][0].astype(np.float16) - case[1][0]).max()
    assert np.abs(out - case[1][0]).max() < 2 * floor
    assert np.abs(lse - case[1][1]).max() < 2e-6


def test_the_wrong_mask_is_seen():
    """The control compares causal attention with a reference for attention that is not causal."""
    (out, _), _ = fixtures.run_attention(True, fixtures.attention_case(True))
    assert np.abs(out - fixtures.attention_case(False)[1][0]).max() > 0.1


def test_schedules_and_poison_do_not_change_results():
    """Results do not depend on the order of waves, or on memory that nothing wrote (poison)."""
    case = fixtures.attention_case(True, 100)
    plain, done = fixtures.run_attention(True, case)
    for options in (
        Options(batch=2),
        Options(lockstep=False),
        Options(poison=0x3C00_4200),
        Options(checks=False),
    ):
        outs, again = fixtures.run_attention(True, case, options=options)
        assert all((a == b).all() for a, b in zip(outs, plain, strict=True))
        assert again.executed == done.executed


def test_executed_is_the_sum_over_classes():
    """Only real instructions count: a block before a branch target has none that ends it."""
    _, done = fixtures.run_attention(True, fixtures.attention_case(True, 100))
    assert done.executed == describe_launch(done)["executed"]


@pytest.fixture(scope="module", params=[False, True], ids=["full", "causal"])
def attention(request):
    """Return a kernel's instructions, and a function that judges the results of a changed kernel.

    The function uses the cases of docs/emulator.md.
    """
    causal = request.param
    cases = fixtures.mutation_cases(causal)
    runs = [fixtures.run_attention(causal, case) for case in cases]
    bounds = [
        [1.5 * np.abs(got - exact).max() for got, exact in zip(outs, case[1], strict=True)]
        for (outs, _), case in zip(runs, cases, strict=True)
    ]

    def judge(instructions) -> bool:
        for case, limits in zip(cases, bounds, strict=True):
            outs, _ = fixtures.run_attention(causal, case, instructions)
            if not all(
                (np.abs(got - exact) <= limit).all()
                for got, exact, limit in zip(outs, case[1], limits, strict=True)
            ):
                return False
        return True

    return runs[0][1].instructions, judge


def test_every_deleted_barrier_is_caught(attention):
    instructions, judge = attention
    verdicts = mutate.judge_deletions(instructions, mutate.barriers(instructions), judge)
    assert verdicts.survived == []
    assert sum(verdicts.caught.values()) >= 10


def test_every_deleted_wait_is_caught(attention):
    """To save time, only every fourth wait is tested. docs/emulator.md has the result for all."""
    instructions, judge = attention
    busy, _ = mutate.busy_waits(instructions, judge)
    verdicts = mutate.judge_deletions(instructions, busy[::4], judge)
    assert verdicts.survived == []
    assert sum(verdicts.caught.values()) >= 8


def test_most_random_deletions_are_caught(attention):
    """Ten deletions are tested, to save time. docs/emulator.md has the result for 200 deletions."""
    instructions, judge = attention
    verdicts = mutate.judge_deletions(instructions, mutate.sample(instructions, 10), judge)
    assert verdicts.share >= 0.75, verdicts


def test_the_whole_kernel_passes_the_judge(attention):
    instructions, judge = attention
    assert judge(instructions)
