# SPDX-License-Identifier: BSD-3-Clause
"""vLLM generates and serves with a small random model, without a network; for vLLM 0.26 to 0.33.

First offline, then `vllm serve` on a free port. Each stage is one child process whose results the
checks read. If a stage fails, so do its checks, with the end of its log. With --url, a server that
runs already; with --model alone, one that serves this folder.
"""

import re
import signal
from collections.abc import Callable, Iterator

from strix_validate.checks import Check, CheckFailed, Result, RunOptions, described, named, require
from strix_validate.limits import read_log
from strix_validate.serving import judges
from strix_validate.serving.costs import foretell, foretell_plain
from strix_validate.serving.endpoint import Endpoint, Silent
from strix_validate.serving.tiny_llama import OTHERS, PROMPT, TOKENS
from strix_validate.serving.tiny_models import MODELS
from strix_validate.serving.users_server import (
    ABORT,
    PREFILL,
    PROBABILITIES,
    STREAMING,
    USAGE,
    USERS,
    describe,
)
from strix_validate.serving.vllm_server import ServerSession
from strix_validate.tiers import run_each

#: Of a log probability, against float32: of fp16; of bf16, activations in fp8 and 4-bit weights.
LOGPROB_BOUND, MODEL_BOUND = 0.05, 0.3
#: Seconds to the first token of the tiny model, once it has answered.
FIRST_TOKEN_LIMIT = 2.0
_CAPTURED = "Graph capturing finished"
_CHOSEN = re.compile(r"Using (\w+) (?:attention )?backend|Overriding with (\w+) out of")


def checks() -> list[Check]:
    """List one check for each body."""
    return list(described("serve", BODIES | USERS))


def applies(check: Check, options: RunOptions) -> bool:
    """Return whether a check is for this server: the user's gets other checks than our own."""
    name = check.id.removeprefix("serve/")
    if name == "url-questions" and not options.questions:
        return False
    return (name in USERS) is bool(options.model)


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers. The user's server runs already, or serves the folder --model."""
    silences: list[Silent] = []
    with ServerSession(options.device, model=options.model) as session:
        bodies = {Check(f"serve/{n}"): of_session(body, session) for n, body in BODIES.items()}
        for name, body in USERS.items():
            bodies[Check(f"serve/{name}")] = _of_server(body, session, options, silences)
        yield from run_each(wanted, options, bodies)


def of_session(body: Callable[[ServerSession], dict], session: ServerSession) -> Callable:
    """Bind a check of a tiny model; it is skipped where vLLM cannot be started."""

    def bound(_: RunOptions) -> dict:
        session.need_vllm()
        return body(session)

    return bound


def announce(wanted: list[Check], options: RunOptions) -> Iterator[str]:
    """Yield what checks of a user's server will cost, before the first one; nothing for others."""
    names = [check.id.removeprefix("serve/") for check in wanted if check.id in users_ids()]
    if options.model and names:
        yield foretell(names, Endpoint(options.url, options.model) if options.url else None)
    if options.plain_url and "url-speculation" in names:
        yield foretell_plain(options.plain_url)


def users_ids() -> set[str]:
    """Return the ids of the checks of a user's server."""
    return {f"serve/{name}" for name in USERS}


def _of_server(
    body: Callable[..., dict], session: ServerSession, options: RunOptions, silences: list[Silent]
) -> Callable[[RunOptions], dict]:
    """Bind a check of the user's server. One that was silent for LIMIT is not asked again."""

    def bound(_: RunOptions) -> dict:
        if silences:
            raise CheckFailed(f"not asked, because before {silences[0]}")
        if options.url:
            server = Endpoint(options.url, options.model)
        else:
            session.need_vllm()
            server = session.server.endpoint
        try:
            measured = body(server, *_more_arguments(body, options))
        except Silent as error:
            silences.append(error)
            raise
        if "tokens_per_second" in measured:
            measured["model"] = name_of(options.model)
        return measured

    return bound


def _more_arguments(body: Callable[..., dict], options: RunOptions) -> list:
    """Return what a check is given beside the server."""
    if body is USERS["url-questions"]:
        return [options.questions]
    if body is USERS["url-speculation"] and options.plain_url:
        return [Endpoint(options.plain_url, options.model)]
    return []


