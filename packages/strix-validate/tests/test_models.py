# SPDX-License-Identifier: BSD-3-Clause
"""Compare the table of `strix-validate models` with vLLM's code and with docs/models.md.

Some tests pass bad input to the command.

To compare with vLLM's code, set VLLM_SOURCE to a folder of vLLM's source with the patches of the
recipe vllm, in an environment that has vLLM's requirements. The last result is in
docs/evidence/2026-11-28-models.md.
"""

import json
import os
import runpy
import shutil
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import hosts
import pytest
from calls import skip_without
from models import FILES as CONFIGS
from models import FORMATS, SHAPES, THREADS
from strix_validate import tiers
from strix_validate.cli import app
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB
from strix_validate.models import choose, command, diffusion, model_memory, reading, table
from typer.testing import CliRunner

FOLDER = Path(__file__).parent / "configs"
CHECKOUT = Path(__file__).parents[3]
#: Models that are tested with each format: dense, experts, and linear attention with experts.
EACH_FORMAT = ("Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B")
CASES = dict(CONFIGS)
for _name, _form in product(EACH_FORMAT, FORMATS):
    CASES[f"{_name}, {_form}"] = CONFIGS[_name] | {"quantization_config": FORMATS[_form]}
#: Changes of a quantization_config that leave parts of layers in 16 bits, by model and format.
EXCLUDED: dict[tuple[str, str], dict[str, dict]] = {
    ("Qwen3-30B-A3B", "w4a16"): {
        "without attention": {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]},
        "without experts": {"ignore": ["lm_head", "re:.*mlp.experts.*"]},
        "without experts of layer 0": {
            "ignore": [
                f"model.layers.0.mlp.experts.{number}.{name}_proj"
                for number, name in product(range(128), ("gate", "up", "down"))
            ]
        },
    },
    ("Qwen3-30B-A3B", "gptq"): {
        "without attention": {"dynamic": {"lm_head": {}, "-:.*attn.*": {}}},
        "experts not excluded": {"dynamic": {"-:.*experts.*": {}}},
    },
    ("Qwen3-30B-A3B", "awq"): {
        "without layer 0": {"modules_to_not_convert": ["model.layers.0.", "mlp.gate"]}
    },
    ("Qwen3-30B-A3B", "fp8-blocks"): {
        "without some experts": {
            "modules_to_not_convert": [f"model.layers.{number}.mlp.experts" for number in range(4)]
        }
    },
    ("Llama-3.1-8B", "w4a16"): {
        "without four layers": {"ignore": ["lm_head", r"re:model\.layers\.[0-3]\..*"]}
    },
}
for (_name, _form), _changes in EXCLUDED.items():
    for _label, _change in _changes.items():
        CASES[f"{_name}, {_form} {_label}"] = CONFIGS[_name] | {
            "quantization_config": FORMATS[_form] | _change
        }
