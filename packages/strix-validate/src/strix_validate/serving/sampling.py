# SPDX-License-Identifier: BSD-3-Clause
"""Whether a server obeys sampling parameters: frequencies of tokens, seeds, penalties, biases.

The log probabilities of one greedy step say how often each token is to be drawn. Draws are one
token long, so that hundreds of them cost little.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import Endpoint, Generation, Refused

#: Draws of a setting, and of one request.
_DRAWS, _AT_ONCE = 256, 64
#: Standard deviations: one right draw in 100,000 exceeds it, and a second one decides then.
_DEVIATIONS = 4.3
#: Beginnings after which several tokens are likely.
_PROMPTS = (
    "Pick one of red, green, blue and yellow at random:",
    "I rolled a die, and it showed the number",
    "My favourite animal is the",
    "One of the largest cities of Europe is",
    "It was the",
    "We hold these",
)
#: Tokens that a request lists: vLLM's limit, and OpenAI's.
_LISTED = (20, 5)
#: Repeats itself, and is continued likewise.
_REPETITION = "one two three four five six " * 12
_PENALIZED = 48
#: Nats by which logits may differ between prefill and decoding; see judges.
_NATS = 0.3
#: Two probabilities with a smaller ratio may change their order with rounding.
_CLEAR = 1.35
#: Relative error of a probability, from rounding in 16 bits.
_ROUNDING = 0.05


@dataclass(frozen=True)
class _Setting:
    """Sampling parameters, and how often they let each token be drawn.

    Attributes:
        parameters: Of the request.
        expected: Probability of each token, up to a factor.
        other: Probability of all others, by the same factor.
        unclear: Tokens near a cut, which may be kept or not.
        power: By which the model's probabilities were raised.
    """

    parameters: dict
    expected: dict[int, float]
    other: float = 0.0
    unclear: frozenset[int] = frozenset()
    power: float = 1.0


def judge_sampling(server: Endpoint) -> dict:
    """Require that temperature, top_k, top_p, min_p, n, seeds and logit_bias do what they should.

    Raises:
        CannotRun: no prompt has several likely next tokens, as with random weights.
    """
    prompt, listed = _choose_prompt(server)
    settings = _list_settings(listed)
    refused = []
    for name, setting in settings.items():
        try:
            _require_frequencies(server, prompt, name, setting)
        except Refused as error:  # vLLM takes no min_p and no logit_bias together with drafts
            refused.append(f"{name} ({error!s:.80})")
    if len(refused) == len(settings):
        raise CannotRun(f"the server refuses sampling parameters: {refused[0]}")
    _judge_seeds(server, prompt)
    try:
        _judge_bias(server, prompt, min(listed, key=listed.__getitem__))
    except Refused as error:
        refused.append(f"logit_bias ({error!s:.80})")
    checked = [name for name in settings if not any(each.startswith(name) for each in refused)]
    measured = {"settings": ", ".join(checked), "draws": _DRAWS * len(checked)}
    return measured | ({"not_checked": "; ".join(refused)} if refused else {})


def _list_settings(listed: Mapping[int, float]) -> dict[str, _Setting]:
    ranked = sorted(listed, key=lambda token: -listed[token])
    settings = {"temperature 1": _Setting({}, dict(listed), max(0.0, 1 - sum(listed.values())))}
    kept = min(10, len(ranked) - 1)
    edge = listed[ranked[kept]]
    for temperature in (0.25, 2.0):
        power = 1 / temperature
        settings[f"temperature {temperature:g} with top_k {kept}"] = _Setting(
            {"temperature": temperature, "top_k": kept},
            {token: listed[token] ** power for token in ranked if listed[token] > _CLEAR * edge},
            unclear=frozenset(t for t in ranked if edge / _CLEAR <= listed[t] <= _CLEAR * edge),
            power=power,
        )
    cut = _find_cut([listed[token] for token in ranked])
    if cut:
        last, following = listed[ranked[cut - 1]], listed[ranked[cut]]
        expected = {token: listed[token] for token in ranked[:cut]}
        least = math.sqrt(last * following) / listed[ranked[0]]
        settings |= {
            f"top_k {cut}": _Setting({"top_k": cut}, expected),
            f"top_p for {cut}": _Setting({"top_p": sum(expected.values()) - last / 2}, expected),
            f"min_p for {cut}": _Setting({"min_p": least}, expected),
        }
    return settings


def _find_cut(probabilities: Sequence[float]) -> int:
    """Return the rank after which a probability falls most, of the second to the sixth.

    It is 0 where none falls clearly. The first rank alone would be greedy decoding.
    """
    ranks = range(2, min(7, len(probabilities)))
    likely = [rank for rank in ranks if probabilities[rank - 1] >= 2 * _ROUNDING]
    falls = {rank: probabilities[rank - 1] / probabilities[rank] for rank in likely}
    best = max(falls, key=falls.__getitem__, default=0)
    return best if best and falls[best] >= _CLEAR else 0


def _choose_prompt(server: Endpoint) -> tuple[list[int], dict[int, float]]:
    """Return the prompt whose next token is least certain, and its likely next tokens."""
    best: tuple[float, list[int], dict[int, float]] = (0.0, [], {})
    for text in _PROMPTS:
        prompt = server.generate(text, 1).prompt
        listed = _list_next(server, prompt)
        values = sorted(listed.values(), reverse=True)
        if sum(values) < 0.5 or len(values) < 2:
            continue
        entropy = -sum(value * math.log(value) for value in values if value > 0)
        if values[0] <= 0.9 and entropy > best[0]:
            best = entropy, prompt, listed
    if not best[1]:
        raise CannotRun("after no prompt has this model several likely tokens, and few others")
    return best[1], best[2]


def _list_next(server: Endpoint, prompt: list[int]) -> dict[int, float]:
    """Return the probabilities of the likeliest next tokens."""
    for number in _LISTED:
        try:
            scored = server.score(prompt, server.generate(prompt, 1).tokens, listed=number)
        except Refused:
            continue
        return {token: math.exp(value) for token, value in scored.listed[0].items()}
    raise CannotRun("the server lists no log probabilities of several tokens")


def _draw(
    server: Endpoint, prompt: list[int], seed: int, number: int, length: int = 1, **more
) -> list[Generation]:
    settings = {"temperature": 1.0, "top_k": -1, "seed": seed, "n": number} | more
    choices = server.generate_choices(prompt, length, **settings)
    require(len(choices) == number, f"n is {number}, and {len(choices)} choices are answered")
    written = sum(len(each.tokens) for each in choices)
    require(
        written == number * length,
        f"{written} tokens of {number} choices, max_tokens is {length}",
    )
    for each in choices:
        require(each.prompt == prompt, "a request was answered for another one's prompt")
        counted = each.usage.get("completion_tokens")
        message = f"usage says {counted} tokens of {number} choices, expected {written}"
        require(counted == written, message)
    return choices


def _require_frequencies(server: Endpoint, prompt: list[int], name: str, setting: _Setting) -> None:
    """Require that tokens are drawn as often as expected; a second draw decides."""
    for attempt in range(2):
        requests = [
            _draw(server, prompt, 1000 * attempt + 100 * i, _AT_ONCE, **setting.parameters)
            for i in range(_DRAWS // _AT_ONCE)
        ]
        tokens = [each.tokens[0] for choices in requests for each in choices]
        message = _compare([t for t in tokens if t not in setting.unclear], setting)
        if not message:
            return
    alike = all(len({each.tokens[0] for each in choices}) == 1 for choices in requests)
    part = ", and all choices of n are equal" if alike else ""
    raise CheckFailed(f"{name} is ignored or wrong{part}: {message}")


def _compare(tokens: Sequence[int], setting: _Setting) -> str:
    """Return how frequencies differ from probabilities, by Pearson's test; empty if they agree."""
    size = len(tokens)
    counts = Counter(tokens)
    strangers = sum(counts[token] for token in counts if token not in setting.expected)
    if setting.other == 0 and strangers:
        allowed = f"the {len(setting.expected)} allowed"
        return f"{strangers} of {size} tokens are not among {allowed}"
    total = sum(setting.expected.values()) + setting.other
    pairs = [(counts[token], size * p / total) for token, p in setting.expected.items()]
    pairs.append((strangers, size * setting.other / total))
    pairs.sort(key=lambda pair: -pair[1])
    while len(pairs) > 1 and pairs[-1][1] < 5:  # the rare ones are one group
        last, before = pairs.pop(), pairs.pop()
        pairs.append((last[0] + before[0], last[1] + before[1]))
    if len(pairs) == 1:
        return ""
    error = _ROUNDING * setting.power
    statistic = sum((seen - mean) ** 2 / (mean + (error * mean) ** 2) for seen, mean in pairs)
    freedom = len(pairs) - 1
    # Wilson and Hilferty's approximation of the distribution of chi squared
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + _DEVIATIONS * math.sqrt(spread)) ** 3
    if statistic <= limit:
        return ""
    shown = ", ".join(f"{seen} ({mean:.0f})" for seen, mean in pairs[:4])
    return f"of {size} tokens, the likeliest came this often (expected): {shown}"


