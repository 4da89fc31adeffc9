# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM chooses for a GPU, with mock kernel drivers (KFD) and AMD SMI modules.

The platform, the attention backend, the kernel of rms_norm and the tuned tables of MoE kernels.

    python check_detection.py [--source DIR] [CASE...]

Each case runs in a process of its own, because vLLM looks once, at import; no GPU is needed. With
--source it loads the platform modules of an unpacked sdist beside a torch without ROCm. Without it,
`vllm --version` is a case too: it ends in an error where no platform is found.
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
from pathlib import Path

import torch

CPU, STRIX_HALO, NAVI31, MI300 = (f"gfx_target_version {n}\n" for n in (0, 110501, 110000, 90402))
FOLDER = None  # a properties entry that cannot be read, also by root
ROCM, NONE = "RocmPlatform", "UnspecifiedPlatform"
GFX1151 = {"platform": ROCM, "arch": "gfx1151", "capability": [11, 5], "name": "AMD_Radeon_8060S"}
TRITON_FIRST = {"first": "TRITON_ATTN", "rocm_attn_stays": True}
NO_AITER_NORM = {"rms_norm": ["native"]}
#: Tables by their names' ends; "as default": from how many tokens on one equals vLLM's default.
#: "fp8 depth": the deepest tile of experts in FP8, per tensor and in blocks (patch 0009).
TABLES = {
    "tables": {"": True, ",dtype=int4_w4a16": True}, "as default": 33, "fp8 depth": 32,
}  # fmt: skip
#: what is seen: (KFD nodes, the amdsmi module, torch is a ROCm build, what vLLM must say)
CASES = {
    "no driver": ([], "absent", True, {"platform": NONE}),
    "a node without GPU": ([CPU], "absent", True, {"platform": NONE}),
    "unreadable": ([FOLDER], "absent", True, {"platform": NONE}),
    "no number": (["gfx_target_version x\n"], "absent", True, {"platform": NONE}),
    "torch without ROCm": ([CPU, STRIX_HALO], "absent", False, {"platform": NONE}),
    "no amdsmi": (
        [CPU, STRIX_HALO],
        "absent",
        True,
        GFX1151 | TRITON_FIRST | NO_AITER_NORM | TABLES,
    ),
    "one node unreadable": ([FOLDER, STRIX_HALO], "absent", True, GFX1151),
    "amdsmi lists nothing": ([CPU, STRIX_HALO], "empty", True, GFX1151),
    "amdsmi without library": ([CPU, STRIX_HALO], "broken", True, GFX1151),
    "amdsmi lists it": ([], "lists", True, GFX1151 | TRITON_FIRST | TABLES),
    "gfx1100": (
        [CPU, NAVI31],
        "absent",
        True,
        {"platform": ROCM, "arch": "gfx1100"} | TRITON_FIRST | NO_AITER_NORM,
    ),
    "gfx942": (
        [CPU, MI300],
        "absent",
        True,
        {"arch": "gfx942", "first": "ROCM_ATTN", "rms_norm": ["aiter", "native"]},
    ),
}
COMMAND = "vllm --version"
INSTALLED = {COMMAND: ([CPU, STRIX_HALO], "absent", True, GFX1151)}


def fake_amdsmi(kind: str) -> types.ModuleType | None:
    """An amdsmi module of one kind; None makes its import fail."""
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
    module.amdsmi_init = (lambda: {}["libamd_smi.so"]) if kind == "broken" else lambda: None
    return module


def load_source(folder: Path) -> None:
    """Stand in for an installed vLLM: its tree, its version, and what its platforms do not need."""
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


def functions(module: str, names: set[str], **globals_: object) -> types.SimpleNamespace:
    """Functions of one of vLLM's modules, without what else its import loads."""
    file = Path(sys.modules["vllm"].__path__[0], f"{module}.py")
    wanted = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    future = "from __future__ import annotations\n"
    exec(future + "\n".join(map(ast.unparse, wanted)), globals_)
    return types.SimpleNamespace(**{name: globals_[name] for name in names})


