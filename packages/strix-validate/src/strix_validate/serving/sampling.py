# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether a server applies sampling parameters: frequencies, seeds, penalties and biases.

The log probabilities of one greedy step show how often each token should be drawn. A draw is one
token long, so hundreds of draws cost little.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import Endpoint, Generation, Refused

#: Number of draws for a setting, and number of draws in one request.
_DRAWS = 256
_DRAWS_PER_REQUEST = 64
#: Limit of a sample's deviation, in standard deviations. One correct sample in 100,000 exceeds the
#: limit, so a second sample decides if the first one exceeds it.
_DEVIATIONS = 4.3
#: Prompts after which several next tokens are likely.
_PROMPTS = (
    "Pick one of red, green, blue and yellow at random:",
    "I rolled a die, and it showed the number",
    "My favourite animal is the",
    "One of the largest cities of Europe is",
    "It was the",
    "We hold these",
)
#: Maximum number of tokens for which vLLM, or OpenAI's API, lists log probabilities.
_LISTED_BY_VLLM = 20
_LISTED_BY_OPENAI = 5
#: A text that repeats itself, so that a model goes on repeating it.
_REPETITION = "one two three four five six " * 12
#: Number of tokens that are generated with penalties.
_PENALIZED = 48
#: Nats by which logits may differ between prefill and decoding; see judges.
_NATS = 0.3
#: Rounding may change the order of two probabilities whose ratio is smaller than this.
_CLEAR = 1.35
#: Relative error of a probability, from rounding in 16 bits.
_ROUNDING = 0.05


@dataclass(frozen=True)
class _Setting:
    """Sampling parameters, and how often each token should be drawn with them.

    Attributes:
        parameters: Keys of the request.
        expected: Probability of each token, up to a common factor.
        other: Probability of all tokens that `expected` lacks, up to the same factor.
        unclear: Tokens near a limit such as top_k, which may be allowed or not.
        power: Power to which the model's probabilities were raised.
    """

    parameters: dict
    expected: dict[int, float]
    other: float = 0.0
    unclear: frozenset[int] = frozenset()
    power: float = 1.0


def judge_sampling(server: Endpoint) -> dict:
    """Require that temperature, top_k, top_p, min_p, n, seeds and logit_bias have their effects.

    Raises:
        CannotRun: No prompt has several likely next tokens, as with random weights; or the server
            refuses sampling parameters, or lists no log probabilities.
    """
    prompt, probabilities = _choose_prompt(server)
    settings = _list_settings(probabilities)
    checked = []
    refused = []
    for name, setting in settings.items():
        try:
            _require_frequencies(server, prompt, name, setting)
            checked.append(name)
        except Refused as error:  # vLLM accepts no min_p and no logit_bias together with drafts
            refused.append(f"{name} ({error!s:.80})")
    if not checked:
        raise CannotRun(f"the server refuses sampling parameters: {refused[0]}")
    _judge_seeds(server, prompt)
    unlikely = min(probabilities, key=probabilities.__getitem__)
    try:
        _judge_bias(server, prompt, unlikely)
    except Refused as error:
        refused.append(f"logit_bias ({error!s:.80})")
    measured = {"settings": ", ".join(checked), "draws": _DRAWS * len(checked)}
    if refused:
        measured["not_checked"] = "; ".join(refused)
    return measured


def _list_settings(probabilities: Mapping[int, float]) -> dict[str, _Setting]:
    """Return the settings to draw with, by their names in messages.

    Args:
        probabilities: Probabilities of the likeliest next tokens.
    """
    ranked = sorted(probabilities, key=lambda token: -probabilities[token])
    unlisted = max(0.0, 1 - sum(probabilities.values()))
    settings = {"temperature 1": _Setting({}, dict(probabilities), unlisted)}
    top_k = min(10, len(ranked) - 1)
    for temperature in (0.25, 2.0):
        name = f"temperature {temperature:g} with top_k {top_k}"
        settings[name] = _make_scaled(probabilities, ranked, temperature, top_k)
    cut = _find_cut([probabilities[token] for token in ranked])
    if cut:
        last = probabilities[ranked[cut - 1]]
        following = probabilities[ranked[cut]]
        expected = {token: probabilities[token] for token in ranked[:cut]}
        top_p = sum(expected.values()) - last / 2
        min_p = math.sqrt(last * following) / probabilities[ranked[0]]
        settings[f"top_k {cut}"] = _Setting({"top_k": cut}, expected)
        settings[f"top_p for {cut} tokens"] = _Setting({"top_p": top_p}, expected)
        settings[f"min_p for {cut} tokens"] = _Setting({"min_p": min_p}, expected)
    return settings


