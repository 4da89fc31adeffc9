# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM's own code chooses for a model on a mock GPU, without weights or a real one.

    python -m strix_validate.models.choose SOURCE < CONFIGS.json

vLLM builds each model on torch's meta device, as its server does: every layer chooses its backend
and its kernel, and the parameters have their shapes and no memory. What the machine lacks is made
up: the kernel driver, HIP's answers, and, of a source that is not built, its operators' names.
vLLM looks at the machine once, at import, so this is a process of its own.
"""

import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from strix_validate import GPUS, NAMED, TARGET
from strix_validate.checks import CannotRun
from strix_validate.vllm import source as vllm_source

#: KFD's: the CPU, and the GPU, as 110501 with four SIMDs in each of its processors.
_NODES = (
    "gfx_target_version 0",
    f"gfx_target_version {TARGET[3:5]}0{TARGET[5]}0{TARGET[6:]}\n"
    f"simd_count {4 * GPUS[TARGET]}\ndrm_render_minor 128",
)
#: The libraries of vLLM's operators, which are compiled.
_OPERATORS = ("_C", "_rocm_C", "_moe_C", "_C_cache_ops")
#: Of the stack's packages, those whose import needs a GPU, or that the sdist has not.
_PACKAGES = ("flash_attn", "triton_kernels")


def ask(configs: Sequence[dict], source: Path) -> list[dict]:
    """Ask vLLM's code about each config.json.

    An answer has chosen, names by part; parameters, bytes; or error, vLLM's refusal.

    Raises:
        CannotRun: vLLM's requirements are not installed, or its code fails on this machine.
    """
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "strix_validate.models.choose", source],
        input=json.dumps(configs), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CannotRun(f"vLLM's own code does not run here: {last:.300}")
    return json.loads(done.stdout)


class _Packages(vllm_source.Finder):
    """Serves mocks of the stack's packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module):
        module.__file__ = "a mock"
        if module.__name__ == "flash_attn":  # as the recipe's patch does
            os.environ.setdefault("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")


class OnMeta(TorchFunctionMode):
    """Makes on torch's meta device what a model makes on the GPU by name."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _operators(source: Path) -> list[torch.library.Library]:
    """Define operators of the names that sources declare: layers look them up, none is called."""
    texts = [file.read_text(errors="replace") for file in (source / "csrc").rglob("*.cpp")]
    names = sorted({name for text in texts for name in re.findall(r'def\(\s*"(\w+)', text)})
    libraries = [torch.library.Library(name, "FRAGMENT") for name in _OPERATORS]
    for library in libraries:
        for name in names:
            library.define(f"{name}() -> ()")
    return libraries


def make_machine(folder: Path, source: Path) -> list[torch.library.Library]:
    """Make this process believe in the GPU, before vLLM is imported."""
    for number, text in enumerate(_NODES):
        node = folder / "kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"{text}\n")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.modules["amdsmi"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _Packages(source))
    torch.version.hip = torch.version.hip or "7.15"
    answers = types.SimpleNamespace(
        multi_processor_count=GPUS[TARGET], is_integrated=1, total_memory=96 << 30,
        gcnArchName=TARGET, warp_size=32, major=11, minor=int(TARGET[5]), name=NAMED,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: answers
    cuda.current_device = lambda: torch.device("meta")
    cuda.Stream = type("Stream", (), {"__init__": lambda self, *args, **options: None})
    backends = importlib.import_module("triton.backends").backends
    for name in backends:
        backends[name].driver.is_active = staticmethod(lambda name=name: name == "amd")
    built = list((source / "vllm").glob("_C*.so"))
    if not built:
        metadata: Any = importlib.metadata
        installed, own = metadata.version, vllm_source.version(source)
        metadata.version = lambda name: own if name == "vllm" else installed(name)
    interface: Any = importlib.import_module("vllm.platforms.interface")
    interface.in_wsl = lambda: False
    interface.SYS_CLASS = str(folder)
    return [] if built else _operators(source)


def start_worker(folder: Path) -> None:
    """Make this process a worker, alone in its groups."""
    config = importlib.import_module("vllm.config")
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    groups = importlib.import_module("vllm.distributed.parallel_state")
    with config.set_current_vllm_config(config.VllmConfig()):
        groups.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        groups.initialize_model_parallel()
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.init_workspace_manager(torch.device("meta"))


def _choose(config: dict, folder: Path) -> dict:
    """Return what vLLM chooses for one model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    current = importlib.import_module("vllm.config").set_current_vllm_config
    build = importlib.import_module("vllm.model_executor.model_loader.utils").initialize_model
    options = {"skip_tokenizer_init": True, "load_format": "dummy"}
    made = arguments(model=str(folder), **options).create_engine_config()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(made.model_config.dtype)
    try:
        with torch.device("meta"), OnMeta(), current(made):
            model = build(made)
    finally:
        torch.set_default_dtype(usual)
    layers = made.compilation_config.static_forward_context.values()
    pairs = {*_attention(layers), *_kernels(model)}
    chosen = {
        part: sorted({name for p, name in pairs if p == part}) for part in sorted(dict(pairs))
    }
    return {"chosen": chosen, "parameters": sum(p.nbytes for p in model.parameters())}


def _attention(layers) -> Iterator[tuple[str, str]]:
    for layer in layers:
        kind = type(layer).__name__
        if found := getattr(layer, "attn_backend", None) or getattr(layer, "backend_cls", None):
            # layers that do not see the past alone make a class of their own from a backend's
            yield ("attention", found.get_name())
        if found := getattr(layer, "prefill_backend", None):
            yield ("prefill", found.get_name())
        if found := getattr(layer, "gdn_prefill_backend", None):
            yield ("linear attention", f"{kind} {found}")


def _kernels(model) -> Iterator[tuple[str, str]]:
    for layer in model.modules():
        if type(layer).__name__.endswith("EncoderAttention"):
            yield ("encoder", layer.attn_backend.name)
        method = getattr(layer, "quant_method", None)
        kind = type(method).__name__
        if experts := getattr(method, "experts_cls", None):
            yield ("experts", experts.__name__)
        elif kind.endswith("LinearMethod") and type(layer).__name__ not in _UNQUANTIZED:
            held = [*vars(method).values(), *vars(getattr(layer, "scheme", method)).values()]
            names = [type(x).__name__ for x in held if ".kernels." in type(x).__module__]
            yield ("linear", names[0] if names else kind)


#: Gates of experts, which stay in 16 bits in most formats and not in all.
_UNQUANTIZED = ("GateLinear", "ReplicatedLinear")


def main() -> None:
    """Answer for the configurations on standard input."""
    source, answers = Path(sys.argv[1]), []
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM prints
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = make_machine(folder, source)
        start_worker(folder)
        for number, config in enumerate(json.load(sys.stdin)):
            try:
                answers.append(_choose(config, folder / f"model-{number}"))
            except Exception as error:
                answers.append({"error": f"{type(error).__name__}: {error}"})
        del libraries
    with os.fdopen(output, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
