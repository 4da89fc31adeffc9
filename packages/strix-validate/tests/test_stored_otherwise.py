# SPDX-License-Identifier: BSD-3-Clause
"""Models without a config.json: GGUF files, Mistral's params.json, and the folder of a LoRA."""

import json
import random
import shlex
import struct
from pathlib import Path

import hosts
import pytest
from models import FILES
from strix_validate.cli import app
from strix_validate.doctor.tree import Tree
from strix_validate.installing import suggest_installation
from strix_validate.layers import defaults
from strix_validate.models import answer, command, gguf_file, lora, mistral, table
from typer.testing import CliRunner


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", *map(str, arguments)], env={"COLUMNS": "4000"})
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def write(file: Path, arch: str = "qwen3", **changes: object) -> Path:
    """Write a GGUF file as llama.cpp's converter does, but with only three of a model's tensors."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(file, arch)
    sizes = {
        "block_count": 2,
        "embedding_length": 512,
        "feed_forward_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "context_length": 40960,
    } | changes
    for key, value in sizes.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{n}" for n in range(2000)])
    writer.add_string("general.base_model.0.repo_url", "https://huggingface.co/Qwen/Qwen3-8B")
    writer.add_tensor("output_norm.weight", numpy.zeros(512, numpy.float32))
    packed = numpy.zeros((512, 512 // 256 * 144), numpy.uint8)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.add_tensor(
        "token_embd.weight",
        numpy.zeros((2000, 512 // 256 * 210), numpy.uint8),
        raw_dtype=gguf.GGMLQuantizationType.Q6_K,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


#: Bytes of the file's tensors.
SIZE = 512 * 4 + 512 * 288 + 2000 * 420


def test_a_gguf_file_is_answered(tmp_path: Path) -> None:
    """`models` answers about a GGUF file, though its folder has no config.json."""
    file = write(tmp_path / "model-Q4_K_M.gguf")
    status, output = run(file)
    assert status == 0
    assert "starts, according to the table" in output
    assert "vllm-gguf-plugin: compiled, interpreted, emulated (Q6_K)" in output
    assert "TRITON_ATTN: compiled, interpreted, emulated (heads)" in output
    assert "1 KiB of KV cache per token" in output
    assert "environment `formats`" in output
    assert "--tool-call-parser hermes" in output
    status, output = run(file, "--json")
    result = json.loads(output)
    assert (result["weights"], result["token"]) == (SIZE, 2 * 2 * 2 * 2 * 64)
    assert result["length"] == 40960
    assert run(tmp_path)[0] == 0  # the file's folder is accepted, too


def test_the_line_that_serves_a_gguf_file(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    result = command.answer_gguf(file)
    tree = Tree(hosts.make(tmp_path / "host", {}))
    line = answer.describe(str(file), result, tree)[-1]
    assert f"pixi run -e formats serve {file} --tokenizer Qwen/Qwen3-8B --gpu-memory" in line


def test_a_hybrid_gguf_file(tmp_path: Path) -> None:
    keys = {"block_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "ssm.state_size": 128}
    model = gguf_file.read(write(tmp_path / "model.gguf", "nemotron_h_moe", **keys))
    assert model.token == 2 * 2 * 2 * 2 * 64
    assert model.config["layer_types"] == ["mamba", "full_attention"] * 2
    assert model.config["model_type"] == "nemotron_h"


def test_the_model_types_of_gguf_files_exist() -> None:
    """Each architecture that is renamed is renamed to a model_type of transformers."""
    model_types = set(gguf_file.MODEL_TYPES.values())
    assert model_types <= defaults.contents()["types"].keys()


def test_shards_are_read_together(tmp_path: Path) -> None:
    first = write(tmp_path / "model-00001-of-00002.gguf")
    status, output = run(first)
    assert status == 2
    assert "model-00002-of-00002.gguf is missing" in output
    write(tmp_path / "model-00002-of-00002.gguf")
    assert gguf_file.read(first).weights == 2 * SIZE


def test_types_without_a_kernel_and_encoders(tmp_path: Path) -> None:
    status, output = run(write(tmp_path / "mmproj.gguf", "clip"))
    assert status == 2
    assert "pass the model's own file" in output
    assert gguf_file.make_row("TQ1_0").refused
    assert not gguf_file.make_row("Q8_0").refused


def test_each_type_of_gguf_has_its_checks() -> None:
    from strix_validate import tiers

    existing = {check.id for tier in tiers.TIERS for check in tiers.load(tier).checks()}
    for kind in table.read_table()["gguf_types"]:
        row = gguf_file.make_row(kind.upper())
        assert set(row.checks) <= existing
        assert row.proven == "compiled, interpreted, emulated"


def test_every_truncated_gguf_file_gives_one_message(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    ends = [*range(0, 64, 7), *range(64, len(content), len(content) // 40), len(content) - 1]
    for end in ends:
        file.write_bytes(content[:end])
        status, output = run(file)
        assert status == 2 and "cannot be read as a GGUF file" in output, end
        assert "Traceback" not in output


def test_damaged_gguf_files_end(tmp_path: Path) -> None:
    """With header bytes replaced, the command gives an answer or a message, in bounded time."""
    content = write(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    seed = random.Random(7)
    for _ in range(60):
        data = bytearray(content)
        for _ in range(3):
            data[seed.randrange(800)] = seed.randrange(256)
        file.write_bytes(data)
        status, output = run(file)
        assert status in (0, 1, 2)
        assert "Traceback" not in output


def header(*fields: bytes, tensors: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields)) + b"".join(fields)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


#: Impossible lengths and damaged headers. Without limits, some of them would make a reader loop
#: without end or fill the memory.
HOSTILE = {
    "an array without end": header(key("a", 9, struct.pack("<IQ", 0, 1 << 62))),
    "arrays in arrays": header(key("a", 9, struct.pack("<IQ", 9, 1) * 100_000)),
    "a string without end": header(key("a", 8, struct.pack("<Q", 1 << 62))),
    "keys without end": b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 62),
    "tensors without end": b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
    "an unknown type": header(key("a", 99, b"")),
    "version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "no magic": b"GGML" * 9,
    "zeros": bytes(1 << 16),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("padding", [0, 1 << 19])
def test_a_hostile_gguf_file_gives_one_message(name: str, padding: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(HOSTILE[name])
    with file.open("r+b") as opened:
        opened.truncate(len(HOSTILE[name]) + padding)  # append zeros that take no disk space
    status, output = run(file)
    assert status == 2
    assert "Traceback" not in output
    assert "cannot be read as a GGUF file" in output or "is it a model" in output


def test_without_the_package_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    status, output = run(tmp_path / "model.gguf")
    assert status == 2
    assert suggest_installation("gguf") in output


def test_a_gguf_file_whose_attention_vllm_refuses(tmp_path: Path) -> None:
    """Whatever the format of the weights, vLLM refuses GLM-5's attention, which chooses tokens."""
    sizes = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}
    status, output = run(write(tmp_path / "glm.gguf", "glm-dsa", **sizes))
    assert status == 1
    assert "does not start, according to the table" in output
    assert "cannot import name 'dtypes' from 'aiter'" in output


