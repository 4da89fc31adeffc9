# SPDX-License-Identifier: BSD-3-Clause
"""Package test: vLLM makes the right choices for a GPU.

    python check_detection.py [--source DIR] [CASE...]

The test checks the platform, the attention backend, the implementation of rms_norm and the tuned
tables of MoE kernels. The kernel driver (KFD) and AMD SMI are mocks, so no GPU is needed. Each case
runs in a new process, because vLLM detects the platform once, at import.

With --source, the platform modules are loaded from an unpacked sdist, with any build of torch.
Without --source, vLLM has to be installed. In that case, the test also runs the command
`vllm --version`, which fails if no platform is found.
"""

import argparse
import ast
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import torch

# Contents of the file `properties` of a node in KFD's topology.
CPU = "gfx_target_version 0\n"
STRIX_HALO = "gfx_target_version 110501\n"
NAVI31 = "gfx_target_version 110000\n"
MI300 = "gfx_target_version 90402\n"
FOLDER = None  # stands for a folder `properties`, which not even root can read as a file
ROCM = "RocmPlatform"
NONE = "UnspecifiedPlatform"
GFX1151 = {
    "platform": ROCM,
    "arch": "gfx1151",
    "capability": [11, 5],
    "name": "AMD_Radeon_8060S",
}
TRITON_FIRST = {"first": "TRITON_ATTN", "rocm_attn_stays": True}
NO_AITER_NORM = {"rms_norm": ["native"]}
TABLES = {
    # by the end of a table's name: whether vLLM has the table
    "tables": {"": True, ",dtype=int4_w4a16": True},
    # from this number of tokens on, the table has vLLM's default tile
    "as default": 33,
    # the largest BLOCK_SIZE_K of experts in FP8, with a scale per tensor or per block (patch 0009)
    "fp8 depth": 32,
}


@dataclass(frozen=True)
class Case:
    """A machine, and the choices that vLLM must make on it.

    Attributes:
        nodes: For each node of KFD, the content of its file `properties`, or FOLDER.
        expected: The expected choices; other choices are not compared.
        amdsmi: The kind of the amdsmi module; see `fake_amdsmi`.
        is_rocm: Whether torch is a ROCm build.
    """

    nodes: list[str | None]
    expected: dict
    amdsmi: str = "absent"
    is_rocm: bool = True


CASES = {
    "no driver": Case([], {"platform": NONE}),
    "a node without GPU": Case([CPU], {"platform": NONE}),
    "unreadable": Case([FOLDER], {"platform": NONE}),
    "no number": Case(["gfx_target_version x\n"], {"platform": NONE}),
    "torch without ROCm": Case([CPU, STRIX_HALO], {"platform": NONE}, is_rocm=False),
    "no amdsmi": Case(
        [CPU, STRIX_HALO],
        GFX1151 | TRITON_FIRST | NO_AITER_NORM | TABLES,
    ),
    "one node unreadable": Case([FOLDER, STRIX_HALO], GFX1151),
    "amdsmi lists nothing": Case([CPU, STRIX_HALO], GFX1151, amdsmi="empty"),
    "amdsmi without library": Case([CPU, STRIX_HALO], GFX1151, amdsmi="broken"),
    "amdsmi lists it": Case([], GFX1151 | TRITON_FIRST | TABLES, amdsmi="lists"),
    "gfx1100": Case(
        [CPU, NAVI31],
        {"platform": ROCM, "arch": "gfx1100"} | TRITON_FIRST | NO_AITER_NORM,
    ),
    "gfx942": Case(
        [CPU, MI300],
        {"arch": "gfx942", "first": "ROCM_ATTN", "rms_norm": ["aiter", "native"]},
    ),
}
COMMAND = "vllm --version"
INSTALLED = {COMMAND: Case([CPU, STRIX_HALO], GFX1151)}