def name_of(model: str) -> str:
    """Return a model's name without its folders: of "Qwen/Qwen3-8B" and of a path in a cache."""
    cached = re.search(r"models--[^/]+--([^/]+)/snapshots(/|$)", model)
    return cached.group(1) if cached else model.rstrip("/").rpartition("/")[2]


def offline_repeats(session: ServerSession) -> dict:
    """Greedy decoding gives the same tokens for the same prompt in a batch. Garbage on gfx1151 was
    different garbage each time: https://github.com/lemonade-sdk/vllm-rocm/issues/24"""
    first, *others = session.offline["tokens"]
    require(len(first) == TOKENS, f"{len(first)} tokens, {TOKENS} were asked for")
    require(all(tokens == first for tokens in others), "the same prompt gave different tokens")
    return {"tokens": str(first[:8]), "repeats": len(others) + 1}


def offline_logits(session: ServerSession) -> dict:
    """The first token's log probability is transformers' in float32. Decoding that runs and is
    wrong looks like a bad model: https://github.com/vllm-project/vllm/issues/56021"""
    return _compare(session.reference, session.offline, LOGPROB_BOUND)


def _compare(reference: list[float], found: dict, bound: float) -> dict:
    """Return the first token's error. Raise CheckFailed if it or the gap to the best is too big."""
    token = found["tokens"][0][0]
    error = abs(found["logprob"] - reference[token])
    short = max(reference) - reference[token]
    require(error <= bound, f"off by {error:.3f}, {bound} is allowed")
    require(short <= bound, f"token {token} is not the likeliest, by {short:.3f}")
    return {"logprob": {"error": error, "bound": bound}}


def _serving(name: str) -> Callable[[ServerSession], dict]:
    """Build the check of a model of tiny_models."""

    def body(session: ServerSession) -> dict:
        if plugin := MODELS[name].plugin:
            session.need_vllm(plugin)
        reference, found = session.generate(name)
        first, *others = found["tokens"]
        require(all(tokens == first for tokens in others), "the same prompt gave different tokens")
        return _compare(reference, found, MODEL_BOUND)

    body.__doc__ = f"A tiny model, {name}, generates what it should. Catches {MODELS[name].why}"
    return body


def start(session: ServerSession) -> dict:
    """`vllm serve` answers, or says why not. It died in silence or hung:
    https://github.com/vllm-project/vllm/issues/32180"""
    return {"seconds": round(session.server.start_seconds, 1)}


def graphs(session: ServerSession) -> dict:
    """The server captured HIP graphs of decoding. Capturing them hung, and --enforce-eager hides
    that: https://github.com/vllm-project/vllm/issues/32180"""
    log = read_log(session.server.log)
    require(_CAPTURED in log, f"the log does not say {_CAPTURED!r}: the server ran without graphs")
    return {"captured": log.count(_CAPTURED)}


def attention_backend(session: ServerSession) -> dict:
    """The server says which attention backend it chose. ROCM_ATTN, the default of AMD GPUs,
    decodes 7 times slower than TRITON_ATTN on gfx1151: https://github.com/ROCm/vllm/issues/994"""
    log = read_log(session.server.log)
    names = [first or second for first, second in _CHOSEN.findall(log)]
    require(names, "the log names no attention backend")
    require("ROCM_ATTN" not in names, "ROCM_ATTN was chosen, the slow one on gfx1151")
    return {"backend": ", ".join(dict.fromkeys(names))}


def completion(session: ServerSession) -> dict:
    """/v1/completions gives the tokens of offline decoding: graph capture and scheduling change
    nothing. https://github.com/vllm-project/vllm/issues/32180"""
    tokens, expected = session.answer.tokens, session.offline["tokens"][0]
    require(tokens == expected, f"{tokens[:8]}..., offline {expected[:8]}...")
    return {"tokens": len(tokens)}


def decode(session: ServerSession) -> dict:
    """Each token that the server decodes is as likely as transformers finds it in float32 after the
    ones before it, and the likeliest. A correct first token, which prefill gives, hid garbage
    behind it: https://github.com/lemonade-sdk/vllm-rocm/issues/24"""
    found = session.answer
    scored = session.score(found.tokens)
    error = judges.largest_difference(found.logprobs, scored["logprobs"])
    require(error <= LOGPROB_BOUND, f"off by {error:.3f}, {LOGPROB_BOUND} is allowed")
    short = judges.largest_difference(scored["best"], scored["logprobs"])
    require(short <= LOGPROB_BOUND, f"a token is not the likeliest, by {short:.3f}")
    return {"logprobs": {"error": error, "bound": LOGPROB_BOUND}}