_RULES = ("lm_head", "-:.*attn.*", "-:.*shared_expert.*", "-:.*mtp.*", "-:.*visual.*")
CASES["Qwen3.6-35B-A3B, gptq"] = SHAPES["Qwen3.6-35B-A3B"] | {
    "quantization_config": FORMATS["gptq"] | {"dynamic": {rule: {} for rule in _RULES}}
}
CASES |= {name: config for name, config in SHAPES.items() if table.was_compared(config)}
CASES |= THREADS
#: Groups of checks that prove something only on a GPU.
ON_A_GPU = ("conv", "gemm", "sdpa")
#: GiB of parameters that vLLM 0.33.0 allocates.
ALLOCATES = {
    "DeepSeek-V2-Lite": 29.26,
    "Gemma-3-1B": 1.86,
    "Llama-3.1-8B": 14.96,
    "Mistral-7B": 13.49,
    "Qwen2.5-VL-7B": 15.45,
    "Qwen3-30B-A3B": 56.87,
    "Qwen3-8B": 15.26,
    "Qwen3-Embedding-0.6B": 1.11,
    "Qwen3-Next-80B-A3B": 148.41,
    "Whisper-large-v3": 2.88,
    "gpt-oss-20b": 14.12,
    "multilingual-e5-large": 1.04,
    "Llama-3.1-8B, awq": 5.33,
    "Llama-3.1-8B, fp8-blocks": 8.46,
    "Qwen3-30B-A3B, w4a16": 15.52,
    "Qwen3-Next-80B-A3B, gptq": 39.2,
    "Qwen3-30B-A3B, w4a16 without attention": 16.79,
    "Qwen3-30B-A3B, w4a16 without experts": 55.6,
    "Qwen3-30B-A3B, w4a16 without experts of layer 0": 16.36,
    "Qwen3-30B-A3B, gptq without attention": 16.78,
    "Qwen3-30B-A3B, gptq experts not excluded": 15.53,
    "Qwen3-30B-A3B, awq without layer 0": 16.51,
    "Qwen3-30B-A3B, fp8-blocks without some experts": 31.27,
    "Llama-3.1-8B, w4a16 without four layers": 6.52,
    "Qwen3.6-35B-A3B, gptq": 20.86,
    "Llama-3.1-8B, w8a16": 8.56,
    "Llama-3.1-8B, w8a16-channels": 8.46,
    "Qwen3-30B-A3B, gptq-8": 29.46,
    "DeepSeek-V4-Flash": 145.29,
    "GLM-4.5-Air": 199.07,
    "GLM-4.7-Flash": 55.79,
    "GLM-5": 1385.64,
    "Gemma-3-27B": 51.1,
    "Gemma-4-26B-A4B": 48.09,
    "Gemma-4-31B": 58.46,
    "Granite-4.0-H-Small": 59.99,
    "Llama-3.3-70B": 131.42,
    "Llama-4-Scout": 202.36,
    "Mistral-Small-3.2-24B": 44.72,
    "Olmo-3-32B": 60.04,
    "Phi-4": 27.31,
    "Qwen3.5-122B-A10B": 228.29,
    "Qwen3.6-35B-A3B": 65.39,
    "Qwen3.8-27B": 50.96,
    "gpt-oss-120b": 68.59,
}


def list_differences(config: dict, answer: dict) -> list[str]:
    """Return the differences between vLLM's choices for a model and the rows of the table."""
    rows = table.find_rows(config)
    # Leave out refusals of rows that also have a kernel: vLLM refuses that kernel only on a device,
    # and there is no device here.
    if refused := [row.refused for row in rows if row.refused and not row.chosen]:
        return [words for words in refused if words not in answer.get("error", "")]
    expected: dict[str, set[str]] = {}
    for row in rows:
        expected.setdefault(row.part, set()).add(row.chosen)
    chosen = {part: set(names) for part, names in answer.get("chosen", {}).items()}
    parts = expected.keys() | chosen.keys()
    different = [part for part in parts if expected.get(part) != chosen.get(part)]
    messages = [f"{part}: {chosen.get(part)}" for part in different]
    if answer.get("error"):
        messages.append(answer["error"])
    return messages


@pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
@skip_without("transformers", "compressed_tensors", "xgrammar")
def test_the_table_is_what_vllm_chooses() -> None:
    answers = choose.ask(list(CASES.values()), Path(os.environ["VLLM_SOURCE"]).resolve())
    answers_by_case = dict(zip(CASES, answers, strict=True))
    differences = {name: list_differences(CASES[name], answers_by_case[name]) for name in CASES}
    assert {name: messages for name, messages in differences.items() if messages} == {}
    assert {n: round(answers_by_case[n]["parameters"] / 2**30, 2) for n in ALLOCATES} == ALLOCATES
    used_rows = {row for config in CASES.values() for row in table.find_rows(config)}
    rows = {row for row in table.read_rows() if row.part != "images"}
    assert rows <= used_rows, "a row that no model here has"


def test_a_wrong_row_is_found() -> None:
    correct = {"chosen": {"attention": ["TRITON_ATTN"], "linear": ["UnquantizedLinearMethod"]}}
    llama = CONFIGS["Llama-3.1-8B"]
    assert list_differences(llama, correct) == []
    assert list_differences(llama, {"chosen": correct["chosen"] | {"attention": ["ROCM_ATTN"]}})
    assert list_differences(llama, {"chosen": correct["chosen"] | {"experts": ["TritonExperts"]}})
    assert list_differences(llama, {"error": "no backend"})
    assert list_differences(CASES["Llama-3.1-8B, fp8"], correct)


