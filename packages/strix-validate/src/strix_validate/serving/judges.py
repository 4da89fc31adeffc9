# SPDX-License-Identifier: BSD-3-Clause
"""Whether a running server is correct, and how fast, from its answers alone.

No reference model is needed. What a server generates step by step is given back to it as one
prompt, whose log probabilities come from other kernels: prefill, not decoding. Where both may be
wrong alike, a text that every model knows, and numbers hidden in a long prompt, tell.
"""

import itertools
import math
import re
import statistics
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, Endpoint, Generation, Scores, Silent

#: Requests at a time that are judged, and how often so many.
TOGETHER, _ROUNDS = 32, 4
#: Of a log probability between prefill and decoding, and between alone and in a batch: sums have
#: another order, in 16 bits. One token in 50 may be off by more, none by five times that.
_BOUND, _RARE, _FAR = 0.3, 50, 5
#: Tokens of a long answer, and of the prompts that numbers are hidden in.
LONG, RECALLED = 640, (8192, 32768)
#: Trained models take 0.3 to 1.3 bits for a byte of the known text and below 4 nats for a token;
#: one that guesses takes log2(32,000) / 4.3 = 3.5 bits and 10 nats, or as bytes 8 bits and 5.5.
_BITS, _NATS = 2.0, 4.5
_WINDOW = 256
_SUBJECTS = [
    "a tide", "a violin", "photosynthesis", "the printing press", "a glacier", "bread",
    "the compass", "cement", "an eclipse", "the monsoon", "a honeybee", "paper", "a volcano",
    "the loom", "rust", "an orchard",
]  # fmt: skip
PROMPTS = tuple(
    f"In one long paragraph, the causes and the consequences of {subject}:" for subject in _SUBJECTS
)
#: Prompts that all differ; each is sent twice at once.
MANY = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, TOGETHER * _ROUNDS // 2 + 1)]
#: Letters of several bytes, which go on likewise.
LETTERS = ("日本語、中文、한국어、Ελληνικά、🙂🦭🙂🦭 — " * 6).rstrip()
#: Tokens that are listed at each step.
_LISTED = 5
#: Nats below the likeliest token within which a listed one is compared.
_NEAR = 5.0


def known_text() -> str:
    """Return five pages that are in every model's training: Lincoln, Dickens, Austen and others."""
    return (files(__package__) / "known_text.txt").read_text()


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference of two lists of numbers.

    Raise CheckFailed where their lengths differ, or one is no number.
    """
    return max(_differences(first, second), default=0.0)


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    require(len(first) == len(second), f"{len(first)} log probabilities of {len(second)} tokens")
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    require(all(x == x for x in differences), "a log probability is not a number")
    return differences


def judge_greedy(
    server: Endpoint, *answers: Generation, bound: float = _BOUND, about: str = ""
) -> dict:
    """Require that what was generated is what the server's own prefill finds likeliest.

    Raise CheckFailed otherwise; about: what its message begins with. Near ties may fall either way.
    """
    return _judge_differences(_compare_with_prefill(server, answers), bound, about)


def _compare_with_prefill(
    server: Endpoint, answers: Sequence[Generation]
) -> list[tuple[list[float], list[float]]]:
    """Return by how much each token is less likely than the best, and decoding's differences."""
    scores: dict[tuple[int, ...], Scores] = {}
    differences = []
    for found in answers:
        whole = (*found.prompt, *found.tokens)
        if whole not in scores:
            scores[whole] = server.score(found.prompt, found.tokens)
        scored = scores[whole]
        short = _differences(scored.best, scored.own)
        differences.append((short, _differences(found.logprobs, scored.own)))
    return differences


def _judge_differences(
    differences: Sequence[tuple[list[float], list[float]]], bound: float, about: str
) -> dict:
    short = [value for values, _ in differences for value in values]
    errors = [value for _, values in differences for value in values]
    _require_near(short, f"{about}a token is less likely than another by", bound)
    _require_near(errors, f"{about}decoding and prefill differ by", bound)
    return {
        "logprobs": {"error": statistics.mean(errors), "bound": bound, "largest": max(errors)},
        "greedy": {"error": statistics.mean(short), "bound": bound, "largest": max(short)},
    }


