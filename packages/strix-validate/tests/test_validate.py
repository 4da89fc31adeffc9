# SPDX-License-Identifier: BSD-3-Clause
"""The validator tells correct results from wrong ones, and "not run" from "passed".

These tests also run in the package's test environment (recipes/strix-validate).
"""

import contextlib
import inspect
import json
import math
import re
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import wrong_reference
from calls import skip_without
from program import run
from strix_validate import cli, tiers
from strix_validate.attention import flash_cases, sdpa, sdpa_cases, sdpa_problem
from strix_validate.checks import (
    CannotRun,
    Check,
    CheckFailed,
    RunOptions,
    Size,
    State,
    exit_code,
)
from strix_validate.numerics import comparison, reference
from strix_validate.reporting.record import Record
from strix_validate.tiers import backend, kernels
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.cases import make
from strix_validate.vllm import vllm_checks
from typer.testing import CliRunner

CHECK = Check("id", "title", "purpose")


def tensors(*, heads=4, kv_heads=2, seqlen_q=33, seqlen_k=48, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k), (heads, seqlen_q))
    return [torch.randn(2, *size, 16, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reference_equals_torch_in_double(is_causal, kv_heads):
    q, k, v, grad_out = tensors(kv_heads=kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=is_causal, enable_gqa=True
        )
    grads = torch.autograd.grad(out, leaves, grad_out)
    results = reference.attention(q, k, v, grad_out, causal="top-left" if is_causal else None)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(results[name], expected.detach(), rtol=1e-12, atol=1e-12)


def test_reference_has_autograds_gradients_with_softcap_and_mask():
    """A mask is added after the softcap, so its gradient is that of the capped scores."""
    q, k, v, grad_out = tensors(kv_heads=4)
    mask = torch.randn(33, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, mask.expand(2, 4, -1, -1))]
    scores = 0.25 * leaves[0] @ leaves[1].transpose(-2, -1)
    out = (2 * torch.tanh(scores / 2) + leaves[3]).softmax(-1) @ leaves[2]
    grads = torch.autograd.grad(out, leaves, grad_out)
    results = reference.attention(q, k, v, grad_out, softcap=2, attn_mask=mask)
    for name, expected in zip(("out", "dq", "dk", "dv", "dmask"), (out, *grads), strict=True):
        torch.testing.assert_close(results[name], expected.detach(), rtol=1e-12, atol=1e-12)


def test_mask_matches_flash_attns_documentation():
    """flash_attn_func documents two causal masks: of 2 queries and 5 keys, and of 5 and 2."""
    assert reference.mask(2, 5, "bottom-right", (-1, -1)).int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert reference.mask(5, 2, "bottom-right", (-1, -1)).int().tolist() == [
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 0],
        [1, 1],
    ]
    assert reference.mask(3, 3, None, (1, 0)).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_queries_without_keys_give_zeros():
    q, k, v, grad_out = tensors(seqlen_q=40, seqlen_k=8)
    results = reference.attention(q, k, v, grad_out, causal="bottom-right")
    assert not results["out"][:, :, :32].any()
    assert not results["dq"][:, :, :32].any()
    assert all(bool(x.isfinite().all()) for x in results.values())


def test_heads_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="do not divide"):
        reference.attention(*tensors(heads=4, kv_heads=3))


def test_tensors_without_elements_have_no_error():
    assert comparison.rms(torch.empty(0, 4)) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bound_catches_what_is_not_finite(value):
    inputs = tensors(dtype=torch.float32)

    def compute(precision):
        return reference.attention(*inputs, dtype=precision)

    broken = compute(torch.float32)
    broken["dk"][0, 0, 0, 0] = value
    result = comparison.compare(CHECK, broken, compute, torch.float32)
    assert (result.state, result.reason) == (State.FAILED, "wrong: dk")
    assert result.measured["dk"]["error"] is None


