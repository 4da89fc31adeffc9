# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether a running server is correct, from its answers alone.

No reference model is needed. The tokens that a server generated step by step (decoding) are sent
back to it as one prompt, whose log probabilities other kernels compute (prefill). If both are wrong
in the same way, the probabilities of a text that every model knows, and numbers hidden in a long
prompt, show the fault.

At a near tie, two tokens are almost equally likely, and rounding decides which one is generated.
If the server generates the other token at a near tie, this is no fault.
"""

import itertools
import math
import re
import statistics
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, Endpoint, Generation, Scores, Silent

#: Number of concurrent requests, and number of rounds of such requests.
TOGETHER = 32
_ROUNDS = 4
#: Nats by which a log probability may differ between prefill and decoding, and between a request
#: alone and in a batch, because 16-bit sums are computed in another order.
_BOUND = 0.3
#: One token in every _RARE may exceed the bound, but none may exceed _FAR times the bound.
_RARE = 50
_FAR = 5
#: Number of tokens of a long answer.
LONG = 640
#: Lengths, in tokens, of the prompts in which numbers are hidden.
RECALLED = (8192, 32768)
#: Tokens that the server's context must have beyond a prompt with hidden numbers, for the question
#: and the answer.
RECALL_MARGIN = 256
#: Maximum bits per byte of the known text, and maximum nats per token. Trained models need 0.3 to
#: 1.3 bits per byte and less than 4 nats per token. A model that guesses among 32,000 tokens of 4.3
#: bytes needs log2(32,000) / 4.3 = 3.5 bits per byte and 10 nats per token. If its tokens are
#: bytes, it needs 8 bits per byte and 5.5 nats per token.
_BITS = 2.0
_NATS = 4.5
#: Number of tokens of a window of the known text.
_WINDOW = 256
_SUBJECTS = [
    "a tide",
    "a violin",
    "photosynthesis",
    "the printing press",
    "a glacier",
    "bread",
    "the compass",
    "cement",
    "an eclipse",
    "the monsoon",
    "a honeybee",
    "paper",
    "a volcano",
    "the loom",
    "rust",
    "an orchard",
]
PROMPTS = tuple(
    f"In one long paragraph, the causes and the consequences of {subject}:" for subject in _SUBJECTS
)
#: Different prompts. Each one is sent twice at the same time.
MANY = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, TOGETHER * _ROUNDS // 2 + 1)]
#: A text with letters of several bytes, which a model continues with more such letters.
LETTERS = ("日本語、中文、한국어、Ελληνικά、🙂🦭🙂🦭 — " * 6).rstrip()
#: Number of likeliest tokens whose log probabilities are requested at each step.
_LISTED = 5
#: A listed token is compared if it is at most this many nats below the likeliest token.
_NEAR = 5.0
#: Tokens of a context that has room for the known text, which has 800 to 900 tokens.
_TEXT_CONTEXT = 1024
#: How many numbers are hidden in a long prompt.
_HIDDEN = 5
#: Maximum number of letters of a long prompt, for each token that the prompt should have.
_LETTERS_PER_TOKEN = 8


def read_known_text() -> str:
    """Return six passages that every model was trained on, from Lincoln, Austen and others."""
    return (files(__package__) / "known_text.txt").read_text()


def require_room_for_text(server: Endpoint) -> None:
    """Raise CannotRun if the server's context may be too short for the known text."""
    require_room(server, _TEXT_CONTEXT)