def _require_near(values: Sequence[float], message: str, bound: float) -> None:
    """Require that one value in 50 is above the bound, and none above five times that."""
    outside = sum(value > bound for value in values)
    worst = max(values, default=0.0)
    require(
        outside <= len(values) // _RARE and worst <= _FAR * bound,
        f"{message} {worst:.2f}, {bound} allowed; {outside} of {len(values)} are over it",
    )


def judge_pairs(
    server: Endpoint, answers: Sequence[Generation], bound: float = _BOUND, about: str = ""
) -> dict:
    """Judge answers to prompts that were sent twice at once, side by side, each on its own.

    Equal requests in one batch may part at a near tie, but nowhere else.
    """
    differences = _compare_with_prefill(server, answers)
    for i, each in enumerate(differences):
        same = answers[i].tokens == answers[i ^ 1].tokens
        part = "" if same else "two equal requests at once get different answers, one is wrong: "
        _judge_differences([each], _FAR * bound, f"{about}{part}")
    return _judge_differences(differences, bound, about)


def judge_usage(found: Generation, number: int) -> dict:
    """Require that tokens are counted, and the end is said to be the limit's."""
    require(len(found.tokens) == number, f"{len(found.tokens)} tokens, {number} were asked for")
    counts = (len(found.prompt), number, len(found.prompt) + number)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(found.usage == expected, f"usage says {found.usage}, expected {expected}")
    return found.usage


def judge_finish(found: Generation, expected: str) -> dict:
    """Return the reason for the end, if it is the expected one; else raise CheckFailed."""
    require(found.finish == expected, f"finish_reason is {found.finish!r}, expected {expected!r}")
    return {"finish_reason": found.finish}


def judge_probabilities(server: Endpoint, prompt: str | list[int], number: int = 24) -> dict:
    """Require that the listed values of each step are logarithms of the model's probabilities."""
    found = server.generate(prompt, number, logprobs=_LISTED)
    require(len(found.top) == number, f"top_logprobs of {len(found.top)} steps, expected {number}")
    steps = [_read_listed(step) for step in found.top]
    values = [value for step in steps for value in step.values()]
    require(
        all(math.isfinite(value) and value <= 1e-3 for value in values),
        "top_logprobs are no log probabilities: one is above zero or no number",
    )
    sums = [sum(math.exp(value) for value in step.values()) for step in steps]
    require(max(sums) <= 1.001, f"probabilities sum to {max(sums):.4f}")
    fewest = min(map(len, steps))
    require(fewest >= _LISTED, f"{fewest} top_logprobs, {_LISTED} were asked for")
    scored = server.score(found.prompt, found.tokens, listed=_LISTED)
    for step, expected in zip(steps, scored.listed, strict=True):
        likely = min(step.values()) + _FAR * _BOUND
        absent = [
            token for token, value in expected.items() if value > likely and token not in step
        ]
        require(not absent, f"top_logprobs leave out token {absent}, which is likelier than others")
    own = [step.get(token, -math.inf) for step, token in zip(steps, found.tokens, strict=True)]
    message = "top_logprobs and the log probability of a token differ by"
    _require_near(_differences(own, found.logprobs), message, 0.01)
    differences = [
        abs(value - expected[token])
        for step, expected in zip(steps, scored.listed, strict=True)
        for token, value in step.items()
        if token in expected and expected[token] > max(expected.values()) - _NEAR
    ]
    _require_near(differences, "top_logprobs and those of the prompt differ by", _BOUND)
    return {"largest_sum": max(sums), "least_sum": min(sums), "compared": len(differences)}


def _read_listed(step: dict[str, float]) -> dict[int, float]:
    """Return the log probabilities by token id."""
    names = {name: name.removeprefix("token_id:") for name in step}
    wrong = [name for name, number in names.items() if not number.isdecimal()]
    require(not wrong, f"top_logprobs name {wrong[:3]}, token ids were asked for")
    return {int(number): step[name] for name, number in names.items()}


def judge_text_of(found: Generation, prompt: str) -> None:
    """Require that a text does not repeat the prompt where its tokens do not."""
    repeats = found.tokens[: len(found.prompt)] == found.prompt[: len(found.tokens)]
    echoed = found.text.lstrip().startswith(prompt[:40])
    require(repeats or not echoed, "the text of an answer begins with the prompt: it is an echo")


