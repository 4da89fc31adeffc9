# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether a server's chat applies the template, and answers with a string.

The content of answers is not judged. These checks examine which tokens the server passes to the
model for a chat, whether the answer has the form that clients rely on, and whether the model's
prefill finds the answer's tokens likeliest.
"""

from collections.abc import Mapping, Sequence

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, Endpoint, Refused
from strix_validate.serving.judges import judge_greedy
from strix_validate.serving.messages import Reply, chat, stream_chat

#: Maximum tokens of an answer, which may begin with thoughts.
ANSWER = 1024
#: Number of tokens of a short answer.
_SHORT = 48
#: The word that each message of the chat contains, by the name of the message.
_WORDS = {
    "system": "tamarind",
    "user": "marmoset",
    "assistant": "obsidian",
    "last": "periwinkle",
}
#: Contents of the messages. All begin and end with the same words, so any difference between the
#: tokens that surround two contents comes from the template.
_CONTENTS = {
    name: f"Now hear this: the word is {word}, and no more." for name, word in _WORDS.items()
}
#: How many tokens at the beginning and at the end of a message may merge with tokens of the
#: template.
BEGIN = 3
END = 1
QUESTION = "What is the capital of France? Answer with the name of the city alone."
#: An answer with this many letters must be streamed in several parts. A shorter one may come in one
#: part, since several drafted tokens are sent together.
_LETTERS_OF_A_PART = 100
#: The fault that is reported if the prompt lacks a message, by the name of the message.
_MISSING_MESSAGES = {
    "system": "the system message is dropped",
    "user": "the first turn of the user is forgotten",
    "assistant": "the turn of the assistant is forgotten",
    "last": "the last turn of the user is dropped",
}


def judge_chat(server: Endpoint) -> dict:
    """Require that the template includes each message of a chat and tells the roles apart.

    Raises:
        CannotRun: The server has no chat, or the model has no template.
    """
    history = []
    for name, content in _CONTENTS.items():
        role = "user" if name == "last" else name
        history.append({"role": role, "content": content})
    refusal = ""
    try:
        reply = chat(server, history, _SHORT, ignore_eos=True)
    except Refused as error:  # a template may refuse a system message, so it is left out
        refusal = str(error)
        history = history[1:]
        reply = chat(server, history, _SHORT, ignore_eos=True)
    if not reply.prompt:
        return _judge_counts(server, history, reply)
    contents = dict(_CONTENTS)
    if refusal:
        del contents["system"]
    _require_messages(server, contents, reply)
    _require_opened_turn(server, history, reply)
    judge_reply_usage(reply, _SHORT)
    measured = judge_greedy(server, reply.generation, about="in a chat ")
    measured["tokens"] = len(reply.prompt)
    if refusal:
        measured["system"] = refusal
    return measured


def _require_messages(
    server: Endpoint,
    contents: Mapping[str, str],
    reply: Reply,
) -> None:
    """Require that a chat's prompt contains the contents in order, and tells the roles apart.

    Args:
        server: The server.
        contents: Contents of the messages by key of _CONTENTS.
        reply: The answer, with the tokens of its prompt.
    """
    starts = {}
    ends = {}
    for name, content in contents.items():
        inside = tokenize(server, content)[BEGIN:-END]
        starts[name] = find(reply.prompt, inside)
        ends[name] = starts[name] + len(inside)
    missing = [_MISSING_MESSAGES[name] for name, start in starts.items() if start < 0]
    require(not missing, f"the chat's prompt lacks a message: {', '.join(missing)}")
    require(
        starts["user"] < starts["assistant"] < starts["last"],
        "the turns of the chat are not in their order",
    )
    before_assistant = reply.prompt[ends["user"] : starts["assistant"]]
    before_user = reply.prompt[ends["assistant"] : starts["last"]]
    require(
        before_assistant != before_user,
        "the chat template is not applied: the prompt does not tell the user from the assistant",
    )


def _judge_counts(server: Endpoint, history: Sequence[dict], reply: Reply) -> dict:
    """Judge the template by counts of tokens, for a server that returns no token ids of a chat."""
    judge_reply_usage(reply, _SHORT)
    edges = BEGIN + END
    sizes = [len(tokenize(server, message["content"])) - edges for message in history]
    for i, size in enumerate(sizes):
        # templates may require alternating turns, so the message is shortened and not removed
        shorter = list(history)
        shorter[i] = history[i] | {"content": "No."}
        added = reply.read - chat(server, shorter, 1).read
        require(
            added > size // 2,
            f"the {history[i]['role']}'s message is dropped from a chat: it adds {added} of its "
            f"{size} tokens to the prompt",
        )
    first = tokenize(server, "Again")
    second = tokenize(server, "Below")
    has_begin_token = len(first) > 1 and first[0] == second[0]
    content_tokens = sum(size + edges - has_begin_token for size in sizes)
    template_tokens = reply.read - content_tokens
    require(
        template_tokens > len(history),
        f"the chat template is not applied: besides the contents of {len(history)} messages, the "
        f"prompt has only {template_tokens} tokens",
    )
    return {"tokens": reply.read}


def _require_opened_turn(
    server: Endpoint,
    messages: Sequence[dict],
    reply: Reply,
) -> None:
    """Require that the prompt opens the assistant's turn, if the template can do so."""
    prompts = {}
    for is_opened in (True, False):
        body = {"messages": list(messages), "add_generation_prompt": is_opened}
        try:
            prompts[is_opened] = server.ask("/tokenize", body).get("tokens")
        except Refused:
            return
    require(
        prompts[True] == prompts[False] or reply.prompt != prompts[False],
        "the chat's prompt does not open the assistant's turn (add_generation_prompt)",
    )