def require_room(server: Endpoint, needed: int) -> None:
    """Raise CannotRun if the server's context has fewer tokens than a check needs."""
    context = server.context()
    if 0 < context < needed:
        raise CannotRun(
            f"the server's context of {context} tokens is shorter than the {needed} tokens that "
            "this check needs"
        )


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest absolute difference between corresponding numbers of two lists.

    Raises:
        CheckFailed: Their lengths differ, or a number is NaN.
    """
    return max(_absolute_differences(first, second), default=0.0)


def _absolute_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    require(len(first) == len(second), f"{len(first)} log probabilities of {len(second)} tokens")
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    has_nan = any(math.isnan(difference) for difference in differences)
    require(not has_nan, "a log probability is not a number")
    return differences


def judge_greedy(
    server: Endpoint,
    *answers: Generation,
    bound: float = _BOUND,
    about: str = "",
) -> dict:
    """Require that the server's own prefill finds the generated tokens likeliest, or nearly so.

    Args:
        server: The server.
        *answers: The server's answers.
        bound: Nats by which log probabilities may differ.
        about: First words of the message of a failure.

    Raises:
        CheckFailed: More tokens exceed the bound than _RARE allows, or one exceeds _FAR times the
            bound.
    """
    differences = _compare_with_prefill(server, answers)
    return _judge_differences(differences, bound, about)


@dataclass(frozen=True)
class _Differences:
    """How an answer differs from the result of prefill, in nats for each token.

    Attributes:
        gaps: By how much each token is less likely than the likeliest one, according to prefill.
        errors: By how much the log probability of decoding differs from that of prefill.
    """

    gaps: list[float]
    errors: list[float]


def _compare_with_prefill(server: Endpoint, answers: Sequence[Generation]) -> list[_Differences]:
    scores: dict[tuple[int, ...], Scores] = {}
    differences = []
    for answer in answers:
        full_prompt = (*answer.prompt, *answer.tokens)
        if full_prompt not in scores:
            scores[full_prompt] = server.score(answer.prompt, answer.tokens)
        scored = scores[full_prompt]
        gaps = _absolute_differences(scored.best, scored.logprobs)
        errors = _absolute_differences(answer.logprobs, scored.logprobs)
        differences.append(_Differences(gaps, errors))
    return differences


def _judge_differences(
    differences: Sequence[_Differences],
    bound: float,
    about: str,
) -> dict:
    gaps: list[float] = []
    errors: list[float] = []
    for difference in differences:
        gaps += difference.gaps
        errors += difference.errors
    _require_near(
        gaps,
        f"{about}a token is less likely than another by",
        bound,
    )
    _require_near(errors, f"{about}decoding and prefill differ by", bound)
    return {
        "logprobs": _summarise(errors, bound),
        "greedy": _summarise(gaps, bound),
    }


def _summarise(values: Sequence[float], bound: float) -> dict[str, float]:
    return {
        "error": statistics.mean(values),
        "bound": bound,
        "largest": max(values),
    }


def _require_near(values: Sequence[float], message: str, bound: float) -> None:
    """Allow one value in every _RARE to exceed the bound, but none to exceed _FAR times it."""
    num_outside = sum(value > bound for value in values)
    worst = max(values, default=0.0)
    require(
        num_outside <= len(values) // _RARE and worst <= _FAR * bound,
        f"{message} {worst:.2f} nats, {bound} allowed; {num_outside} of {len(values)} values "
        "exceed this bound",
    )


def judge_pairs(
    server: Endpoint,
    answers: Sequence[Generation],
    bound: float = _BOUND,
    about: str = "",
) -> dict:
    """Judge the answers to prompts, each of which was sent twice at the same time.

    The answers to equal prompts may become different at a near tie, but nowhere else.

    Args:
        server: The server.
        answers: The server's answers, with those to equal prompts side by side.
        bound: Nats by which log probabilities may differ.
        about: First words of the message of a failure.
    """
    differences = _compare_with_prefill(server, answers)
    for i, difference in enumerate(differences):
        twin = answers[i ^ 1]
        message = about
        if answers[i].tokens != twin.tokens:
            message += "two equal requests at once get different answers, of which one is wrong: "
        _judge_differences([difference], _FAR * bound, message)
    return _judge_differences(differences, bound, about)


def judge_usage(answer: Generation, number: int) -> dict:
    """Require that an answer has as many tokens as requested, and that usage counts them."""
    num_tokens = len(answer.tokens)
    require(num_tokens == number, f"{num_tokens} tokens, but {number} were requested")
    counts = (len(answer.prompt), number, len(answer.prompt) + number)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(answer.usage == expected, f"usage says {answer.usage}, expected {expected}")
    return answer.usage


def judge_finish(answer: Generation, expected: str) -> dict:
    """Require that an answer ended for the expected reason, and return the reason."""
    finish = answer.finish
    require(finish == expected, f"finish_reason is {finish!r}, expected {expected!r}")
    return {"finish_reason": finish}


def judge_probabilities(
    server: Endpoint,
    prompt: str | list[int],
    number: int = 24,
) -> dict:
    """Require that the listed values of each step are logarithms of the model's probabilities."""
    answer = server.generate(prompt, number, logprobs=_LISTED)
    num_steps = len(answer.top)
    require(num_steps == number, f"top_logprobs of {num_steps} steps, expected {number}")
    steps = [_read_listed(step) for step in answer.top]
    sums = _sum_probabilities(steps)
    scored = server.score(answer.prompt, answer.tokens, listed=_LISTED)
    _require_likeliest_listed(steps, scored)
    chosen = [step.get(token, -math.inf) for step, token in zip(steps, answer.tokens, strict=True)]
    message = "top_logprobs and the log probability of a token differ by"
    _require_near(
        _absolute_differences(chosen, answer.logprobs),
        message,
        0.01,
    )
    differences = []
    for step, expected in zip(steps, scored.listed, strict=True):
        threshold = max(expected.values()) - _NEAR
        for token, value in step.items():
            if token in expected and expected[token] > threshold:
                differences.append(abs(value - expected[token]))
    _require_near(
        differences,
        "top_logprobs and the log probabilities of the prompt differ by",
        _BOUND,
    )
    return {
        "largest_sum": max(sums),
        "least_sum": min(sums),
        "compared": len(differences),
    }


