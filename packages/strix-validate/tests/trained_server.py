# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for a server of the user's with a trained model, and for faulty ones.

Its model continues three tokens as they went on before, in the prompt or in texts that it knows,
and else by a sum over all that it read. Tokens are words, and signs on their own.
"""

import contextlib
import functools
import json
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from strix_validate.serving import judges

V = 32_000
RIGHT, OTHER = math.log(0.5), math.log(0.5 / (V - 1))
WORDS: list[str] = []
IDS: dict[str, int] = {}
LOCK = threading.Lock()


@functools.cache  # prompts of 32,768 tokens come again with each server
def encode(text):
    words = re.findall(r"\s?\w+|\s?[^\w\s]|\s", text)
    with LOCK:
        for word in words:
            if word not in IDS:
                IDS[word] = len(WORDS)
                WORDS.append(word)
    return [IDS[word] for word in words]


KNOWN = encode(judges.known_text())
POOL = len(WORDS)
OF_KNOWN = {tuple(KNOWN[i : i + 3]): KNOWN[i + 3] for i in range(len(KNOWN) - 3)}


class Reader:
    """Reads tokens one by one; `next` is the likeliest one."""

    def __init__(self, fault):
        self.fault, self.seen, self.last, self.sum = fault, {}, (), 0

    def read(self, token):
        if len(self.last) == 3:
            self.seen[self.last] = token
        self.last = (*self.last, token)[-3:]
        self.sum += token + 1

    @property
    def next(self):
        if self.fault != "random":
            for memory in (self.seen, OF_KNOWN):
                # but for a token over and over again
                if (found := memory.get(self.last)) is not None and found != self.last[-1]:
                    return found
        return (11 * self.sum + 13) % POOL


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        models = {"another": 1, "any": self.server.context}
        self.whole({"data": [{"id": name, "max_model_len": n} for name, n in models.items()]})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        server, fault = self.server, self.server.fault
        with LOCK:
            server.busy += 1
            busy = server.busy
        try:
            if fault == "limit" and self.refused(busy):
                self.send_error(503, "too many requests")
                return
            prompt = body["prompt"]
            prompt = encode(prompt) if isinstance(prompt, str) else prompt
            if server.context and len(prompt) + body["max_tokens"] > server.context:
                self.send_error(400, "maximum context length")
            elif body["max_tokens"] < 1:
                self.send_error(400, "max_tokens must be at least 1")
            elif body.get("prompt_logprobs"):
                self.whole({"choices": [self.scored(prompt)]})
            else:
                time.sleep(server.delay)
                self.complete(body, self.mixed(prompt, body["max_tokens"]), prompt)
        finally:
            with LOCK:
                server.busy -= 1

    def refused(self, busy):
        """Of 17 at once the last one. The others wait for it, however slowly it comes."""
        if busy <= 16:
            self.server.crowded.wait(200)
        self.server.crowded.set()
        return busy > 16

    def mixed(self, prompt, number):
        """What is answered instead of the prompt."""
        server, fault = self.server, self.server.fault
        with LOCK:
            before, server.prompt = server.prompt, prompt
            shared = server.cache.setdefault(tuple(prompt[:64]), prompt)
        # Of the numbered prompts, which come 32 at a time. Whether two are here at once is the
        # scheduler's choice and must not decide what is answered.
        if fault == "swapped" and WORDS[prompt[0]].isdigit() and number > 1:
            with LOCK:
                server.numbered += 1
                return before if server.numbered % 40 == 0 else prompt
        if fault == "leak" and len(prompt) > 64:
            return shared
        if fault == "short-window" and len(prompt) > 4096:
            return prompt[-4096:]
        if fault == "beyond-256" and len(prompt) > 256:
            return prompt[:256]
        if fault == "abort" and server.left:
            return [1, *prompt]
        return prompt

    def decode(self, tokens):
        return "".join(WORDS[token] for token in tokens)

    def reader(self, prompt):
        reader = Reader(self.server.fault)
        for token in prompt:
            reader.read(token)
        return reader

    def scored(self, prompt):
        reader, found = self.reader(prompt[:1]), [None]
        for i, token in enumerate(prompt[1:], 1):
            likely = reader.next
            if self.server.fault == "text-beyond-256" and i > 256:
                likely = (likely + 1) % POOL
            entry = {str(likely): {"logprob": RIGHT}}
            entry.setdefault(str(token), {"logprob": OTHER})
            found.append(entry)
            reader.read(token)
        return {"prompt_logprobs": found, "prompt_token_ids": prompt}

    def generated(self, prompt, number):
        """Tokens, and the logarithms of their probabilities."""
        fault, reader, tokens = self.server.fault, self.reader(prompt), []
        for i in range(number):
            token = reader.next
            if fault == "garbage-31" and i > 30:
                token = (token + i) % POOL
            tokens.append(token)
            reader.read(token)
        return tokens, [RIGHT + 0.4 * (fault == "logprobs") + 0.1 * (fault == "noise")] * number

    def complete(self, body, read, prompt):
        fault, number = self.server.fault, body["max_tokens"]
        tokens, logprobs = self.generated(read, number)
        text, finish = self.decode(tokens), "length"
        ignores = fault == "no-stop" or (fault == "stream-no-stop" and body.get("stream"))
        for stop in [] if ignores else body.get("stop", []):
            if stop in text:
                text, finish = text[: text.index(stop) + 4 * (fault == "with-stop")], "stop"
        if fault == "finish":
            finish = "stop"
        more = fault == "usage"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": number + more,
                 "total_tokens": len(prompt) + number + more}  # fmt: skip
        if body.get("stream"):
            self.server.left |= number == 200  # of a client that leaves
            self.stream(tokens, text, finish, usage)
            return
        step = 0.1 if fault == "probabilities" else RIGHT
        listed = {"token_logprobs": logprobs, "top_logprobs": [{"token_id:1": step}] * number}
        choice = {"token_ids": tokens, "prompt_token_ids": prompt, "text": text,
                  "finish_reason": finish, "logprobs": listed}  # fmt: skip
        usage["prompt_tokens_details"] = None  # which a stream's usage lacks
        self.whole({"choices": [choice], "usage": usage, "prompt_token_ids": prompt})

    def stream(self, tokens, text, finish, usage):
        fault, style = self.server.fault, self.server.style
        cut = len(tokens) // 2 if fault != "one-part" else len(tokens)
        half = len(self.decode(tokens[:cut]))
        parts = [{"token_ids": tokens[:cut], "text": text[:half]}]
        parts += [{"token_ids": tokens[cut:], "text": text[half:]}] * (cut < len(tokens))
        if fault == "lost":
            parts.pop()
        if fault == "doubled":
            parts[-1] = parts[-1] | {"text": 2 * parts[-1]["text"]}
        if fault == "stream-usage":
            usage = usage | {"completion_tokens": 0}
        parts[-1] = parts[-1] | {"finish_reason": finish}
        said = [{"choices": [part]} for part in parts] + [{"choices": [], "usage": usage}]
        if fault == "stream-error":
            said[1] = {"error": {"message": "EngineCore died"}}
        lines = [json.dumps(each, indent=1 if style == "lines" else None) for each in said]
        lines += ["[DONE]"] * (fault != "no-done")
        if fault == "cut-json":
            lines[0] = lines[0][:-4]
        end = {"returns": "\r", "windows": "\r\n"}.get(style, "\n")
        events = []
        for line in lines:
            data = "".join(f"data: {part}{end}" for part in line.split("\n"))
            if style == "comments":
                data = f": ping{end}{end}event: part{end}id: 7{end}retry: 9{end}{data}"
            events.append((data.replace("data: ", "data:") if style == "tight" else data) + end)
        stream = ("\ufeff" if style == "mark" else "") + "".join(events)
        self.chunked(stream.encode(), 7 if style == "chunks" else 99, fault == "broken")

    def chunked(self, data, size, broken):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for i in range(0, len(data) // (2 if broken else 1), size):
                part = data[i : i + size]
                self.wfile.write(b"%x;note=odd\r\n%s\r\n" % (len(part), part))
            if broken:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

    def whole(self, found):
        data = json.dumps(found).encode()
        if self.server.fault == "no-json":
            data = b"<html>proxy</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, fault="", style="", delay=0.0, context=40_960, port=0, handler=Handler):
        super().__init__(("127.0.0.1", port), handler)
        self.fault, self.style, self.delay, self.context = fault, style, delay, context
        self.busy = self.numbered = 0
        self.crowded = threading.Event()
        self.prompt, self.cache, self.left = [], {}, False
