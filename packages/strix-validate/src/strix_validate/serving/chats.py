# SPDX-License-Identifier: BSD-3-Clause
"""Whether a server's chat applies the template, and answers as a string.

What a model says is its own affair. These checks read which tokens the server gives to the model
for a chat, whether the answer has the form that clients rely on, and whether its tokens are the
ones that the model's prefill finds likeliest.
"""

from collections.abc import Sequence

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, Endpoint, Refused
from strix_validate.serving.judges import judge_greedy
from strix_validate.serving.messages import Reply, chat, stream_chat

#: Tokens of an answer that may think first.
ANSWER = 1024
_SHORT = 48
#: Contents that begin and end alike, so that what lies between them is the template's.
_WORDS = {"system": "tamarind", "user": "marmoset", "assistant": "obsidian", "last": "periwinkle"}
_CONTENTS = {
    name: f"Now hear this: the word is {word}, and no more." for name, word in _WORDS.items()
}
#: Tokens at the ends of a content that may merge with what is beside them.
BEGIN, END = 3, 1
QUESTION = "What is the capital of France? Answer with the name of the city alone."
#: Letters that a part of a stream may have at most: several drafted tokens come in one.
_LETTERS_OF_A_PART = 100


def judge_chat(server: Endpoint) -> dict:
    """Require that the template holds each message of a chat and tells the roles apart.

    Raises:
        CannotRun: the server has no chat, or the model has no template.
    """
    history = [
        {"role": role.replace("last", "user"), "content": content}
        for role, content in _CONTENTS.items()
    ]
    refused = ""
    try:
        reply = chat(server, history, _SHORT, ignore_eos=True)
    except Refused as error:  # some templates have no place for a system message
        history, refused = history[1:], str(error)
        reply = chat(server, history, _SHORT, ignore_eos=True)
    if not reply.prompt:
        return _judge_counts(server, history, reply)
    insides = {
        name: tokens_of(server, content)[BEGIN : -END or None]
        for name, content in _CONTENTS.items()
        if not (refused and name == "system")
    }
    starts = {name: find(reply.prompt, inside) for name, inside in insides.items()}
    names = {
        "system": "the system message is dropped",
        "user": "the first turn of the user is forgotten",
        "assistant": "the turn of the assistant is forgotten",
        "last": "the last turn of the user is dropped",
    }
    missing = [names[name] for name, start in starts.items() if start < 0]
    require(not missing, f"{', '.join(missing)}: no such tokens are in the chat's prompt")
    require(
        starts["user"] < starts["assistant"] < starts["last"],
        "the turns of the chat are in another order",
    )
    ends = {name: start + len(insides[name]) for name, start in starts.items()}
    to_assistant = reply.prompt[ends["user"] : starts["assistant"]]
    to_user = reply.prompt[ends["assistant"] : starts["last"]]
    require(
        to_assistant != to_user,
        "the chat template is not applied: the prompt does not tell the user from the assistant",
    )
    _require_opened_turn(server, history, reply)
    judge_reply_usage(reply, _SHORT)
    measured = judge_greedy(server, reply.generation, about="in a chat ")
    return measured | {"tokens": len(reply.prompt)} | ({"system": refused} if refused else {})


def _judge_counts(server: Endpoint, history: Sequence[dict], reply: Reply) -> dict:
    """Require likewise of a server that gives no token ids of a chat, by its counts of tokens."""
    judge_reply_usage(reply, _SHORT)
    if not reply.read:
        raise CannotRun("the server has no chat with token ids or counts of tokens")
    edges = BEGIN + END
    sizes = [len(tokens_of(server, message["content"])) - edges for message in history]
    for message, size in zip(history, sizes, strict=True):
        # templates may want turns to alternate, so the message stays, with next to nothing in it
        shorter = [each | {"content": "No."} if each is message else each for each in history]
        added = reply.read - chat(server, shorter, 1).read
        require(
            added > size // 2,
            f"a message of a chat is dropped or forgotten, that of the {message['role']}: it adds "
            f"{added} tokens to the prompt, of {size}",
        )
    first, second = tokens_of(server, "Again"), tokens_of(server, "Below")
    begins = len(first) > 1 and first[0] == second[0]
    glue = reply.read - sum(size + edges - begins for size in sizes)
    require(
        glue > len(history),
        f"the chat template is not applied: it adds {glue} tokens to {len(history)} messages",
    )
    return {"tokens": reply.read}


def _require_opened_turn(server: Endpoint, messages: Sequence[dict], reply: Reply) -> None:
    """Require that the prompt opens the assistant's turn, where the template has such an end."""
    prompts = []
    for opened in (True, False):
        body = {"messages": list(messages), "add_generation_prompt": opened}
        try:
            prompts.append(server.ask("/tokenize", body).get("tokens"))
        except Refused:
            return
    require(
        prompts[0] == prompts[1] or reply.prompt != prompts[1],
        "the chat's prompt does not open the assistant's turn (add_generation_prompt)",
    )


