# SPDX-License-Identifier: BSD-3-Clause
"""The validator reads damaged files, and gives an answer or one clear message."""

import json
import os
from pathlib import Path

import hosts
import pytest
from models import FILES
from mutants import Tally, texts, trees
from records import make, timing
from strix_validate.checks import Check, Result, State
from strix_validate.cli import app
from strix_validate.doctor import environment, host, interpreter, kernel_lists
from strix_validate.json_file import read_json_object
from strix_validate.layers.config import ModelLayers, read_layers
from strix_validate.reporting import record
from test_doctor import examine
from threads import THREADS
from typer import testing
from typer.main import get_command

COMPARED = {"error": 1e-3, "bound": 4e-3, "rms": 1e-4, "rms_bound": 1e-3}
RECORD = make(
    Result(Check("a/b", "t", "w"), State.PASSED, "", {"out": COMPARED}),
    timing("flash", "tiny", "full", 1.5),
    Result(Check("a/c", "t", "w"), State.SKIPPED, "[/] [bold]not here"),
    tier="attention",
)
CONFIG = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4096,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "torch_dtype": "bfloat16",
    "quantization_config": {"bits": 4, "group_size": 128},
}
META = {
    "name": "pytorch",
    "version": "2.13.0",
    "build": "h1_0",
    "sha256": "00",
    "channel": "https://conda.anaconda.org/conda-forge/linux-64",
    "depends": ["python >=3.12", "triton ==3.7.1 h2_0"],
}
KERNELS = {
    "kernels": {
        "AB": {
            "name": "k",
            "types": {"x": "*fp32"},
            "constants": {"B": "64"},
            "options": {"num_warps": 4},
            "files": {"k.json": "00"},
        }
    }
}


class Refused(Exception):
    """The program refused its input with one message and exit status 2."""


Tally.refusal = Refused
COMMAND = get_command(app)


@pytest.fixture(autouse=True)
def command_is_built_once(monkeypatch) -> None:
    """Build the command once, because this takes three times as long as a run of the command."""
    monkeypatch.setattr(testing, "_get_command", lambda _: COMMAND)


def mutants(valid: dict, stream: int, count: int) -> list[bytes]:
    original = json.dumps(valid, indent=1).encode()
    changed = [json.dumps(tree).encode() for tree in trees(valid, stream, count)]
    return [original, *changed, *texts(original, stream + 100, count)]


@pytest.fixture
def damage(record_property):
    """Return a function that reads mutants of a file, and counts accepted and refused mutants."""

    def read_mutants(name: str, file: Path, contents: list[bytes], read, is_correct=bool) -> Tally:
        tally = Tally(name, record_property)
        for mutant in contents:
            file.write_bytes(mutant)
            tally.give(read, is_correct, mutant)
        return tally

    return read_mutants


def test_records(tmp_path: Path, damage) -> None:
    file = tmp_path / "a.json"

    def report() -> bool:
        done = testing.CliRunner().invoke(
            app, ["report", str(file), "-o", str(tmp_path / "a.html")]
        )
        if done.exit_code == 2 and isinstance(done.exception, SystemExit):
            raise Refused(done.output)
        assert done.exit_code == 0, done.exception
        return "<html" in (tmp_path / "a.html").read_text()

    tally = damage("record", file, mutants(json.loads(RECORD.dump()), 1, 60), report)
    assert tally.outcomes["accepted"]
    assert tally.outcomes["refused"]


def is_list(value: object) -> bool:
    return isinstance(value, list)


def ended_without_exception(results: dict) -> bool:
    """Return whether no check of the doctor ended in a Python exception."""
    return not any("Error:" in result.reason for result in results.values())


