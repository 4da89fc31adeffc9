# SPDX-License-Identifier: BSD-3-Clause
"""Create and run a Llama with random weights, or a model of tiny_models, without a network.

    python -m strix_validate.serving.tiny_llama make|generate FOLDER [MODEL]
    python -m strix_validate.serving.tiny_llama score FOLDER TOKENS

MODEL is a key of tiny_models.MODELS and TOKENS a JSON list. Each task runs in a process of its own,
which frees its GPU memory before a server starts. The last line of a task's output is JSON.
"""

import json
import os
import sys
from pathlib import Path

#: The share of the GPU's memory that must be free for vLLM to start, even if the size of the KV
#: cache is given (request_memory in vllm/v1/worker/utils.py). vLLM's default of 0.92 leaves
#: little memory to other programs.
SHARE = 0.05
#: Token ids.
PROMPT = [1, 5, 7, 11, 13, 17, 19, 23] * 8
#: Tokens to generate.
TOKENS = 24
#: Number of requests of a batch, all with the prompt PROMPT.
_REPEATS = 3
#: Prompts for concurrent requests. They have several lengths, and none is the beginning of another.
OTHERS = [[29 + 31 * i, *PROMPT[i : 9 + 4 * i], 3 + i] for i in range(11)]
#: The chat template. A user's message becomes the token 3, its words and the token 4; any other
#: message becomes its words and the token 4.
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}w3 {% endif %}"
    "{{ message.content }} w4 {% endfor %}"
)
_VOCABULARY = 512


def make(folder: str) -> dict:
    """Write the model in fp16, and return the log probability of every token after PROMPT.

    transformers computes the log probabilities in float32 on the CPU. The model has head dim 128
    and grouped heads, like real Llamas.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        # this range is larger than the default, with which logits are so similar that any token
        # passes the checks
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)
    _make_tokenizer(Path(folder))
    # the model is read again, because half() also rounded rope's frequencies, which are not stored
    # in the file
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    return {"logprobs": logits.log_softmax(-1).tolist()}


def _make_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token 7 is the word w7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(_VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def _score(folder: str, tokens: list[int]) -> dict:
    """Score tokens that follow PROMPT with transformers in float32 on the CPU.

    Returns:
        "logprobs": log probability of each token after the tokens before it.
        "best": log probability of the likeliest token at each place.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    of_tokens = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return {"logprobs": of_tokens.tolist(), "best": logprobs.amax(-1).tolist()}


def _generate(folder: str, dtype: str = "float16") -> dict:
    """Generate greedy tokens for a batch of equal prompts, with vLLM in this process.

    Returns:
        "tokens": the tokens of each repeat.
        "logprob": log probability of the first token.
    """
    # vLLM reads this variable at import. With 0, the engine runs in this process, and ends with it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from strix_validate.serving.tiny_models import GGUF

    file = Path(folder, GGUF)
    path = str(file) if file.exists() else folder
    model = LLM(
        path,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        # this is a size in bytes, because a share of the memory would include other programs'
        # memory
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=SHARE,
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
    )
    prompts = [{"prompt_token_ids": PROMPT}] * _REPEATS
    outputs = [request.outputs[0] for request in model.generate(prompts, sampling)]
    first_token = outputs[0].token_ids[0]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprob": outputs[0].logprobs[0][first_token].logprob,
    }


def _make_model(folder: str, name: str) -> dict:
    """Write a model of tiny_models; return the result of tiny_models.make."""
    from strix_validate.serving import tiny_models

    # without this, transformers would use fla's kernels if they are installed, even on the CPU
    sys.modules["fla"] = None  # type: ignore[assignment]
    return tiny_models.make(name, Path(folder), PROMPT)


def _run_task(task: str, folder: str, argument: str = "") -> dict:
    if task == "score":
        return _score(folder, json.loads(argument))
    if task == "make":
        return _make_model(folder, argument) if argument else make(folder)
    if task == "generate":
        return _generate(folder, "bfloat16") if argument else _generate(folder)
    raise ValueError(f"no such task: {task}")


if __name__ == "__main__":
    print(json.dumps(_run_task(*sys.argv[1:])))