def judge_text(server: Endpoint) -> dict:
    """Require that a text that every model knows is likely, in each window of 256 tokens.

    A window's cost is that of its share of the text: tokens differ between models.
    """
    text = known_text()
    own = server.score(text).own
    bits = -sum(own) / math.log(2) / len(text.encode())
    windows = [own[i : i + _WINDOW] for i in range(0, len(own) - _WINDOW // 2, _WINDOW)] or [own]
    nats = [-statistics.mean(window) for window in windows]
    wrong = [
        i
        for i, each in enumerate(nats)
        if not (each <= _NATS or each * len(own) / math.log(2) / len(text.encode()) <= _BITS)
    ]
    said = f"{bits:.1f} bits for a byte of a known text, {nats[0]:.1f} nats for a first token"
    require(0 not in wrong, f"the model guesses, as random weights do: {said}")
    at = wrong[0] * _WINDOW if wrong else 0
    require(not wrong, f"from token {at} on a known text is guessed: {max(nats):.1f} nats; {said}")
    return {"bits_per_byte": round(bits, 3), "tokens": len(own)}


def judge_recall(server: Endpoint, length: int) -> dict:
    """Require that numbers at five depths of a prompt of so many tokens are found again.

    Raises:
        CannotRun: the server takes shorter prompts only, or the model finds none in a short one.
    """
    context = server.context()
    if context and context < length + 256:
        raise CannotRun(f"the server's context of {context} tokens is shorter")
    pages = [f"Page {i}. {line}\n" for i, line in enumerate(_lines(length * 8), 1)]
    rate = len(server.generate(known_text(), 1).prompt) / len(known_text())
    ends = list(itertools.accumulate(len(page) * rate for page in pages))
    pages = pages[: sum(end < length for end in ends) + 1]
    missed: list[str] = []
    begin = time.perf_counter()
    for place in range(5):
        # two at once, with other numbers, that differ from the first word on
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(_ask_number, server, pages, place, i) for i in (0, 1)]
            answers = [each.result() for each in asked]
        if all(answers[i].startswith(_number(place, 1 - i)) for i in (0, 1)):
            raise CheckFailed("of two long prompts at once, each gets the other's answer: swapped")
        right = [answer.startswith(_number(place, i)) for i, answer in enumerate(answers)]
        missed += [] if all(right) else [f"{25 * place} %"]
        if not all(right) and not _ask_number(server, [], 0, 0).startswith(_number(0, 0)):
            raise CannotRun("this model repeats no number even from a short prompt")
    said = "attention at this length is wrong, or the model too weak for it"
    require(not missed, f"a number is not found again from depth {', '.join(missed)}: {said}")
    return {"tokens": round(sum(map(len, pages)) * rate), "seconds": time.perf_counter() - begin}


def _lines(size: int) -> Iterator[str]:
    lines = itertools.cycle(known_text().splitlines())
    while size > 0:
        line = next(lines)
        size -= len(line)
        yield line


def _number(place: int, document: int) -> str:
    return str(71_353 + 5_417 * place + 1_009 * document)


def _ask_number(server: Endpoint, pages: Sequence[str], place: int, document: int) -> str:
    """Ask for one of five numbers that stand between the pages; return what is answered.

    The prompts are alike up to the question: later ones begin with what the cache holds.
    """
    whole = list(pages)
    for i in reversed(range(5)):
        line = f"The number of {_SUBJECTS[i]} is {_number(i, document)}.\n"
        whole.insert(round(i * len(pages) / 4), line)
    title = ("First", "Another")[document]
    prompt = f"{title} text.\n{''.join(whole)}As said above, the number of {_SUBJECTS[place]} is"
    answer = server.generate(prompt, 12).text
    return answer.strip().replace(",", "")


def judge_together(
    server: Endpoint, prompts: Sequence, load: int, number: int = 24, bound: float = _BOUND
) -> dict:
    """Require that each of several requests at a time gets its own answer."""
    with ThreadPoolExecutor(load) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt, number), prompts))
    for prompt, found in zip(prompts, together, strict=True):
        alone = server.generate(prompt, 1)
        require(found.prompt == alone.prompt, "a request was answered for another one's prompt")
        judge_usage(found, number)
    return judge_greedy(server, *together, bound=bound) | {"requests": len(together)}