def _judge_seeds(server: Endpoint, prompt: list[int]) -> None:
    """Require that a seed repeats its tokens, that another seed has others, and choices differ."""

    def tokens_of(seed: int) -> list[list[int]]:
        found = _draw(server, prompt, seed, 4, 16)
        return [each.tokens for each in found]

    def alone(seed: int) -> list[int]:
        (found,) = _draw(server, prompt, seed, 1, 16)
        return found.tokens

    # a near tie of rounded numbers may fall otherwise, but not three times
    repeats = any(alone(seed) == alone(seed) for seed in (11, 12, 13))
    require(repeats, "the seed is ignored: the same one gives other tokens each time")
    first, second = tokens_of(21), tokens_of(22)
    several = [first, second, tokens_of(23), tokens_of(24)]
    equal = all(tokens == choices[0] for choices in several for tokens in choices)
    require(not equal, "all choices of n are equal")
    require(first != second, "the seed is ignored: two seeds give the same tokens")


def _judge_bias(server: Endpoint, prompt: list[int], unlikely: int) -> None:
    """Require that logit_bias forbids and forces a token."""
    (free,) = server.generate(prompt, 1).tokens
    (banned,) = server.generate(prompt, 1, logit_bias={str(free): -100}).tokens
    require(banned != free, "logit_bias is ignored: a token with a bias of -100 is taken")
    (forced,) = server.generate(prompt, 1, logit_bias={str(unlikely): 100}).tokens
    require(forced == unlikely, "logit_bias is ignored: a token with a bias of 100 is not taken")


