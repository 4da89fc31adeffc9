# SPDX-License-Identifier: BSD-3-Clause
"""A server of vLLM, ours with a tiny model or the user's, and how it is judged."""

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
