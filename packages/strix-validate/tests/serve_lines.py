# SPDX-License-Identifier: BSD-3-Clause
"""Judge command lines of `vllm serve` by vLLM's own argument parser and planning of its KV cache.

    python tests/serve_lines.py SOURCE < LINES.json

LINES.json has a pair for each command line: a config.json, and the arguments after the model's
name. vLLM builds the model on torch's meta device, as strix_validate.models.choose does, and plans
the KV cache as vLLM's engine does at start (EngineCore._initialize_kv_caches). The answer is vLLM's
error message, or "".
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from strix_validate.models import choose


def judge(config: dict, arguments: list[str], folder: Path) -> str:
    """Return vLLM's error message for a command line, or "" if vLLM accepts the line."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    cli = importlib.import_module("vllm.entrypoints.common.cli_args")
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    engine = importlib.import_module("vllm.engine.arg_utils")
    parser = cli.make_arg_parser(parsing.FlexibleArgumentParser())
    try:
        options = parser.parse_args(["--model", str(folder), *arguments])
    except SystemExit:
        return "vLLM's parser refuses an argument"
    if unknown := find_unknown_parsers(options):
        return unknown
    # The folder has no tokenizer, which a reasoning parser would need.
    options.skip_tokenizer_init = True
    options.load_format = "dummy"
    options.reasoning_parser = ""
    vllm = engine.EngineArgs.from_cli_args(options).create_engine_config()
    build = importlib.import_module("vllm.model_executor.model_loader.utils").initialize_model
    current = importlib.import_module("vllm.config").set_current_vllm_config
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(vllm.model_config.dtype)
    try:
        with torch.device("meta"), choose.OnMeta(), current(vllm):
            build(vllm)
            plan(vllm)
    finally:
        torch.set_default_dtype(default_dtype)
    return ""


def find_unknown_parsers(options) -> str:
    """Return a message that names parsers which are not in vLLM's registries, or ""."""
    tools = importlib.import_module("vllm.tool_parsers").ToolParserManager.list_registered()
    reasoning = importlib.import_module("vllm.reasoning").ReasoningParserManager.list_registered()
    pairs = ((options.tool_call_parser, tools), (options.reasoning_parser, reasoning))
    missing = [name for name, registered in pairs if name and name not in registered]
    return f"no parser is called {', '.join(missing)}" if missing else ""


def plan(vllm) -> None:
    """Plan a KV cache of the size on the command line; raise ValueError as vLLM does."""
    platforms = importlib.import_module("vllm.platforms")
    utils = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    layouts = importlib.import_module("vllm.v1.attention.backends.utils")
    registry = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    registry.register_all_kvcache_specs(vllm)
    platforms.current_platform.update_block_size_for_backend(vllm)
    specs = [utils.get_kv_cache_spec(vllm)]
    connector = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
    backends = layouts.get_supported_kv_cache_layouts(connector.get_current_attn_backends(vllm))
    names = [[layout.name for layout in backends]]
    layouts.resolve_kv_cache_layout(vllm, names, list(specs[0].values()))
    groups = planning.get_global_kv_cache_groups(vllm, specs)
    bytes_ = vllm.cache_config.kv_cache_memory_bytes
    planning.get_kv_cache_configs(vllm, specs, [bytes_], groups)


def main() -> None:
    """Judge the command lines on standard input."""
    source = Path(sys.argv[1])
    answers = []
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM prints to standard output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = choose.make_machine(folder, source)
        choose.start_worker(folder)
        for number, (config, arguments) in enumerate(json.load(sys.stdin)):
            try:
                answers.append(judge(config, arguments, folder / f"model-{number}"))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        del libraries
    with os.fdopen(output, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