def test_every_check_of_the_table_exists() -> None:
    existing = {check.id for tier in tiers.TIERS for check in tiers.load(tier).checks()}
    named = {name for row in table.read_rows() for name in row.checks}
    assert named
    assert not named - existing
    assert {name.partition("/")[0] for name in named} == {*table.PROVES, *ON_A_GPU}


def test_architectures_are_those_that_are_compared() -> None:
    names = {name for config in CASES.values() for name in config["architectures"]}
    assert table.was_compared(CONFIGS["Qwen3-8B"])
    assert not table.was_compared({})
    assert SHAPES.keys() - CASES.keys() == {"Mistral-Small-4-119B"}
    assert sorted(names) == table.read_table()["architectures"]


@pytest.mark.skipif(not (CHECKOUT / "docs").is_dir(), reason="only a checkout has docs/models.md")
def test_page_and_table_agree() -> None:
    written = (CHECKOUT / "docs" / "models.md").read_text()
    page = runpy.run_path(str(CHECKOUT / "tools/models_page.py"))
    assert written == page["render"](written, FOLDER), "tools/models_page.py writes it"
    prose = " ".join(written.split())
    assert f"with vLLM {table.version()} and" in prose
    assert f"leave {page['ROOM'] / GIB:.0f} GiB for weights and cache" in prose
    records = {row.record for row in table.read_rows()} - {""}
    assert records
    assert all((CHECKOUT / "docs/evidence" / name).is_file() for name in records)


#: Billions of parameters of models: the publisher's number, and the number that transformers 5.24
#: has for the model's config.json, without the head for multi-token prediction.
PARAMETERS = {
    "Qwen3.5-122B-A10B": (122, 122.563),
    "Qwen3.6-35B-A3B": (35, 35.107),
    "Qwen3.8-27B": (27, 27.357),
    "Qwen3-Next-80B-A3B": (80, 79.674),
    "GLM-4.5-Air": (106, 106.852),
    "GLM-4.7-Flash": (30, 29.943),
    "GLM-5": (744, 743.911),
    "gpt-oss-120b": (117, 116.829),
    "DeepSeek-V4-Flash": (284, 284.332),
    "Gemma-3-27B": (27, 27.432),
    "Gemma-4-31B": (31, 31.273),
    "Gemma-4-26B-A4B": (26, 25.806),
    "Mistral-Small-3.2-24B": (24, 24.011),
    "Mistral-Small-4-119B": (119, 119.401),
    "Phi-4": (14.7, 14.660),
    "Granite-4.0-H-Small": (32, 32.207),
    "Olmo-3-32B": (32, 32.234),
    "Llama-3.3-70B": (70, 70.554),
    "Llama-4-Scout": (109, 108.642),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_model_of_2026_ends_the_command(name: str) -> None:
    """vLLM refuses only GLM-5. For each other model, the answer has the size of its weights."""
    assert name in PARAMETERS
    answer = command.answer(SHAPES[name], None, None)
    text = "\n".join(command.describe("NAME", answer, Tree()))
    assert bool(answer.refusal) == (name == "GLM-5")  # docs/evidence/2026-11-26-vllm-by-hand.md
    weights = f"{answer.weights / 2**30:.1f} GiB of weights"
    assert (answer.refusal or weights) in text
    assert "at least" not in text


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_are_published(name: str) -> None:
    packed = ("quantization_config", "expert_dtype")
    config = {key: value for key, value in (CONFIGS | SHAPES)[name].items() if key not in packed}
    counted = model_memory.weights(config) / 2e9
    published, in_transformers = PARAMETERS[name]
    assert counted == pytest.approx(in_transformers, rel=0.002)
    assert counted == pytest.approx(published, rel=0.02)
    assert model_memory.uncounted(config) == []


@pytest.mark.parametrize("name", ALLOCATES)
def test_weights_are_what_vllm_allocates(name: str) -> None:
    assert model_memory.weights(CASES[name]) / 2**30 == pytest.approx(ALLOCATES[name], rel=0.01)


def test_mamba_layers_are_named_and_need_no_cache() -> None:
    config = SHAPES["Granite-4.0-H-Small"]
    assert model_memory.cache_of_token(config) == 4 * 4 * 8 * 128
    answer = command.answer(config, None, None)
    assert "36 layers of mamba" in "\n".join(command.describe("NAME", answer, Tree()))


#: Keys of Qwen4's config.json that Qwen3.5's lacks. The count leaves out the parameters of these
#: keys.
QWEN_4 = {"hc_count": 4, "hc_lowrank": 320, "ngram_size": 3, "ngram_vocab_size_base": 20_000_000}


def test_what_is_not_counted_makes_a_lower_bound() -> None:
    config = SHAPES["Qwen3.6-35B-A3B"]
    answer = command.answer(config | {"text_config": config["text_config"] | QWEN_4}, None, None)
    text = "\n".join(command.describe("NAME", answer, Tree()))
    assert "at least 65.4 GiB" in text
    assert "without the parts whose size is hc_lowrank" in text
    assert len(answer.uncounted) == len(QWEN_4)
    answer = command.answer(config | {"audio_config": {"hidden_size": 1}}, None, None)
    assert answer.uncounted == ["the encoder of sound"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen3-30B-A3B", "tuned for E=128,N=768"),
        ("Qwen3-30B-A3B, awq", "tuned for E=128,N=768,dtype=int4_w4a16"),
        ("Qwen3-30B-A3B, fp8-blocks", "vLLM's defaults, no table of E=128,N=768,dtype=fp8_w8a8"),
        ("Qwen3.6-35B-A3B", "vLLM's defaults, no table of E=256,N=512"),
        ("gpt-oss-120b", ""),
        ("DeepSeek-V4-Flash", ""),
        ("Qwen3-8B", ""),
    ],
)
def test_tiles_of_experts(name: str, words: str, tmp_path: Path) -> None:
    """If VLLM_SOURCE is set, the tables in vLLM's patched source must give the same answer."""
    config = (CASES | SHAPES)[name]
    tiles = table.describe_tiles(config)
    assert tiles.startswith(words)
    assert bool(tiles) == bool(words)
    assert table.describe_tiles(config, tmp_path).startswith("vLLM's defaults" if words else "")
    if source := os.environ.get("VLLM_SOURCE"):
        assert table.describe_tiles(config, Path(source)) == tiles