def judge_twice_together(server: Endpoint, prompts: Sequence, load: int, number: int = 24) -> dict:
    """Require likewise of prompts that are each sent twice at once."""
    doubled = [prompt for prompt in prompts for _ in range(2)]
    with ThreadPoolExecutor(load) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt, number), doubled))
    for prompt, found in zip(doubled[::2], together[::2], strict=True):
        alone = server.generate(prompt, 1)
        require(found.prompt == alone.prompt, "a request was answered for another one's prompt")
    for first, second in zip(together[::2], together[1::2], strict=True):
        message = "of two equal requests at once the second was answered for another prompt"
        require(first.prompt == second.prompt, message)
    for found in together:
        judge_usage(found, number)
    return judge_pairs(server, together) | {"requests": len(together)}


def judge_stream(server: Endpoint, prompt, number: int = 24) -> dict:
    """Require that a stream has the same text, tokens and usage, in parts.

    A near tie may fall the other way; then its tokens are judged as another answer's.
    """
    for _ in range(3):
        whole, parts = server.generate(prompt, number), server.stream(prompt, number)
        if whole.tokens == parts.tokens or len(whole.tokens) != len(parts.tokens):
            break
        scored = server.score(whole.prompt, parts.tokens)
        if largest_difference(scored.best, scored.own) > _BOUND:
            break
    require("\ufffd" in whole.text or "\ufffd" not in parts.text, "a stream breaks letters in two")
    for name in ("tokens", "text", "finish", "usage"):
        first, second = getattr(whole, name), getattr(parts, name)
        require(first == second, f"{name} of a stream: {str(second)[:80]}, else {str(first)[:80]}")
    require(len(parts.seconds) > 1, "all tokens came in one part")
    return {"parts": len(parts.seconds), "letters": sum(not each.isascii() for each in whole.text)}


def judge_stop(server: Endpoint, prompt, number: int = 64) -> dict:
    """Require that an answer ends before a stop string, whole or in a stream.

    An answer that took another way before it, at a near tie, is asked for again.
    """
    for ask in (server.generate, server.stream):
        for _ in range(3):
            text = server.generate(prompt, number).text
            stop = text[len(text) // 2 :][:4]
            require(len(stop) == 4, f"the text of {number} tokens is {text!r}")
            found, right = ask(prompt, number, stop=[stop]), text[: text.index(stop)]
            if found.text.startswith(right):
                break
        require(found.text == right, f"{found.text!r} before the stop string, expected: {right!r}")
        judge_finish(found, "stop")
    return {"stop": stop}


def judge_abort(server: Endpoint, prompt, number: int = 24, bound: float = _BOUND) -> dict:
    """Require that after clients that left, the next gets a correct answer, as soon as before."""
    begin = time.perf_counter()
    server.generate(prompt, number)
    before = time.perf_counter() - begin
    for _ in range(3):
        leaving = server.stream_parts(prompt, 200)
        next(leaving)
        leaving.close()
    begin = time.perf_counter()
    limit = 60 + 3 * before
    try:
        found = server.generate(prompt, number, limit)
    except Silent as error:
        message = f"after clients that left, an answer takes more than {limit:.0f} s, {before:.1f} "
        raise CheckFailed(f"{message}before") from error
    judge_greedy(server, found, bound=bound)
    return {"next_seconds": round(time.perf_counter() - begin, 2)}


def judge_questions(server: Endpoint, least: int) -> dict:
    """Require that so many of the 50 questions of questions.toml get the right number.

    Asked in words, behind three that are answered, which a model without a chat template needs.
    """
    known = tomllib.loads((files(__package__) / "questions.toml").read_text())
    shown = [f"Question: {each['ask']}\nAnswer: {each['answer']}\n\n" for each in known["shown"]]

    def is_right(each: dict) -> bool:
        asked = f"{''.join(shown)}Question: {each['ask']}\nAnswer:"
        text = server.generate(asked, 200, stop=["\n\n", "Question:"]).text.replace(",", "")
        found = re.findall(r"(?:answer is|####)\D{0,9}?(-?\d+)", text) or re.findall(r"-?\d+", text)
        return bool(found) and int(found[-1]) == each["is"]

    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(is_right, known["question"]))
    said = f"{sum(right)} of {len(right)} answers are right"
    require(sum(right) >= least, f"{said}, {least} were expected")
    return {"right": sum(right), "asked": len(right)}