def _make_scaled(
    probabilities: Mapping[int, float],
    ranked: Sequence[int],
    temperature: float,
    top_k: int,
) -> _Setting:
    """Return the setting with a temperature and top_k.

    Args:
        probabilities: Probabilities of the likeliest next tokens.
        ranked: These tokens, the likeliest one first.
        temperature: Sampling parameter.
        top_k: Sampling parameter.
    """
    power = 1 / temperature
    edge = probabilities[ranked[top_k]]
    expected = {}
    unclear = []
    for token in ranked:
        probability = probabilities[token]
        if probability > _CLEAR * edge:
            expected[token] = probability**power
        elif probability >= edge / _CLEAR:
            unclear.append(token)
    parameters = {"temperature": temperature, "top_k": top_k}
    return _Setting(
        parameters,
        expected,
        unclear=frozenset(unclear),
        power=power,
    )


def _find_cut(probabilities: Sequence[float]) -> int:
    """Return the rank, from 2 to 6, after which the probability falls most.

    If the probability falls clearly after none of these ranks, return 0. Rank 1 is left out,
    because drawing from one token is greedy decoding.
    """
    ratios = {}
    for rank in range(2, min(7, len(probabilities))):
        probability = probabilities[rank - 1]
        if probability >= 2 * _ROUNDING:
            ratios[rank] = probability / probabilities[rank]
    if not ratios:
        return 0
    best = max(ratios, key=ratios.__getitem__)
    return best if ratios[best] >= _CLEAR else 0


def _choose_prompt(server: Endpoint) -> tuple[list[int], dict[int, float]]:
    """Return the prompt with the least certain next token, and the likeliest tokens' probabilities.

    Raises:
        CannotRun: No prompt of _PROMPTS has several likely next tokens, or the server lists no log
            probabilities.
    """
    highest_entropy = 0.0
    best_prompt: list[int] = []
    best_probabilities: dict[int, float] = {}
    for text in _PROMPTS:
        prompt = server.generate(text, 1).prompt
        probabilities = _list_next(server, prompt)
        values = list(probabilities.values())
        if sum(values) < 0.5 or len(values) < 2:
            continue
        entropy = -sum(value * math.log(value) for value in values if value > 0)
        if max(values) <= 0.9 and entropy > highest_entropy:
            highest_entropy = entropy
            best_prompt = prompt
            best_probabilities = probabilities
    if not best_prompt:
        raise CannotRun(
            "this model has several likely tokens, and few others, after none of the check's "
            "prompts"
        )
    return best_prompt, best_probabilities


def _list_next(server: Endpoint, prompt: list[int]) -> dict[int, float]:
    """Return the probabilities of the likeliest tokens after a prompt."""
    for number in (_LISTED_BY_VLLM, _LISTED_BY_OPENAI):
        try:
            tokens = server.generate(prompt, 1).tokens
            scored = server.score(prompt, tokens, listed=number)
        except Refused:
            continue
        return {token: math.exp(value) for token, value in scored.listed[0].items()}
    raise CannotRun("the server refuses to list the log probabilities of the likeliest tokens")