def _read_listed(step: dict[str, float]) -> dict[int, float]:
    """Return the log probabilities of a step by token id."""
    numbers = {name: name.removeprefix("token_id:") for name in step}
    wrong = [name for name, number in numbers.items() if not number.isdecimal()]
    require(not wrong, f"top_logprobs name {wrong[:3]}, but token ids were requested")
    return {int(number): step[name] for name, number in numbers.items()}


def _sum_probabilities(steps: Sequence[dict[int, float]]) -> list[float]:
    """Return the sum of each step's probabilities, after judging the listed values."""
    sums = []
    for step in steps:
        values = step.values()
        require(
            all(math.isfinite(value) and value <= 1e-3 for value in values),
            "top_logprobs are no log probabilities: one of them is above zero, infinite or NaN",
        )
        sums.append(sum(math.exp(value) for value in values))
    require(max(sums) <= 1.001, f"probabilities sum to {max(sums):.4f}")
    fewest = min(map(len, steps))
    require(fewest >= _LISTED, f"{fewest} top_logprobs, but {_LISTED} were requested")
    return sums


def _require_likeliest_listed(steps: Sequence[dict[int, float]], scored: Scores) -> None:
    """Require that each list omits no token that prefill finds clearly likelier than a listed one.

    Args:
        steps: The server's lists: log probabilities by token id, for each step.
        scored: Log probabilities that prefill computes.
    """
    for step, expected in zip(steps, scored.listed, strict=True):
        threshold = min(step.values()) + _FAR * _BOUND
        absent = [
            token for token, value in expected.items() if value > threshold and token not in step
        ]
        require(
            not absent,
            f"top_logprobs leave out the tokens {absent}, which are likelier than a listed token",
        )


