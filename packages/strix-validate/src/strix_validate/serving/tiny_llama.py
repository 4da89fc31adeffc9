# SPDX-License-Identifier: BSD-3-Clause
"""A Llama with random weights, or one of tiny_models, made and run without a network:
-m ... make|generate FOLDER [MODEL], or score FOLDER TOKENS.

It runs in its own process, which frees its GPU memory before a server starts. The last line of its
output is JSON.
"""

import json
import os
import sys
from pathlib import Path

#: Token ids.
PROMPT = [1, 5, 7, 11, 13, 17, 19, 23] * 8
TOKENS = 24
_REPEATS = 3
#: Other prompts, for requests at the same time: of several lengths, none the begin of another.
OTHERS = [[29 + 31 * i, *PROMPT[i : 9 + 4 * i], 3 + i] for i in range(11)]
#: Of a message the tokens 3, its words, 4.
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}w3 {% endif %}"
    "{{ message.content }} w4 {% endfor %}"
)


def make(folder: str) -> dict:
    """Write the model, fp16; return the log probability of each token after the prompt.

    They come from transformers in float32 on the CPU. Head dim 128 and grouped heads, as real
    Llamas have.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        # larger than the default: with flat logits, any token would do
        initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    _make_tokenizer(Path(folder))
    # read again: half() rounds the frequencies of rope as well, which no weight holds
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    return {"logprobs": logits.log_softmax(-1).tolist()}


def _make_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token 7 is the word w7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def _score(folder: str, tokens: list[int]) -> dict:
    """Score these tokens after the prompt, by transformers in float32 on the CPU.
    Return the log probability of each after the ones before it, and that of the likeliest one."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    found = logits.log_softmax(-1)
    own = found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return {"logprobs": own.tolist(), "best": found.amax(-1).tolist()}


def _generate(folder: str, dtype: str = "float16") -> dict:
    """Generate greedy tokens for one prompt, several times in a batch, by vLLM in this process.
    Return them, and the log probability of the first one."""
    # the engine in this process ends with it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from strix_validate.serving.tiny_models import GGUF

    file = Path(folder, GGUF)
    model = LLM(
        str(file) if file.exists() else folder,
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
    prompts = [{"prompt_token_ids": PROMPT}] * _REPEATS
    outputs = [found.outputs[0] for found in model.generate(prompts, sampling)]
    first = outputs[0].token_ids[0]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprob": outputs[0].logprobs[0][first].logprob,
    }


if __name__ == "__main__":
    task, folder, *model = sys.argv[1:]
    if task == "score":
        found = _score(folder, json.loads(model[0]))
    elif not model:
        found = {"make": make, "generate": _generate}[task](folder)
    elif task == "make":
        from strix_validate.serving import tiny_models

        # transformers takes fla's kernels where they are installed, for a model on the CPU as well
        sys.modules["fla"] = None  # type: ignore[assignment]
        found = tiny_models.make(model[0], Path(folder), PROMPT)
    else:
        found = _generate(folder, "bfloat16")
    print(json.dumps(found))
