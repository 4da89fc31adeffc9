# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether a server's chat returns tool calls in tool_calls, and follows a JSON schema."""

import json
import re

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.chats import (
    BEGIN,
    END,
    answer_limit,
    find,
    judge_reply_stream,
    judge_reply_usage,
    require_content,
    tokenize,
)
from strix_validate.serving.endpoint import Endpoint, Refused
from strix_validate.serving.judges import require_room
from strix_validate.serving.messages import Reply, chat

#: Tokens that the server's context must have for the check of tools: half for the prompt, which
#: contains the tool, and half for the answer.
_TOOLS_CONTEXT = 1024
#: A tool whose name no text has by chance.
TOOL = "look_up_tide_table"
#: The permitted values of each argument of the tool. The lists are short, so that the model's
#: answer ends.
_ARGUMENTS: dict[str, list] = {"harbour": ["Bergen", "Oslo", "Lisbon"], "day": [1, 2, 3]}
_PARAMETERS: dict = {
    "type": "object",
    "properties": {
        "harbour": {"type": "string", "enum": _ARGUMENTS["harbour"]},
        "day": {"type": "integer", "enum": _ARGUMENTS["day"]},
    },
    "required": ["harbour", "day"],
    "additionalProperties": False,
}
_TOOLS: list[dict] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Return the times of high water of a harbour.",
            "parameters": _PARAMETERS,
            "strict": True,
        },
    }
]
ASK_TOOL = [{"role": "user", "content": "When is high water in Bergen on day 2? Use the tool."}]
#: A tool_choice that names the tool.
_NAMED = {"type": "function", "function": {"name": TOOL}}
#: A pattern of a call that a model wrote and that no parser separated from the text.
_CALL_AS_TEXT = re.compile(
    rf"(?:[\"'=<.>\uff5c\]]\s*{TOOL}|{TOOL}\s*(?:[\"'({{\[<\uff5c>]|json|```))"
    r".*harbour[\"']?\s*[:=>]",
    re.S,
)
#: A text with characters of two to four bytes, which a faulty stream may split.
UNICODE = "naïve 日本語 🙂🦭 Ωмега"
_SCHEMA: dict = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "enum": [UNICODE]},
        "number": {"type": "integer", "enum": [3, 5, 7]},
    },
    "required": ["text", "number"],
    "additionalProperties": False,
}
ASK_SCHEMA = [{"role": "user", "content": "Describe the weather in one sentence of English."}]


def judge_tools(server: Endpoint) -> dict:
    """Require that a tool call is in tool_calls, and that a tool's result reaches the model.

    Raises:
        CannotRun: The context is too short; or the model does not end its tool call; or the server
            takes no tools, for example because it was started without a parser of tool calls.
    """
    require_room(server, _TOOLS_CONTEXT)
    limit = answer_limit(server)
    named = _call(server, _NAMED, limit)
    schema = _judge_calls(server, named, "a named tool_choice")
    require(named.finish in ("stop", "tool_calls"), f"finish_reason is {named.finish!r}")
    judge_reply_usage(named, limit)
    judge_reply_stream(
        server,
        ASK_TOOL,
        named,
        limit,
        tools=_TOOLS,
        tool_choice=_NAMED,
    )
    automatic = _call(server, "auto", limit)
    text = f"{automatic.content or ''}\n{automatic.reasoning}"
    require(
        automatic.calls or automatic.finish == "length" or not _CALL_AS_TEXT.search(text),
        f"a tool call came as text, not as tool_calls: {text.strip()!r:.120}",
    )
    if automatic.calls:
        schema = _judge_calls(server, automatic, "tool_choice auto")
        finish = automatic.finish
        require(finish == "tool_calls", f"finish_reason of a call is {finish!r}")
        judge_reply_stream(
            server,
            ASK_TOOL,
            automatic,
            limit,
            tools=_TOOLS,
            tool_choice="auto",
        )
    forbidden = _call(server, "none", limit)
    require(not forbidden.calls, "tool_choice is none, but a tool is called")
    return {
        "auto": "called" if automatic.calls else "not called",
        "schema": schema,
        "result": _judge_result(server, named),
    }