def prefix(session: ServerSession) -> dict:
    """A prompt whose beginning is cached gives the same log probabilities; blocks of another
    prompt's would give others: https://github.com/vllm-project/vllm/issues/5543"""
    server, longer = session.server.endpoint, [*PROMPT, *OTHERS[0]]
    found = [server.generate(longer, TOKENS) for _ in range(2)]
    return judges.judge_greedy(server, *found, bound=LOGPROB_BOUND)


def together(session: ServerSession) -> dict:
    """Of eleven prompts at a time, four in a batch, each gets its own answer: rows of a batch or
    blocks of the cache were mixed up: https://github.com/vllm-project/vllm/issues/15730"""
    server = session.server.endpoint
    for load in (2, 11):
        found = judges.judge_together(server, OTHERS[:load], load, TOKENS, LOGPROB_BOUND)
    return found


def finish_reason(session: ServerSession) -> dict:
    """An answer says why it ends: at the limit, or at a stop string, which it leaves out.
    https://docs.vllm.ai/en/latest/serving/openai_compatible_server/"""
    judges.judge_finish(session.answer, "length")
    words = session.answer.text.split()
    stop = next((word for word in words if words.index(word) >= 2), "")
    require(stop, f"the answer repeats one or two words: {words[:8]}")
    found = session.server.endpoint.generate(PROMPT, TOKENS, stop=[f"{stop} "])
    judges.judge_finish(found, "stop")
    right = words[: words.index(stop)]
    require(found.text.split() == right, f"{found.text!r} before the stop, expected: {right}")
    return {"stop": stop}


def chat(session: ServerSession) -> dict:
    """/v1/chat/completions applies the model's chat template: it gives what the filled-in template
    does. https://docs.vllm.ai/en/latest/serving/openai_compatible_server/"""
    server = session.server.endpoint
    messages = [{"role": "user", "content": "w5 w7"}, {"role": "assistant", "content": "w11"}]
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found = server.ask("/v1/chat/completions", body | {"return_token_ids": True})
    plain = server.generate([3, 5, 7, 4, 11, 4], TOKENS)
    require(found["prompt_token_ids"] == plain.prompt, f"prompt {found['prompt_token_ids']}")
    tokens = found["choices"][0]["token_ids"]
    require(tokens == plain.tokens, f"{tokens[:8]}..., the template's {plain.tokens[:8]}...")
    return {"tokens": len(tokens)}


def latency(session: ServerSession) -> dict:
    """A warm server's first token comes within two seconds: a kernel compiled in each request, or a
    wait for a timeout. https://github.com/vllm-project/vllm/issues/32180"""
    server = session.server.endpoint
    first = min(server.stream(OTHERS[i], 4).seconds[0] for i in range(3))
    require(first <= FIRST_TOKEN_LIMIT, f"{first:.1f} s to the first token")
    return {"first_token_ms": 1e3 * first}


def stop(session: ServerSession) -> dict:
    """The server ends on SIGTERM and leaves no process, which would keep the GPU's memory:
    https://github.com/vllm-project/vllm/issues/32180"""
    status = session.server.stop(session.stop_limit)
    require(status in (0, -signal.SIGTERM), f"exit status {status}")
    return {"status": status}


BODIES: dict[str, Callable[[ServerSession], dict]] = {
    **named(offline_repeats, offline_logits),
    **{f"model-{name}": _serving(name) for name in MODELS},
    **named(start, graphs, attention_backend, completion, decode),
    "prefill": describe(
        lambda s: judges.judge_greedy(s.server.endpoint, s.answer, bound=LOGPROB_BOUND), PREFILL
    ),
    **named(prefix, together),
    "usage": describe(lambda s: judges.judge_usage(s.answer, TOKENS), USAGE),
    **named(finish_reason),
    "probabilities": describe(
        lambda s: judges.judge_probabilities(s.server.endpoint, PROMPT), PROBABILITIES
    ),
    **named(chat),
    "streaming": describe(
        lambda s: judges.judge_stream(s.server.endpoint, PROMPT, TOKENS), STREAMING
    ),
    "abort": describe(
        lambda s: judges.judge_abort(s.server.endpoint, PROMPT, TOKENS, LOGPROB_BOUND), ABORT
    ),
    **named(latency, stop),  # the last one ends the server
}