def test_a_crash_of_the_child_has_its_last_lines(monkeypatch):
    child = SimpleNamespace(returncode=1, stderr="Traceback\n a\n b\nKeyError: 'c'\n")
    monkeypatch.setattr(triton_modes.subprocess, "run", lambda *words, **options: child)
    message = re.escape("exit status 1:  a |  b | KeyError: 'c'")
    with pytest.raises(triton_modes.ChildError, match=message):
        triton_modes.run([], "interpret")


@pytest.mark.parametrize(("elements", "share"), [(16, 0.5 + 1), (1600, 0.5 + 0.1)])
@pytest.mark.parametrize("excess", [-0.02, 0.02])
def test_the_bound_of_a_mean_error_depends_on_the_number_of_elements(elements, share, excess):
    """In float16 its factor is 0.5, and 4 / sqrt(elements) more."""
    exact = {"out": torch.ones(elements, dtype=torch.float64)}
    storing = torch.finfo(torch.float16).eps / 2 / math.sqrt(3)
    actual = {"out": exact["out"] + (share + excess) * storing}
    result = comparison.compare(CHECK, actual, lambda _: exact, torch.float16)
    assert result.state is (State.PASSED if excess < 0 else State.FAILED)


class FaultyTensor:
    """A tensor of a GPU whose kernel failed. Reading the tensor's numbers raises the error."""

    def cpu(self):
        raise RuntimeError("unspecified launch failure")


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (FaultyTensor(), ("RuntimeError", "unspecified launch failure")),
        (torch.ones(3), None),
    ],
)
def test_fault_of_a_kernel_is_its_calls(result, error):
    call = SimpleNamespace(execute=lambda device: {"out": result})
    assert triton_modes.answer(call, "cuda").error == error


def test_exit_code_counts_skipped_as_neither():
    passed, failed, skipped = State
    assert exit_code([passed, skipped]) == 0
    assert exit_code([passed, failed, skipped]) == 1
    assert exit_code([skipped]) == 3
    assert exit_code([]) == 3


def test_faults_of_a_kernel():
    values = {
        "machine": ("EM_AMDGPU", "EM_X86_64"),
        "mach": (0x4A, 0x41),
        "target": ("amdgcn-amd-amdhsa--gfx1151", "amdgcn-amd-amdhsa--gfx1100"),
        "lds": (65536, 65792),
        "mfma": (0, 3),
    }
    correct = {name: value for name, (value, _) in values.items()}
    assert kernels.find_faults(correct) == []
    for name, (_, wrong_value) in values.items():
        assert len(kernels.find_faults(correct | {name: wrong_value})) == 1


def test_a_cpu_passes_and_json_is_alone_on_stdout():
    """The test runs all attention and backend checks of the size that suits a CPU."""
    tiers = ("--tier", "attention", "--tier", "backend")
    done = run("run", *tiers, "--size", "quick", "--json", "--device", "cpu")
    record = Record.model_validate_json(done.stdout)
    assert done.returncode == 0, done.stderr
    assert record.versions["torch"]
    assert record.device.type == "cpu"
    assert record.subject == "harness"
    assert record.summary["passed"] >= 60
    assert record.summary["comparisons"] >= 240
    for state in State:
        assert record.summary[state.value] == sum(c.state is state for c in record.checks)
    for check in record.checks:
        assert check.purpose
        assert check.tier in tiers
        pairs = {k: v for k, v in check.measured.items() if isinstance(v, dict)}
        if check.state is State.PASSED:
            assert all(pair["error"] <= pair["bound"] for pair in pairs.values())
        else:
            assert check.reason
    assert any(set(check.measured) >= {"out", "dq", "dk", "dv"} for check in record.checks)


@pytest.mark.parametrize("check", [backend.compiled_in, backend.can_flash, backend.can_efficient])
def test_attention_backends_of_a_cpu_are_not_checked(check):
    with pytest.raises(CannotRun, match="only a GPU's attention backends"):
        check(RunOptions(device="cpu"))