def fake_amdsmi(kind: str) -> types.ModuleType | None:
    """Return a mock of the amdsmi module.

    Args:
        kind: "lists" (it lists one GPU), "empty" (it lists none), "broken" (its library is
            missing), or "absent".

    Returns:
        The mock; for "absent" None, with which the import fails.
    """
    if kind == "absent":
        return None
    module = types.ModuleType("amdsmi")
    handles = ["gpu"] if kind == "lists" else []
    asic = {"target_graphics_version": "gfx1151", "device_id": "0x1586", "market_name": "AMD"}
    for name in ("gpu_device_uuid", "gpu_memory_total"):
        setattr(module, f"amdsmi_get_{name}", None)
    module.AmdSmiException = module.AmdSmiMemoryType = type("AmdSmi", (Exception,), {})
    module.amdsmi_topo_get_link_type = module.amdsmi_topo_get_numa_node_number = None
    module.amdsmi_get_processor_handles = lambda: handles
    module.amdsmi_get_gpu_asic_info = lambda _: asic
    module.amdsmi_shut_down = lambda: None
    module.amdsmi_init = lambda: None
    if kind == "broken":
        module.amdsmi_init = lambda: {}["libamd_smi.so"]  # raises KeyError, as AMD's module does
    return module


def load_source(folder: Path) -> None:
    """Make vLLM's source importable, with mocks of modules that the tested modules import."""
    package = types.ModuleType("vllm")
    package.__path__ = [str(folder / "vllm")]
    sys.modules |= {"vllm": package, "regex": re}
    importlib.metadata.version = lambda name: "0"
    aiter = types.ModuleType("vllm._aiter_ops")
    aiter.is_aiter_found_and_supported = lambda: False
    off = {"is_mha_enabled": lambda: False, "is_rdna_aiter_enabled": lambda: False}
    aiter.rocm_aiter_ops = types.SimpleNamespace(**off)
    sys.modules["vllm._aiter_ops"] = aiter
    levels = types.SimpleNamespace(NONE=0)
    priority = types.SimpleNamespace(with_default=lambda _, **ops: types.SimpleNamespace(**ops))
    for name, content in {
        "vllm.config": {},
        "vllm.config.compilation": {"CompilationMode": levels, "CUDAGraphMode": levels},
        "vllm.config.kernel": {"IrOpPriorityConfig": priority},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)


def load_functions(module: str, names: set[str], **globals_: object) -> types.SimpleNamespace:
    """Return functions of one of vLLM's modules, without importing the module.

    Args:
        module: The path of the module in vllm, without `.py`.
        names: The names of the functions.
        globals_: The global names that the functions use.
    """
    file = Path(sys.modules["vllm"].__path__[0], f"{module}.py")
    lines = ["from __future__ import annotations"]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            lines.append(ast.unparse(node))
    exec("\n".join(lines), globals_)
    return types.SimpleNamespace(**{name: globals_[name] for name in names})


def list_rms_norms(platform: object) -> list[str]:
    """Return the implementations of rms_norm in vLLM's order, with AITER and graphs enabled."""
    os.environ["VLLM_ROCM_USE_AITER"] = "1"
    compilation = types.SimpleNamespace(backend="inductor", mode=1, cudagraph_mode=1)
    config = types.SimpleNamespace(compilation_config=compilation)
    return list(platform.get_default_ir_op_priority(config).rms_norm)


def read_moe_tables(platform: object) -> dict:
    """Return facts about vLLM's tuned tables for Qwen3-30B-A3B, with the keys of TABLES."""
    moe = load_functions(
        "model_executor/layers/fused_moe/fused_moe",
        {"get_config_file_name", "get_default_config"},
        get_device_name_as_file_name=platform.get_device_name,
        envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        current_platform=platform,
    )
    folder = Path(sys.modules["vllm"].__path__[0], "model_executor/layers/fused_moe/configs")
    table = folder / moe.get_config_file_name(128, 768, None)
    int4_table = folder / moe.get_config_file_name(128, 768, "int4_w4a16")
    result = {"tables": {"": table.exists(), ",dtype=int4_w4a16": int4_table.exists()}}
    if table.exists():
        entries = json.loads(table.read_text())
        configs = {int(tokens): config for tokens, config in entries.items()}
        last_other = 0
        for tokens in range(1, 20000):
            nearest = min(configs, key=lambda listed, tokens=tokens: abs(listed - tokens))
            default = moe.get_default_config(tokens, 128, 768, 2048, 8, None)
            if configs[nearest] != default:
                last_other = tokens
        result["as default"] = last_other + 1
    depths = []
    for tokens in (1, 64, 65, 4096):
        for block in (None, [128, 128]):
            config = moe.get_default_config(tokens, 128, 768, 2048, 8, "fp8_w8a8", block)
            depths.append(config["BLOCK_SIZE_K"])
    return result | {"fp8 depth": max(depths)}


