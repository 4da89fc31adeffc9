# SPDX-License-Identifier: BSD-3-Clause
"""Estimate how many tokens and minutes the checks of a user's server need, before they begin."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from strix_validate.checks import CannotRun, CheckFailed
from strix_validate.serving import caches, judges
from strix_validate.serving.endpoint import Endpoint

#: Rounded numbers of tokens that the server reads and generates for each check, without a prefix
#: cache. A reasoning model generates up to 1,024 more tokens in each answer of a chat.
_COSTS = {
    "url-text": (900, 1),
    "url-prefill": (700, 640),
    "url-together": (9_000, 3_300),
    "url-long-together": (27_000, 210),
    "url-recall-8192": (84_000, 130),
    "url-recall-32768": (330_000, 130),
    "url-usage": (100, 50),
    "url-stop": (200, 400),
    "url-probabilities": (60, 30),
    "url-sampling": (600, 2_000),
    "url-penalties": (1_000, 200),
    "url-chat": (500, 60),
    "url-chat-answer": (300, 50),
    "url-tools": (1_500, 200),
    "url-schema": (60, 100),
    "url-speculation": (8_000, 900),
    "url-streaming": (400, 150),
    "url-abort": (200, 650),
    "url-questions": (10_000, 5_000),
    "url-load-1": (30, 64),
    "url-load-4": (100, 256),
    "url-load-16": (400, 1_024),
    "url-bench": (16_000, 2_048),
}
#: Number of tokens that the second server, which has no speculation, reads.
PLAIN = 7_000
#: Assumed tokens per second, read and generated, for a server that was not measured.
_ASSUMED_RATES = (500.0, 20.0)
#: Number of tokens that are generated to measure a server's speed.
_PROBE = 32


@dataclass(frozen=True)
class Server:
    """The properties of a server on which the costs depend.

    Attributes:
        context: Tokens of the context; 0 if unknown.
        block: Tokens of a block of the cache; 0 if unknown.
        rates: Tokens per second, read and generated.
        measured: Whether the rates are this server's.
    """

    context: int = 0
    block: int = 0
    rates: tuple[float, float] = _ASSUMED_RATES
    measured: bool = False


def estimate_cost(name: str, server: Server) -> tuple[int, int]:
    """Return how many tokens a check reads and generates; 0 if the context is too short for it."""
    if name == "url-context":
        return 4 * server.context + 2_500, 70
    if name == "url-prefix":
        try:
            length = caches.shared_length(server.context, server.block)
        except CannotRun:
            return 0, 0
        return 28 * length, 550
    if name.startswith("url-recall-"):
        length = int(name.removeprefix("url-recall-"))
        is_too_long = 0 < server.context < length + judges.RECALL_MARGIN
        if is_too_long:
            return 0, 0
    return _COSTS[name]


def probe(endpoint: Endpoint) -> Server:
    """Return a server's context length, block size and measured speed; defaults after an error."""
    try:
        context = endpoint.context()
        block = endpoint.block_size()
        # only the second round counts, because the first requests may compile kernels
        for _ in range(2):
            begin = time.perf_counter()
            prompt = f"{begin} {judges.read_known_text()[:2000]}"
            num_read = len(endpoint.generate(prompt, 1).prompt)
            middle = time.perf_counter()
            endpoint.generate("Once", _PROBE)
            end = time.perf_counter()
    except (CheckFailed, CannotRun):  # the checks will report this error
        return Server()
    read_rate = num_read / max(middle - begin, 1e-3)
    generation_rate = _PROBE / max(end - middle, 1e-3)
    return Server(
        context,
        block,
        (read_rate, generation_rate),
        measured=True,
    )


def describe_costs(names: Sequence[str], endpoint: Endpoint | None) -> str:
    """Return a line that says how many tokens checks need, and about how long they take.

    Args:
        names: Names of the checks.
        endpoint: The server; None if it does not run yet.
    """
    server = probe(endpoint) if endpoint else Server()
    costs = {name: estimate_cost(name, server) for name in names}
    num_read = sum(read for read, _ in costs.values())
    num_generated = sum(generated for _, generated in costs.values())
    read_rate, generation_rate = server.rates
    minutes = (num_read / read_rate + num_generated / generation_rate) / 60
    largest = max(costs, key=lambda name: sum(costs[name]))
    context = ""
    if "url-context" in names and not server.context:
        context = "; serve/url-context also reads four times the context, which is not counted"
    source = "as just measured" if server.measured else "as an example"
    return (
        f"serve: the server reads about {num_read:,} tokens and generates {num_generated:,}. At "
        f"{read_rate:,.0f} and {generation_rate:,.1f} tokens a second ({source}), this takes "
        f"{minutes:,.0f} minutes; cached prompts and concurrent requests make it faster. "
        f"serve/{largest} needs the most tokens, {sum(costs[largest]):,}: --skip serve/{largest} "
        f"leaves it out{context}"
    )


def describe_plain_costs(url: str) -> str:
    """Return a line that says how many tokens the server without speculation needs."""
    return f"serve: the server at {url} reads about {PLAIN:,} tokens, and generates 12 tokens"
