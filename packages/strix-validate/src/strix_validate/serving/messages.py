# SPDX-License-Identifier: BSD-3-Clause
"""/v1/chat/completions as a client sees it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, NEUTRAL, Endpoint, Generation, Refused

CHAT = "/v1/chat/completions"
#: Tells templates that know it to leave out the thinking; others ignore it.
_BRIEF = {"enable_thinking": False}


@dataclass(frozen=True)
class Reply:
    """An answer of a chat.

    Attributes:
        prompt: Token ids of the filled-in template; empty in a stream, and of servers without them.
        tokens: Token ids of the answer, thoughts and end token included; likewise.
        logprobs: Log probability of each token; empty in a stream.
        content: Text of the message; None if the server sends null.
        reasoning: Thoughts that a parser took out of the message.
        calls: Tool calls, each with a function's name and arguments.
        finish: Reason for the end.
        usage: COUNTS.
        parts: Number of parts of a stream with content, thoughts or calls.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    content: str | None
    reasoning: str
    calls: list[dict]
    finish: str
    usage: dict
    parts: int = 0

    @property
    def written(self) -> int:
        """Number of tokens of the answer."""
        return len(self.tokens) or int(self.usage.get("completion_tokens") or 0)

    @property
    def read(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt) or int(self.usage.get("prompt_tokens") or 0)

    @property
    def generation(self) -> Generation:
        """The answer as one of /v1/completions."""
        return Generation(
            self.prompt, self.tokens, self.logprobs, self.content or "", self.finish, self.usage
        )


def chat(server: Endpoint, messages: Sequence[dict], number: int, **more) -> Reply:
    """Return the greedy answer to messages.

    Raises:
        CannotRun: the server has no chat.
    """
    body = _body(messages, number) | {"logprobs": True, "top_logprobs": 1} | more
    answer = _ask(server, body)
    choice = (answer.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    entries = (choice.get("logprobs") or {}).get("content") or []
    return Reply(
        answer.get("prompt_token_ids") or [],
        choice.get("token_ids") or [],
        [float(entry["logprob"]) for entry in entries],
        message.get("content"),
        message.get("reasoning") or message.get("reasoning_content") or "",
        [_read_call(call) for call in message.get("tool_calls") or []],
        choice.get("finish_reason") or "",
        _counts(answer),
    )


def stream_chat(server: Endpoint, messages: Sequence[dict], number: int, **more) -> Reply:
    """Return the answer likewise, put together from the parts of a stream."""
    body = _body(messages, number) | more
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    whole = _Parts()
    for part in server.events_of(CHAT, {"model": server.model, **body}):
        whole.usage = _counts(part) if part.get("usage") else whole.usage
        for choice in part.get("choices") or []:
            whole.add(choice)
    content = "".join(whole.content) if whole.content else None
    try:
        calls = [_read_call({"function": call}) for _, call in sorted(whole.calls.items())]
    except CheckFailed as error:
        raise CheckFailed(f"tool calls of a streamed chat: {error}") from error
    return Reply(
        [], whole.tokens, [], content, "".join(whole.reasoning), calls, whole.finish, whole.usage,
        whole.parts,
    )  # fmt: skip


@dataclass
class _Parts:
    tokens: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict] = field(default_factory=dict)
    finish: str = ""
    usage: dict = field(default_factory=dict)
    parts: int = 0

    def add(self, choice: dict) -> None:
        """Add a part of the stream."""
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.tokens += choice.get("token_ids") or []
        self.content += [delta["content"]] if delta.get("content") else []
        self.reasoning += [thought] if thought else []
        self.finish = choice.get("finish_reason") or self.finish
        self.parts += bool(delta.get("content") or thought or delta.get("tool_calls"))
        for call in delta.get("tool_calls") or []:
            function = self.calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
            for name in function:
                function[name] += (call.get("function") or {}).get(name) or ""


def _body(messages: Sequence[dict], number: int) -> dict:
    return {
        "messages": list(messages),
        "max_tokens": number,
        "temperature": 0,
        "return_token_ids": True,
        "chat_template_kwargs": _BRIEF,
        **NEUTRAL,
    }


def _ask(server: Endpoint, body: dict) -> dict:
    try:
        return server.ask(CHAT, body)
    except Refused as error:
        if error.code in (404, 405, 501):
            raise CannotRun(f"the server has no chat: {error}") from error
        if "chat template" in str(error):
            raise CannotRun(f"the model has no chat template: {error}") from error
        raise


def _read_call(call: dict) -> dict:
    """Return a call's name and arguments. Raise CheckFailed where it has another form."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise CheckFailed(f"a tool call has no function: {json.dumps(call):.200}")
    name, text = function.get("name"), function.get("arguments")
    require(isinstance(text, str), f"arguments of a tool call are no string of JSON: {text!r:.200}")
    try:
        arguments = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"arguments of a tool call are not JSON: {text!r:.200}") from error
    return {"name": name, "arguments": arguments}


def _counts(answer: dict) -> dict:
    usage = answer.get("usage") or {}
    return {name: usage.get(name) for name in COUNTS}
