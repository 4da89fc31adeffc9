# SPDX-License-Identifier: BSD-3-Clause
"""Each entry of skips.toml matches a reason that a check can give."""

import ast
import re
from pathlib import Path

import strix_validate
from strix_validate import skips

#: The reasons that are messages of torch.
TORCH = (
    "No viable backend",
    "No available kernel",
    "do not support non-zero dropout",
    "same last dimension",
    "(?i)expected.*(half|bfloat16|dtype)",
    "(?i)attn_?mask",
    "attention mask",
    "(?i)causal.*seqlen",
    "is_causal",
    "same num_heads",
    "invalid dtype for bias",
    "(?i)out of memory",
)
#: The reason that is a message of strix-emulate.
EMULATOR = ("no disassembler for GFX11",)
#: What the checks can put into the braces of their messages.
VALUES = (
    "7",
    "core",
    "bitsandbytes",
    "conch",
    "fla",
    "gfx1151",
    "liger_kernel",
    "sageattention",
    "transformers",
    "vllm_gguf_plugin",
)


def list_messages() -> set[str]:
    """Return the strings of the sources, f-strings once for each of VALUES, without docstrings."""
    messages = set()
    for path in Path(strix_validate.__file__).parent.rglob("*.py"):
        if path.name == "skips.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                for value in VALUES:
                    messages.add("".join(p if isinstance(p, str) else value for p in parts))
            elif isinstance(node, ast.Constant) and node not in docstrings:
                messages.add(str(node.value))
    return messages


def find_unmatched(pattern: str, messages: set[str]) -> list[str]:
    """Return the alternatives of a pattern that match no message of ours."""
    alternatives = re.split(r"\|(?![^(]*\))", pattern)
    ours = [text for text in alternatives if text not in TORCH + EMULATOR]
    return [text for text in ours if not any(re.search(text, message) for message in messages)]


def test_the_reasons_of_skips_toml_are_in_the_sources() -> None:
    """A reworded message would turn its expected skips into failures."""
    messages = list_messages()
    assert find_unmatched("only a GPU|no text of ours", messages) == ["no text of ours"]
    unmatched = {entry.pattern: find_unmatched(entry.pattern, messages) for entry in skips.table()}
    assert not {key: texts for key, texts in unmatched.items() if texts}