def select_platform(sys_class: str, amdsmi: str, is_rocm: bool, source: Path | None) -> object:
    """Return the platform that vLLM chooses in this process.

    Args:
        sys_class: A folder that replaces /sys/class.
        amdsmi: The kind of the amdsmi module.
        is_rocm: Whether torch is a ROCm build.
        source: The unpacked sdist of vLLM; None if vLLM is installed.
    """
    if source:
        load_source(source)
    sys.modules["amdsmi"] = fake_amdsmi(amdsmi)
    torch.version.hip = (torch.version.hip or "7.15") if is_rocm else None
    from vllm.platforms import interface

    interface.in_wsl = lambda: False
    interface.SYS_CLASS = sys_class  # patch 0001
    from vllm import platforms

    return platforms.current_platform


def detect(name: str, sys_class: str, source: Path | None) -> dict:
    """Return vLLM's choices in this process. For the case COMMAND, also run the command.

    Args:
        name: The name of the case.
        sys_class: A folder that replaces /sys/class.
        source: The unpacked sdist of vLLM; None if vLLM is installed.
    """
    case = (CASES | INSTALLED)[name]
    platform = select_platform(sys_class, case.amdsmi, case.is_rocm, source)
    choices = {"platform": type(platform).__name__}
    if choices["platform"] == ROCM:
        from vllm.platforms import rocm

        backends = rocm._get_backend_priorities(use_mla=False, use_sparse=False)
        order = [backend.name for backend in backends]
        capability = platform.get_device_capability()
        choices["arch"] = rocm._GCN_ARCH
        choices["capability"] = [capability.major, capability.minor]
        choices["first"] = order[0]
        choices["rocm_attn_stays"] = "ROCM_ATTN" in order
        if rocm._GCN_ARCH == "gfx1151":
            choices["name"] = platform.get_device_name()
            choices |= read_moe_tables(platform)
        choices["rms_norm"] = list_rms_norms(platform)
    if name == COMMAND:
        from vllm.entrypoints.cli.main import main as command

        sys.argv = COMMAND.split()
        with contextlib.suppress(SystemExit):
            command()
    return choices


def make_nodes(sys_class: Path, nodes: list[str | None]) -> None:
    """Make KFD's nodes in a folder that replaces /sys/class."""
    for number, text in enumerate(nodes):
        properties = sys_class / "kfd/kfd/topology/nodes" / str(number) / "properties"
        if text is FOLDER:
            properties.mkdir(parents=True)
        else:
            properties.parent.mkdir(parents=True)
            properties.write_text(f"cpu_cores_count 1\n{text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    os.environ.pop("VLLM_TARGET_DEVICE", None)
    cases = CASES if options.source else CASES | INSTALLED
    failed = 0
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in options.cases or cases:
            case = cases[name]
            with tempfile.TemporaryDirectory() as folder:
                make_nodes(Path(folder), case.nodes)
                try:
                    choices = pool.apply(detect, (name, folder, options.source))
                except Exception as error:
                    choices = {"platform": f"{type(error).__name__}: {error}"}
            wrong = {}
            for key, expected in case.expected.items():
                if choices.get(key) != expected:
                    wrong[key] = choices.get(key)
            print(f"{name}: wrong choices {wrong}" if wrong else f"{name}: ok", flush=True)
            failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