@pytest.mark.parametrize(("kind", "heads"), [("llama", 2), ("gemma3_text", 1)])
def test_a_head_of_its_own_is_counted_where_the_file_does_not_say(kind: str, heads: int) -> None:
    config = dict(CONFIGS["Llama-3.1-8B"], model_type=kind)
    untied = model_memory.weights(config | {"tie_word_embeddings": False})
    tied = model_memory.weights(config | {"tie_word_embeddings": True})
    config.pop("tie_word_embeddings", None)
    assert model_memory.weights(config) == (untied if heads == 2 else tied)


def test_vllm_is_asked_about_a_format_that_the_table_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = CONFIGS["Llama-3.1-8B"] | {"quantization_config": {"quant_method": "new"}}
    answer = command.answer(config, None, None)
    assert answer.refusal == "Unknown quantization method: new"
    assert "use instead       4 bits" in "\n".join(command.describe("NAME", answer, Tree()))
    vllm_answer = {"chosen": {"linear": ["Some"]}, "parameters": 5 << 30}
    monkeypatch.setattr(choose, "ask", lambda configs, source: [vllm_answer])
    monkeypatch.setattr("strix_validate.vllm.source.version", lambda source: "0.33.0")
    answer = command.answer(config, None, tmp_path)
    text = "\n".join(command.describe("NAME", answer, Tree()))
    assert "Some: not in the table" in text
    assert "5.0 GiB of weights, 128 KiB of KV" in text
    monkeypatch.setattr(choose, "ask", lambda *_: [{"error": "No kernel.\nTraceback"}])
    assert command.answer(config, None, tmp_path).refusal == "No kernel."


def test_only_the_table_guesses_about_an_unknown_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = CONFIGS["Llama-3.1-8B"] | {"architectures": ["NewForCausalLM"]}
    vllm_answer = {"chosen": {"linear": ["Some"]}, "parameters": 5 << 30}
    monkeypatch.setattr(choose, "ask", lambda configs, source: [vllm_answer])
    monkeypatch.setattr("strix_validate.vllm.source.version", lambda source: "0.33.0")
    for source in (None, tmp_path):
        answer = command.answer(config, None, source)
        text = "\n".join(command.describe("NAME", answer, Tree()))
        assert ("the rest is a guess" in text) == (source is None)


