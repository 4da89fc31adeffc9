# SPDX-License-Identifier: BSD-3-Clause
"""A mock of a user's server with a trained model, correct or with a fault.

After three tokens, the model predicts the token that followed these tokens before, in the prompt or
in a known text. If they never occurred before, the model computes the next token from the sum of
all tokens. A token is a word or a punctuation mark. Chats, tools and schemas are in
trained_chat.py.
"""

import contextlib
import functools
import itertools
import json
import math
import random
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from strix_validate.serving import judges

V = 32_000
#: Probabilities of the four likeliest tokens, and of all other tokens together.
SHARES, OTHERS_SHARE = (0.5, 0.25, 0.125, 0.0625), 0.0625
RIGHT = math.log(SHARES[0])
OTHER = math.log(OTHERS_SHARE / (V - len(SHARES)))
#: Probabilities of the four likeliest tokens of a server whose two likeliest tokens are nearly
#: tied.
TIED = (0.38, 0.37, 0.125, 0.0625)
#: Number of likeliest tokens that are listed one by one; all other tokens are one group.
LISTED = 20
#: Numbers of tokens of a prompt above which the faults `hybrid` and `drafts-cache` have an effect.
#: Each fault tells prompts apart only by this number of their first tokens.
HYBRID = 1600
DRAFTED = 512
#: How many tokens at the end of the context a fault spoils.
END = 64
#: The keys of requests, which are parameters of OpenAI's or vLLM's API. A strict server refuses
#: other keys.
KEYS = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "n",
    "stop",
    "ignore_eos",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "response_format",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "tokens",
    "add_generation_prompt",
}
WORDS: list[str] = []
IDS: dict[str, int] = {}
LOCK = threading.Lock()


@functools.cache  # each server gets the same prompts of 32,768 tokens
def encode(text):
    words = re.findall(r"\s?\w+|\s?[^\w\s]|\s", text)
    with LOCK:
        for word in words:
            if word not in IDS:
                IDS[word] = len(WORDS)
                WORDS.append(word)
    return [IDS[word] for word in words]


KNOWN = encode(judges.read_known_text())
POOL = len(WORDS)
KNOWN_SUCCESSORS = {tuple(KNOWN[i : i + 3]): KNOWN[i + 3] for i in range(len(KNOWN) - 3)}