def _call(server: Endpoint, choice: object, limit: int) -> Reply:
    try:
        return chat(server, ASK_TOOL, limit, tools=_TOOLS, tool_choice=choice)
    except Refused as error:
        if "parser" in str(error) or "tool" in str(error):
            raise CannotRun(f"the server takes no tools: {error}") from error
        raise


def _judge_calls(server: Endpoint, reply: Reply, about: str) -> str:
    """Require calls of TOOL and no other tool; return whether arguments follow its schema.

    A weak model may break the schema, because some of vLLM's parsers do not enforce it. But an
    argument that the model's tokens contain must not be missing in the call.
    """
    if reply.finish == "length":
        raise CannotRun(f"the model does not end its tool call in {reply.written} tokens")
    text = f"{reply.content or ''}{reply.reasoning}".strip()
    require(reply.calls, f"no tool_calls with {about}: the answer is text, {text!r:.120}")
    verdict = "kept"
    for call in reply.calls:
        require(
            call["name"] == TOOL,
            f"the model calls the tool {call['name']!r:.80}, but the only tool is {TOOL}",
        )
        if _follows_schema(call["arguments"]):
            continue
        verdict = "broken by the model"
        written = server.detokenize(reply.tokens) if reply.tokens else ""
        arguments = json.dumps(call["arguments"])
        lost = [name for name in _ARGUMENTS if name in written and name not in arguments]
        require(
            not lost,
            f"a tool call loses {', '.join(lost)}: {arguments:.80}, but the model wrote "
            f"{written!r:.80}",
        )
    return verdict


def _follows_schema(arguments: object) -> bool:
    if not isinstance(arguments, dict) or arguments.keys() != _ARGUMENTS.keys():
        return False
    return all(arguments[name] in values for name, values in _ARGUMENTS.items())


def _judge_result(server: Endpoint, reply: Reply) -> str:
    """Require that a tool's result is in the next prompt, if the template has tools.

    Args:
        server: The server.
        reply: An answer with a call of the tool.

    Returns:
        Whether the result is in the prompt, or why that cannot be judged.
    """
    # An invented result. The model would not write it by itself.
    result = "High water is at the word periwinkle, and no more."
    arguments = json.dumps(reply.calls[0]["arguments"])
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": TOOL, "arguments": arguments},
    }
    messages: list[dict] = [
        *ASK_TOOL,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
        },
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": TOOL,
            "content": result,
        },
    ]
    try:
        following = chat(server, messages, 1, tools=_TOOLS)
    except Refused as error:
        return f"refused: {error}"
    without_tools = chat(server, ASK_TOOL, 1)
    if reply.read <= without_tools.read:
        return "the chat template has no tools"
    if not following.prompt:
        return "not judged: the server gives no token ids"
    inside = tokenize(server, result)[BEGIN:-END]
    require(find(following.prompt, inside) >= 0, "the result of a tool is not in the chat's prompt")
    return "in the prompt"


def judge_schema(server: Endpoint) -> dict:
    """Require that an answer follows a JSON schema, and that a stream does not break its letters.

    Raises:
        CannotRun: The server accepts no schema, or the model does not end its answer.
    """
    limit = answer_limit(server)
    json_schema = {"name": "answer", "schema": _SCHEMA, "strict": True}
    response_format = {"type": "json_schema", "json_schema": json_schema}
    try:
        reply = chat(
            server,
            ASK_SCHEMA,
            limit,
            response_format=response_format,
        )
    except Refused as error:
        raise CannotRun(f"the server takes no JSON schema: {error}") from error
    content = reply.content or ""
    begins_json = content.lstrip()[:1] in ("", "{")
    if reply.finish == "length" and begins_json:
        raise CannotRun(f"the model does not end its JSON in {reply.written} tokens")
    require_content(reply)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"the JSON schema is ignored: {reply.content!r:.120}") from error
    properties = _SCHEMA["properties"]
    require(
        isinstance(answer, dict)
        and answer.keys() == properties.keys()
        and all(answer[name] in rule["enum"] for name, rule in properties.items()),
        f"the answer breaks the JSON schema: {reply.content!r:.120}",
    )
    judge_reply_stream(
        server,
        ASK_SCHEMA,
        reply,
        limit,
        response_format=response_format,
    )
    return {"tokens": reply.written}
