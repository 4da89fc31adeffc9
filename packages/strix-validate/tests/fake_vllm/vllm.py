# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for vLLM: the interfaces that the serving tier uses, and faults by $FAKE_VLLM.

Imported it is the offline engine; run as `vllm serve` it is the server.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

FAULT = os.environ.get("FAKE_VLLM", "")


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

    lock, busy, two = threading.Lock(), 0, threading.Event()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAULT == "latency":
            time.sleep(0.2)
        if FAULT == "http":
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
        self.complete(body, prompt, FAULT == "cross-talk" and self.mixed(body, prompt))

    def mixed(self, body, prompt):
        """Whether two of tiny_llama.OTHERS, which alone begin so, were here at a time.

        The first waits for a second, however slowly that comes.
        """
        if prompt[0] < 29 or body["max_tokens"] == 1 or body.get("stream"):
            return False
        with Handler.lock:
            Handler.busy += 1
            if Handler.busy > 1:
                Handler.two.set()
        found = Handler.two.wait(200)
        with Handler.lock:
            Handler.busy -= 1
        return found

    def templated(self, messages):
        """Of tiny_llama's template."""
        found = []
        for message in messages:
            found += [3] * (message["role"] == "user" and FAULT != "template")
            found += [*(int(word[1:]) for word in message["content"].split()), 4]
        return found

    def complete(self, body, prompt, mixed):
        number = body["max_tokens"]
        # the cross-talk: another request's tokens from the second one on
        tokens = tokens_for(prompt, number)
        logprobs = [RIGHT] * number
        if FAULT == "tokens":
            tokens[3] += 1
        if FAULT == "garbage" or (FAULT == "abort" and Handler.aborted):
            tokens[1:] = [7] * (number - 1)
        if FAULT == "prefix":
            tokens[1:] = [7] * (number - 1) if len(prompt) > 70 else tokens[1:]
        if mixed:
            tokens = [tokens[0], *tokens_for([1, *prompt], number)[1:]]
        if FAULT.startswith("decode-logprobs"):
            # a server of the user's may be off by more
            logprobs[1:] = [RIGHT + (0.2 if FAULT == "decode-logprobs" else 0.4)] * (number - 1)
        text, finish = "".join(f"w{token} " for token in tokens), "length"
        for stop in body.get("stop", []):
            if stop in text and FAULT != "stop-string":
                text, finish = text[: text.index(stop)], "stop"
        if FAULT == "finish":
            finish = "stop" if finish == "length" else "length"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": number + (FAULT == "usage"),
                 "total_tokens": len(prompt) + number + (FAULT == "usage")}  # fmt: skip
        top = {"token_id:1": 0.1 if FAULT == "probabilities" else RIGHT}
        if not body.get("stream"):
            listed = {"token_logprobs": logprobs, "top_logprobs": [top] * number}
            choice = {"token_ids": tokens, "prompt_token_ids": prompt, "text": text,
                      "finish_reason": finish, "logprobs": listed}  # fmt: skip
            # which a stream's usage lacks
            usage["prompt_tokens_details"] = None
            whole = {"choices": [choice], "usage": usage, "prompt_token_ids": prompt}
            self.answer(json.dumps(whole).encode())
            return
        cut = number if FAULT == "one-part" else number // 2
        words = text.split(" ")
        parts = [(tokens[:cut], " ".join(words[:cut]) + " " * (cut < number))]
        parts += [(tokens[cut:], " ".join(words[cut:]))] * (cut < number)
        if FAULT == "one-part":
            parts = [(tokens, text)]
        if FAULT == "lost":
            parts.pop()
        if FAULT == "doubled-text":
            parts[-1] = (parts[-1][0], parts[-1][1] * 2)
        lines = [{"choices": [{"token_ids": ids, "text": said}]} for ids, said in parts]
        lines[-1]["choices"][0]["finish_reason"] = finish
        if FAULT == "stream-usage":
            usage["completion_tokens"] -= 1
        lines = [json.dumps(line) for line in [*lines, {"choices": [], "usage": usage}]]
        lines += ["[DONE]"] * (FAULT != "no-done")
        if body["max_tokens"] == 200:
            Handler.aborted = True
        self.answer("".join(f"data: {line}\n\n" for line in lines).encode())

    aborted = False

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
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    assert sys.argv[1] == "serve" and Path(sys.argv[2]).is_dir(), sys.argv
    serve(sys.argv[3:])
