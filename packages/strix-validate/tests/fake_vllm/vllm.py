# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for vLLM: the interfaces that the serving tier uses, and faults by $FAKE_VLLM.

Imported it is the offline engine; run as `vllm serve` it is the server.
"""

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

FAULT = os.environ.get("FAKE_VLLM", "")


def tokens_for(prompt, number):
    return [(sum(prompt) + 7 * i) % 512 for i in range(number)]


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, *, skip_tokenizer_init, kv_cache_memory_bytes, **options):
        assert Path(model).is_dir() and skip_tokenizer_init and kv_cache_memory_bytes
        self.model = Path(model).name
        if FAULT == "crash":
            raise RuntimeError("Failed to infer device type")

    def generate(self, prompts, sampling):
        outputs = []
        for i, prompt in enumerate(prompts):
            tokens = tokens_for(prompt["prompt_token_ids"], sampling.max_tokens)
            if FAULT == "repeats" and i:
                tokens[-1] += 1
            off = {"logits": 0.2, self.model: 0.4}.get(FAULT, 0.0)
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
        assert self.path == "/v1/completions" and body["return_token_ids"]
        tokens = tokens_for(body["prompt"], body["max_tokens"])
        if FAULT == "http":
            self.send_error(500, "EngineCore died")
            return
        if FAULT == "tokens":
            tokens[3] += 1
        if not body.get("stream"):
            self.answer(json.dumps({"choices": [{"token_ids": tokens}]}).encode())
            return
        parts = [tokens] if FAULT == "one-part" else [tokens[:10], tokens[10:]]
        if FAULT == "lost":
            parts.pop()
        lines = [json.dumps({"choices": [{"token_ids": part}]}) for part in parts]
        lines += ["[DONE]"] * (FAULT != "no-done")
        self.answer("".join(f"data: {line}\n\n" for line in lines).encode())

    def answer(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def serve(arguments):
    port = int(arguments[arguments.index("--port") + 1])
    if FAULT == "dies":
        sys.exit("RuntimeError: Engine core initialization failed")
    if FAULT == "hangs":
        time.sleep(600)
    if FAULT == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    name = "ROCM_ATTN" if FAULT == "slow-backend" else "TRITON_ATTN"
    if FAULT != "silent":
        print(f"Using {name} backend out of potential backends: ['{name}'].", flush=True)
    if FAULT != "no-graphs":
        print("Graph capturing finished in 1 secs, took 0.01 GiB", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    assert sys.argv[1] == "serve" and Path(sys.argv[2]).is_dir(), sys.argv
    serve(sys.argv[3:])
