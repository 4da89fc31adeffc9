# SPDX-License-Identifier: BSD-3-Clause
"""Package test: the plugin maps the names and the rows of a GGUF file's weights correctly.

Without our patches, the plugin maps them incorrectly. vLLM's modules are replaced by mocks.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch


class Mock(ModuleType):
    """A module in which a capitalized name is an empty base class, and any other name is a mock."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return MagicMock()
        return type(name, (), {"__init__": lambda self, *args, **options: None})


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mock for vllm and each of its modules."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Mock(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Mocks())
torch.ops.vllm = MagicMock()  # the operators that the plugin registers through vLLM
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig  # noqa: E402 (after the mocks)
from vllm_gguf_plugin.weights_adapter import get_weights_adapter  # noqa: E402 (after the mocks)


def require(condition, message: str) -> None:
    """End the program with a message unless the condition is true."""
    if not condition:
        sys.exit(message)


def load(config, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor that vLLM gets for a tensor of layer 0 in the file.

    Args:
        config: The model's configuration.
        name: The tensor's name, without the prefix `model.layers.0.self_attn.`.
        weight: The tensor in the file.
    """
    named = [(f"model.layers.0.self_attn.{name}", weight)]
    ((_, mapped),) = get_weights_adapter(config).map_weights(named)
    return mapped


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows in the order of a GGUF file, like LlamaModel.permute in llama.cpp."""
    rows = weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
    return rows.reshape(weight.shape)


HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = LlamaConfig(**HEADS)
QWEN = Qwen3Config(**HEADS)
for num_heads, projection in ((4, "q_proj"), (2, "k_proj")):
    for suffix in ("weight", "qweight"):  # `qweight` is a quantized weight
        name = f"{projection}.{suffix}"
        weight = torch.randint(0, 256, (16 * num_heads, 36), dtype=torch.uint8)
        mapped = load(LLAMA, name, permute(weight, num_heads))
        require(torch.equal(mapped, weight), f"the rows of Llama's {name} are not permuted back")
        mapped = load(QWEN, name, weight)
        require(torch.equal(mapped, weight), f"the rows of Qwen's {name} are permuted")
weight = torch.randn(32, 64)
mapped = load(LLAMA, "v_proj.weight", weight)
require(torch.equal(mapped, weight), "the rows of Llama's v_proj.weight are permuted")
mapped = load(LLAMA, "q_proj.qweight_type", torch.tensor(12))
require(mapped == 12, f"the type of Llama's q_proj is {mapped}, not 12")

config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, architectures=["Qwen3MoeForCausalLM"])
names = get_weights_adapter(config).build_name_map(
    SimpleNamespace(hf_config=config, dtype=torch.bfloat16, trust_remote_code=False)
)
for part in ("gate", "up", "down"):
    expected = f"model.layers.1.mlp.experts.0.{part}_proj.weight"
    name = names[f"blk.1.ffn_{part}_exps.weight"]
    require(name == expected, f"Qwen3-MoE's {part} is named {name}")
print("rows of Llama and Qwen3 have the right order, experts of Qwen3-MoE have the right names")
