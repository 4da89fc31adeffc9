# SPDX-License-Identifier: BSD-3-Clause
"""A server of vLLM, ours with a tiny model or the user's, and how it is judged.

Its modules, imported where they are needed:

* ``bench_serve``: what `vllm bench serve` measures.
* ``endpoint``: `Endpoint`, an OpenAI-compatible server.
* ``judges``: what is asked of a server's answers.
* ``tiny_llama``: a tiny Llama with random weights, and what it must answer; run as a process.
* ``tiny_models``: `MODELS`, tiny models in the weight formats that vLLM serves.
* ``vllm_server``: `ServerSession`: a tiny model, what vLLM makes of it offline, and `vllm
  serve` with it.
"""

__all__ = ["bench_serve", "endpoint", "judges", "tiny_llama", "tiny_models", "vllm_server"]
