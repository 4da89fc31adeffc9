# SPDX-License-Identifier: BSD-3-Clause
"""A running server with OpenAI's interface and vLLM's additions, as a client sees it."""

import contextlib
import http.client
import io
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from strix_validate import limits
from strix_validate.checks import CannotRun, CheckFailed
from strix_validate.serving.web import open_url

#: Seconds without a byte after which a request has failed. A slow server that reads a long prompt
#: is silent for as long, so this is an hour: it finds servers that hang, not slow ones.
LIMIT = 3600.0
#: Sampling parameters that change nothing. A model's generation_config.json may have others, which
#: vLLM takes where a request says nothing.
NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: What a server says that it used, of OpenAI's API.
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class Refused(CheckFailed):
    """A server answered a request with an HTTP error.

    Attributes:
        code: The HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code = code


class Silent(CheckFailed):
    """A server sent nothing for longer than the limit."""


@dataclass(frozen=True)
class Generation:
    """An answer: tokens as ids, log probabilities of each, and COUNTS.

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
        return self._open(path, limit, json.dumps({"model": self.model, **body}).encode())

    def _open(self, path: str, limit: float, data: bytes | None = None):
        request = urllib.request.Request(
            f"{self.url.rstrip('/').removesuffix('/v1')}{path}",
            data,
            {"Content-Type": "application/json", **_authorization()},
        )
        try:
            return open_url(request, limit)
        except urllib.error.HTTPError as error:
            text = error.read(limits.ERROR).decode(errors="replace")[:300]
            raise Refused(error.code, text) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise Silent(f"{self.url} sent nothing for {limit:.0f} s") from error
            raise CheckFailed(f"{self.url} does not answer: {error}") from error

    def ask(self, path: str, body: dict, limit: float = LIMIT) -> dict:
        """Return the whole answer to a request; raise CheckFailed if there is none."""
        with self.post(path, body, limit) as answer, _readable():
            return json.loads(limits.read_answer(answer, self.url))

    def metrics(self) -> str:
        """Return the server's counters in Prometheus' format; empty if it has none."""
        try:
            with self._open("/metrics", LIMIT) as answer, _readable():
                return limits.read_answer(answer, self.url).decode(errors="replace")
        except Refused:
            return ""

    def block_size(self) -> int:
        """Return the tokens of the largest block of the cache; 0 if the server does not say."""
        sizes = re.findall(
            r'\b(?:mamba_|effective_attention_)?block_size="(\d+)"',
            "".join(re.findall(r"^vllm:cache_config_info\{.*", self.metrics(), re.M)),
        )
        return max(map(int, sizes), default=0)

    def count(self, name: str) -> float | None:
        """Return the sum of a counter over engines; None if the server does not count it."""
        values = re.findall(rf"^{name}(?:_total)?(?:\{{.*\}})? ([-+.\w]+)$", self.metrics(), re.M)
        return sum(map(float, values)) if values else None

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; empty if the server has no way."""
        try:
            return self.ask("/detokenize", {"tokens": list(tokens)}).get("prompt") or ""
        except Refused:
            return ""

    def context(self) -> int:
        """Return how many tokens the model takes, as the server lists it; 0 if it does not say."""
        with self._open("/v1/models", LIMIT) as answer, _readable():
            listed = json.loads(limits.read_answer(answer, self.url)).get("data") or []
        own = [entry for entry in listed if entry.get("id") == self.model]
        return int((own or listed or [{}])[0].get("max_model_len") or 0)

    def generate(
        self, prompt: str | list[int], number: int = 24, limit: float = LIMIT, **more
    ) -> Generation:
        """Generate greedy tokens after a prompt.

        Raises:
            CannotRun: the server gives no token ids, as vLLM does.
        """
        return self.generate_choices(prompt, number, limit, **more)[0]

    def generate_choices(
        self, prompt: str | list[int], number: int, limit: float = LIMIT, **more
    ) -> list[Generation]:
        """Generate likewise, and return all choices, each with the usage of the whole answer."""
        answer = self.ask("/v1/completions", _request(prompt, number, **more), limit)
        usage = _counts(answer.get("usage") or {})
        return [_read_choice(choice, usage) for choice in answer.get("choices") or [{}]]

    def stream(self, prompt: str | list[int], number: int = 24, **more) -> Generation:
        """Generate likewise, in parts. Raise CheckFailed if the last one is not [DONE]."""
        begin, text, finish = time.perf_counter(), "", ""
        tokens: list[int] = []
        times: list[float] = []
        usage: dict = {}
        for part in self.stream_parts(prompt, number, **more):
            usage = part.get("usage") or usage
            for choice in part.get("choices") or []:
                tokens += choice.get("token_ids") or []
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
                times.append(time.perf_counter() - begin)
        return Generation([], tokens, [], text, finish, _counts(usage), seconds=tuple(times))

    def stream_parts(self, prompt: str | list[int], number: int, **more) -> Generator[dict]:
        """Yield the parts of a streamed answer. Raise CheckFailed for a stream without an end."""
        body = _request(prompt, number, stream=True, stream_options={"include_usage": True}, **more)
        yield from self.events_of("/v1/completions", body)

    def events_of(self, path: str, body: dict) -> Generator[dict]:
        """Yield the parts of a streamed answer. Raise CheckFailed for a stream without an end."""
        with self.post(path, body) as answer, _readable():
            # any line ends, a byte order mark, and letters cut in two by the chunks of HTTP
            lines = limits.read_lines(io.TextIOWrapper(answer, encoding="utf-8-sig"), self.url)
            for data in events(lines):
                if data == "[DONE]":
                    return
                part = json.loads(data)
                if part.get("error"):
                    raise CheckFailed(f"the stream says: {str(part['error'])[:300]}")
                yield part
        raise CheckFailed("the stream ended without [DONE]")

    def score(
        self, prompt: str | list[int], tokens: list[int] | None = None, listed: int = 1
    ) -> "Scores":
        """Score the tokens after a prompt, or those of the prompt itself but for the first.

        listed: how many tokens are listed at each place.
        """
        whole = prompt if tokens is None else [*prompt, *tokens]
        body = _request(whole, 1, prompt_logprobs=listed)
        choice = (self.ask("/v1/completions", body).get("choices") or [{}])[0]
        found = choice.get("prompt_logprobs")
        if not found:
            raise CannotRun("the server returns no log probabilities of a prompt")
        if tokens is None:
            prompt, tokens = [0], (choice.get("prompt_token_ids") or [])[1:]
        entries = found[len(prompt) :]
        pairs = list(zip(map(str, tokens), entries, strict=False))
        if len(entries) != len(tokens) or any(token not in entry for token, entry in pairs):
            raise CheckFailed("the log probabilities of a prompt are not those of its tokens")
        return Scores(
            [entry[token]["logprob"] for token, entry in pairs],
            [max(each["logprob"] for each in entry.values()) for entry in entries],
            [{int(token): each["logprob"] for token, each in entry.items()} for entry in entries],
        )


@dataclass(frozen=True)
class Scores:
    """Of each token its log probability, that of the likeliest one there, and all listed ones."""

    own: list[float]
    best: list[float]
    listed: list[dict[int, float]] = field(default_factory=list)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn what can go wrong while an answer is read into CheckFailed."""
    try:
        yield
    except TimeoutError as error:
        raise Silent(f"the answer stood still: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise CheckFailed(f"the answer broke off: {type(error).__name__} {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"the answer is not JSON in UTF-8: {error}") from error


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of each event of a stream, as the HTML standard has it (9.2.6).

    A comment begins with a colon, other fields are not asked for, and an event may have several
    lines of data.
    """
    data: list[str] = []
    for line in lines:
        name, _, value = line.rstrip("\n").partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line.strip() and data:
            yield "\n".join(data)
            data = []
    if data:  # some servers leave out the last empty line
        yield "\n".join(data)


def _authorization() -> dict[str, str]:
    """Return the header that gives a server its key, $OPENAI_API_KEY, as OpenAI's clients do."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read_choice(choice: dict, usage: dict) -> Generation:
    if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
        raise CannotRun("the server does not return token ids, as vLLM 0.10.2 and newer do")
    logprobs = choice.get("logprobs") or {}
    return Generation(
        choice["prompt_token_ids"],
        choice["token_ids"],
        logprobs.get("token_logprobs") or [],
        choice.get("text") or "",
        choice.get("finish_reason") or "",
        usage,
        logprobs.get("top_logprobs") or [],
    )


def _request(prompt: str | list[int], number: int, **more) -> dict:
    return {
        "prompt": prompt, "max_tokens": number, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True, **NEUTRAL,
        **({} if more.get("stream") else {"logprobs": 1}), **more,
    }  # fmt: skip


def _counts(usage: dict) -> dict:
    """Pick the three counts; vLLM adds `prompt_tokens_details`, but not to each kind of answer."""
    return {name: usage.get(name) for name in COUNTS}
