# SPDX-License-Identifier: BSD-3-Clause
"""C against numpy: every operation bit for bit, whole kernels, and what happens without C."""

import os
import shutil

import fixtures
import native_check
import numpy as np
import pytest
from strix_emulate.api import Options
from strix_emulate.arithmetic import translate
from strix_emulate.native import generate
from strix_emulate.native import library as native


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """The installed libstrix-emulate, or one that is compiled here and now."""
    if native.loaded() is not None:
        yield native.loaded()
        return
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler.split()[0]) or native.processor_level() < 2:
        pytest.skip("no libstrix-emulate is installed, and there is no C compiler")
    folder = tmp_path_factory.mktemp("native")
    generate.build(folder, compiler, (native.processor_level(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRIX_EMULATE_NATIVE", str(folder))
        native.forget()
        yield native.loaded()
    native.forget()


@pytest.mark.parametrize("width", [32, 64])
def test_every_operation_gives_what_numpy_gives(width):
    report = native_check.run(2400, width=width)
    assert report.differences == []
    assert len(report.compared) >= 400
    # numpy's: comparisons of nothing, 16 bits of scalar registers, packed ones, output modifiers
    assert {name for name in report.numpy_only if not name.endswith(("f16", "f64"))
            and not name.startswith(("v_pk_", "v_dot4", "v_dot8"))} <= {
        f"{cmp}_{test}_{kind}{bits}" for cmp in ("v_cmp", "v_cmpx") for test in "ft"
        for kind in "fiu" for bits in (16, 32, 64)
    } | {f"s_{name}_{kind}" for kind in ("b32", "b64") for name in (
        "cmov", "bitset0", "bitset1", "and_not0_wrexec", "and_not1_wrexec")}  # fmt: skip


def test_a_wrong_operation_is_seen(library):
    """The control: two handlers, each in the other's place."""
    right = dict(library.functions)
    try:
        library.functions["v_add_f32"] = right["v_sub_f32"]
        assert any("v_add_f32" in text for text in native_check.run(2400, seed=2).differences)
    finally:
        library.functions.update(right)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_give_the_same_bits(causal, checks):
    case = fixtures.attention_case(causal, 100, heads=2)
    results = []
    for by_c in (True, False):
        outs, done = fixtures.run_attention(
            causal, case, options=Options(checks=checks, native=by_c)
        )
        results.append([*(x.tobytes() for x in outs), done.executed])
    assert results[0] == results[1]


def test_most_of_a_kernel_is_executed_by_c():
    """Not by falling back: at most one in ten wave-instructions is numpy's."""
    calls = []
    original = native_check.Step.execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_check.Step, "execute", lambda self, g, checks: (
            calls.append(g.n), original(self, g, checks)))  # fmt: skip
        _, done = fixtures.run_attention(True, fixtures.attention_case(True, 100))
    assert sum(calls) < done.executed / 10


def test_a_library_of_another_version_is_refused(library, monkeypatch):
    monkeypatch.setattr(native, "digest", lambda: "another")
    with pytest.raises(OSError, match="another version"):
        native.Library(library.path)


def test_where_there_is_none_numpy_says_so(tmp_path, monkeypatch):
    level = native.processor_level()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / f"libstrix-emulate-v{level}.so").write_text("no library")
    for value, words in (("off", "is off"), (str(tmp_path), "no libstrix-emulate is installed"),
                         (str(tmp_path / "bad"), "bad/libstrix")):  # fmt: skip
        monkeypatch.setenv("STRIX_EMULATE_NATIVE", value)
        native.forget()
        assert native.describe().startswith("numpy alone: ") and words in native.describe()
        fixtures.run_attention(False, fixtures.attention_case(False, 3))
    monkeypatch.undo()
    native.forget()


def test_translation():
    """C says what numpy would do; what cannot be said is refused."""
    text = translate.loop("f", lambda a, b: np.where(a > b, a, b + 1), ["u4"], ["u4", "u4"])
    assert "s0[l]" in text and ">" in text and "?" in text
    for function in (
        lambda a, b: np.asarray(a) + b,
        lambda a, b: a if (a > b) else b,
        lambda a, _b: a,
        lambda a, b: np.convolve(a, b),
    ):
        with pytest.raises(translate.Untranslatable):
            translate.loop("f", function, ["u4"], ["u4", "u4"])
