# SPDX-License-Identifier: BSD-3-Clause
"""Each gap in the coverage of Triton kernels by quick checks has a reason in coverage_gaps.toml.

A gap is a loop with one trip, a grid axis with one program, a flag or argument with one value, or a
flag that lacks one of the values with which the kernel compares it. record_coverage.py writes
coverage.json. If only one case has some value, or a second trip or program, coverage.json names
this case. The tests check that coverage.json is up to date. They run no kernel, except one test of
the recording.
"""

import copy
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import coverage_cases
import pytest
from calls import skip_without
from record_coverage import REQUIRED, SEVERAL, merge

FOLDER = Path(__file__).parent
RECORD = json.loads((FOLDER / "coverage.json").read_text())
REASONS = tomllib.loads((FOLDER / "coverage_gaps.toml").read_text())["gaps"]
PATTERNS = [pattern for entry in REASONS for pattern in entry["of"]]


def list_gaps(record: dict) -> Iterator[str]:
    """Yield the gaps in a library's record, such as a loop of which no case makes two trips."""
    for kernel, parts in record["kernels"].items():
        for flag, values in parts["flags"].items():
            compared = parts["compared"].get(flag, ())
            if len(values) < 2 and not compared:
                yield f"{kernel}: {flag} is always {next(iter(values), 'missing')}"
            for value in compared:
                if value not in values:
                    yield f"{kernel}: {flag} is never {value}"
        for axis, (programs, _) in parts["grid"].items():
            if programs < 2:
                yield f"{kernel}: axis {axis} has one program"
        for loop, (trips, _) in parts["loops"].items():
            if trips < 2:
                yield f"{kernel}: at most one trip of {loop}"
    for function, arguments in record["functions"].items():
        for argument, values in arguments.items():
            present = [value for value, case in values.items() if case]
            if len(present) < min(len(values), 2) or (
                len(present) == 1 and present[0] not in REQUIRED
            ):
                yield f"{function}: {argument} is always {next(iter(present), 'missing')}"


def without(record: dict, case: str) -> dict:
    """Return a library's record without one of its cases."""
    kernels = {}
    for name, parts in record["kernels"].items():
        kernels[name] = parts | {
            "grid": _counts_without(parts["grid"], case),
            "loops": _counts_without(parts["loops"], case),
            "flags": _values_without(parts["flags"], case),
        }
    functions = copy.deepcopy(record["functions"])
    for arguments in functions.values():
        for owners_by_value in arguments.values():
            for value, owner in owners_by_value.items():
                if owner == case:
                    owners_by_value[value] = ""
    return record | {"kernels": kernels, "functions": functions}


def _counts_without(counts: dict[str, list], case: str) -> dict[str, list]:
    result = {}
    for key, (count, owner) in counts.items():
        result[key] = [1, ""] if owner == case else [count, owner]
    return result


def _values_without(flags: dict[str, dict[str, str]], case: str) -> dict[str, dict[str, str]]:
    return {
        flag: {value: owner for value, owner in values.items() if owner != case}
        for flag, values in flags.items()
    }


def has_reason(gap: str) -> bool:
    return any(gap == pattern or fnmatchcase(gap, pattern) for pattern in PATTERNS)


def new_gaps(library: str, record: dict) -> list[str]:
    """List the gaps of a record that have no reason."""
    gaps = (f"{library}: {gap}" for gap in list_gaps(record))
    return [gap for gap in gaps if not has_reason(gap)]