#: Those keys of Mistral-Small-3.2's params.json that `models` reads.
PARAMS = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 32768,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
    "vision_encoder": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    },
}


def test_a_params_json_alone(tmp_path: Path) -> None:
    """The folder has no config.json."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    status, output = run(tmp_path)
    assert status == 0
    assert "44.7 GiB of weights, 160 KiB of KV cache" in output
    assert "FLASH_ATTN" in output
    assert "--tool-call-parser mistral" in output
    result = command.answer_model(str(tmp_path), None).answer
    tree = Tree(hosts.make(tmp_path / "host", {}))
    line = answer.describe("NAME", result, tree)[-1]
    assert f"vllm serve NAME {mistral.FLAGS} --gpu-memory-utilization" in line


def test_vllms_source_answers_for_a_params_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "answer", lambda config, folder, source: source)
    monkeypatch.setattr(command, "replace", lambda result, **_: result)
    (tmp_path / "vllm/platforms").mkdir(parents=True)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert command.answer_model(str(tmp_path), tmp_path).answer == tmp_path.resolve()


def test_formats_and_experts_of_a_params_json(tmp_path: Path) -> None:
    """Ministral's FP8 has one scale per tensor, for which gfx11 has no kernel."""
    file = tmp_path / "params.json"
    file.write_text(json.dumps(PARAMS | {"quantization": {"qformat_weight": "fp8_e4m3"}}))
    status, output = run(tmp_path)
    assert status == 1
    assert "ScaledMM" in output
    assert "FP8 in blocks" in output
    params = PARAMS | {"moe": {"num_experts": 8, "num_experts_per_tok": 2}}
    assert mistral.convert_params(params)["text_config"]["model_type"] == "mixtral"
    file.write_text(json.dumps(params))
    assert "TritonExperts" in run(tmp_path)[1]
    for change in ({"quantization": {"qformat_weight": "int3"}}, {"moe": 3}, {"dim": None}):
        file.write_text(json.dumps(PARAMS | change))
        status, output = run(tmp_path)
        assert status == 2
        assert "params.json" in output
        assert "Traceback" not in output