def rms_norm_order(platform: object) -> list[str]:
    """The implementations of rms_norm in vLLM's order, where AITER is wanted and graphs are on."""
    os.environ["VLLM_ROCM_USE_AITER"] = "1"
    compilation = types.SimpleNamespace(backend="inductor", mode=1, cudagraph_mode=1)
    config = types.SimpleNamespace(compilation_config=compilation)
    return list(platform.get_default_ir_op_priority(config).rms_norm)


def moe_tables(platform: object) -> dict:
    """Which tables for Qwen3-30B-A3B are found by name, and from where one is the default."""
    moe = functions(
        "model_executor/layers/fused_moe/fused_moe",
        {"get_config_file_name", "get_default_config"},
        get_device_name_as_file_name=platform.get_device_name,
        envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        current_platform=platform,
    )
    folder = Path(sys.modules["vllm"].__path__[0], "model_executor/layers/fused_moe/configs")
    files = {
        dtype: folder / moe.get_config_file_name(128, 768, dtype) for dtype in (None, "int4_w4a16")
    }
    said = {"tables": {f",dtype={d}" if d else "": file.exists() for d, file in files.items()}}
    if files[None].exists():
        table = {int(key): value for key, value in json.loads(files[None].read_text()).items()}
        nearest = {m: table[min(table, key=lambda key: abs(key - m))] for m in range(1, 20000)}
        other = [m for m, entry in nearest.items()
                 if entry != moe.get_default_config(m, 128, 768, 2048, 8, None)]  # fmt: skip
        said["as default"] = max(other) + 1
    depths = [
        moe.get_default_config(m, 128, 768, 2048, 8, "fp8_w8a8", block)["BLOCK_SIZE_K"]
        for m in (1, 64, 65, 4096) for block in (None, [128, 128])
    ]  # fmt: skip
    return said | {"fp8 depth": max(depths)}


def select_platform(sys_class: str, amdsmi: str, hip: bool, source: Path | None) -> object:
    """vLLM's choice in this process, with `sys_class` for /sys/class."""
    if source:
        load_source(source)
    sys.modules["amdsmi"] = fake_amdsmi(amdsmi)
    torch.version.hip = (torch.version.hip or "7.15") if hip else None
    from vllm.platforms import interface

    interface.in_wsl = lambda: False
    interface.SYS_CLASS = sys_class  # patch 0001
    from vllm import platforms

    return platforms.current_platform


def detect(case: str, sys_class: str, source: Path | None) -> dict:
    """What vLLM says in this process, with `sys_class` for /sys/class."""
    _, amdsmi, hip, _ = (CASES | INSTALLED)[case]
    platform = select_platform(sys_class, amdsmi, hip, source)
    said = {"platform": type(platform).__name__}
    if said["platform"] == ROCM:
        from vllm.platforms import rocm

        order = [b.name for b in rocm._get_backend_priorities(use_mla=False, use_sparse=False)]
        capability = platform.get_device_capability()
        said |= {"arch": rocm._GCN_ARCH, "capability": [capability.major, capability.minor]}
        said |= {"first": order[0], "rocm_attn_stays": "ROCM_ATTN" in order}
        if rocm._GCN_ARCH == "gfx1151":
            said["name"] = platform.get_device_name()
            said |= moe_tables(platform)
        said["rms_norm"] = rms_norm_order(platform)
    if case == COMMAND:
        from vllm.entrypoints.cli.main import main as command

        sys.argv = COMMAND.split()
        with contextlib.suppress(SystemExit):
            command()
    return said


def make_nodes(sys_class: Path, nodes: list[str | None]) -> None:
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
    known = CASES | ({} if options.source else INSTALLED)
    failed = 0
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for case in options.cases or known:
            nodes, _, _, wanted = known[case]
            with tempfile.TemporaryDirectory() as folder:
                make_nodes(Path(folder), nodes)
                try:
                    said = pool.apply(detect, (case, folder, options.source))
                except Exception as error:
                    said = {"platform": f"{type(error).__name__}: {error}"}
            wrong = {key: said.get(key) for key, value in wanted.items() if said.get(key) != value}
            print(f"{case}: {'says ' + str(wrong) if wrong else 'ok'}", flush=True)
            failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