@skip_without("triton")
@pytest.mark.parametrize("run_all", [False, True])
def test_what_a_launch_is_recorded_as(run_all):
    """Running only the first and the last trip of each loop gives the same record as running all.

    In this kernel, the last program makes the most trips. All five programs run, because they are
    few.
    """
    program = (
        "import json, interpreted, record_coverage; from strix_validate.triton import interpreter; "
        "interpreter.complete(); "
        f"answer = record_coverage.run_in_child(interpreted.Launching(), ('triton.',), {run_all}); "
        "print(json.dumps(answer))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    record, error = json.loads(out.stdout.splitlines()[-1])
    assert error == ""
    (kernel,) = record["kernels"].values()
    assert kernel["flags"] == {"out": {"given": True}, "scale": {"None": True}, "MODE": {"2": True}}
    assert kernel["compared"] == {"MODE": ["1"]}
    assert kernel["grid"] == {"0": 5, "1": 1}
    assert list(kernel["loops"].values()) == [5]
    merged = merge({"a": record}) | {"version": "", "cases": {}}
    gaps = [gap.removeprefix("interpreted._count: ") for gap in list_gaps(merged)]
    assert gaps == ["scale is always None", "MODE is never 1", "axis 1 has one program"]


@cache
def digests(library: str) -> dict[str, str]:
    return {case.name: case.digest() for case in coverage_cases.quick_cases(library)}


def stale_cases(recorded: dict[str, str], cases: dict[str, str]) -> list[str]:
    """List the cases that are new, removed, or changed since they were recorded."""
    names = sorted(recorded.keys() | cases.keys())
    return [name for name in names if recorded.get(name) != cases.get(name)]


@pytest.mark.parametrize("library", coverage_cases.LIBRARIES)
def test_the_record_is_of_the_cases_as_they_are(library):
    assert stale_cases(RECORD[library]["cases"], digests(library)) == [], "run record_coverage.py"


@pytest.mark.parametrize(
    ("recorded", "stale"),
    [
        ({"a": "1", "b": "2"}, []),
        ({"a": "0", "b": "2"}, ["a"]),
        ({"a": "1"}, ["b"]),
        ({"a": "1", "b": "2", "c": "3"}, ["c"]),
    ],
)
def test_which_case_is_stale(recorded, stale):
    assert stale_cases(recorded, {"a": "1", "b": "2"}) == stale


@pytest.mark.parametrize("library", coverage_cases.LIBRARIES)
def test_each_gap_has_a_reason(library):
    assert new_gaps(library, RECORD[library]) == [], "add a case, or a reason"


def all_gaps() -> list[str]:
    return [f"{library}: {gap}" for library in RECORD for gap in list_gaps(RECORD[library])]


def test_each_reason_has_a_gap():
    gaps = all_gaps()
    unused = [x for x in PATTERNS if not any(gap == x or fnmatchcase(gap, x) for gap in gaps)]
    assert unused == []
    assert all(len(entry["reason"]) > 20 for entry in REASONS)


def test_a_pattern_names_its_value_or_loop():
    """A pattern may stand for several kernels or flags, but not for several values or loops."""
    wildcard = re.compile(r" (is always|is never|trip of) .*[*?\[]")
    patterns = set(PATTERNS) - set(all_gaps())
    assert [pattern for pattern in sorted(patterns) if wildcard.search(pattern)] == []


def owners(record: dict) -> set[str]:
    """Return each case that is the only one with some value, or with a second program or trip."""
    names = set()
    kernels = list_kernels(record)
    for parts in [*record["functions"].values(), *(kernel["flags"] for kernel in kernels)]:
        for values in parts.values():
            names.update(values.values())
    for kernel in kernels:
        for part in ("grid", "loops"):
            names.update(owner for _, owner in kernel[part].values())
    return names - {"", SEVERAL}


def list_kernels(record: dict) -> list[dict]:
    return list(record["kernels"].values())


@pytest.mark.parametrize("library", coverage_cases.LIBRARIES)
def test_the_record_names_its_own_cases(library):
    assert owners(RECORD[library]) <= RECORD[library]["cases"].keys()


#: A case, and a part of the name of the gap that appears if the case is removed.
REMOVED = {
    ("aiter", "cache-prompt"): "_fwd_kernel_splitK: axis 0 has one program",
    ("aiter", "cache-pages-parts"): "at most one trip of _fwd_kernel_splitK+272 for offset",
    ("aiter", "strided"): "attn_fwd: HEAD_STRIDE_ALIGNED_8 is always True",
    ("fla", "gla-packed"): "chunk_gla_bwd_kernel_dA: IS_VARLEN is always False",
    ("flash", "cache-alibi-batch"): "_fwd_kernel_splitK: USE_ALIBI is always False",
    ("flash", "cache-prompt"): "_fwd_kernel_splitK: axis 0 has one program",
    ("flash", "cache-full-rotary"): "flash_attn_with_kvcache: causal is always True",
    ("gguf", "q2_k-5-512-24"): "q2_k_gemm_kernel: at most one trip of",
    ("liger", "loss-sum"): "reduction is always mean",
    ("sage", "packed-blocks"): "attn_qk_int8_block_varlen._attn_fwd: axis 0 has one program",
    ("vllm", "conv1d-drafts"): "_causal_conv1d_update_kernel: IS_SPEC_DECODING is always False",
    ("vllm", "logprobs-many"): "_topk_log_softmax_kernel: at most one trip of",
    ("vllm", "prefill-pictures-window"): "MM_PREFIX_CLAMP_SW is always False",
}


@pytest.mark.parametrize(("library", "case"), REMOVED)
def test_a_case_that_goes_leaves_a_gap(library, case):
    gaps = new_gaps(library, without(RECORD[library], case))
    assert any(REMOVED[library, case] in gap for gap in gaps)


@pytest.mark.parametrize(
    ("part", "gaps"),
    [
        ({"flags": {"CAUSAL": {"True": "a"}}}, ["k: CAUSAL is always True"]),
        ({"flags": {"CAUSAL": {"True": "a", "False": SEVERAL}}}, []),
        ({"flags": {"MODE": {"0": "a"}}, "compared": {"MODE": ["0", "2"]}}, ["k: MODE is never 2"]),
        ({"grid": {"1": [1, ""]}}, ["k: axis 1 has one program"]),
        ({"grid": {"1": [2, "a"]}, "loops": {"f+3 for i in range(n)": [9, "a"]}}, []),
        ({"loops": {"f+3 for i in n": [1, ""]}}, ["k: at most one trip of f+3 for i in n"]),
    ],
)
def test_what_of_a_kernel_is_a_gap(part, gaps):
    kernel = {"flags": {}, "compared": {}, "grid": {}, "loops": {}} | part
    assert list(list_gaps({"kernels": {"k": kernel}, "functions": {}})) == gaps


@pytest.mark.parametrize(
    ("values", "is_gap"),
    [
        ({"None": "a"}, True),
        ({"its default": "a"}, True),
        ({"a tensor": "a"}, False),
        ({"its default": "a", "a number": "b"}, False),
        ({"a tensor": "a", "a number": ""}, True),
    ],
)
def test_which_argument_is_a_gap(values, is_gap):
    record = {"kernels": {}, "functions": {"f": {"x": values}}}
    assert bool(list(list_gaps(record))) is is_gap


def test_a_required_argument_that_lacks_a_kind_is_recorded():
    arguments = {"x": {"a tensor": True, "a number": False}, "y": {"a tensor": True}}
    merged = merge({"a": {"kernels": {}, "functions": {"f": arguments}}})
    assert list(list_gaps(merged)) == ["f: x is always a tensor"]


def test_a_gap_that_has_no_reason_fails():
    kernel = {"flags": {"NEW": {"True": SEVERAL}}, "compared": {}, "grid": {}, "loops": {}}
    record = {"kernels": {"kernel": kernel}, "functions": {}}
    assert new_gaps("vllm", record) == ["vllm: kernel: NEW is always True"]
