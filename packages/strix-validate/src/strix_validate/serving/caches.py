# SPDX-License-Identifier: BSD-3-Clause
"""Judge a server's prefix cache, batches, drafts and full context, at realistic lengths.

The cache stores the beginning of a prompt in whole blocks. If layers of linear attention share the
cache, a block can have thousands of tokens. The reference is the server's own prefill, which
computes log probabilities of a prompt without cache and drafts.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from strix_validate.checks import CannotRun, require
from strix_validate.serving.endpoint import Endpoint, Generation
from strix_validate.serving.judges import (
    LETTERS,
    judge_finish,
    judge_greedy,
    judge_pairs,
    judge_usage,
    read_known_text,
    require_room_for_text,
)

#: Number of tokens that prompts share, not counting _BEYOND_BLOCK: the size of the largest block
#: that vLLM 0.33 uses in the cache of a common hybrid model. If a server reports a block size, and
#: two of its blocks are larger, prompts share two blocks instead. If the context is too short,
#: prompts share as much as it has room for.
_SHARED = 2144
#: Number of tokens that prompts share beyond _SHARED or two blocks, whichever is more.
_BEYOND_BLOCK = 64
#: Maximum number of tokens of the question that follows a shared beginning.
_TAIL = 24
#: Number of tokens that a request of judge_prefix or judge_long_pairs generates, except in the
#: first turn of a conversation.
_GENERATED = 24
#: Number of tokens of an answer that becomes a part of the next turn's prompt.
_TURN = 96
#: Number of requests with the same beginning before variants are sent. vLLM stores the state of a
#: beginning only when the beginning is repeated.
_SIGHTINGS = 3
#: Number of variants: further prompts with the beginning, which every second one changes after the
#: first block. Each is sent twice, all at the same time.
_VARIANTS = 4
#: Number of tokens that are generated at the end of the context.
_LAST = 32
#: Maximum number of tokens of the short prompt with which the end of the context is compared.
_SHORT_PROMPT = 1024
#: Prompt tokens that a vLLM server reads in a step by default, with 70 to 160 GiB of GPU memory.
_STEP = 8192
#: Bytes of a logit in 16 bits and of its log probability in 32 bits.
_LOGIT_BYTES = 6
#: Bytes of logits that are assumed to fit into the memory of every server.
_LOGITS_ROOM = 4 << 30
#: Maximum number of prompt tokens whose log probabilities fit into a server's response.
_SCORED_TOKENS = 1 << 16
#: Number of tokens of the passage that a prompt repeats at its end, for the model to complete.
_PASSAGE = 96
#: vLLM's counter of drafted tokens.
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
#: Nats by which tokens may, on average, be less likely at the end of the context than in a short
#: prompt.
_WORSE = 2.0
#: Nats by which decoding and prefill may differ at the end of the context.
_LAST_BOUND = 1.5
#: Numbers of tokens of the answers with drafts. They differ, so that requests end at different
#: times, and the rows of the batch move.
_DRAFT_LENGTHS = (96, 40, 160, 24, 64, 128, 32, 80)


class Pages:
    """Tokens of the text of judges.read_known_text, repeated, for prompts of exact lengths.

    Attributes:
        begin: Tokens that the server puts before each prompt.
    """

    def __init__(self, server: Endpoint) -> None:
        """Encode the known text. Raise CannotRun if the server's context is too short for it."""
        require_room_for_text(server)
        self._server = server
        self.begin: list[int] = []
        first = server.generate("Again", 1).prompt
        second = server.generate("Below", 1).prompt
        if len(first) > 1 and first[0] == second[0]:
            self.begin = first[:1]
        self._page = self.encode(read_known_text())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that the server puts before each prompt."""
        return self._server.generate(text, 1).prompt[len(self.begin) :]

    def take(self, length: int, start: int = 0) -> list[int]:
        """Return `length` tokens of the repeated text, from its token `start` on."""
        page = self._page
        return [page[i % len(page)] for i in range(start, start + length)]

    def prompt(self, length: int, start: int = 0) -> list[int]:
        """Return a prompt of exactly `length` tokens."""
        return [*self.begin, *self.take(length - len(self.begin), start)]


def shared_length(context: int, block: int) -> int:
    """Return how many tokens the prompts of judge_prefix share.

    Args:
        context: Tokens of the server's context; 0 if unknown.
        block: Tokens of a block of its cache; 0 if unknown.

    Raises:
        CannotRun: The context has no room for a whole block and the answers.
    """
    length = max(_SHARED, 2 * block) + _BEYOND_BLOCK
    room = context - 2 * _TURN - 2 * _TAIL if context else length
    if room < min(length, block + _BEYOND_BLOCK):
        raise CannotRun(
            f"the server's context of {context} tokens is shorter than a cache block plus the "
            "answers"
        )
    return min(length, room)


def judge_prefix(server: Endpoint) -> dict:
    """Require right answers to prompts that share more than a block of the cache.

    The prompts are sent one by one, several at once, and as later turns of a conversation.

    Raises:
        CannotRun: A block of the cache or the known text does not fit into the context.
    """
    block = server.block_size()
    length = shared_length(server.context(), block)
    pages = Pages(server)
    shared = pages.prompt(length)
    questions = []
    for i in range(_SIGHTINGS + _VARIANTS):
        text = f" The number {40_321 + 7_919 * i} stands beside the words"
        questions.append(pages.encode(text)[:_TAIL])
    alone = [
        server.generate([*shared, *question], _GENERATED) for question in questions[:_SIGHTINGS]
    ]
    about = f"after a repeated beginning of {length} tokens, "
    measured = judge_greedy(server, *alone, about=about)
    # in every second variant, the question is also inserted into the shared part, after the first
    # block of that part
    place = max(length * 3 // 4, min(block + 16, length))
    variants = []
    for i, question in enumerate(questions[_SIGHTINGS:]):
        beginning = shared
        if i % 2:
            beginning = shared[:place] + question + shared[place:]
        variants.append([*beginning, *question])
    together = ask_twice_at_once(server, variants, _GENERATED)
    judge_pairs(server, together, about=about)
    turns = _take_turns(server, pages, length, block)
    judge_greedy(
        server,
        *turns,
        about="in a turn after an earlier answer, ",
    )
    for answer in [*alone, *together]:
        judge_usage(answer, _GENERATED)
    return measured | {"shared_tokens": length, "block": block}


def _double(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return each prompt twice, side by side."""
    return list(itertools.chain.from_iterable((prompt, prompt) for prompt in prompts))