@pytest.mark.parametrize("gpu", ["AMD Radeon 8060S", "AMD Radeon 8060S (emulated)"])
def test_a_profiler_that_sees_nothing_is_a_fault_of_a_real_gpu(gpu, monkeypatch):
    silent = contextlib.nullcontext(SimpleNamespace(events=list))
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: silent)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.ones(shape))
    monkeypatch.setattr(sdpa, "call", lambda *_: None)
    expected = CannotRun if "emulated" in gpu else CheckFailed
    with pytest.raises(expected):
        backend.kernel_name(RunOptions(device="cuda"))


def test_wrong_reference_fails(monkeypatch):
    monkeypatch.setattr(reference, "attention", wrong_reference.scaled)
    arguments = ["attention", "--json", "--device", "cpu", "--only", "sdpa/flash/gqa-float32"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["summary"]["failed"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://x"], "--url needs --model"),
        (["--url", "localhost:8000", "--model", "x"], "--url localhost:8000: the URL must begin"),
        (
            ["--url", "http://x", "--model", "x", "--plain-url", "strix/v1"],
            "--plain-url strix/v1: the URL must begin with http://",
        ),
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--plain-url", "http://x"], "--plain-url needs --url"),
        (["--questions", "9"], "--questions needs --model"),
        (["--questions", "51"], "50"),
        (["--seed", str(2**32)], "4294967295"),
    ],
)
def test_wrong_usage_of_run(options, message):
    done = CliRunner().invoke(cli.app, ["run", "--quick", *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_quick_runs_what_needs_the_machine(monkeypatch):
    """`run --quick` has its own tiers and skips MIOpen's slow search. --tier replaces the tiers."""
    runs = []
    monkeypatch.setattr(
        cli,
        "run_and_exit",
        lambda names, skip, size, **options: runs.append((names, skip, size)),
    )
    assert CliRunner().invoke(cli.app, ["run", "--quick"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["run", "--quick", "--tier", "bench"]).exit_code == 0
    assert runs == [(list(tiers.QUICK), ["conv"], Size.QUICK), (["bench"], [], Size.QUICK)]


def test_a_command_without_the_option_has_the_device_that_it_needs(monkeypatch):
    devices = []
    monkeypatch.setattr(cli, "run_and_exit", lambda names, device, **_: devices.append(device))
    for command in ("kernels", "serve"):
        assert CliRunner().invoke(cli.app, [command]).exit_code == 0
    assert devices == ["cpu", "auto"]


def test_nothing_to_check_is_not_success():
    for device, route in (("cpu", "efficient"), ("cuda", "flash")):
        arguments = ["attention", "--device", device, "--only", f"sdpa/{route}"]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 3


def test_without_torch_it_says_so():
    done = run("attention", without="torch")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "torch" in done.stderr
    assert "nothing could be checked" in done.stderr
    done = run("list", without="torch")
    assert done.returncode == 0
    assert "doctor/kernel" in done.stdout
    assert "tier attention is not listed: torch is not installed" in done.stderr
    done = run("list", "--only", "sdpa", without="torch")
    assert done.returncode == 2
    assert "tier attention is not listed: torch is not installed" in done.stderr
    done = run("warm", without="torch")
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing to compile" in done.stderr


def test_version():
    assert run("--version").stdout.strip() == f"strix-validate {version('strix-validate')}"


def list_arguments(build) -> dict:
    """Return a builder's arguments by name, including defaults."""
    parameters = inspect.signature(build).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    return defaults | getattr(build, "keywords", {})


def test_a_name_says_what_is_computed():
    cases = {**flash_cases.COMPILED, **flash_cases.EMULATED, **vllm_checks.COMPUTED}
    shapes = [(case.name, vars(case)) for case in sdpa_cases.CASES]
    shapes += [(case.label, list_arguments(case.build)) for case in flash_cases.CASES]
    shapes += [(name, list_arguments(case.build)) for name, case in cases.items()]
    for name, shape in shapes:
        words = name.split("-")
        for size in (word[1:] for word in words if re.fullmatch(r"d\d+", word)):
            assert shape["head_dim"] == int(size), name
        for word in {"causal", "window", "softcap", "sinks", "alibi"} & {*words} & shape.keys():
            assert bool(shape[word]) is ("not" not in words), name
        if length := re.search(r"length-(\d+)", name):
            assert shape["seqlen_q"] == shape["seqlen_k"] == int(length[1]), name
        for side, pattern in (("q", "one-(query|token)"), ("k", "one-(key|token)")):
            if f"seqlen_{side}" in shape and re.search(pattern, name):
                assert shape[f"seqlen_{side}"] == 1, name


def test_a_whole_tile_of_keys_is_shut_out():
    """The dtype's most negative number hides a tile of keys in the second sequence.

    The mask is causal in both sequences.
    """
    (case,) = (case for case in sdpa_cases.CASES if case.name == "least-mask")
    mask = sdpa_problem.build_mask(case, torch.float16, torch.Generator())
    masked = mask == torch.finfo(torch.float16).min
    assert masked[1, 0, :, :70].all()
    assert not masked[0, 0, :, :70].any()
    assert masked[:, 0, 0, -1].all()
    assert not masked[:, 0, -1, -1].any()


def test_every_sequence_is_compared_unless_they_take_gigabytes():
    compared = {
        case.name: sdpa_problem.Problem(case, torch.float16, "cpu").compared
        for case in sdpa_cases.CASES
        if case.name in ("full", "batch-9")
    }
    assert compared == {"full": None, "batch-9": None}
    (case,) = (case for case in sdpa_cases.CASES if case.name == "batch-9")
    large = sdpa_problem.Problem(replace(case, gib=1), torch.float16, "cpu")
    assert large.compared == [0, 1, 4, 7, 8]


def test_a_list_of_kernels_has_no_names_of_checks():
    done = CliRunner().invoke(cli.app, ["list", "--kernels", "--only", "kernels"])
    assert done.exit_code == 2


def test_list_names_every_check_once():
    lines = CliRunner().invoke(cli.app, ["list"]).stdout.splitlines()
    ids = [line for line in lines if not line.startswith(" ")]
    assert len(ids) == len(set(ids)) > 500
    listed = json.loads(CliRunner().invoke(cli.app, ["list", "--json"]).stdout)
    # Each title must have one line. The ids do not show a second line, because it is indented:
    # Python before 3.13 keeps the indentation of docstrings.
    assert not [check["id"] for check in listed if "\n" in check["title"] + check["purpose"]]
    # Below each id are the title and the bug that the check catches, or one line if they are equal.
    below = dict(pairwise(lines))
    assert all(below.get(name, "").startswith("    ") for name in ids)


needs_flash_attn = skip_without("flash_attn")


@needs_flash_attn
def test_flash_attn_in_the_interpreter():
    only = [f"flash-attn/interpreter/{name}-float32" for name in ("causal", "window", "softcap")]
    arguments = [word for name in only for word in ("--only", name)]
    done = run("attention", "--json", "--device", "cpu", *arguments)
    record = json.loads(done.stdout)
    assert done.returncode == 0, record
    assert record["summary"] == {"passed": 3, "failed": 0, "skipped": 0, "comparisons": 4}


@needs_flash_attn
def test_kernel_compiles_and_a_wrong_target_fails():
    (check,) = [check for check in kernels.checks() if check.id == "kernels/d64"]
    call, _ = make("d64", flash_cases.COMPILED["d64"])
    (answer,) = triton_modes.run([call], "compile").calls
    assert kernels.judge(check, answer).state is State.PASSED
    kernel = answer.kernels[0]
    flags = 48  # offset of e_flags in the header of a 64-bit ELF file
    other_chip = kernel.elf[:flags] + b"\x41" + kernel.elf[flags + 1 :]
    changed = triton_modes.CompiledKernel(
        kernel.name, other_chip, kernel.assembly, kernel.launch_lds
    )
    result = kernels.judge(check, triton_modes.CallAnswer(kernels=(changed, *answer.kernels[1:])))
    assert result.state is State.FAILED
    assert "0x41" in result.reason
    assert kernels.judge(check, triton_modes.CallAnswer()).state is State.FAILED
