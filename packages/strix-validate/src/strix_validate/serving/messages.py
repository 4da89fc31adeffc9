# SPDX-License-Identifier: BSD-3-Clause
"""Client of /v1/chat/completions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, NEUTRAL, Endpoint, Generation, Refused

CHAT = "/v1/chat/completions"
#: The parameter that turns thinking off, in chat templates that have this parameter. Other
#: templates ignore it.
_NO_THINKING = {"enable_thinking": False}


@dataclass(frozen=True)
class Reply:
    """An answer of a chat.

    Attributes:
        prompt: Token ids of the filled-in template; empty in a stream, or if the server gives no
            ids.
        tokens: Token ids of the answer, thoughts and end token included; empty if the server gives
            no ids.
        logprobs: Log probability of each token; empty in a stream.
        content: Text of the message; None if the server sends null.
        reasoning: Thoughts that a parser separated from the message.
        calls: Tool calls, each with a function's name and arguments.
        finish: Reason for the end.
        usage: Values of COUNTS.
        parts: How many parts of a stream contain content, thoughts or calls; 0 without a stream.
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
        """The answer in the form of an answer of /v1/completions."""
        return Generation(
            prompt=self.prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            text=self.content or "",
            finish=self.finish,
            usage=self.usage,
        )


def chat(
    server: Endpoint,
    messages: Sequence[dict],
    number: int,
    **parameters,
) -> Reply:
    """Return the greedy answer to messages.

    Args:
        server: The server.
        messages: Messages of the chat, each with a role and content.
        number: Maximum number of tokens of the answer.
        **parameters: Further keys of the request.

    Raises:
        CannotRun: The server has no chat, or the model has no chat template.
    """
    body = _body(messages, number)
    body |= {"logprobs": True, "top_logprobs": 1}
    body |= parameters
    answer = _ask(server, body)
    choice = (answer.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    entries = (choice.get("logprobs") or {}).get("content") or []
    return Reply(
        prompt=answer.get("prompt_token_ids") or [],
        tokens=choice.get("token_ids") or [],
        logprobs=[float(entry["logprob"]) for entry in entries],
        content=message.get("content"),
        reasoning=_reasoning(message),
        calls=[_read_call(call) for call in message.get("tool_calls") or []],
        finish=choice.get("finish_reason") or "",
        usage=_counts(answer),
    )


def stream_chat(
    server: Endpoint,
    messages: Sequence[dict],
    number: int,
    **parameters,
) -> Reply:
    """Return the answer as :func:`chat` does, put together from the parts of a stream."""
    body = _body(messages, number)
    body |= parameters
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = _StreamedReply()
    for part in server.stream_events(CHAT, {"model": server.model, **body}):
        if part.get("usage"):
            reply.usage = _counts(part)
        for choice in part.get("choices") or []:
            reply.add(choice)
    try:
        calls = [_read_call({"function": call}) for _, call in sorted(reply.calls.items())]
    except CheckFailed as error:
        raise CheckFailed(f"tool calls of a streamed chat: {error}") from error
    content = "".join(reply.content) if reply.content else None
    return Reply(
        prompt=[],
        tokens=reply.tokens,
        logprobs=[],
        content=content,
        reasoning="".join(reply.reasoning),
        calls=calls,
        finish=reply.finish,
        usage=reply.usage,
        parts=reply.parts,
    )


@dataclass
class _StreamedReply:
    """A reply that is put together from the parts of a stream; see Reply for the attributes.

    Attributes:
        content: The pieces of the message.
        reasoning: The pieces of the thoughts.
        calls: Name and arguments of each tool call, by its index.
    """

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
        content = delta.get("content")
        reasoning = _reasoning(delta)
        calls = delta.get("tool_calls") or []
        self.tokens += choice.get("token_ids") or []
        if content:
            self.content.append(content)
        if reasoning:
            self.reasoning.append(reasoning)
        self.finish = choice.get("finish_reason") or self.finish
        if content or reasoning or calls:
            self.parts += 1
        for call in calls:
            self._add_call(call)

    def _add_call(self, call: dict) -> None:
        index = call.get("index", 0)
        full_call = self.calls.setdefault(index, {"name": "", "arguments": ""})
        part = call.get("function") or {}
        for key in full_call:
            full_call[key] += part.get(key) or ""


def _reasoning(message: dict) -> str:
    """Return a message's thoughts. Their key differs between versions of vLLM."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _body(messages: Sequence[dict], number: int) -> dict:
    return {
        "messages": list(messages),
        "max_tokens": number,
        "temperature": 0,
        "return_token_ids": True,
        "chat_template_kwargs": _NO_THINKING,
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
    """Return a tool call's name and arguments.

    Raises:
        CheckFailed: The call has no function, or its arguments are not JSON.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        raise CheckFailed(f"a tool call has no function: {json.dumps(call):.200}")
    text = function.get("arguments")
    require(isinstance(text, str), f"arguments of a tool call are no string of JSON: {text!r:.200}")
    try:
        arguments = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"arguments of a tool call are not JSON: {text!r:.200}") from error
    return {"name": function.get("name"), "arguments": arguments}


def _counts(answer: dict) -> dict:
    usage = answer.get("usage") or {}
    return {name: usage.get(name) for name in COUNTS}
