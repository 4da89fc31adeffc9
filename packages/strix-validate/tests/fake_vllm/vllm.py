# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for vLLM: the interfaces that the serving tier uses, and the faults of $FAKE_VLLM.

Imported it is the offline engine; run as `vllm serve` it is the server.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from strix_validate.serving.endpoint import COUNTS

FAULTS = os.environ.get("FAKE_VLLM", "").split()
RIGHT, OTHER = math.log(0.5), math.log(0.5 / 511)


def likeliest(prefix):
    return (7 * sum(prefix) + len(prefix)) % 512


def tokens_for(prompt, number):
    found = list(prompt)
    for _ in range(number):
        found.append(likeliest(found))
    return found[len(prompt) :]


def scores(prefix, tokens):
    """Of each token after the prefix, by id: its own log probability and the likeliest one's."""
    found = []
    for token in tokens:
        entry = {str(likeliest(prefix)): {"logprob": RIGHT}}
        entry.setdefault(str(token), {"logprob": OTHER})
        found.append(entry)
        prefix = [*prefix, token]
    return found


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, *, skip_tokenizer_init, kv_cache_memory_bytes, **options):
        assert Path(model).is_dir() and skip_tokenizer_init and kv_cache_memory_bytes
        self.model = Path(model).name
        if "crash" in FAULTS:
            raise RuntimeError("Failed to infer device type")

    def generate(self, prompts, sampling):
        outputs = []
        for i, prompt in enumerate(prompts):
            tokens = tokens_for(prompt["prompt_token_ids"], sampling.max_tokens)
            if "repeats" in FAULTS and i:
                tokens[-1] += 1
            off = 0.2 if "logits" in FAULTS and self.model == "model" else 0.0
            off += 0.4 * (self.model in FAULTS)
            logprob = SimpleNamespace(logprob=math.log(0.5) + off)
            output = SimpleNamespace(token_ids=tokens, logprobs=[{tokens[0]: logprob}])
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/health"
        self.answer(b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "latency" in FAULTS:
            time.sleep(0.2)
        if "http" in FAULTS:
            self.send_error(500, "EngineCore died")
            return
        assert body["temperature"] == 0 and body["ignore_eos"] and body["return_token_ids"]
        if self.path == "/v1/chat/completions":
            prompt = self.templated(body["messages"])
        else:
            assert self.path == "/v1/completions"
            prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = [ord(letter) for letter in prompt]
        if body.get("prompt_logprobs"):
            found = [None, *scores(prompt[:1], prompt[1:])]
            self.answer(json.dumps({"choices": [{"prompt_logprobs": found}]}).encode())
            return
        self.complete(body, prompt)

    def templated(self, messages):
        """Of tiny_llama's template."""
        found = []
        for message in messages:
            found += [3] * (message["role"] == "user" and "template" not in FAULTS)
            found += [*(int(word[1:]) for word in message["content"].split()), 4]
        return found

    def complete(self, body, prompt):
        number = body["max_tokens"]
        tokens, logprobs = tokens_for(prompt, number), [RIGHT] * number
        if "garbage" in FAULTS or ("prefix" in FAULTS and len(prompt) > 70):
            tokens[1:] = [7] * (number - 1)
        if "decode-logprobs" in FAULTS:
            logprobs[1:] = [RIGHT + 0.2] * (number - 1)
        text, finish = "".join(f"w{token} " for token in tokens), "length"
        for stop in body.get("stop", []):
            if stop in text and "stop-string" not in FAULTS:
                text, finish = text[: text.index(stop)], "stop"
        if "finish" in FAULTS:
            finish = "stop" if finish == "length" else "length"
        counts = (len(prompt), number, len(prompt) + number)
        usage = dict(zip(COUNTS, counts, strict=True))
        if not body.get("stream"):
            listed = {"token_logprobs": logprobs, "top_logprobs": [{"token_id:1": RIGHT}] * number}
            choice = {"token_ids": tokens, "prompt_token_ids": prompt, "text": text,
                      "finish_reason": finish, "logprobs": listed}  # fmt: skip
            # which a stream's usage lacks
            usage["prompt_tokens_details"] = None
            whole = {"choices": [choice], "usage": usage, "prompt_token_ids": prompt}
            self.answer(json.dumps(whole).encode())
            return
        cut = number // 2
        words = text.split(" ")
        first = {"token_ids": tokens[:cut], "text": " ".join(words[:cut]) + " "}
        last = {"token_ids": tokens[cut:], "text": " ".join(words[cut:]), "finish_reason": finish}
        said = [{"choices": [first]}, {"choices": [last]}, {"choices": [], "usage": usage}]
        lines = [*map(json.dumps, said), "[DONE]"]
        self.answer("".join(f"data: {line}\n\n" for line in lines).encode())

    def answer(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    # of more waiting clients than that, one's connection is sometimes reset; sixteen come at a time
    request_queue_size = 64


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
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    assert sys.argv[1] == "serve" and Path(sys.argv[2]).is_dir(), sys.argv
    serve(sys.argv[3:])