def test_bitsandbytes_has_weights_of_4_or_8_bits() -> None:
    sizes = {}
    for bits in (4, 8):
        quantization = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
        config = CONFIGS["Llama-3.1-8B"] | {"quantization_config": quantization}
        sizes[bits] = model_memory.weights(config)
    assert sizes[8] - sizes[4] == 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) // 2


@pytest.mark.parametrize("bits", [4, 8])
def test_the_weights_of_an_unknown_format_are_a_lower_bound(bits: int) -> None:
    """If groups of weights differ in their bits, it is unknown which weights have how many bits."""
    groups = {
        "group_0": {"weights": {"type": "int", "num_bits": 4, "strategy": "group"}},
        "group_1": {"weights": {"type": "int", "num_bits": bits, "strategy": "group"}},
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    config = CONFIGS["Llama-3.1-8B"] | {"quantization_config": quantization}
    answer = command.answer(config, None, None)
    text = "\n".join(command.describe("NAME", answer, Tree()))
    assert ("at least" in text) == (bits == 8)
    assert ("2 of each weight, because the bits of the format" in text) == (bits == 8)


def test_files_count_before_dimensions(tmp_path: Path) -> None:
    assert model_memory.weights_of_files(tmp_path) == 0
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 123}}')
    assert model_memory.weights_of_files(tmp_path) == 123
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    assert model_memory.weights_of_files(tmp_path) == 4
    answer = command.answer(CONFIGS["Llama-3.1-8B"], tmp_path, None)
    assert (answer.weights, answer.token) == (4, 32 * 2 * 8 * 128 * 2)
    shards = {"lm_head.weight": "a.safetensors", "norm.weight": "b.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 123}, "weight_map": shards}))
    assert model_memory.weights_of_files(tmp_path) == 123  # b is not downloaded yet
    (tmp_path / "b.safetensors").write_bytes(b"56")
    assert model_memory.weights_of_files(tmp_path) == 6


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", *map(str, arguments)], env={"COLUMNS": "4000"})
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


needs_table = pytest.mark.skipif(bool(find_spec("vllm")), reason="vLLM itself answers here")


def test_another_gpu_is_not_answered_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only vLLM's own code gives answers about other GPUs, and not about pipelines."""
    monkeypatch.setattr(table, "TARGET", "gfx1150")
    with pytest.raises(table.NoModel, match="for gfx1151, not gfx1150: only vLLM's own code"):
        command.answer(CONFIGS["Llama-3.1-8B"], None, None)
    with pytest.raises(table.NoModel, match="for gfx1151, not gfx1150$"):
        diffusion.answer({}, FOLDER)


@needs_table
def test_command_says_backend_proof_and_memory() -> None:
    status, output = run(FOLDER / "Qwen3-30B-A3B.json")
    assert status == 0
    assert "TRITON_ATTN: compiled, interpreted, emulated (heads)" in output
    assert "TritonExperts: compiled, interpreted, emulated (16 bits)" in output
    assert "56.9 GiB of weights, 96 KiB of KV cache per token" in output
    status, output = run(FOLDER / "Qwen3-30B-A3B.json", "--json")
    assert status == 0
    assert json.loads(output)["parts"]["experts"] == ["TritonExperts"]


@needs_table
@pytest.mark.parametrize(("form", "words"), [("fp8", "FP8 in blocks"), ("gguf", "llama.cpp")])
def test_command_fails_where_vllm_refuses(form: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[f"Llama-3.1-8B, {form}"]))
    status, output = run(tmp_path)
    assert status == 1
    assert "does not start" in output
    assert words in output


def test_flags_are_the_doctors(tmp_path: Path) -> None:
    tree = Tree(hosts.make(tmp_path, {}))
    fits = command.answer(CONFIGS["Qwen3-30B-A3B"], None, None)
    output = command.describe("NAME", fits, tree)[-1]
    assert "vllm serve NAME --gpu-memory-utilization 0.9" in output
    assert "tokens" in output
    large = command.answer(CONFIGS["Qwen3-Next-80B-A3B"], None, None)
    assert "does not fit" in command.describe("NAME", large, tree)[-1]
    unknown = command.answer(CONFIGS["Llama-3.1-8B"] | {"architectures": ["New"]}, None, None)
    assert "a guess" in command.describe("NAME", unknown, tree)[1]


