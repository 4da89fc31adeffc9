# SPDX-License-Identifier: BSD-3-Clause
"""Whether a running server is correct, and how fast, from its answers alone.

No reference model is needed. What a server generates step by step is given back to it as one
prompt, whose log probabilities come from other kernels: prefill, not decoding. Where both may be
wrong alike, a text that every model knows, and numbers hidden in a long prompt, tell.
"""

import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import COUNTS, LIMIT, Endpoint, Generation

#: Requests at a time that are measured; that are judged, and how often so many.
LOADS = (1, 4, 16)
TOGETHER, _ROUNDS = 32, 4
#: Of a log probability between prefill and decoding, and between alone and in a batch: sums have
#: another order, in 16 bits. One token in 50 may be off by more, none by five times that.
_BOUND, _RARE, _FAR = 0.3, 50, 5
#: Tokens of a long answer, and of the prompts that numbers are hidden in.
LONG, RECALLED = 300, (8192, 32768)
#: Trained models take 0.3 to 1.3 bits for a byte of the known text and below 4 nats for a token;
#: one that guesses takes log2(32,000) / 4.3 = 3.5 bits and 10 nats, or as bytes 8 bits and 5.5.
_BITS, _NATS = 2.0, 4.5
_WINDOW = 256
#: Requests, and how many at a time; tokens that each has and gets.
_REQUESTS, _LOAD, _READ, _WRITTEN = 32, 16, 512, 64
#: Of its result, what is kept; times are in milliseconds.
_KEPT = (
    "completed", "failed", "request_throughput", "output_throughput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
_SUBJECTS = [
    "a tide", "a violin", "photosynthesis", "the printing press", "a glacier", "bread",
    "the compass", "cement", "an eclipse", "the monsoon", "a honeybee", "paper", "a volcano",
    "the loom", "rust", "an orchard",
]  # fmt: skip
PROMPTS = tuple(
    f"In one long paragraph, the causes and the consequences of {subject}:" for subject in _SUBJECTS
)
#: Prompts that all differ.
MANY = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, TOGETHER * _ROUNDS + 1)]


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


def judge_greedy(server: Endpoint, *answers: Generation, bound: float = _BOUND) -> dict:
    """Require that what was generated is what the server's own prefill finds likeliest.

    Raise CheckFailed otherwise. Near ties may fall either way.
    """
    short: list[float] = []
    errors: list[float] = []
    for found in answers:
        scored = server.score(found.prompt, found.tokens)
        short += _differences(scored.best, scored.own)
        errors += _differences(found.logprobs, scored.own)
    for values, said in (
        (short, "a token is less likely than another by"),
        (errors, "decoding and prefill differ by"),
    ):
        outside = sum(value > bound for value in values)
        worst = max(values, default=0.0)
        require(
            outside <= len(values) // _RARE and worst <= _FAR * bound,
            f"{said} {worst:.2f}, {bound} allowed; {outside} of {len(values)} are over it",
        )
    return {
        "logprobs": {"error": statistics.mean(errors), "bound": bound, "largest": max(errors)},
        "greedy": {"error": statistics.mean(short), "bound": bound, "largest": max(short)},
    }


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


def judge_probabilities(found: Generation) -> dict:
    """Require that in no step the listed probabilities exceed one."""
    require(found.top, "no log probabilities of other tokens")
    sums = [sum(math.exp(value) for value in step.values()) for step in found.top]
    require(max(sums) <= 1.001, f"probabilities sum to {max(sums):.4f}")
    return {"largest_sum": max(sums), "least_sum": min(sums)}


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
    missed = []
    begin = time.perf_counter()
    for place in range(5):
        found = _ask_number(server, pages, place, LIMIT + length / 20)
        missed += [] if found else [f"{25 * place} %"]
        if not found and not _ask_number(server, [], 0, LIMIT):
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


def _ask_number(server: Endpoint, pages: Sequence[str], place: int, limit: float) -> bool:
    """Ask for one of five numbers that stand between the pages; return if it is answered.

    The prompts are alike up to the question: later ones begin with what the cache holds.
    """
    numbers = [str(71_353 + 5_417 * i) for i in range(5)]
    whole = list(pages)
    for i in reversed(range(5)):
        line = f"The number of {_SUBJECTS[i]} is {numbers[i]}.\n"
        whole.insert(round(i * len(pages) / 4), line)
    prompt = f"{''.join(whole)}As said above, the number of {_SUBJECTS[place]} is"
    answer = server.generate(prompt, 12, limit).text
    return answer.strip().replace(",", "").startswith(numbers[place])


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


def shared_prompts() -> list[str]:
    """Return prompts that begin alike, by more than four blocks of 16 tokens, and then differ.

    The first half differs in the middle and ends alike; the others differ at their ends.
    """
    page, *_ = known_text().splitlines()
    first, last = page[:600], page[600:]
    inside = [f"{first} The number is {40_321 + 7_919 * i}.{last} The number is" for i in range(4)]
    return inside + [f"{first} {prompt}" for prompt in PROMPTS[:4]]


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
    for name in ("tokens", "text", "finish", "usage"):
        first, second = getattr(whole, name), getattr(parts, name)
        require(first == second, f"{name} of a stream: {str(second)[:80]}, else {str(first)[:80]}")
    require(len(parts.seconds) > 1, "all tokens came in one part")
    return {"parts": len(parts.seconds)}


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
    found = server.generate(prompt, number, 60 + 3 * before)
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


def measure(server: Endpoint, load: int, prompts: Sequence, number: int = 64) -> dict:
    """Measure the time to the first token, and tokens a second, of so many requests at a time.

    Other prompts each time: what a prefix cache holds would take no time.
    """
    numbered = [f"{time.time_ns()} {prompts[i % len(prompts)]}" for i in range(load)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        found = list(pool.map(lambda prompt: server.stream(prompt, number), numbered))
    taken = time.perf_counter() - begin
    require(all(each.seconds for each in found), "a stream had no tokens")
    return {
        "first_token_ms": 1e3 * statistics.median(each.seconds[0] for each in found),
        "tokens_per_second": sum(len(each.tokens) for each in found) / taken,
        "requests": load,
    }


def bench_serve(server: Endpoint) -> dict:
    """Run `vllm bench serve`, and return its numbers under its own names.

    Raises:
        CannotRun: there is no command vllm. CheckFailed: it ends with an error, or a request did.
    """
    program = shutil.which("vllm")
    if program is None:
        raise CannotRun("vllm is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program, "bench", "serve", "--base-url", server.url, "--model", server.model,
            "--dataset-name", "random", "--random-input-len", str(_READ),
            "--random-output-len", str(_WRITTEN), "--num-prompts", str(_REQUESTS),
            "--max-concurrency", str(_LOAD), "--ignore-eos", "--disable-tqdm", "--save-result",
            "--result-dir", folder, "--result-filename", "found.json",
        ]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"vllm bench serve took more than {LIMIT:.0f} s") from error
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
            raise CheckFailed(f"vllm bench serve ended with {ended.returncode}: {' '.join(last)}")
        try:
            found = json.loads(Path(folder, "found.json").read_bytes())
            kept = {name: float(found[name]) for name in _KEPT if name in found}
            done = int(found["completed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckFailed(f"vllm bench serve wrote no result: {error!r:.200}") from error
    require(done == _REQUESTS, f"{done} of {_REQUESTS} requests of vllm bench serve were answered")
    return kept
