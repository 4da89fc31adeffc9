# SPDX-License-Identifier: BSD-3-Clause
"""A mock of the interfaces of vLLM that the serving tier uses, with the faults in $FAKE_VLLM.

An import of the mock gives the offline engine. The command `vllm serve` starts its server.
"""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))
import trained_server

FAULTS = os.environ.get("FAKE_VLLM", "").split()
#: The share of the GPU's memory that other programs leave.
FREE = 0.5
RIGHT = math.log(0.5)
OTHER = math.log(0.5 / 511)


def likeliest(prefix):
    return (7 * sum(prefix) + len(prefix)) % 512


def generate_tokens(prompt, number):
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(likeliest(tokens))
    return tokens[len(prompt) :]


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, *, skip_tokenizer_init, kv_cache_memory_bytes, **options):
        assert Path(model).is_dir()
        assert skip_tokenizer_init
        assert kv_cache_memory_bytes
        if options.get("gpu_memory_utilization", 0.92) > FREE:  # request_memory
            raise ValueError("Free memory is less than desired GPU memory utilization")
        self.model = Path(model).name
        if "crash" in FAULTS:
            raise RuntimeError("Failed to infer device type")

    def generate(self, prompts, sampling):
        outputs = []
        for i, prompt in enumerate(prompts):
            tokens = generate_tokens(prompt["prompt_token_ids"], sampling.max_tokens)
            if "repeats" in FAULTS and i:
                tokens[-1] += 1
            off = 0.2 if "logits" in FAULTS and self.model == "model" else 0.0
            off += 0.4 * (self.model in FAULTS)
            logprob = SimpleNamespace(logprob=math.log(0.5) + off)
            output = SimpleNamespace(token_ids=tokens, logprobs=[{tokens[0]: logprob}])
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


class Reader:
    """Reads tokens one by one; `next` is the likeliest next token."""

    def __init__(self, prompt):
        self.tokens = list(prompt)

    def read(self, token):
        self.tokens.append(token)

    @property
    def next(self):
        return likeliest(self.tokens)


class Handler(trained_server.Handler):
    """A handler with tiny_llama's vocabulary and chat template."""

    def do_GET(self):
        assert self.path == "/health"
        self.send_json({})

    def answer(self, body):
        if "latency" in FAULTS:
            time.sleep(0.2)
        if "http" in FAULTS:
            self.send_error(500, "EngineCore died")
            return
        assert body["temperature"] == (body.get("n", 1) > 1)
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        if self.path == "/v1/chat/completions":
            body["prompt"] = self.encode_chat(body["messages"])
        else:
            assert self.path == "/v1/completions"
        super().answer(body)

    def encode_chat(self, messages):
        tokens = []
        for message in messages:
            tokens += [3] * (message["role"] == "user" and "template" not in FAULTS)
            tokens += [*(int(word[1:]) for word in message["content"].split()), 4]
        return tokens

    def decode(self, tokens):
        return "".join(f"w{token} " for token in tokens)

    def reader(self, prompt):
        return Reader(prompt)

    def generate(self, prompt, number):
        tokens, logprobs = super().generate(prompt, number)
        if "garbage" in FAULTS or ("prefix" in FAULTS and len(prompt) > 70):
            tokens[1:] = [7] * (number - 1)
        if "decode-logprobs" in FAULTS:
            logprobs[1:] = [RIGHT + 0.2] * (number - 1)
        return tokens, logprobs


def serve(arguments):
    port = int(arguments[arguments.index("--port") + 1])
    if "dies" in FAULTS:
        sys.exit("RuntimeError: Engine core initialization failed")
    if "hangs" in FAULTS:
        time.sleep(600)
    if "stays" in FAULTS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "orphan" in FAULTS:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    name = "ROCM_ATTN" if "slow-backend" in FAULTS else "TRITON_ATTN"
    if "silent" not in FAULTS:
        print(f"Using {name} backend out of potential backends: ['{name}'].", flush=True)
    if "no-graphs" not in FAULTS:
        print("Graph capturing finished in 1 secs, took 0.01 GiB", flush=True)
    fault = next((name for name in FAULTS if name in ("no-stop", "finish")), "")
    trained_server.Server(fault, context=0, port=port, handler=Handler).serve_forever()


if __name__ == "__main__":
    assert sys.argv[1] == "serve" and Path(sys.argv[2]).is_dir(), sys.argv
    serve(sys.argv[3:])
