# SPDX-License-Identifier: BSD-3-Clause
"""Let vLLM's own code choose backends and kernels for a model, on a mock GPU, without weights.

    python -m strix_validate.models.choose SOURCE < CONFIGS.json

SOURCE is vLLM's source folder, and CONFIGS.json is a list of the contents of config.json files.

vLLM builds each model as its server does, but on torch's meta device: every layer chooses its
backend and its kernel, and the parameters have shapes but no memory. Mocks replace the kernel
driver and HIP, which the machine may lack; if the source is not built, mocks also replace vLLM's
operators. vLLM examines the machine once, at import, so this runs in a process of its own.
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

from strix_validate import GPUS, TARGET, VLLM_DEVICE_NAME
from strix_validate.checks import CannotRun
from strix_validate.vllm import source as vllm_source

#: Contents of the files "properties" in KFD's topology: one for the CPU, and one for the GPU, which
#: has a version such as 110501, and four SIMDs per workgroup processor.
_NODES = (
    "gfx_target_version 0",
    f"gfx_target_version {TARGET[3:5]}0{TARGET[5]}0{TARGET[6:]}\n"
    f"simd_count {4 * GPUS[TARGET]}\ndrm_render_minor 128",
)
#: The libraries of vLLM's compiled operators.
_OPERATORS = ("_C", "_rocm_C", "_moe_C", "_C_cache_ops")
#: Packages that mocks replace: flash_attn needs a GPU at import, and vLLM's sdist lacks
#: triton_kernels.
_PACKAGES = ("flash_attn", "triton_kernels")
#: Classes of the experts' gates. Answers leave gates out, because only some formats quantize them.
_UNQUANTIZED = ("GateLinear", "ReplicatedLinear")


def ask(configs: Sequence[dict], source: Path) -> list[dict]:
    """Ask vLLM's code about each config.json.

    Args:
        configs: Contents of the files.
        source: vLLM's source folder.

    Returns:
        An answer for each file: "chosen", lists of names by part of the model, and "parameters",
        the bytes of the parameters; or "error", the exception by which vLLM refuses the model.

    Raises:
        CannotRun: vLLM's requirements are not installed, or its code fails on this machine.
    """
    search_path = [str(source)]
    if os.environ.get("PYTHONPATH"):
        search_path.append(os.environ["PYTHONPATH"])
    process = subprocess.run(
        [
            sys.executable,
            "-P",  # otherwise, libraries would be imported from the current folder
            "-m",
            "strix_validate.models.choose",
            source,
        ],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise CannotRun(f"vLLM's own code does not run here: {lines[-1]:.300}")
    return json.loads(process.stdout)


class _Packages(vllm_source.Finder):
    """Provides mocks of the packages of _PACKAGES."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module):
        module.__file__ = "a mock"
        # The real flash_attn, with the recipe's patch, sets this variable at import.
        if module.__name__ == "flash_attn":
            os.environ.setdefault("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")


