# SPDX-License-Identifier: BSD-3-Clause
"""A running server of vLLM, looked at from outside: is it consistent with itself, and how fast?

No reference model is needed. What a server generates step by step is given back to it as one
prompt, whose log probabilities come from other kernels: prefill, not decoding.
"""

import json
import os
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from strix_validate.checks import CannotRun, CheckFailed, require

#: Requests at a time.
LOADS = (1, 4, 16)
#: Of a log probability between prefill and decoding, and between alone and in a batch: sums have
#: another order, in 16 bits.
_BOUND = 0.3
#: Seconds that a request may take, and those after an aborted one.
LIMIT, _AFTER_ABORT = 300.0, 60.0
#: What a server says that it used, of OpenAI's API.
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_SUBJECTS = (
    "A tide, a violin, photosynthesis, the printing press, a glacier, bread, the compass, cement, "
    "an eclipse, the monsoon, a honeybee, paper, a volcano, the loom, rust, an orchard"
)
PROMPTS = tuple(
    f"In one long paragraph, the causes and the consequences of {subject}:"
    for subject in _SUBJECTS.split(", ")
)


@dataclass(frozen=True)
class Generation:
    """An answer: tokens as ids, log probabilities of each, and _COUNTS.

    seconds: from the request to each part of a stream.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    usage: dict
    top: list[dict[str, float]] = field(default_factory=list)
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A server. url: without /v1."""

    url: str
    model: str

    def post(self, path: str, body: dict, limit: float = LIMIT):
        """Send a request; return the open answer. Raise CheckFailed with what an error says."""
        request = urllib.request.Request(
            f"{self.url.rstrip('/').removesuffix('/v1')}{path}",
            json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json", **_authorization()},
        )
        try:
            return urllib.request.urlopen(request, timeout=limit)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise CheckFailed(f"HTTP {error.code}: {text}") from error
        except OSError as error:
            raise CheckFailed(f"{self.url} does not answer: {error}") from error

    def generate(
        self, prompt: str | list[int], number: int = 24, limit: float = LIMIT, **more
    ) -> Generation:
        """Generate greedy tokens after a prompt.

        Raises:
            CannotRun: the server gives no token ids, as vLLM does.
        """
        with self.post("/v1/completions", _request(prompt, number, **more), limit) as answer:
            found = json.load(answer)
        choice = found["choices"][0]
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
            raise CannotRun(
                "the server does not return token ids: it is no vLLM of 0.10.2 or newer"
            )
        logprobs = choice.get("logprobs") or {}
        return Generation(
            choice["prompt_token_ids"],
            choice["token_ids"],
            logprobs.get("token_logprobs") or [],
            choice.get("text") or "",
            choice.get("finish_reason") or "",
            _counts(found.get("usage") or {}),
            logprobs.get("top_logprobs") or [],
        )

    def stream(self, prompt: str | list[int], number: int = 24, **more) -> Generation:
        """Generate likewise, in parts. Raise CheckFailed if the last one is not [DONE]."""
        body = _request(prompt, number, stream=True, stream_options={"include_usage": True}, **more)
        begin, text, finish = time.perf_counter(), "", ""
        tokens: list[int] = []
        times: list[float] = []
        usage: dict = {}
        for part in self.parts("/v1/completions", body):
            usage = part.get("usage") or usage
            for choice in part["choices"]:
                tokens += choice.get("token_ids") or []
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
                times.append(time.perf_counter() - begin)
        return Generation([], tokens, [], text, finish, _counts(usage), seconds=tuple(times))

    def parts(self, path: str, body: dict) -> Iterator[dict]:
        """Yield the parts of a streamed answer. Raise CheckFailed for a stream without an end."""
        with self.post(path, body) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        raise CheckFailed("the stream ended without [DONE]")

    def score(self, prompt: list[int], tokens: list[int]) -> tuple[list[float], list[float]]:
        """Return each later token's log probability, and that of the likeliest one there."""
        body = _request([*prompt, *tokens], 1, prompt_logprobs=1)
        with self.post("/v1/completions", body) as answer:
            found = json.load(answer)["choices"][0].get("prompt_logprobs")
        if not found:
            raise CannotRun("the server returns no log probabilities of a prompt")
        own = [
            [entry[str(token)]["logprob"], max(each["logprob"] for each in entry.values())]
            for token, entry in zip(tokens, found[len(prompt) :], strict=True)
        ]
        return [pair[0] for pair in own], [pair[1] for pair in own]


def _authorization() -> dict[str, str]:
    """Return the header that gives a server its key, $OPENAI_API_KEY, as OpenAI's clients do."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _request(prompt: str | list[int], number: int, **more) -> dict:
    return {
        "prompt": prompt, "max_tokens": number, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
        **({} if more.get("stream") else {"logprobs": 1}), **more,
    }  # fmt: skip


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference of two lists of numbers.

    Raise CheckFailed where their lengths differ, or one is no number.
    """
    require(len(first) == len(second), f"{len(first)} log probabilities of {len(second)} tokens")
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    require(all(x == x for x in differences), "a log probability is not a number")
    return max(differences, default=0.0)


