# SPDX-License-Identifier: BSD-3-Clause
"""Start a vLLM server with a tiny model, or use the user's server, and judge its answers."""

__all__ = [
    "caches",
    "chats",
    "costs",
    "endpoint",
    "judges",
    "messages",
    "sampling",
    "speed",
    "structures",
    "tiny_llama",
    "tiny_models",
    "users_server",
    "vllm_server",
    "web",
]