def test_copies_of_machines(tmp_path: Path, record_property) -> None:
    """No check of the doctor ends in an exception if a file of the machine is damaged.

    Each file in turn is a mutant, has 3 GiB, is missing, or is a pipe.
    """
    tally = Tally("machine", record_property)
    hosts.make(tmp_path, {})
    pairs = [pair for machine in THREADS.values() for pair in machine.files.items()]
    files = {name: text for name, text in pairs if isinstance(text, str)} | hosts.HEALTHY
    for number, (name, text) in enumerate(sorted(files.items())):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for mutant in texts(text.encode(), 200 + number, 6) if text else ():
            file.write_bytes(mutant)
            tally.give(lambda: examine(tmp_path), ended_without_exception, (name, mutant))
        with file.open("wb") as sparse:
            sparse.truncate(3 << 30)
        tally.give(lambda: examine(tmp_path), ended_without_exception, f"{name}: 3 GiB")
        file.unlink()
        tally.give(lambda: examine(tmp_path), ended_without_exception, f"{name}: none")
        os.mkfifo(file)
        tally.give(lambda: examine(tmp_path), ended_without_exception, f"{name}: a pipe")
        file.unlink()
        if name in hosts.HEALTHY:
            file.write_text(text)


@pytest.mark.parametrize("name", ["e" * 300, "e/" * 3000])
def test_an_environment_whose_name_no_folder_has(name: str, tmp_path: Path) -> None:
    environ = f"HOME=/home/{name}\0CONDA_PREFIX=/home/{name}\0"
    assert ended_without_exception(examine(hosts.make(tmp_path, {"proc/self/environ": environ})))


def test_models(tmp_path: Path, damage) -> None:
    file = tmp_path / "config.json"

    def read() -> ModelLayers:
        try:
            return read_layers(read_json_object(file))
        except ValueError as error:
            raise Refused(str(error)) from error

    tally = damage("config.json", file, mutants(CONFIG, 2, 300), read)
    assert tally.outcomes["accepted"]
    assert tally.outcomes["refused"]


DENSE = FILES["Qwen3-8B"]
QUANTIZED = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
AWQ = DENSE | CONFIG | QUANTIZED | {"num_hidden_layers": 2}
INDEX = {
    "metadata": {"total_size": 16_381_470_720},
    "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"},
}
PIPELINE = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}