def _draw(
    server: Endpoint,
    prompt: list[int],
    seed: int,
    number: int,
    length: int = 1,
    **parameters,
) -> list[Generation]:
    """Draw choices, by default at temperature 1 from the whole vocabulary.

    Args:
        server: The server.
        prompt: Token ids.
        seed: Seed of the request.
        number: Number of choices to draw.
        length: Tokens of each choice.
        **parameters: Sampling parameters, which may replace the default ones.
    """
    settings = {
        "temperature": 1.0,
        "top_k": -1,
        "seed": seed,
        "n": number,
    } | parameters
    choices = server.generate_choices(prompt, length, **settings)
    require(len(choices) == number, f"n is {number}, but the answer has {len(choices)} choices")
    num_tokens = sum(len(choice.tokens) for choice in choices)
    require(
        num_tokens == number * length,
        f"{number} choices have {num_tokens} tokens in total, but {number * length} are expected: "
        f"max_tokens is {length}, for each choice",
    )
    for choice in choices:
        require(choice.prompt == prompt, "a request got the answer to another request's prompt")
        counted = choice.usage.get("completion_tokens")
        require(
            counted == num_tokens,
            f"usage says {counted} tokens for {number} choices, expected {num_tokens}",
        )
    return choices


def _require_frequencies(
    server: Endpoint,
    prompt: list[int],
    name: str,
    setting: _Setting,
) -> None:
    """Require that tokens are drawn as often as expected, at the first or the second attempt."""
    message = ""
    all_equal = True
    for attempt in range(2):
        tokens = []
        all_equal = True
        for i in range(_DRAWS // _DRAWS_PER_REQUEST):
            seed = 1000 * attempt + 100 * i
            choices = _draw(
                server,
                prompt,
                seed,
                _DRAWS_PER_REQUEST,
                **setting.parameters,
            )
            drawn = [choice.tokens[0] for choice in choices]
            all_equal = all_equal and len(set(drawn)) == 1
            tokens += [token for token in drawn if token not in setting.unclear]
        message = _compare(tokens, setting)
        if not message:
            return
    part = ", and all choices of n are equal" if all_equal else ""
    raise CheckFailed(f"{name} is ignored or wrong{part}: {message}")


def _compare(tokens: Sequence[int], setting: _Setting) -> str:
    """Compare frequencies with probabilities by Pearson's test; return a message if they differ."""
    size = len(tokens)
    counts = Counter(tokens)
    num_others = sum(counts[token] for token in counts if token not in setting.expected)
    if setting.other == 0 and num_others:
        allowed = f"the {len(setting.expected)} allowed"
        return f"{num_others} of {size} tokens are not among {allowed}"
    pairs = _pair_with_means(counts, num_others, setting, size)
    if len(pairs) == 1:
        return ""
    error = _ROUNDING * setting.power
    statistic = sum((count - mean) ** 2 / (mean + (error * mean) ** 2) for count, mean in pairs)
    if statistic <= _chi_squared_limit(len(pairs) - 1):
        return ""
    shown = ", ".join(f"{count} ({mean:.0f})" for count, mean in pairs[:4])
    return f"counts of the likeliest tokens in {size} draws (expected counts): {shown}"


def _pair_with_means(
    counts: Counter,
    num_others: int,
    setting: _Setting,
    size: int,
) -> list[tuple[int, float]]:
    """Return the count and the expected count of each token, the likeliest one first.

    Rare tokens share one entry, because Pearson's test needs an expected count of five.

    Args:
        counts: How often each token was drawn.
        num_others: Draws of tokens that the setting does not list.
        setting: Probabilities of tokens.
        size: Number of draws.
    """
    total = sum(setting.expected.values()) + setting.other
    pairs = []
    for token, probability in setting.expected.items():
        pairs.append((counts[token], size * probability / total))
    pairs.append((num_others, size * setting.other / total))
    pairs.sort(key=lambda pair: -pair[1])
    while len(pairs) > 1 and pairs[-1][1] < 5:
        last_count, last_mean = pairs.pop()
        count, mean = pairs.pop()
        pairs.append((last_count + count, last_mean + mean))
    return pairs


def _chi_squared_limit(freedom: int) -> float:
    """Return the value of chi squared that corresponds to _DEVIATIONS standard deviations.

    The distribution of chi squared is approximated by Wilson and Hilferty's formula.

    Args:
        freedom: Degrees of freedom.
    """
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + _DEVIATIONS * math.sqrt(spread)) ** 3


