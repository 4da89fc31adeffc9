# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's Triton kernels: how they are launched, and what they must return.

Its modules, imported where they are needed:

* ``attention``: attention over a paged cache, and the cache's writer: functions that build a call.
* ``experts``: `ExpertsCall`: a fused mixture of experts as vLLM's server launches it.
* ``kernels``: RMS norm, rope and experts: functions that build a call.
* ``linear_attention``: gated delta rule, convolution and norm: functions that build a call, and
  cases.
* ``lora``: adapters: a function that builds a call, and cases.
* ``mla``: latent attention: functions that build a call, and cases.
* ``model``: a tiny model of these kernels, decoded token by token.
* ``model_layers``: the table's layers as calls of attention, and which of them are quick.
* ``mxfp4``: gpt-oss's experts in MXFP4.
* ``quantized``: products with quantized weights: functions that build a call, and cases.
* ``sampling``: a step's choice of tokens: functions that build a call, and cases.
* ``source``: vLLM's modules from a folder of its source, without an installation.
* ``vllm_call``: `VllmCall`, a launch with tensors.
* ``vllm_checks``: the checks of these kernels in the tiers kernels, attention and emulated.
"""

__all__ = [
    "attention", "experts", "kernels", "linear_attention", "lora", "mla", "model",
    "model_layers", "mxfp4", "quantized", "sampling", "source", "vllm_call", "vllm_checks",
]  # fmt: skip