def run_models(*words: str) -> str:
    """Run `strix-validate models`, and check that its output has no control characters."""
    done = testing.CliRunner().invoke(app, ["models", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert all(c.isprintable() or c == "\n" for c in done.output)
    if done.exit_code == 2:
        raise Refused(done.output)
    return done.output


def test_a_module_that_is_called_vllm(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    output = run_models(str(tmp_path))
    assert "vllm is not installed" in output
    assert "GiB of weights" in output


def test_indexes_of_weights(tmp_path: Path, damage) -> None:
    """If the weights' index is damaged, has an absurd size in it, or takes 3 GiB, it is not used.

    The sizes then come from config.json.
    """
    file = tmp_path / "model.safetensors.index.json"
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    huge_size = b'{"metadata": {"total_size": 1%s}}' % (b"0" * 400)
    contents = [*mutants(INDEX, 10, 80), huge_size]

    def read() -> str:
        return run_models(str(tmp_path))

    def has_sizes(output: str) -> bool:
        return "GiB of weights" in output

    tally = damage("index of weights", file, contents, read, has_sizes)
    with file.open("wb") as sparse:
        sparse.truncate(3 << 30)
    tally.give(read, has_sizes, "3 GiB")


def load_record(file: Path) -> record.Record:
    try:
        return record.load(file)
    except record.BadRecord as error:
        raise Refused(str(error)) from error


@pytest.mark.parametrize(
    "read", [read_json_object, lambda file: run_models(str(file)), load_record]
)
def test_no_config_is_read_for_ever(read, tmp_path: Path) -> None:
    """The reader refuses a pipe, and a file of 3 GiB."""
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises((Refused, ValueError), match="more than"):
        read(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises((Refused, ValueError), match=r"regular file|not a file"):
        read(file)


@pytest.mark.parametrize("count", [1001, 10**9])
@pytest.mark.parametrize("valid", [DENSE, AWQ])
def test_layers_are_not_counted_for_ever(valid: dict, count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(valid | {"num_hidden_layers": count}))
    with pytest.raises(Refused, match=f"num_hidden_layers = {count}"):
        run_models(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "valid"),
    [("config.json", DENSE), ("config.json", AWQ), ("model_index.json", PIPELINE)],
)
def test_answers_about_models(name: str, valid: dict, tmp_path: Path, damage) -> None:
    escapes = dict.fromkeys(("model_type", "_class_name"), "\x1b[2J")
    evil = valid | escapes | {"architectures": ["\x1b]0;owned\x07ForCausalLM"]}
    contents = [*mutants(valid, 8, 120), json.dumps(evil).encode()]
    tally = damage(f"models, {name}", tmp_path / name, contents, lambda: run_models(str(tmp_path)))
    assert tally.outcomes["accepted"]
    assert tally.outcomes["refused"]


def test_weights(tmp_path: Path, damage) -> None:
    """`models` answers or refuses if headers are damaged or too long, or if files are pipes."""
    (tmp_path / "model_index.json").write_text(json.dumps(PIPELINE))
    (tmp_path / "vae").mkdir()
    file = tmp_path / "vae" / "a.safetensors"
    head = {"w": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}}
    contents = [len(x).to_bytes(8, "little") + x + bytes(32) for x in mutants(head, 9, 120)]
    tally = damage("safetensors", file, contents, lambda: run_models(str(tmp_path)))
    assert tally.outcomes["accepted"]
    assert tally.outcomes["refused"]
    with file.open("wb") as sparse:
        sparse.write((1 << 32).to_bytes(8, "little"))
        sparse.truncate((1 << 32) + 8)
    with pytest.raises(Refused, match="longer than"):
        run_models(str(tmp_path))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Refused, match="not a regular file"):
        run_models(str(tmp_path))
    file.unlink()
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert "GiB of weights" in run_models(str(tmp_path))


def test_lists_of_kernels(tmp_path: Path, damage) -> None:
    file = tmp_path / kernel_lists.FOLDER / "a" / kernel_lists.LIST
    file.parent.mkdir(parents=True)

    def read() -> list[str]:
        lists = kernel_lists.read_lists(tmp_path)
        kernels = [kernel for kernel_list in lists.values() for kernel in kernel_list.values()]
        return [kernel_lists.describe(kernel) for kernel in kernels]

    damage("kernels.json", file, mutants(KERNELS, 3, 300), read, is_list)
    file.write_text(json.dumps(KERNELS))
    assert read() == ["k(*fp32) B=64 num_warps=4"]


@pytest.mark.parametrize(
    "reader",
    [
        host.list_packages,
        lambda prefix: [interpreter.read_conda_record(prefix, "pytorch")],
        lambda prefix: list(environment.find_exact_requirements(prefix, "pytorch")),
    ],
    ids=["packages", "record", "requirements"],
)
def test_conda_meta(reader, tmp_path: Path, damage) -> None:
    file = tmp_path / "conda-meta/pytorch-2.13.0-h1_0.json"
    file.parent.mkdir()
    damage("conda-meta", file, mutants(META, 4, 200), lambda: reader(tmp_path), is_list)
    file.write_text(json.dumps(META))
    assert reader(tmp_path)


def test_a_package_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta" / "pytorch-1-0.json").write_text("[")
    assert [(p.name, p.version) for p in host.list_packages(tmp_path)] == [
        ("pytorch-1-0", "unreadable")
    ]
    (tmp_path / "conda-meta" / "pytorch-2-0.json").write_text(json.dumps(META))
    package = interpreter.read_conda_record(tmp_path, "pytorch")
    assert package
    assert package["version"] == "2.13.0"
