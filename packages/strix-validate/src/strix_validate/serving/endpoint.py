# SPDX-License-Identifier: BSD-3-Clause
"""Client of a running server with OpenAI's API and vLLM's additions."""

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
from typing import Any

from strix_validate import limits
from strix_validate.checks import CannotRun, CheckFailed
from strix_validate.serving.web import open_url

#: Seconds without a byte after which a request fails. A slow server sends nothing while it reads a
#: long prompt, so the limit is an hour: it detects servers that hang, not slow ones.
LIMIT = 3600.0
#: Sampling parameters that change nothing. A request states them, because vLLM otherwise uses those
#: of the model's generation_config.json.
NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: Keys of an answer's `usage` in OpenAI's API.
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_COMPLETIONS = "/v1/completions"


class Refused(CheckFailed):
    """A server answered a request with an HTTP error.

    Attributes:
        code: The HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code = code


class Silent(CheckFailed):
    """A server sent nothing for longer than the time limit of the request."""


@dataclass(frozen=True)
class Generation:
    """An answer of /v1/completions.

    Attributes:
        prompt: Token ids of the prompt; empty in a stream.
        tokens: Token ids of the answer.
        logprobs: Log probability of each token of the answer, in nats; empty in a stream.
        text: Text of the answer.
        finish: Reason for the end ("finish_reason").
        usage: Values of COUNTS.
        top: Log probabilities of the listed tokens of each step, by "token_id:N".
        seconds: Times from the request to each part of a stream.
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
    """A server.

    Attributes:
        url: The server's address, with or without /v1.
        model: The model's name on the server.
    """

    url: str
    model: str

    @property
    def base(self) -> str:
        """The server's address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def post(self, path: str, body: dict, limit: float = LIMIT):
        """Send a request and return the open HTTP response.

        Raises:
            CheckFailed: The server does not answer, or answers with an error, whose text is in the
                message.
        """
        data = json.dumps({"model": self.model, **body}).encode()
        return self._open(path, limit, data)

    def _open(self, path: str, limit: float, data: bytes | None = None):
        headers = {"Content-Type": "application/json", **_authorization()}
        request = urllib.request.Request(f"{self.base}{path}", data, headers)
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
        """Return the whole answer to a request.

        Raises:
            CheckFailed: There is no complete answer.
        """
        with self.post(path, body, limit) as answer, _convert_errors():
            return self._read_json(answer)

    def _read_json(self, answer: Any) -> dict:
        value = json.loads(limits.read_response(answer, self.url))
        if not isinstance(value, dict):
            raise CheckFailed(f"{self.url} sent JSON that is no object: is this server vLLM?")
        return value

    def metrics(self) -> str:
        """Return the server's counters in Prometheus' format; empty if it has none."""
        try:
            with self._open("/metrics", LIMIT) as answer, _convert_errors():
                return limits.read_response(answer, self.url).decode(errors="replace")
        except Refused:
            return ""

    def block_size(self) -> int:
        """Return how many tokens the largest cache block has; 0 if the server does not list it."""
        lines = re.findall(r"^vllm:cache_config_info\{.*", self.metrics(), re.M)
        sizes = re.findall(
            r'\b(?:mamba_|effective_attention_)?block_size="(\d+)"',
            "".join(lines),
        )
        return max(map(int, sizes), default=0)

    def count(self, name: str) -> float | None:
        """Return the sum of a counter over engines; None if the server does not count it."""
        pattern = rf"^{name}(?:_total)?(?:\{{.*\}})? ([-+.\w]+)$"
        values = re.findall(pattern, self.metrics(), re.M)
        if not values:
            return None
        return sum(map(float, values))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones; empty if the server cannot do this."""
        try:
            answer = self.ask("/detokenize", {"tokens": list(tokens)})
        except Refused:
            return ""
        return answer.get("prompt") or ""

    def context(self) -> int:
        """Return how many tokens the model accepts; 0 if the server does not list it."""
        with self._open("/v1/models", LIMIT) as answer, _convert_errors():
            models = self._read_json(answer).get("data") or []
        same_name = [entry for entry in models if entry.get("id") == self.model]
        candidates = same_name or models
        if not candidates:
            return 0
        return int(candidates[0].get("max_model_len") or 0)

    def generate(
        self,
        prompt: str | list[int],
        number: int = 24,
        limit: float = LIMIT,
        **parameters,
    ) -> Generation:
        """Generate greedy tokens after a prompt.

        Args:
            prompt: Text or token ids.
            number: Tokens to generate.
            limit: Seconds to wait for a byte.
            **parameters: Further keys of the request, such as sampling parameters.

        Raises:
            CannotRun: The server, unlike vLLM, does not return token ids.
        """
        return self.generate_choices(prompt, number, limit, **parameters)[0]

    def generate_choices(
        self,
        prompt: str | list[int],
        number: int,
        limit: float = LIMIT,
        **parameters,
    ) -> list[Generation]:
        """Generate as :meth:`generate` does, and return all choices.

        Each choice has the usage of the whole answer.
        """
        request = _request(prompt, number, **parameters)
        answer = self.ask(_COMPLETIONS, request, limit)
        usage = _counts(answer.get("usage") or {})
        choices = answer.get("choices") or [{}]
        return [_read_choice(choice, usage) for choice in choices]

    def stream(
        self,
        prompt: str | list[int],
        number: int = 24,
        **parameters,
    ) -> Generation:
        """Generate as :meth:`generate` does, in parts.

        Raises:
            CheckFailed: The stream reports an error, or does not end with [DONE].
        """
        begin = time.perf_counter()
        text = ""
        finish = ""
        tokens: list[int] = []
        times: list[float] = []
        usage: dict = {}
        for part in self.stream_parts(prompt, number, **parameters):
            usage = part.get("usage") or usage
            for choice in part.get("choices") or []:
                tokens += choice.get("token_ids") or []
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
                times.append(time.perf_counter() - begin)
        return Generation(
            [],
            tokens,
            [],
            text,
            finish,
            _counts(usage),
            seconds=tuple(times),
        )

    def stream_parts(self, prompt: str | list[int], number: int, **parameters) -> Generator[dict]:
        """Yield the parts of a streamed answer.

        Raises:
            CheckFailed: The stream reports an error, or does not end with [DONE].
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        request = _request(prompt, number, **options, **parameters)
        yield from self.stream_events(_COMPLETIONS, request)

    def stream_events(self, path: str, body: dict) -> Generator[dict]:
        """Yield the parts of the streamed answer to any request.

        Raises:
            CheckFailed: The stream reports an error, or does not end with [DONE].
        """
        with self.post(path, body) as answer, _convert_errors():
            # this wrapper accepts any line ends, a byte order mark, and letters cut in two by HTTP
            # chunks
            text = io.TextIOWrapper(answer, encoding="utf-8-sig")
            for data in events(limits.read_lines(text, self.url)):
                if data == "[DONE]":
                    return
                part = json.loads(data)
                if part.get("error"):
                    raise CheckFailed(f"the stream says: {str(part['error'])[:300]}")
                yield part
        raise CheckFailed("the stream ended without [DONE]")

    def score(
        self,
        prompt: str | list[int],
        tokens: list[int] | None = None,
        listed: int = 1,
    ) -> "Scores":
        """Score tokens with the server's prefill.

        Args:
            prompt: Text or token ids; token ids if `tokens` is given.
            tokens: Tokens after the prompt. If None, the prompt's own tokens except the first are
                scored.
            listed: How many of the likeliest tokens are listed at each place.

        Raises:
            CannotRun: The server returns no log probabilities of a prompt.
        """
        full_prompt = prompt if tokens is None else [*prompt, *tokens]
        request = _request(full_prompt, 1, prompt_logprobs=listed)
        answer = self.ask(_COMPLETIONS, request)
        choice = (answer.get("choices") or [{}])[0]
        entries = choice.get("prompt_logprobs")
        if not entries:
            raise CannotRun("the server returns no log probabilities of a prompt")
        if tokens is None:
            tokens = (choice.get("prompt_token_ids") or [])[1:]
            entries = entries[1:]
        else:
            entries = entries[len(prompt) :]
        return _read_scores(tokens, entries)


@dataclass(frozen=True)
class Scores:
    """Log probabilities at each position of a text, in nats.

    Attributes:
        logprobs: Log probability of the token at the position.
        best: Log probability of the likeliest token.
        listed: Log probability of each listed token, by its id.
    """

    logprobs: list[float]
    best: list[float]
    listed: list[dict[int, float]] = field(default_factory=list)


def _read_scores(tokens: Sequence[int], entries: Sequence[dict]) -> Scores:
    """Return the scores of tokens.

    Args:
        tokens: Token ids.
        entries: The server's `prompt_logprobs` of each token.

    Raises:
        CheckFailed: The entries do not belong to the tokens.
    """
    fits = len(entries) == len(tokens) and all(
        str(token) in entry for token, entry in zip(tokens, entries, strict=True)
    )
    if not fits:
        raise CheckFailed("the log probabilities of a prompt are not those of its tokens")
    logprobs = []
    best = []
    listed = []
    for token, entry in zip(tokens, entries, strict=True):
        values = {int(name): value["logprob"] for name, value in entry.items()}
        logprobs.append(values[int(token)])
        best.append(max(values.values()))
        listed.append(values)
    return Scores(logprobs, best, listed)


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Turn errors of reading an answer into CheckFailed."""
    try:
        yield
    except TimeoutError as error:
        raise Silent(f"the answer stopped: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise CheckFailed(f"the answer broke off: {type(error).__name__} {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"the answer is not JSON in UTF-8: {error}") from error


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of each event of a stream, as the HTML standard defines it (9.2.6).

    A comment begins with a colon, fields other than data are ignored, and an event may have several
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
    """Return the header with a server's key, $OPENAI_API_KEY, as OpenAI's clients send it."""
    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    return {"Authorization": f"Bearer {key}"}


def _read_choice(choice: dict, usage: dict) -> Generation:
    tokens = choice.get("token_ids")
    prompt = choice.get("prompt_token_ids")
    if tokens is None or prompt is None:
        raise CannotRun("the server does not return token ids, as vLLM 0.10.2 and newer do")
    logprobs = choice.get("logprobs") or {}
    return Generation(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs.get("token_logprobs") or [],
        text=choice.get("text") or "",
        finish=choice.get("finish_reason") or "",
        usage=usage,
        top=logprobs.get("top_logprobs") or [],
    )


def _request(prompt: str | list[int], number: int, **parameters) -> dict:
    request = {
        "prompt": prompt,
        "max_tokens": number,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **NEUTRAL,
    }
    if not parameters.get("stream"):
        request["logprobs"] = 1
    return request | parameters


def _counts(usage: dict) -> dict:
    """Return the three counts; vLLM adds `prompt_tokens_details` to some kinds of answers only."""
    return {name: usage.get(name) for name in COUNTS}