class Reader:
    """Reads tokens one by one; `next` is the likeliest next token."""

    def __init__(self, fault):
        self.fault = fault
        self.successors = {}  # by three tokens: the token that followed them
        self.last = ()
        self.sum = 0

    def read(self, token):
        if len(self.last) == 3:
            self.successors[self.last] = token
        self.last = (*self.last, token)[-3:]
        self.sum += token + 1

    @property
    def next(self):
        if self.fault != "random":
            for successors in (self.successors, KNOWN_SUCCESSORS):
                token = successors.get(self.last)
                # The model must not repeat one token forever.
                if token is not None and token != self.last[-1]:
                    if self.fault == "drafts-alike" and self.sum % 7 == 0:
                        return (
                            token + 1
                        ) % POOL  # prefill uses this property, so it agrees with decoding
                    return token
        return (11 * self.sum + 13) % POOL


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        if self.path == "/metrics":
            lines = [f'vllm:cache_config_info{{block_size="{server.block}",engine="0"}} 1.0']
            if server.drafts:
                name = "vllm:spec_decode_num_draft_tokens_total"
                lines.append(f'{name}{{engine="0"}} {server.generated}.0')
            self.send_data("\n".join(lines).encode())
            return
        models = {"another": 1, "any": server.context}
        self.send_json({"data": [{"id": name, "max_model_len": n} for name, n in models.items()]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        unknown = sorted(body.keys() - KEYS)
        if unknown:
            self.send_error(400, f"unknown parameters: {' '.join(unknown)}")
        elif self.path == "/detokenize":
            self.send_json({"prompt": self.decode(body["tokens"])})
        elif self.path == "/tokenize":
            self.send_json({"tokens": self.apply_template(body, body["add_generation_prompt"])})
        else:
            self.answer(body)

    def apply_template(self, body, opened=True):
        """Return the tokens of a chat. trained_chat implements this."""
        raise NotImplementedError

    def answer(self, body):
        server = self.server
        fault = self.server.fault
        with LOCK:
            server.busy += 1
            busy = server.busy
        try:
            if fault == "limit" and self.is_refused(busy):
                self.send_error(503, "too many requests")
                return
            if "prompt" not in body:
                time.sleep(server.delay)
                self.chat(body)
                return
            prompt = body["prompt"]
            prompt = encode(prompt) if isinstance(prompt, str) else prompt
            with LOCK:
                server.read += len(prompt)
            if server.context and len(prompt) + body["max_tokens"] > server.context:
                self.send_error(400, "maximum context length")
            elif body["max_tokens"] < 1:
                self.send_error(400, "max_tokens must be at least 1")
            elif server.drafts and (body.get("min_p") or body.get("logit_bias")):
                self.send_error(400, "min_p and logit_bias are not supported with drafts")
            elif body.get("prompt_logprobs"):
                self.send_json({"choices": [self.score(prompt, body["prompt_logprobs"])]})
            else:
                time.sleep(server.delay)
                self.complete(body, self.replace_prompt(prompt, body["max_tokens"]), prompt)
        finally:
            with LOCK:
                server.busy -= 1

    def is_refused(self, busy):
        """Return whether this request is the last of 17 at once. The other 16 wait for it."""
        if busy <= 16:
            self.server.crowded.wait(200)
        self.server.crowded.set()
        return busy > 16

    def replace_prompt(self, prompt, number):
        """Return the prompt that is answered: with some faults, not the request's own prompt."""
        server = self.server
        fault = self.server.fault
        with LOCK:
            shared = server.cache.setdefault(tuple(prompt[:64]), prompt)
        # The check sends 32 numbered prompts at a time. The fault must not depend on which prompts
        # are here at once, because the scheduler decides this.
        if fault == "swapped" and WORDS[prompt[0]].isdigit() and number > 1:
            with LOCK:
                server.numbered.append(prompt)
                if len(server.numbered) % 40:
                    return prompt
                # Each prompt comes twice, so the previous prompt may be the same.
                return next(p for p in reversed(server.numbered) if p != prompt)
        if fault == "leak" and len(prompt) > 64:
            return shared
        if fault == "hybrid" and len(prompt) > HYBRID:
            with LOCK:
                return server.states.setdefault(tuple(prompt[:HYBRID]), prompt)
        if fault == "drafts-cache" and len(prompt) > DRAFTED:
            with LOCK:  # the fault: from the third time on, a prompt loses its last token
                server.sights[tuple(prompt[:DRAFTED])] += 1
                count = server.sights[tuple(prompt[:DRAFTED])]
            return prompt[:-1] if count > 2 else prompt
        if fault == "twins" and WORDS[prompt[0]].isdigit() and number > 1:
            with LOCK:  # the check sends each numbered prompt as two equal requests at once
                server.sights[tuple(prompt)] += 1
                return prompt if server.sights[tuple(prompt)] % 2 else [7, *prompt[::-1]]
        if fault == "long-swapped" and len(prompt) > 2000 and number > 1:
            with LOCK:
                before = server.long or prompt
                server.long = prompt
            return before
        if fault == "pairs-swapped" and len(prompt) > 8000 and number == 12:
            return self.exchange(prompt)
        if fault == "short-window" and len(prompt) > 4096:
            return prompt[-4096:]
        if fault == "beyond-256" and len(prompt) > 256:
            return prompt[:256]
        if fault == "abort" and server.has_abort:
            return [1, *prompt]
        return prompt

    def exchange(self, prompt):
        """Wait for another prompt and return it. Each request then gets the other's answer."""
        waiting = self.server.waiting
        with waiting:
            pair = self.server.pairs[-1]
            if len(pair) == 2:
                pair = []
                self.server.pairs.append(pair)
            pair.append(prompt)
            place = len(pair) - 1
            waiting.notify_all()
            waiting.wait_for(lambda: len(pair) == 2, self.server.patience)
        return pair[1 - place] if len(pair) == 2 else prompt

    def decode(self, tokens):
        return "".join(WORDS[token] for token in tokens)

    def reader(self, prompt):
        reader = Reader(self.server.fault)
        for token in prompt:
            reader.read(token)
        return reader

    def rank_tokens(self, reader, number=LISTED):
        """Return the likeliest tokens with their log probabilities."""
        shares = TIED if self.server.style == "ties" else SHARES
        likely = reader.next
        logprobs = {likely: math.log(shares[0])}
        steps = itertools.count(1)
        while len(logprobs) < number:
            value = math.log(shares[len(logprobs)]) if len(logprobs) < len(shares) else OTHER
            logprobs.setdefault((likely + 101 * next(steps)) % POOL, value)
        return logprobs

    def score(self, prompt, number=1):
        reader = self.reader(prompt[:1])
        prompt_logprobs = [None]
        for i, token in enumerate(prompt[1:], 1):
            logprobs = self.rank_tokens(reader, max(number, len(SHARES)))
            is_late = i >= self.server.context - END
            if (self.server.fault == "text-beyond-256" and i > 256) or (
                self.server.fault in ("context-scores", "context-unread") and is_late
            ):
                logprobs = {(key + 1) % POOL: value for key, value in logprobs.items()}
            listed = dict(itertools.islice(logprobs.items(), number))
            listed[token] = logprobs.get(token, OTHER)
            prompt_logprobs.append({str(key): {"logprob": x} for key, x in listed.items()})
            reader.read(token)
        return {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": prompt}

    def generate(self, prompt, number):
        """Return greedy tokens, and their log probabilities."""
        fault = self.server.fault
        reader = self.reader(prompt)
        tokens = []
        logprobs = []
        for i in range(number):
            token = self.take_tie(reader, prompt, i)
            likely = token == reader.next
            if (fault == "garbage-31" and i > 30) or (fault == "garbage-513" and i >= 512):
                token = (token + i) % POOL
            place = len(prompt) + i
            context = self.server.context
            if fault == "context-garbage" and place >= context - END:
                token = (token + place) % POOL
            if fault == "context-unread" and place >= context - END:
                # Scores have the same fault, so that decoding and prefill agree.
                token = (token + 1) % POOL
            tokens.append(token)
            logprob = RIGHT
            if self.server.style == "ties":
                logprob = math.log(TIED[0] if likely else TIED[1])
            if fault == "context-logprobs" and place >= context - END:
                logprob = -9.0
            logprobs.append(logprob + 0.4 * (fault == "logprobs") + 0.1 * (fault == "noise"))
            reader.read(token)
        return tokens, logprobs

    def take_tie(self, reader, prompt, place):
        """Return the likeliest token.

        A server with ties returns the tied token once for the second of three equal requests.
        """
        server = self.server
        if server.style != "ties" or place != 5:
            return reader.next
        with LOCK:
            server.sights[tuple(prompt)] += 1
            is_second = server.sights[tuple(prompt)] % 3 == 2
        return list(self.rank_tokens(reader))[1 if is_second else 0]

    def sample(self, prompt, number, body, choice):
        """Return drawn tokens, or at temperature 0 the likeliest after penalties and biases.

        Each token has the log probability RIGHT.
        """
        fault = self.server.fault
        server = self.server
        seed = 5 if fault == "seed-constant" else body.get("seed")
        if fault == "seed-ignored":
            with LOCK:
                server.seeds += 1
                seed = server.seeds
        generator = random.Random(f"{seed} {0 if fault == 'n-equal' else choice}")
        reader = self.reader(prompt)
        tokens = []
        for _ in range(number):
            weights = self.weights(reader, prompt, tokens, body)
            token = max(weights, key=weights.__getitem__)
            if body["temperature"]:
                (token,) = generator.choices(list(weights), list(weights.values()))
            if token < 0:  # -1 stands for all tokens without a weight of their own
                token = generator.randrange(POOL)
            tokens.append(token)
            reader.read(token)
        return tokens, [RIGHT] * number

    def weights(self, reader, prompt, tokens, body):
        """Return the weights with which tokens are drawn, after penalties, biases and truncation.

        The key -1 has the weight of all tokens that are not listed.
        """
        fault = self.server.fault
        parameters = {name: value for name, value in body.items() if f"{name}-ignored" != fault}
        counts = Counter(tokens)
        logits = self.rank_tokens(reader)
        unlisted = (token for token in range(POOL) if token not in counts and token not in logits)
        logits[next(unlisted)] = OTHER
        for token, bias in (parameters.get("logit_bias") or {}).items():
            logits[int(token)] = logits.get(int(token), OTHER) + bias
        for token in logits:
            logits[token] -= parameters.get("frequency_penalty", 0) * counts[token]
            logits[token] -= parameters.get("presence_penalty", 0) * (counts[token] > 0)
            if token in counts or token in prompt:
                logits[token] *= parameters.get("repetition_penalty", 1)
        temperature = parameters.get("temperature") or 1
        if fault == "temperature-ignored":
            temperature = 1
        ranked = sorted(logits, key=lambda token: -logits[token])
        weights = {token: math.exp(logits[token] / temperature) for token in ranked}
        weights[-1] = (V - len(weights)) * math.exp(OTHER / temperature)
        if parameters.get("top_k", -1) > 0:
            weights = dict(itertools.islice(weights.items(), parameters["top_k"]))
        total = sum(weights.values())
        selected = {}
        before = 0.0
        for token, weight in weights.items():
            max_weight = max(weights.values()) if token != -1 else math.inf
            if (
                before < parameters.get("top_p", 1.0)
                and weight >= parameters.get("min_p", 0.0) * max_weight
            ):
                selected[token] = weight
            before += weight / total
        if fault == "greedy":
            return dict(itertools.islice(selected.items(), 1))
        return selected

    def complete(self, body, read, prompt):
        fault = self.server.fault
        number = body["max_tokens"]
        number += fault == "one-more"
        neutral = body["temperature"] == 0 and not body.get("logit_bias")
        neutral = neutral and not body.get("frequency_penalty") and not body.get("presence_penalty")
        neutral = neutral and body.get("repetition_penalty", 1) == 1
        choices = []
        for i in range(1 if fault == "n-one" else body.get("n", 1)):
            if neutral:
                tokens, logprobs = self.generate(read, number)
            else:
                tokens, logprobs = self.sample(read, number, body, i)
            choices.append(self.choice(body, tokens, logprobs, prompt))
        with LOCK:
            self.server.generated += number * len(choices)
        written = number * (1 if fault == "usage-n" else len(choices)) + (fault == "usage")
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": written,
            "total_tokens": len(prompt) + written,
        }
        if body.get("stream"):
            # The check of aborted requests asks for 200 tokens, and its client disconnects.
            self.server.has_abort |= number == 200
            first = choices[0]
            self.stream(first["token_ids"], first["text"], first["finish_reason"], usage)
            return
        usage["prompt_tokens_details"] = None  # not in the usage of a stream
        self.send_json({"choices": choices, "usage": usage, "prompt_token_ids": prompt})

    def choice(self, body, tokens, logprobs, prompt):
        fault = self.server.fault
        text = self.decode(tokens)
        finish = "length"
        ignores = fault == "no-stop" or (fault == "stream-no-stop" and body.get("stream"))
        for stop in [] if ignores else body.get("stop", []):
            if stop in text:
                text = text[: text.index(stop) + 4 * (fault == "with-stop")]
                finish = "stop"
        if fault == "finish":
            finish = "stop"
        if fault == "echo":
            text = self.decode(prompt) + text
        reader = self.reader(prompt)
        top = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            listed = dict(
                itertools.islice(self.rank_tokens(reader).items(), body.get("logprobs", 1))
            )
            listed[token] = logprob
            if fault == "probabilities":
                listed = dict.fromkeys(listed, -0.1)
            if fault == "raw-logits":
                listed = {key: value - 3.0 for key, value in listed.items()}
            if fault == "positive-logits":
                listed = {key: value + 12.0 for key, value in listed.items()}
            if fault == "other-listed":
                listed = {key if key == token else key + 1: v for key, v in listed.items()}
            top.append({f"token_id:{key}": value for key, value in listed.items()})
            reader.read(token)
        listed = {"token_logprobs": logprobs, "top_logprobs": top}
        return {
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "text": text,
            "finish_reason": finish,
            "logprobs": listed,
        }

    def stream(self, tokens, text, finish, usage):
        fault = self.server.fault
        style = self.server.style
        cut = len(tokens) // 2 if fault != "one-part" else len(tokens)
        half = len(self.decode(tokens[:cut]))
        if fault == "letters" and not text.isascii():
            place = next(i for i, letter in enumerate(text) if not letter.isascii())
            text = f"{text[:place]}\ufffd\ufffd{text[place + 1 :]}"
        parts = [{"token_ids": tokens[:cut], "text": text[:half]}]
        parts += [{"token_ids": tokens[cut:], "text": text[half:]}] * (cut < len(tokens))
        if fault == "lost":
            parts.pop()
        if fault == "doubled":
            parts[-1] = parts[-1] | {"text": 2 * parts[-1]["text"]}
        if fault == "stream-usage":
            usage = usage | {"completion_tokens": 0}
        parts[-1] = parts[-1] | {"finish_reason": finish}
        events_data = [{"choices": [part]} for part in parts] + [{"choices": [], "usage": usage}]
        if fault == "stream-error":
            events_data[1] = {"error": {"message": "EngineCore died"}}
        indent = 1 if style == "lines" else None
        lines = [json.dumps(event, indent=indent) for event in events_data]
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

    def chat(self, body):
        """Answer a chat. trained_chat implements this."""
        self.send_error(404)

    def send_json(self, content):
        data = json.dumps(content).encode()
        self.send_data(b"<html>proxy</html>" if self.server.fault == "no-json" else data)

    def send_data(self, data):
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

    def __init__(
        self,
        fault="",
        style="",
        delay=0.0,
        context=40_960,
        port=0,
        handler=Handler,
        block=16,
        drafts=False,
    ):
        super().__init__(("127.0.0.1", port), handler)
        self.fault = fault
        self.style = style
        self.delay = delay
        self.context = context
        self.block = block
        self.drafts = drafts
        self.patience = 200
        self.busy = 0
        self.read = 0
        self.generated = 0
        self.seeds = 0
        self.numbered = []
        self.crowded = threading.Event()
        self.waiting = threading.Condition()
        self.cache = {}
        self.has_abort = False
        self.long = []
        self.states = {}
        self.sights = Counter()
        self.pairs = [[]]