def judge_echo(answer: Generation, prompt: str) -> None:
    """Require that an answer's text does not begin with the prompt, unless its tokens do too."""
    num_tokens = min(len(answer.tokens), len(answer.prompt))
    tokens_repeat = answer.tokens[:num_tokens] == answer.prompt[:num_tokens]
    text_repeats = answer.text.lstrip().startswith(prompt[:40])
    require(
        tokens_repeat or not text_repeats,
        "the text of an answer begins with the prompt: it is an echo",
    )


def judge_text(server: Endpoint) -> dict:
    """Require that the model finds a well-known text likely, in each window of 256 tokens.

    A window may exceed the limit of nats per token if it meets the limit of bits per byte, because
    the tokens of models differ in length.

    Raises:
        CannotRun: The context is shorter than the text.
    """
    require_room_for_text(server)
    text = read_known_text()
    logprobs = server.score(text).logprobs
    num_tokens = len(logprobs)
    num_bytes = len(text.encode())
    bits = -sum(logprobs) / math.log(2) / num_bytes
    starts = range(0, num_tokens - _WINDOW // 2, _WINDOW)
    windows = [logprobs[start : start + _WINDOW] for start in starts] or [logprobs]
    nats = [-statistics.mean(window) for window in windows]
    guessed = []
    for i, mean in enumerate(nats):
        bits_per_byte = mean * num_tokens / math.log(2) / num_bytes
        # comparisons with NaN are false, so a window with NaN counts as guessed
        is_likely = mean <= _NATS or bits_per_byte <= _BITS
        if not is_likely:
            guessed.append(i)
    measured = (
        f"{bits:.1f} bits per byte of a known text, {nats[0]:.1f} nats per token of its beginning"
    )
    require(0 not in guessed, f"the model guesses, as random weights do: {measured}")
    if guessed:
        start = guessed[0] * _WINDOW
        raise CheckFailed(
            f"the model guesses in the {_WINDOW} tokens from token {start} on: their mean is "
            f"{nats[guessed[0]]:.1f} nats per token; {measured}"
        )
    return {"bits_per_byte": round(bits, 3), "tokens": num_tokens}


def judge_recall(server: Endpoint, length: int) -> dict:
    """Require that the model repeats numbers from five depths of a prompt correctly.

    Raises:
        CannotRun: The server accepts shorter prompts only, or the model does not even repeat a
            number from a short prompt.
    """
    require_room(server, length + RECALL_MARGIN)
    tokens_per_letter = len(server.generate(read_known_text(), 1).prompt) / len(read_known_text())
    pages = _make_pages(length, tokens_per_letter)
    missed_depths: list[str] = []
    begin = time.perf_counter()
    for place in range(_HIDDEN):
        # the two prompts sent at once hide different numbers, and differ from the first word on
        with ThreadPoolExecutor(2) as pool:
            requests = [pool.submit(_ask_number, server, pages, place, i) for i in (0, 1)]
            answers = [request.result() for request in requests]
        are_swapped = all(answers[i].startswith(_number(place, 1 - i)) for i in (0, 1))
        if are_swapped:
            raise CheckFailed("two long prompts that were sent at once got each other's answers")
        are_right = all(answers[i].startswith(_number(place, i)) for i in (0, 1))
        if are_right:
            continue
        missed_depths.append(f"{25 * place} %")
        if not _ask_number(server, [], 0, 0).startswith(_number(0, 0)):
            raise CannotRun("this model does not repeat a number that a short prompt contains")
    require(
        not missed_depths,
        f"the model does not repeat a number from depth {', '.join(missed_depths)} of a "
        f"prompt of {length} tokens: attention at this length is wrong, or the model is too weak",
    )
    num_letters = sum(map(len, pages))
    return {
        "tokens": round(num_letters * tokens_per_letter),
        "seconds": time.perf_counter() - begin,
    }


def _make_pages(length: int, tokens_per_letter: float) -> list[str]:
    """Return numbered lines of the known text that together have about `length` tokens."""
    pages: list[str] = []
    lines = itertools.cycle(read_known_text().splitlines())
    num_tokens = 0.0
    num_letters = 0
    while num_tokens < length and num_letters < _LETTERS_PER_TOKEN * length:
        line = next(lines)
        page = f"Page {len(pages) + 1}. {line}\n"
        pages.append(page)
        num_tokens += len(page) * tokens_per_letter
        num_letters += len(line)
    return pages


def _number(place: int, document: int) -> str:
    return str(71_353 + 5_417 * place + 1_009 * document)


def _ask_number(
    server: Endpoint,
    pages: Sequence[str],
    place: int,
    document: int,
) -> str:
    """Ask for one of five numbers that are hidden between the pages; return the answer.

    The prompts for the five numbers differ only in the question at their end. Therefore, the
    server's cache has the beginning of every prompt after the first one.
    """
    lines = list(pages)
    for i in reversed(range(_HIDDEN)):
        line = f"The number of {_SUBJECTS[i]} is {_number(i, document)}.\n"
        lines.insert(round(i * len(pages) / (_HIDDEN - 1)), line)
    title = ("First", "Another")[document]
    text = "".join(lines)
    prompt = f"{title} text.\n{text}As said above, the number of {_SUBJECTS[place]} is"
    answer = server.generate(prompt, 12).text
    return answer.strip().replace(",", "")


def _generate_together(
    server: Endpoint,
    prompts: Sequence,
    load: int,
    number: int,
) -> list[Generation]:
    with ThreadPoolExecutor(load) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, number), prompts))