def adapter(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 32, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_loras_folder(tmp_path: Path) -> None:
    """The answer is about the base model, with flags that load the base model and the LoRA."""
    folder = adapter(tmp_path / "lora")
    status, output = run(folder)
    assert status == 2
    assert f"--lora-modules adapter={folder} --max-lora-rank 32" in output
    assert "hf download Qwen/Qwen3-8B" in output
    base = tmp_path / "cache/hub/models--Qwen--Qwen3-8B/snapshots/abc"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(FILES["Qwen3-8B"]))
    status, output = run(folder)
    assert status == 0
    assert "a LoRA of rank 32: the following lines are about Qwen/Qwen3-8B" in output
    served = command.answer_model(str(folder), None)
    line = answer.describe(served.name, served.answer, Tree(hosts.make(tmp_path / "host", {})))[-1]
    assert f"vllm serve Qwen/Qwen3-8B --enable-lora --lora-modules adapter={folder}" in line


def test_a_base_model_of_a_lora_that_is_a_folder_without_a_model(tmp_path: Path) -> None:
    """Only a model that Hugging Face's hub may have can be downloaded."""
    base = adapter(tmp_path / "base")
    status, output = run(adapter(tmp_path / "lora", base_model_name_or_path=str(base)))
    assert status == 2
    assert f"{base} has no config.json of a model" in output
    assert "hf download" not in output


def test_the_command_quotes_folders(tmp_path: Path) -> None:
    base = tmp_path / "my models"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(FILES["Qwen3-8B"]))
    folder = adapter(tmp_path / "my lora", base_model_name_or_path=str(base))
    served = command.answer_model(str(folder), None)
    line = answer.describe(served.name, served.answer, Tree(hosts.make(tmp_path / "host", {})))[-1]
    words = shlex.split(line)
    assert words[1:4] == ["vllm", "serve", str(base)]
    assert f"adapter={folder}" in words


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "IA3"}, "loads only LoRA"),
        ({"base_model_name_or_path": None}, "which model is it for"),
        ({"r": "many"}, "not a positive integer"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole layers"),
        ({"init_lora_weights": "pissa"}, "changed the model's own weights"),
        ({"init_lora_weights": "lora_ga"}, "answers with the original weights are wrong"),
        ({"init_lora_weights": "LoRA_GA"}, "path_initial_model_for_weight_conversion"),
        ({"r": 1024}, "above 512"),
    ],
)
def test_an_adapter_is_refused(keys: dict, words: str, tmp_path: Path) -> None:
    status, output = run(adapter(tmp_path / "lora", **keys))
    assert status == 2
    assert words in output
    assert "Traceback" not in output


def test_ranks_are_vllms() -> None:
    result = lora.Adapter("a", 40, "")
    assert result.flags("f").endswith("--max-lora-rank 64")
    assert "max-lora-rank" not in lora.Adapter("a", 16, "").flags("f")


def test_modelopts_format_beside_a_config(tmp_path: Path) -> None:
    """`models` reads hf_quant_config.json, which ModelOpt of 2024 wrote beside config.json."""
    (tmp_path / "config.json").write_text(json.dumps(FILES["Llama-3.1-8B"]))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    status, output = run(tmp_path)
    assert status == 0
    assert "EmulationNvFp4LinearKernel" in output