def judge_greedy(server: Endpoint, found: Generation, bound: float = _BOUND) -> dict:
    """Require that what was generated is what the server's own prefill finds likeliest.

    Raise CheckFailed otherwise. Near ties may fall either way.
    """
    scored, best = server.score(found.prompt, found.tokens)
    short = max((b - s for s, b in zip(scored, best, strict=True)), default=0.0)
    require(short <= bound, f"a token is less likely than another by {short:.2f}, {bound} allowed")
    error = largest_difference(found.logprobs, scored)
    require(error <= bound, f"decoding and prefill differ by {error:.2f}, {bound} is allowed")
    return {
        "logprobs": {"error": error, "bound": bound},
        "greedy": {"error": short, "bound": bound},
    }


def _counts(usage: dict) -> dict:
    """Pick the three counts; vLLM adds `prompt_tokens_details`, but not to each kind of answer."""
    return {name: usage.get(name) for name in _COUNTS}


def judge_usage(found: Generation, number: int) -> dict:
    """Require that tokens are counted, and the end is said to be the limit's."""
    require(len(found.tokens) == number, f"{len(found.tokens)} tokens, {number} were asked for")
    counts = (len(found.prompt), number, len(found.prompt) + number)
    expected = dict(zip(_COUNTS, counts, strict=True))
    require(found.usage == expected, f"usage says {found.usage}, right is {expected}")
    return found.usage


def judge_finish(found: Generation, expected: str) -> dict:
    """Return the reason for the end, if it is the right one; else raise CheckFailed."""
    require(found.finish == expected, f"finish_reason is {found.finish!r}, right is {expected!r}")
    return {"finish_reason": found.finish}


def judge_probabilities(found: Generation) -> dict:
    """Require that in no step the listed probabilities exceed one."""
    require(found.top, "no log probabilities of other tokens")
    sums = [sum(2.718281828459045**value for value in step.values()) for step in found.top]
    require(max(sums) <= 1.001, f"probabilities sum to {max(sums):.4f}")
    return {"largest_sum": max(sums), "least_sum": min(sums)}


def judge_together(
    server: Endpoint, prompts: Sequence, load: int, number: int = 24, bound: float = _BOUND
) -> dict:
    """Require that each of several requests at a time gets its own answer."""
    with ThreadPoolExecutor(load) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt, number), prompts))
    worst = 0.0
    for prompt, found in zip(prompts, together, strict=True):
        alone = server.generate(prompt, 1)
        require(found.prompt == alone.prompt, "a request was answered for another one's prompt")
        worst = max(worst, judge_greedy(server, found, bound)["logprobs"]["error"])
    return {"logprobs": {"error": worst, "bound": bound}, "requests": len(together)}


def judge_stream(server: Endpoint, prompt, number: int = 24) -> dict:
    """Require that a stream has the same text, tokens and usage, in parts."""
    whole, parts = server.generate(prompt, number), server.stream(prompt, number)
    for name in ("tokens", "text", "finish", "usage"):
        first, second = getattr(whole, name), getattr(parts, name)
        require(first == second, f"{name} of a stream: {str(second)[:80]}, else {str(first)[:80]}")
    require(len(parts.seconds) > 1, "all tokens came in one part")
    return {"parts": len(parts.seconds)}


def judge_abort(server: Endpoint, prompt, number: int = 24, bound: float = _BOUND) -> dict:
    """Require that after a client that left, the next one gets a right answer in time."""
    body = _request(prompt, 200, stream=True)
    next(server.parts("/v1/completions", body)).get("choices")
    begin = time.perf_counter()
    found = server.generate(prompt, number, _AFTER_ABORT)
    judge_greedy(server, found, bound)
    return {"next_seconds": round(time.perf_counter() - begin, 2)}


def measure(server: Endpoint, load: int, prompts: Sequence, number: int = 64) -> dict:
    """Measure the time to the first token, and tokens a second, of so many requests at a time.

    Other prompts each time: what a prefix cache holds would take no time.
    """
    numbered = [f"{time.time_ns()} {prompts[i % len(prompts)]}" for i in range(load)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        found = list(pool.map(lambda prompt: server.stream(prompt, number), numbered))
    taken = time.perf_counter() - begin
    require(all(each.seconds for each in found), "a stream had no tokens")
    return {
        "first_token_ms": 1e3 * statistics.median(each.seconds[0] for each in found),
        "tokens_per_second": sum(len(each.tokens) for each in found) / taken,
        "requests": load,
    }