def judge_penalties(server: Endpoint) -> dict:
    """Require that each token is the likeliest once penalties are subtracted.

    Raises:
        CannotRun: the model repeats nothing by itself.
    """
    prompt = server.generate(_REPETITION, 1).prompt
    plain = server.generate(prompt, _PENALIZED).tokens
    if max(Counter(plain).values()) < 4:
        raise CannotRun("this model does not go on repeating a text that repeats itself")
    penalties: dict[str, Callable[[int], float]] = {
        "frequency_penalty": lambda seen: 2.0 * seen,
        "presence_penalty": lambda seen: 2.0 * min(seen, 1),
    }
    largest = {}
    for name, penalty in penalties.items():
        found = server.generate(prompt, _PENALIZED, **{name: 2.0})
        shortfalls = _list_shortfalls(server, found, penalty)
        outside = sum(value > _NATS for value in shortfalls)
        largest[name] = max(shortfalls)
        require(
            outside <= 1 and largest[name] <= 5 * _NATS,
            f"{name} is ignored or wrong: {outside} of {len(shortfalls)} tokens are not the "
            f"likeliest after it, by {largest[name]:.1f} nats",
        )
    repeated = server.generate(prompt, _PENALIZED, repetition_penalty=10.0).tokens
    require(repeated != plain, "repetition_penalty is ignored: 10 gives the tokens of 1")
    return {f"{name}_largest": value for name, value in largest.items()}


def _list_shortfalls(
    server: Endpoint, found: Generation, penalty: Callable[[int], float]
) -> list[float]:
    """Return by how much each token falls short of the likeliest one after the penalty."""
    scored = server.score(found.prompt, found.tokens, listed=_LISTED[1])
    seen: Counter[int] = Counter()
    shortfalls = []
    for token, own, listed in zip(found.tokens, scored.own, scored.listed, strict=True):
        best = max(value - penalty(seen[each]) for each, value in listed.items())
        shortfalls.append(max(0.0, best - (own - penalty(seen[token]))))
        seen[token] += 1
    return shortfalls