@needs_table
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("config.json", CONFIGS["Qwen3-8B"]),
        ("params.json", {"dim": 64, "n_layers": 2, "n_heads": 8, "hidden_dim": 9, "vocab_size": 9}),
    ],
)
def test_the_command_names_the_folder_of_a_file(name: str, config: dict, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(config))
    served = command.answer_model(str(tmp_path / name), None)
    tree = Tree(hosts.make(tmp_path / "host", {}))
    line = command.describe(served.name, served.answer, tree)[-1]
    assert f"vllm serve {tmp_path} --" in line


@needs_table
def test_a_name_is_found_in_the_cache(tmp_path: Path) -> None:
    status, output = run("Qwen/Qwen3-8B")
    assert status == 2
    assert "hf download Qwen/Qwen3-8B config.json" in output
    assert "gated" in output
    folder = tmp_path / "cache/hub/models--Qwen--Qwen3-8B/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["Qwen3-8B"]))
    assert run("Qwen/Qwen3-8B")[0] == 0


@pytest.mark.parametrize(
    "variables",
    [
        {"XDG_CACHE_HOME": "{0}"},
        {"HF_HOME": "{0}/huggingface", "XDG_CACHE_HOME": "/nowhere"},
        {"HUGGINGFACE_HUB_CACHE": "{0}/huggingface/hub", "HF_HOME": "/nowhere"},
        {"HF_HUB_CACHE": "{0}/huggingface/hub", "HUGGINGFACE_HUB_CACHE": "/nowhere"},
    ],
)
def test_the_cache_is_where_hugging_faces_variables_say(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    folder = tmp_path / "huggingface/hub/models--O--N/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert reading.find_cached("O/N") == folder / "config.json"


def test_the_newest_file_of_the_cache_that_describes_a_model(tmp_path: Path) -> None:
    """In a snapshot, config.json is preferred to params.json, and both to a GGUF file."""
    snapshots = tmp_path / "cache/hub/models--O--N/snapshots"
    files = []
    for second, names in enumerate((["model.gguf"], ["params.json", "config.json"], ["README.md"])):
        folder = snapshots / f"{9 - second}"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
        os.utime(folder, (second, second))
        files.append(folder / names[-1])
    assert reading.find_cached("O/N") == files[1]
    shutil.rmtree(files[1].parent)
    assert reading.find_cached("O/N") == files[0]
    shutil.rmtree(files[0].parent)
    assert reading.find_cached("O/N") is None


def test_a_folder_of_gguf_files_is_its_models_not_its_encoders(tmp_path: Path) -> None:
    (tmp_path / "mmproj-F16.gguf").touch()
    assert reading.find(str(tmp_path)).name == "mmproj-F16.gguf"
    (tmp_path / "qwen3-vl-Q4_K_M.gguf").touch()
    assert reading.find(str(tmp_path)).name == "qwen3-vl-Q4_K_M.gguf"


def header(shapes: dict[str, list[int]], data_bytes: int = 1 << 20) -> bytes:
    """Return a safetensors file whose numbers are zeros."""
    tensors = {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {}, **tensors}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    """Make a folder in diffusers' layout: a transformer in two files, a decoder in two variants."""
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.37.0",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": ["diffusers", "AutoencoderKL"],
        "safety_checker": [None, None],
    }
    (tmp_path / diffusion.INDEX).write_text(json.dumps(index))
    for part, name, shapes in (
        ("transformer", "model-00001-of-00002", {"a": [512, 1024]}),
        ("transformer", "model-00002-of-00002", {"b": [1024], "c": []}),
        ("vae", "model", {"d": [3, 5]}),
        ("vae", "model.fp16", {"d": [3, 5]}),
    ):
        (tmp_path / part).mkdir(exist_ok=True)
        (tmp_path / part / f"{name}.safetensors").write_bytes(header(shapes))
    return tmp_path


