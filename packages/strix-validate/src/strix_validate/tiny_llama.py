# SPDX-License-Identifier: BSD-3-Clause
"""A Llama with random weights, or one of tiny_models, made and run without a network:
-m ... make|generate FOLDER [MODEL].

It runs in its own process, which frees its GPU memory before a server starts. The last line of its
output is JSON.
"""

import json
import os
import sys
from pathlib import Path

#: Token ids; no tokenizer is needed.
PROMPT = [1, 5, 7, 11, 13, 17, 19, 23] * 8
TOKENS = 24
REPEATS = 3


def make(folder: str) -> dict:
    """Writes the model, fp16, and returns the log probability of each token after the prompt, from
    transformers in float32 on the CPU. Head dim 128 and grouped heads, as real Llamas have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=128, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        # larger than the default: with flat logits, any token would do
        initializer_range=0.08,
    )  # fmt: skip
    model = LlamaForCausalLM(config).half()
    model.save_pretrained(folder)
    with torch.no_grad():
        logits = model.float().eval()(torch.tensor([PROMPT])).logits[0, -1]
    return {"logprobs": logits.log_softmax(-1).tolist()}


def generate(folder: str, dtype: str = "float16") -> dict:
    """Greedy tokens of the same prompt, several times in one batch, and the log probability of the
    first one, from vLLM in this process."""
    # the engine in this process ends with it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        # not a share of the memory, which is unified: everyone's
        kv_cache_memory_bytes=256 << 20,
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    prompts = [{"prompt_token_ids": PROMPT}] * REPEATS
    outputs = [found.outputs[0] for found in model.generate(prompts, sampling)]
    first = outputs[0].token_ids[0]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprob": outputs[0].logprobs[0][first].logprob,
    }


if __name__ == "__main__":
    task, folder, *model = sys.argv[1:]
    if not model:
        found = {"make": make, "generate": generate}[task](folder)
    elif task == "make":
        from strix_validate import tiny_models

        found = tiny_models.make(model[0], Path(folder), PROMPT)
    else:
        found = generate(folder, "bfloat16")
    print(json.dumps(found))