def judge_together(
    server: Endpoint,
    prompts: Sequence,
    load: int,
    number: int = 24,
    bound: float = _BOUND,
) -> dict:
    """Require that each of several concurrent requests gets its own answer.

    Args:
        server: The server.
        prompts: One prompt for each request.
        load: Number of concurrent requests.
        number: Tokens to generate for each request.
        bound: Nats by which log probabilities may differ.
    """
    answers = _generate_together(server, prompts, load, number)
    for prompt, answer in zip(prompts, answers, strict=True):
        _require_prompt(server, prompt, answer)
        judge_usage(answer, number)
    measured = judge_greedy(server, *answers, bound=bound)
    return measured | {"requests": len(answers)}


def judge_twice_together(
    server: Endpoint,
    prompts: Sequence,
    load: int,
    number: int = 24,
) -> dict:
    """Judge as judge_together does, but send each prompt twice at once."""
    doubled = list(itertools.chain.from_iterable((prompt, prompt) for prompt in prompts))
    answers = _generate_together(server, doubled, load, number)
    firsts = answers[::2]
    seconds = answers[1::2]
    for prompt, answer in zip(prompts, firsts, strict=True):
        _require_prompt(server, prompt, answer)
    for first, second in zip(firsts, seconds, strict=True):
        require(
            first.prompt == second.prompt,
            "the second of two equal requests at once got the answer to another prompt",
        )
    for answer in answers:
        judge_usage(answer, number)
    return judge_pairs(server, answers) | {"requests": len(answers)}


def _require_prompt(
    server: Endpoint,
    prompt: str | list[int],
    answer: Generation,
) -> None:
    """Send the prompt again, and require that both answers report the same prompt tokens."""
    alone = server.generate(prompt, 1)
    require(answer.prompt == alone.prompt, "a request got the answer to another request's prompt")


