# SPDX-License-Identifier: BSD-3-Clause
"""A tiny language model through the whole of vLLM, against transformers in fp32 on the CPU.

    python check_serving.py [TRITON_ATTN|ROCM_ATTN]...

Nothing is downloaded: the model is random, with head size 128 and four query heads per KV head, so
that both attention backends reach their own kernels. Needs a GPU and says so where there is none.
"""

import os
import sys
import tempfile

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPT = [1, 5, 7, 11, 13, 17, 19, 23] * 8
TOKENS = 24
LOGPROB_TOLERANCE = 0.05


def make_model(folder: str) -> torch.Tensor:
    """Save a random fp16 Llama in `folder`; returns fp32 log-probabilities after PROMPT."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=128, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        initializer_range=0.08,
    )  # fmt: skip
    model = LlamaForCausalLM(config).half()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model.float().eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)


def problems(backend: str) -> list[str]:
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        expected = make_model(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float16", max_model_len=256, max_num_seqs=4,
            enforce_eager=True, kv_cache_memory_bytes=256 << 20, attention_backend=backend, seed=0,
        )  # fmt: skip
        greedy = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1
        )
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 3, greedy)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    first = tokens[0][0]
    said = outputs[0].outputs[0].logprobs[0][first].logprob
    wrong = []
    if len(tokens[0]) != TOKENS or any(other != tokens[0] for other in tokens):
        wrong.append(f"three equal prompts gave {tokens}")
    if abs(said - expected[first].item()) > LOGPROB_TOLERANCE:
        wrong.append(f"log-probability {said:.4f} instead of {expected[first].item():.4f}")
    if expected.max() - expected[first] > LOGPROB_TOLERANCE:
        wrong.append(f"token {first}, although {int(expected.argmax())} is likelier")
    return wrong


def main(backends: list[str]) -> int:
    if not torch.cuda.is_available():
        print("SKIPPED: serving, because torch sees no GPU here; nothing ran on gfx1151")
        return 0
    failed = 0
    for backend in backends or ["TRITON_ATTN"]:
        wrong = problems(backend)
        print(f"{backend}: {'; '.join(wrong) or 'agrees with transformers'}")
        failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