def test_a_folder_of_diffusers(flux: Path) -> None:
    status, output = run(flux)
    assert status == 0
    assert "FluxPipeline, which diffusers runs" in output
    assert "native: emulated by hand" in output
    assert "flash: compiled, interpreted, emulated" in output
    status, output = run(flux, "--json")
    sizes = {"transformer": 2 * (512 * 1024 + 1024 + 1), "scheduler": 0, "vae": 30}
    assert status == 0
    assert json.loads(output)["weights"] == sizes
    for file in flux.glob("*/*.safetensors"):
        file.unlink()
    assert "no safetensors files to count" in run(flux)[1]


def test_a_pipeline_that_is_not_downloaded_completely(flux: Path) -> None:
    """`models` refuses the folder. Otherwise, a part of the weights would count as all of them."""
    names = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    index = flux / "transformer/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert run(flux)[0] == 0
    (flux / "transformer" / names["b"]).unlink()
    status, output = run(flux)
    assert status == 2
    assert f"{names['b']} is missing: is the download complete?" in output


def test_images_fit_or_not(tmp_path: Path) -> None:
    tree = Tree(hosts.make(tmp_path, {}))
    pipelines = [diffusion.Pipeline("FluxPipeline", {"transformer": n << 30}) for n in (22, 200)]
    small, large = (
        diffusion.describe("NAME", pipeline, tree).splitlines()[-1] for pipeline in pipelines
    )
    assert " fits: " in small
    assert "does not fit" in large


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("model_index.json", b"{", "model_index.json"),
        ("model_index.json", b"{}", "names no pipeline"),
        ("model_index.json", b'{"_class_name": "A", "vae": [1, 2]}', "names no pipeline"),
        (
            "model_index.json",
            b'{"_class_name": "A", "../x": ["a", "b"]}',
            "component '../x' is not valid",
        ),
        (
            "model_index.json",
            b'{"_class_name": "A", "/x": ["a", "b"]}',
            "component '/x' is not valid",
        ),
        ("vae/model.safetensors", b"", "not a safetensors file"),
        ("vae/model.safetensors", b"\xff" * 80, "its header is empty, or longer than the file"),
        ("vae/model.safetensors", header({"a": [10**9]}), "do not fit"),
        ("vae/model.safetensors", header({"a": [-3, 5]}), "do not fit"),
        ("vae/model.safetensors", header({"a": [1] * 17}), "more than 16 dimensions"),
        ("vae/model.safetensors", header({"a": ["b"]}), "not a safetensors file"),
    ],
)
def test_a_damaged_folder_of_diffusers(flux: Path, name: str, data: bytes, words: str) -> None:
    (flux / name).write_bytes(data)
    status, output = run(flux)
    assert status == 2
    assert words in output
    assert "Traceback" not in output


#: By name: the text of config.json, or the changes to Llama's, and a part of the message.
BAD: dict[str, tuple[str | dict, str]] = {
    "no text": ("{", "config.json"),
    "a list": ("[]", "not a JSON object"),
    "no model": ("{}", "neither attention heads"),
    "no size": ({"hidden_size": None}, "dimension"),
    "a word": ({"num_hidden_layers": "many"}, "dimension"),
    "a pattern of names that is malformed": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}},
        "quantization_config cannot be read: missing )",
    ),
    "excluded modules in a number": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "ignore": 5}},
        "quantization_config cannot be read",
    ),
    "a list of rules": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": ["-:mlp"]}},
        "quantization_config cannot be read",
    ),
    "not a format": ({"quantization_config": "awq"}, "quantization_config is not an object"),
    "bits in words": (
        {"quantization_config": {"quant_method": "awq", "bits": "four"}},
        "quantization_config cannot be read",
    ),
    "groups in a list": (
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
        "quantization_config cannot be read",
    ),
    "a text in a list": ({"text_config": [1]}, "text_config is not an object"),
    "layers without end": ({"num_hidden_layers": 10**9}, "no model has num_hidden_layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_message(name: str, tmp_path: Path) -> None:
    text, words = BAD[name]
    if isinstance(text, dict):
        text = json.dumps(CONFIGS["Llama-3.1-8B"] | text)
    (tmp_path / "config.json").write_text(text)
    status, output = run(tmp_path)
    assert status == 2
    assert words in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("", "no config.json"),
        ("missing", "is not a file"),
        ("model.gguf", "is not a file"),
    ],
)
def test_what_is_no_model(argument: str, words: str, tmp_path: Path) -> None:
    status, output = run(tmp_path / argument)
    assert status == 2
    assert words in output