def answer_limit(server: Endpoint) -> int:
    """Return how many tokens an answer of a chat may have: ANSWER, or half of a short context."""
    context = server.context()
    return min(ANSWER, context // 2) if context else ANSWER


def tokens_of(server: Endpoint, text: str) -> list[int]:
    """Return the tokens of a text, after what the server puts before each prompt."""
    return server.generate(text, 1).prompt


def find(tokens: Sequence[int], part: Sequence[int]) -> int:
    """Return where a list of tokens holds another one; -1 if it does not."""
    places = range(len(tokens) - len(part) + 1)
    return next((i for i in places if list(tokens[i : i + len(part)]) == list(part)), -1)


def judge_reply_usage(reply: Reply, number: int) -> None:
    """Require that a chat's tokens are counted, and that max_tokens is kept."""
    written = reply.written
    require(written <= number, f"{written} tokens in a chat, max_tokens is {number}")
    require(
        reply.finish != "length" or written == number,
        f"finish_reason is 'length' after {written} tokens of a chat, max_tokens is {number}",
    )
    counts = (reply.read, written, reply.read + written)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(reply.usage == expected, f"usage of a chat says {reply.usage}, expected {expected}")


def judge_chat_answer(server: Endpoint) -> dict:
    """Require that a chat's answer is a string, with the same text and counts in a stream.

    Raises:
        CannotRun: the model thinks for longer than it is waited for.
    """
    limit = answer_limit(server)
    messages = [{"role": "user", "content": QUESTION}]
    cut = chat(server, messages, 5, ignore_eos=True)
    require(cut.written == 5, f"{cut.written} tokens in a chat, max_tokens is 5")
    require(cut.finish == "length", f"finish_reason of a chat is {cut.finish!r}, not 'length'")
    long = stream_chat(server, messages, _SHORT, ignore_eos=True)
    letters = len(f"{long.content or ''}{long.reasoning}")
    in_parts = long.parts > 1 or letters < _LETTERS_OF_A_PART
    require(in_parts, f"all {letters} letters of a streamed chat came in one part")
    reply = chat(server, messages, limit)
    judge_reply_usage(reply, limit)
    if reply.prompt:
        judge_greedy(server, reply.generation, about="in a chat ")
    require_content(reply)
    content = reply.content or ""
    require(
        not content.lstrip().startswith(QUESTION)
        or find(reply.tokens, tokens_of(server, QUESTION)[BEGIN:-END]) >= 0,
        "the content of a chat begins with the question: it is an echo",
    )
    text = server.detokenize(reply.tokens) if reply.tokens else ""
    if text and not reply.reasoning:
        # special tokens have a text as well, which is left out of the content
        rest = iter(text)
        require(
            all(letter in rest for letter in content if not letter.isspace()),
            f"the content of a chat is not the text of its tokens: {content!r:.80}, {text!r:.80}",
        )
    judge_reply_stream(server, messages, reply, limit)
    _judge_stop(server, messages, content, limit)
    return {"content": content[:80], "tokens": reply.written, "finish_reason": reply.finish}


def _judge_stop(server: Endpoint, messages: Sequence[dict], content: str, limit: int) -> None:
    """Require that a chat's answer ends before a stop string; a near tie gets another try."""
    stop = content[len(content) // 2 :][:4]
    before = content[: content.index(stop)]
    if not before.strip():
        return
    for _ in range(3):
        text = chat(server, messages, limit, stop=[stop]).content or ""
        if text == before:
            return
    raise CheckFailed(f"{text!r:.80} of a chat before the stop string, expected {before!r:.80}")


def require_content(reply: Reply) -> None:
    """Raise CheckFailed where an answer that ended has no content, CannotRun where it thinks on."""
    if reply.finish == "length" and reply.reasoning and not reply.content:
        raise CannotRun(f"the model thinks for more than {reply.written} tokens")
    about = f"{reply.written} tokens, {len(reply.reasoning)} letters of reasoning"
    kind = "null" if reply.content is None else "empty"
    require(
        isinstance(reply.content, str) and reply.content.strip(),
        f"the content of a chat's answer is {kind}: finish_reason {reply.finish!r}, {about}",
    )


def judge_reply_stream(
    server: Endpoint, messages: Sequence[dict], reply: Reply, number: int, **more
) -> None:
    """Require that a streamed chat has the same text, calls and counts.

    A near tie may fall the other way; then both are asked for again.
    """
    for _ in range(3):
        parts = stream_chat(server, messages, number, **more)
        first, second = _comparable(reply), _comparable(parts)
        if first == second:
            break
        reply = chat(server, messages, number, **more)
    for name, value in first.items():
        require(
            value == second[name],
            f"{name} of a streamed chat: {str(second[name])[:80]}, else {str(value)[:80]}",
        )


def _comparable(reply: Reply) -> dict:
    """Return what a stream has in common with a whole answer.

    Parsers strip blanks in one and not in the other, and disagree on the end of a named call.
    """
    return {
        "content": (reply.content or "").strip(),
        "reasoning": reply.reasoning.strip(),
        "tool calls": reply.calls,
        "finish_reason": "stop" if reply.calls and reply.finish == "tool_calls" else reply.finish,
        "usage": reply.usage,
    }