def answer_limit(server: Endpoint) -> int:
    """Return how many tokens an answer of a chat may have: ANSWER, or half of a short context."""
    context = server.context()
    if not context:
        return ANSWER
    return min(ANSWER, context // 2)


def tokenize(server: Endpoint, text: str) -> list[int]:
    """Return the tokens of a text, including those that the server puts before each prompt."""
    return server.generate(text, 1).prompt


def find(tokens: Sequence[int], part: Sequence[int]) -> int:
    """Return the index at which a list of tokens contains another list; -1 if it does not."""
    part = list(part)
    for i in range(len(tokens) - len(part) + 1):
        if list(tokens[i : i + len(part)]) == part:
            return i
    return -1


def judge_reply_usage(reply: Reply, number: int) -> None:
    """Require that a chat's tokens are counted correctly, and that max_tokens is respected."""
    written = reply.written
    require(written <= number, f"a chat's answer has {written} tokens, but max_tokens is {number}")
    require(
        reply.finish != "length" or written == number,
        f"finish_reason is 'length' after {written} tokens of a chat, but max_tokens is {number}",
    )
    counts = (reply.read, written, reply.read + written)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(reply.usage == expected, f"usage of a chat says {reply.usage}, expected {expected}")
    require(reply.read > 0, f"usage of a chat counts no tokens of its prompt: {reply.usage}")


def judge_chat_answer(server: Endpoint) -> dict:
    """Require that a chat's answer is a string, with the same text and counts in a stream.

    Raises:
        CannotRun: The model thinks for longer than the limit.
    """
    limit = answer_limit(server)
    messages = [{"role": "user", "content": QUESTION}]
    _judge_limits(server, messages)
    reply = chat(server, messages, limit)
    judge_reply_usage(reply, limit)
    if reply.prompt:
        judge_greedy(server, reply.generation, about="in a chat ")
    require_content(reply)
    content = reply.content or ""
    _judge_content(server, reply, content)
    judge_reply_stream(server, messages, reply, limit)
    _judge_stop(server, messages, reply, limit)
    return {
        "content": content[:80],
        "tokens": reply.written,
        "finish_reason": reply.finish,
    }


def _judge_limits(server: Endpoint, messages: Sequence[dict]) -> None:
    """Require that an answer ends at max_tokens, and that a long answer is streamed in parts."""
    short = chat(server, messages, 5, ignore_eos=True)
    require(short.written == 5, f"a chat's answer has {short.written} tokens, but max_tokens is 5")
    require(short.finish == "length", f"finish_reason of a chat is {short.finish!r}, not 'length'")
    streamed = stream_chat(server, messages, _SHORT, ignore_eos=True)
    num_letters = len(f"{streamed.content or ''}{streamed.reasoning}")
    require(
        streamed.parts > 1 or num_letters < _LETTERS_OF_A_PART,
        f"all {num_letters} letters of a streamed chat came in one part",
    )


def _judge_content(server: Endpoint, reply: Reply, content: str) -> None:
    """Require that a chat's content is the text of its tokens, and does not echo the question."""
    if content.lstrip().startswith(QUESTION):
        question = tokenize(server, QUESTION)[BEGIN:-END]
        is_generated = find(reply.tokens, question) >= 0
        require(is_generated, "the content of a chat begins with the question: it is an echo")
    text = server.detokenize(reply.tokens) if reply.tokens else ""
    if text and not reply.reasoning:
        # The text of special tokens is not in the content. The content's letters must therefore be
        # in the text in the same order, but other letters may be between them.
        remaining = iter(text)
        require(
            all(letter in remaining for letter in content if not letter.isspace()),
            f"the content of a chat is not the text of its tokens: {content!r:.80}, {text!r:.80}",
        )


def _judge_stop(
    server: Endpoint,
    messages: Sequence[dict],
    reply: Reply,
    limit: int,
) -> None:
    """Require that a chat's answer ends before a stop string; after a near tie, ask again."""
    content = reply.content or ""
    stop = content[len(content) // 2 :][:4]
    expected = content[: content.index(stop)]
    # A stop string ends thoughts as well, and the answer then has no content.
    if not expected.strip() or stop in reply.reasoning:
        return
    text = ""
    for _ in range(3):
        text = chat(server, messages, limit, stop=[stop]).content or ""
        if text == expected:
            return
    raise CheckFailed(
        f"with the stop string {stop!r}, a chat's answer ends with {text[-80:]!r}; expected the "
        f"text before the stop string, which ends with {expected[-80:]!r}"
    )


def require_content(reply: Reply) -> None:
    """Require that an answer has content.

    Raises:
        CannotRun: The answer ends at its limit and has only thoughts.
        CheckFailed: The answer has no content for another reason.
    """
    if reply.finish == "length" and reply.reasoning and not reply.content:
        raise CannotRun(f"the model thinks for more than {reply.written} tokens")
    kind = "null" if reply.content is None else "empty"
    require(
        isinstance(reply.content, str) and reply.content.strip(),
        f"the content of a chat's answer is {kind}: finish_reason {reply.finish!r}, "
        f"{reply.written} tokens, {len(reply.reasoning)} letters of reasoning",
    )


def judge_reply_stream(
    server: Endpoint,
    messages: Sequence[dict],
    reply: Reply,
    number: int,
    **parameters,
) -> None:
    """Require that a streamed chat has the same text, calls and counts as one without streaming.

    If they differ, which a near tie can cause, both are requested again, at most twice.

    Args:
        server: The server.
        messages: Messages of the chat.
        reply: The answer to the messages without streaming.
        number: Maximum number of tokens of the answer.
        **parameters: Further keys of the request.
    """
    expected: dict = {}
    streamed: dict = {}
    for attempt in range(3):
        if attempt:
            reply = chat(server, messages, number, **parameters)
        streamed = _comparable(stream_chat(server, messages, number, **parameters))
        expected = _comparable(reply)
        if streamed == expected:
            return
    for name, value in expected.items():
        require(
            value == streamed[name],
            f"{name} of a streamed chat: {str(streamed[name])[:80]}, without streaming: "
            f"{str(value)[:80]}",
        )


def _comparable(reply: Reply) -> dict:
    """Return the values of a reply that must be equal with and without streaming.

    Two differences are no fault, so they are removed here. A parser may strip blanks only in a
    stream, or only without one. The finish reason of a named call may be "tool_calls" or "stop".
    """
    finish = reply.finish
    if reply.calls and finish == "tool_calls":
        finish = "stop"
    return {
        "content": (reply.content or "").strip(),
        "reasoning": reply.reasoning.strip(),
        "tool calls": reply.calls,
        "finish_reason": finish,
        "usage": reply.usage,
    }