class OnMeta(TorchFunctionMode):
    """Creates tensors on torch's meta device if a model names the GPU as their device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _define_operators(source: Path) -> list[torch.library.Library]:
    """Define an operator in each library of _OPERATORS for each name that vLLM's sources declare.

    Layers look the operators up, but do not call them.
    """
    names = set()
    for file in (source / "csrc").rglob("*.cpp"):
        names |= set(re.findall(r'def\(\s*"(\w+)', file.read_text(errors="replace")))
    libraries = []
    for library_name in _OPERATORS:
        library = torch.library.Library(library_name, "FRAGMENT")
        for name in sorted(names):
            library.define(f"{name}() -> ()")
        libraries.append(library)
    return libraries


def make_machine(folder: Path, source: Path) -> list[torch.library.Library]:
    """Mock the GPU in this process, before vLLM is imported.

    Args:
        folder: The folder for the files of the mock kernel driver.
        source: vLLM's source folder.

    Returns:
        Mock libraries of operators, which must be kept alive as long as the mock GPU is used; empty
        if the source is built.
    """
    _write_nodes(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.modules["amdsmi"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _Packages(source))
    _mock_torch()
    backends = importlib.import_module("triton.backends").backends
    for name in backends:
        backends[name].driver.is_active = staticmethod(lambda name=name: name == "amd")
    is_built = any((source / "vllm").glob("_C*.so"))
    if not is_built:
        _mock_version(vllm_source.version(source))
    interface: Any = importlib.import_module("vllm.platforms.interface")
    interface.in_wsl = lambda: False
    interface.SYS_CLASS = str(folder)
    if is_built:
        return []
    return _define_operators(source)


def _write_nodes(folder: Path) -> None:
    for number, text in enumerate(_NODES):
        node = folder / "kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"{text}\n")


def _mock_torch() -> None:
    """Make torch answer like its ROCm build on the target GPU."""
    torch.version.hip = torch.version.hip or "7.15"
    properties = types.SimpleNamespace(
        multi_processor_count=GPUS[TARGET],
        is_integrated=1,
        total_memory=96 << 30,
        gcnArchName=TARGET,
        warp_size=32,
        major=11,
        minor=int(TARGET[5]),
        name=VLLM_DEVICE_NAME,
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: properties
    cuda.current_device = lambda: torch.device("meta")
    cuda.Stream = type(
        "Stream",
        (),
        {"__init__": lambda self, *args, **options: None},
    )


def _mock_version(vllm_version: str) -> None:
    """Make importlib.metadata return a version for vLLM, which need not be installed."""
    metadata: Any = importlib.metadata
    installed_version = metadata.version

    def version(name):
        if name == "vllm":
            return vllm_version
        return installed_version(name)

    metadata.version = version


def start_worker(folder: Path) -> None:
    """Make this process a worker of vLLM, the only one in its process groups.

    Args:
        folder: The folder for the file through which processes of a group find each other.
    """
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
    """Return what vLLM chooses for one model.

    Args:
        config: Contents of its config.json.
        folder: Folder to make for the model.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    set_config = importlib.import_module("vllm.config").set_current_vllm_config
    loader = importlib.import_module("vllm.model_executor.model_loader.utils")
    arguments = engine_args(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
    )
    vllm_config = arguments.create_engine_config()
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device("meta"), OnMeta(), set_config(vllm_config):
            model = loader.initialize_model(vllm_config)
    finally:
        torch.set_default_dtype(default_dtype)
    layers = vllm_config.compilation_config.static_forward_context.values()
    chosen: dict[str, set[str]] = {}
    for part, name in [*_attention(layers), *_kernels(model)]:
        chosen.setdefault(part, set()).add(name)
    return {
        "chosen": {part: sorted(chosen[part]) for part in sorted(chosen)},
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
    }


def _attention(layers) -> Iterator[tuple[str, str]]:
    """Yield the backends of attention layers: the part of the model, and the backend's name."""
    for layer in layers:
        # a layer without causal attention has a subclass of a backend, which inherits get_name
        backend = getattr(layer, "attn_backend", None) or getattr(layer, "backend_cls", None)
        if backend:
            yield ("attention", backend.get_name())
        prefill_backend = getattr(layer, "prefill_backend", None)
        if prefill_backend:
            yield ("prefill", prefill_backend.get_name())
        gdn_backend = getattr(layer, "gdn_prefill_backend", None)
        if gdn_backend:
            yield ("linear attention", f"{type(layer).__name__} {gdn_backend}")


def _kernels(model) -> Iterator[tuple[str, str]]:
    """Yield kernels of encoders, experts and linear layers: the part, and the kernel's name."""
    for layer in model.modules():
        layer_kind = type(layer).__name__
        if layer_kind.endswith("EncoderAttention"):
            yield ("encoder", layer.attn_backend.name)
        method = getattr(layer, "quant_method", None)
        method_kind = type(method).__name__
        experts_class = getattr(method, "experts_cls", None)
        if experts_class:
            yield ("experts", experts_class.__name__)
        elif method_kind.endswith("LinearMethod") and layer_kind not in _UNQUANTIZED:
            yield ("linear", _linear_kernel(layer, method) or method_kind)


def _linear_kernel(layer, method) -> str:
    """Return the name of the class of a linear layer's kernel; "" if it has none.

    Args:
        layer: The layer.
        method: The layer's quantization method. The kernel is an attribute of the method, or of the
            layer's scheme.
    """
    scheme = getattr(layer, "scheme", method)
    for attribute in [*vars(method).values(), *vars(scheme).values()]:
        kind = type(attribute)
        if ".kernels." in kind.__module__:
            return kind.__name__
    return ""


def main() -> None:
    """Answer for the configurations on standard input."""
    source = Path(sys.argv[1])
    configs = json.load(sys.stdin)
    answers = []
    # vLLM prints to standard output, which is reserved for the answers
    output = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = make_machine(folder, source)
        start_worker(folder)
        for number, config in enumerate(configs):
            try:
                answers.append(_choose(config, folder / f"model-{number}"))
            except Exception as error:
                answers.append({"error": f"{type(error).__name__}: {error}"})
        del libraries
    with os.fdopen(output, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