def judge_stream(
    server: Endpoint,
    prompt: str | list[int],
    number: int = 24,
) -> dict:
    """Require that a stream has the text, tokens and usage of an unstreamed answer, in parts.

    If the stream has another token at a near tie, both answers are requested again, at most twice.
    """
    for _ in range(3):
        answer = server.generate(prompt, number)
        streamed = server.stream(prompt, number)
        if answer.tokens == streamed.tokens or len(answer.tokens) != len(streamed.tokens):
            break
        scored = server.score(answer.prompt, streamed.tokens)
        if largest_difference(scored.best, scored.logprobs) > _BOUND:
            break
    has_broken_letter = "\ufffd" in streamed.text and "\ufffd" not in answer.text
    require(not has_broken_letter, "a stream breaks letters in two")
    for name in ("tokens", "text", "finish", "usage"):
        expected = getattr(answer, name)
        value = getattr(streamed, name)
        require(
            expected == value,
            f"{name} of a stream: {str(value)[:80]}, without streaming: {str(expected)[:80]}",
        )
    num_parts = len(streamed.seconds)
    require(num_parts > 1, "all tokens came in one part")
    num_letters = sum(not letter.isascii() for letter in answer.text)
    return {"parts": num_parts, "letters": num_letters}


def judge_stop(
    server: Endpoint,
    prompt: str | list[int],
    number: int = 64,
) -> dict:
    """Require that an answer ends before a stop string, with and without streaming.

    At a near tie, the text before the stop string may differ; then the answer is requested again.
    """
    for ask in (server.generate, server.stream):
        for _ in range(3):
            text = server.generate(prompt, number).text
            stop = text[len(text) // 2 :][:4]
            require(len(stop) == 4, f"the text of {number} tokens is {text!r}")
            answer = ask(prompt, number, stop=[stop])
            expected = text[: text.index(stop)]
            if answer.text.startswith(expected):
                break
        require(
            answer.text == expected,
            f"the text before the stop string is {answer.text!r}, expected {expected!r}",
        )
        judge_finish(answer, "stop")
    return {"stop": stop}


def judge_abort(
    server: Endpoint,
    prompt: str | list[int],
    number: int = 24,
    bound: float = _BOUND,
) -> dict:
    """Require that after clients disconnect, the next client gets a correct answer in time.

    Args:
        server: The server.
        prompt: The prompt of all clients.
        number: Tokens of the next client's answer.
        bound: Nats by which log probabilities may differ.
    """
    begin = time.perf_counter()
    server.generate(prompt, number)
    seconds_before = time.perf_counter() - begin
    for _ in range(3):
        stream = server.stream_parts(prompt, 200)
        next(stream)
        stream.close()
    begin = time.perf_counter()
    limit = 60 + 3 * seconds_before
    try:
        answer = server.generate(prompt, number, limit)
    except Silent as error:
        raise CheckFailed(
            f"after clients disconnected, an answer takes more than {limit:.0f} s; before, it took "
            f"{seconds_before:.1f} s"
        ) from error
    judge_greedy(server, answer, bound=bound)
    return {"next_seconds": round(time.perf_counter() - begin, 2)}


def judge_questions(server: Endpoint, num_required: int) -> dict:
    """Require that enough of the 50 questions of questions.toml are answered with the right number.

    Three questions with answers precede each question. A model without a chat template needs such
    examples.
    """
    table = tomllib.loads((files(__package__) / "questions.toml").read_text())
    examples = "".join(
        f"Question: {example['ask']}\nAnswer: {example['answer']}\n\n" for example in table["shown"]
    )

    def is_right(question: dict) -> bool:
        prompt = f"{examples}Question: {question['ask']}\nAnswer:"
        answer = server.generate(prompt, 200, stop=["\n\n", "Question:"])
        return _last_number(answer.text) == question["is"]

    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(is_right, table["question"]))
    num_right = sum(verdicts)
    message = f"{num_right} of {len(verdicts)} answers are right, {num_required} were expected"
    require(num_right >= num_required, message)
    return {"right": num_right, "asked": len(verdicts)}


def _last_number(text: str) -> int | None:
    """Return the last number after "answer is" or "####", else the last one; None without any."""
    text = text.replace(",", "")
    numbers = re.findall(r"(?:answer is|####)\D{0,9}?(-?\d+)", text) or re.findall(r"-?\d+", text)
    if not numbers:
        return None
    return int(numbers[-1])