def _judge_seeds(server: Endpoint, prompt: list[int]) -> None:
    """Require equal tokens for equal seeds, and different ones for different seeds or choices."""

    def draw_tokens(seed: int, number: int) -> list[list[int]]:
        choices = _draw(server, prompt, seed, number, length=16)
        return [choice.tokens for choice in choices]

    # at a near tie, rounding may change a token, so one equal pair of three is enough
    repeats = any(draw_tokens(seed, 1) == draw_tokens(seed, 1) for seed in (11, 12, 13))
    require(repeats, "the seed is ignored: equal seeds give different tokens")
    draws = [draw_tokens(seed, 4) for seed in (21, 22, 23, 24)]
    all_equal = all(choices.count(choices[0]) == len(choices) for choices in draws)
    require(not all_equal, "all choices of n are equal")
    require(draws[0] != draws[1], "the seed is ignored: two seeds give the same tokens")


def _judge_bias(server: Endpoint, prompt: list[int], unlikely: int) -> None:
    """Require that logit_bias forbids and forces a token.

    Args:
        server: The server.
        prompt: Token ids.
        unlikely: Token to force.
    """
    (likeliest,) = server.generate(prompt, 1).tokens
    (other,) = server.generate(prompt, 1, logit_bias={str(likeliest): -100}).tokens
    require(other != likeliest, "logit_bias is ignored: a token with a bias of -100 is generated")
    (forced,) = server.generate(prompt, 1, logit_bias={str(unlikely): 100}).tokens
    require(
        forced == unlikely,
        "logit_bias is ignored: a token with a bias of 100 is not generated",
    )


def judge_penalties(server: Endpoint) -> dict:
    """Require that penalties have their effects.

    After frequency_penalty or presence_penalty is subtracted, each token, except perhaps one, must
    be the likeliest up to rounding. repetition_penalty must change the tokens.

    Raises:
        CannotRun: The model generates no repetitions without penalties.
    """
    prompt = server.generate(_REPETITION, 1).prompt
    plain = server.generate(prompt, _PENALIZED).tokens
    if max(Counter(plain).values()) < 4:
        raise CannotRun("this model does not repeat itself even after a repetitive prompt")
    penalties: dict[str, Callable[[int], float]] = {
        "frequency_penalty": lambda count: 2.0 * count,
        "presence_penalty": lambda count: 2.0 * min(count, 1),
    }
    measured = {}
    for name, penalty in penalties.items():
        answer = server.generate(prompt, _PENALIZED, **{name: 2.0})
        shortfalls = _list_shortfalls(server, answer, penalty)
        num_outside = sum(value > _NATS for value in shortfalls)
        largest = max(shortfalls)
        require(
            num_outside <= 1 and largest <= 5 * _NATS,
            f"{name} is ignored or wrong: {num_outside} of {len(shortfalls)} tokens are not the "
            f"likeliest after the penalty, by up to {largest:.1f} nats",
        )
        measured[f"{name}_largest"] = largest
    penalized = server.generate(prompt, _PENALIZED, repetition_penalty=10.0).tokens
    require(penalized != plain, "repetition_penalty is ignored: 10 and 1 give the same tokens")
    return measured


def _list_shortfalls(
    server: Endpoint,
    answer: Generation,
    penalty: Callable[[int], float],
) -> list[float]:
    """Return by how much each token is less likely than the likeliest token after the penalty.

    Args:
        server: The server.
        answer: The server's answer with the penalty.
        penalty: Returns how many nats a token loses, for the number of times that it was generated
            before.
    """
    scored = server.score(answer.prompt, answer.tokens, listed=_LISTED_BY_OPENAI)
    counts: Counter[int] = Counter()
    shortfalls = []
    for token, logprob, listed in zip(
        answer.tokens,
        scored.logprobs,
        scored.listed,
        strict=True,
    ):
        best = max(value - penalty(counts[other]) for other, value in listed.items())
        shortfalls.append(max(0.0, best - (logprob - penalty(counts[token]))))
        counts[token] += 1
    return shortfalls
