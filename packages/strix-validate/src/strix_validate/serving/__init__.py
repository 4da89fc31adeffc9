# SPDX-License-Identifier: BSD-3-Clause
"""A server of vLLM, ours with a tiny model or the user's, and how it is judged."""

__all__ = ["endpoint", "judges", "tiny_llama", "tiny_models", "vllm_server", "web"]