def ask_twice_at_once(
    server: Endpoint,
    prompts: Sequence[list[int]],
    number: int,
) -> list[Generation]:
    """Send each prompt twice, all at the same time; return the answers in pairs."""
    doubled = _double(prompts)
    with ThreadPoolExecutor(len(doubled)) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, number), doubled))


def _take_turns(server: Endpoint, pages: Pages, length: int, block: int) -> list[Generation]:
    """Return the answers of two conversations, each of which has two turns.

    Each answer of a first turn crosses the end of a block, so the block's state is stored while the
    answer is decoded. The second turn continues from this state, and is requested twice.

    Args:
        server: The server.
        pages: The source of the prompts.
        length: Approximate number of tokens of a first turn's prompt.
        block: Tokens of a block of the cache; 0 if unknown.
    """
    size = block or 16
    end = max(size, length // size * size)
    answers = []
    for prompt_length in (end - _TURN // 2, end - 8):
        prompt = pages.prompt(max(prompt_length, 64), start=7)
        answer = server.generate(prompt, _TURN)
        next_prompt = [
            *answer.prompt,
            *answer.tokens,
            *pages.encode(" And then, after that,"),
        ]
        answers.append(answer)
        answers += [server.generate(next_prompt, _GENERATED) for _ in range(2)]
    return answers


def judge_long_pairs(server: Endpoint, length: int = _SHARED) -> dict:
    """Require right answers to simultaneous long prompts that differ from the first token on.

    Raises:
        CannotRun: The context is too short for the prompts, their answers or the known text.
    """
    context = server.context()
    if context and context < length + 4 * _GENERATED:
        raise CannotRun(
            f"the server's context of {context} tokens is shorter than prompts of {length} tokens "
            "with their answers"
        )
    pages = Pages(server)
    prompts = []
    for i in range(4):
        beginning = pages.prompt(length + 16 * i, start=31 * i + 3)
        question = pages.encode(f" The number {52_163 + 6_007 * i} stands beside the words")
        prompts.append(beginning + question)
    answers = ask_twice_at_once(server, prompts, _GENERATED)
    for prompt, answer in zip(_double(prompts), answers, strict=True):
        require(answer.prompt == prompt, "a request got the answer to another request's prompt")
    return judge_pairs(
        server,
        answers,
        about=f"among several prompts of {length} tokens at once, ",
    )


def judge_speculation(server: Endpoint, plain: Endpoint | None = None) -> dict:
    """Require that answers with drafted tokens have the tokens that are likeliest without drafts.

    Args:
        server: The server.
        plain: A second server with the same model but without speculation. Its prefill judges the
            answers too, because a fault may affect prefill and drafts of one server in the same
            way.

    Raises:
        CannotRun: The server drafted no tokens, the second server drafts tokens, or the context is
            too short.
    """
    drafted_before = server.count(_DRAFTED) or 0.0
    has_counters = bool(server.metrics())
    prompts = _make_draft_prompts(Pages(server))
    about = "with drafted tokens, "
    doubled = _double(prompts)
    with ThreadPoolExecutor(len(doubled)) as pool:
        answers = list(pool.map(server.generate, doubled, _DRAFT_LENGTHS))
    for answer, number in zip(answers, _DRAFT_LENGTHS, strict=True):
        judge_usage(answer, number)
    measured = judge_greedy(server, *answers, about=about)
    repeated = [server.generate(prompt, 64) for prompt in prompts]
    judge_greedy(
        server,
        *repeated,
        about=f"{about}after a cached prompt, ",
    )
    if plain:
        measured["without_speculation"] = _judge_by_other(plain, [*answers, *repeated])
    if not has_counters:
        return measured
    drafted = (server.count(_DRAFTED) or 0.0) - drafted_before
    if not drafted:
        raise CannotRun("the server drafts no tokens: was it started without speculation?")
    return measured | {"drafted": drafted}


def _make_draft_prompts(pages: Pages) -> list[list[int]]:
    """Return prompts. Two of them repeat themselves, so n-gram speculation drafts tokens too."""
    repeated = pages.encode("The tide comes in, and the tide goes out. ") * 16
    half = repeated[: len(repeated) // 2]
    return [
        [*pages.begin, *repeated],
        pages.prompt(300, start=11),
        [*pages.begin, *pages.encode("Nine moons, "), *half],
        pages.prompt(700, start=5),
    ]


def _judge_by_other(plain: Endpoint, answers: Sequence[Generation]) -> dict:
    """Judge each token by the prefill of a server that was started without speculation."""
    # vLLM counts drafted tokens only if it was started with speculation
    if plain.count(_DRAFTED) is not None:
        raise CannotRun(f"{plain.url} drafts tokens as well: it was started with speculation")
    about = f"compared with the server without speculation at {plain.url}, "
    measured = judge_greedy(plain, *answers, about=about)
    return measured | {"answers": len(answers)}


@dataclass(frozen=True)
class _Completion:
    """The completion of a prompt that ends with a repeated passage.

    Attributes:
        answer: The server's answer.
        right: Share of the answer's tokens that continue the passage.
        nats: Mean negative log probability of the answer's tokens.
    """

    answer: Generation
    right: float
    nats: float


def judge_context(server: Endpoint) -> dict:
    """Require right tokens and log probabilities up to the last token of the context.

    Log probabilities of the whole prompt are requested only if `_can_score` expects that the server
    has the memory for them, and that the answer is not too long.

    Raises:
        CannotRun: The server does not list the length of its context, or the context is too short.
    """
    context = server.context()
    if not context:
        raise CannotRun("the server does not say how long its context is")
    pages = Pages(server)
    about = f"at the end of the context of {context} tokens"
    # The short prompt has at most half of the context's length. If it were as long as the context,
    # it would have the same faults as the end of the context.
    short = _complete_passage(server, pages, min(_SHORT_PROMPT, context // 2))
    full = _complete_passage(server, pages, context)
    answer = full.answer
    judge_usage(answer, _LAST)
    judge_finish(answer, "length")
    require(
        all(math.isfinite(value) and value <= 1e-3 for value in answer.logprobs),
        f"{about}, a log probability is above zero, infinite or NaN",
    )
    largest = _compare_by_prefill(server, answer)
    require(
        largest <= _LAST_BOUND,
        f"{about}, decoding and prefill differ by {largest:.2f} nats, {_LAST_BOUND} allowed",
    )
    is_scored = _can_score(pages, context)
    if is_scored:
        # a prompt as long as the context leaves no room for the token that scoring generates
        shorter = replace(
            answer,
            tokens=answer.tokens[:-1],
            logprobs=answer.logprobs[:-1],
        )
        judge_greedy(server, shorter, about=f"{about}, ")
    measured = {
        "scored": is_scored,
        "tokens": context,
        "largest": largest,
        "nats": full.nats,
    }
    return measured | {"copied": _judge_passage(short, full, about)}


def _judge_passage(short: _Completion, full: _Completion, about: str) -> float | str:
    """Require about equally good completions at the end of the context and in a short prompt.

    Args:
        short: Completion of the short prompt.
        full: Completion at the end of the context.
        about: First words of the message of a failure.

    Returns:
        The share of right tokens, or why the model cannot be judged.
    """
    if short.right < 0.9 or short.nats > _WORSE:
        return "not judged: this model does not copy from a short prompt"
    short_length = len(short.answer.prompt) + len(short.answer.tokens)
    require(
        full.right >= 0.75,
        f"{about}, {full.right:.0%} of the tokens of a repeated passage are right, but "
        f"{short.right:.0%} in a short text of {short_length} tokens: attention at the context's "
        "length is wrong, or the model is too weak",
    )
    require(
        full.nats <= short.nats + _WORSE,
        f"{about}, a repeated passage needs {full.nats:.1f} nats per token, but "
        f"{short.nats:.1f} in a short text of {short_length} tokens: log probabilities are wrong "
        "at the end",
    )
    return full.right


def _compare_by_prefill(server: Endpoint, answer: Generation) -> float:
    """Return how much decoding and prefill differ at an answer's middle and last token, in nats."""
    differences = []
    for i in (_LAST // 2 - 1, _LAST - 1):
        probe = server.generate([*answer.prompt, *answer.tokens[:i]], 1)
        differences.append(abs(probe.logprobs[0] - answer.logprobs[i]))
    return max(differences)


def _can_score(pages: Pages, context: int) -> bool:
    """Return whether a server is expected to list the log probabilities of `context` prompt tokens.

    vLLM's first model runner stores the logits of all tokens that it reads in one step.
    """
    # an upper estimate of the vocabulary's size, which is close to the largest token id of a long
    # text
    vocabulary = 1.5 * max(pages.encode(f"{read_known_text()} {LETTERS}"))
    num_read = min(context, _STEP)
    has_room = vocabulary * num_read * _LOGIT_BYTES <= _LOGITS_ROOM
    return context <= _SCORED_TOKENS and has_room


def _complete_passage(server: Endpoint, pages: Pages, length: int) -> _Completion:
    """Let the server complete a repeated passage; prompt and answer have `length` tokens in all."""
    passage = pages.take(_PASSAGE)
    tokens = [
        *pages.prompt(length - 2 * _PASSAGE),
        *passage,
        *passage,
    ]
    prompt = tokens[:-_LAST]
    expected = tokens[-_LAST:]
    answer = server.generate(prompt, _LAST)
    require(answer.logprobs, "no log probabilities of the tokens")
    pairs = zip(answer.tokens, expected, strict=False)
    num_right = sum(token == other for token, other in pairs)
    return _Completion(
        answer,
        num_right / _LAST,
        -statistics.mean(answer.logprobs),
    )
