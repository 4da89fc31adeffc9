# SPDX-License-Identifier: BSD-3-Clause
"""Check that vLLM 0.26 to 0.33 generates and serves, with small random models and no network.

vLLM first generates offline, then `vllm serve` runs on a free port. Each of these stages is a child
process whose results the checks read. If a stage fails, its checks fail too, with the last
lines of its log as the reason. With --url, other checks run instead, on a server that is already
running. With --model alone, they run on a server that is started for this model folder.
"""

import re
import signal
from collections.abc import Callable, Iterator
from functools import partial

from strix_validate.checks import Check, CheckFailed, Result, RunOptions, read_purpose, require
from strix_validate.limits import read_log
from strix_validate.serving import judges
from strix_validate.serving.costs import describe_costs, describe_plain_costs
from strix_validate.serving.endpoint import Endpoint, Silent
from strix_validate.serving.tiny_llama import OTHERS, PROMPT, TOKENS
from strix_validate.serving.tiny_models import MODELS
from strix_validate.serving.users_server import (
    ABORT,
    PREFILL,
    PROBABILITIES,
    STREAMING,
    USAGE,
    USER_CHECKS,
    ServerCheck,
)
from strix_validate.serving.vllm_server import ServerSession
from strix_validate.tiers import Tier, check_from_purpose, run_each

#: Allowed difference of a log probability in fp16 from that in float32, in nats.
LOGPROB_BOUND = 0.05
#: Allowed difference, in nats, for the models of MODELS. They have bf16, fp8 activations or 4-bit
#: weights.
MODEL_BOUND = 0.3
#: Allowed seconds to the first token, for a tiny model that has answered before.
FIRST_TOKEN_LIMIT = 2.0
_CAPTURED = "Graph capturing finished"
_CHOSEN_BACKEND = re.compile(r"Using (\w+) (?:attention )?backend|Overriding with (\w+) out of")


def checks() -> list[Check]:
    """List the checks of the tiny models and of a user's server."""
    listed = []
    for name, server_check in (SESSION_CHECKS | USER_CHECKS).items():
        listed.append(check_from_purpose(f"serve/{name}", server_check.purpose))
    return listed


def applies(check: Check, options: RunOptions) -> bool:
    """Return whether a check is for the options' kind of server: the user's or a tiny model's.

    The check url-questions also needs the option --questions.
    """
    name = _name(check)
    if name == "url-questions" and not options.questions:
        return False
    is_for_user = name in USER_CHECKS
    return is_for_user is bool(options.model)


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check.

    A user's server is already running, or it is started for the folder --model.
    """
    silences: list[Silent] = []
    with ServerSession(options.device, model=options.model) as session:
        bodies = {}
        for name, server_check in SESSION_CHECKS.items():
            bodies[Check(f"serve/{name}")] = bind_session(server_check, session)
        for name in USER_CHECKS:
            body = partial(_judge_users_server, name, session, silences)
            bodies[Check(f"serve/{name}")] = body
        yield from run_each(selected, options, bodies)


def announce(selected: list[Check], options: RunOptions) -> Iterator[str]:
    """Yield the cost of the selected checks of a user's server, and nothing for other checks."""
    names = [_name(check) for check in selected if _name(check) in USER_CHECKS]
    if options.model and names:
        endpoint = Endpoint(options.url, options.model) if options.url else None
        yield describe_costs(names, endpoint)
    if options.plain_url and "url-speculation" in names:
        yield describe_plain_costs(options.plain_url)


def _name(check: Check) -> str:
    return check.id.removeprefix("serve/")


def bind_session(server_check: ServerCheck, session: ServerSession) -> Callable[[RunOptions], dict]:
    """Return the function of a tiny model's check, which is skipped where vLLM cannot start."""

    def body(options: RunOptions) -> dict:
        del options
        session.need_vllm()
        return server_check.judge(session)

    return body


def _judge_users_server(
    name: str,
    session: ServerSession,
    silences: list[Silent],
    options: RunOptions,
) -> dict:
    """Run a check of the user's server, and return its measurements.

    Args:
        name: Key of USER_CHECKS.
        session: Starts the server if the options have no URL of a running one.
        silences: Errors of requests to which the server sent nothing for endpoint.LIMIT seconds.
            After the first error, no check sends a request.
        options: Options of the run, with the server's URL or model.
    """
    if silences:
        raise CheckFailed(f"no request was sent, because of an earlier failure: {silences[0]}")
    if options.url:
        server = Endpoint(options.url, options.model)
    else:
        session.need_vllm()
        server = session.server.endpoint
    arguments: list = []
    if name == "url-questions":
        arguments = [options.questions]
    if name == "url-speculation" and options.plain_url:
        arguments = [Endpoint(options.plain_url, options.model)]
    if name == "url-bench" and not options.url:
        # The started server has its own name for the model, and no tokenizer has this name.
        arguments = [options.model]
    try:
        measured = USER_CHECKS[name].judge(server, *arguments)
    except Silent as error:
        silences.append(error)
        raise
    if "tokens_per_second" in measured:
        measured["model"] = shorten_name(options.model)
    return measured


def shorten_name(model: str) -> str:
    """Return a model's name without folders, such as "Qwen3-8B" for "Qwen/Qwen3-8B".

    The same name is returned for the model's path in the cache of Hugging Face.
    """
    match = re.search(r"models--[^/]+--([^/]+)/snapshots(/|$)", model)
    if match:
        return match.group(1)
    return model.rstrip("/").rpartition("/")[2]


def offline_repeats(session: ServerSession) -> dict:
    """Greedy decoding gives the same tokens for each copy of a prompt in a batch.

    vLLM on gfx1151 returned garbage, and different garbage each time:
    https://github.com/lemonade-sdk/vllm-rocm/issues/24
    """
    first, *others = session.offline["tokens"]
    require(len(first) == TOKENS, f"{len(first)} tokens were generated, not {TOKENS}")
    _require_equal(first, others)
    return {"tokens": str(first[:8]), "repeats": len(others) + 1}


def offline_logits(session: ServerSession) -> dict:
    """The first token's log probability agrees with that of transformers in float32.

    Decoding that does not crash but is wrong looks like a bad model:
    https://github.com/vllm-project/vllm/issues/56021
    """
    return _compare(session.reference, session.offline, LOGPROB_BOUND)


def _require_equal(first: list[int], others: list[list[int]]) -> None:
    all_equal = all(tokens == first for tokens in others)
    require(all_equal, "the same prompt gave different tokens")


def _compare(reference: list[float], generated: dict, bound: float) -> dict:
    """Return the error of the first token's log probability.

    Args:
        reference: Log probability of each token of the vocabulary, in float32.
        generated: The output that vLLM generates; see tiny_llama._generate.
        bound: Limit in nats for the error, and for the gap to the likeliest token.

    Raises:
        CheckFailed: The error or the gap exceeds the bound.
    """
    token = generated["tokens"][0][0]
    error = abs(generated["logprob"] - reference[token])
    gap = max(reference) - reference[token]
    require(
        error <= bound,
        f"the log probability of token {token} is off by {error:.3f} nats, {bound} allowed",
    )
    require(
        gap <= bound,
        f"token {token} is not the likeliest: another token's log probability is {gap:.3f} nats "
        "higher",
    )
    return {"logprob": {"error": error, "bound": bound}}


def _judge_model(name: str, session: ServerSession) -> dict:
    """Require equal answers to equal prompts, and a first token that agrees with transformers.

    Args:
        name: Key of tiny_models.MODELS.
        session: Writes the model, and lets vLLM generate.
    """
    plugin = MODELS[name].plugin
    if plugin:
        session.need_vllm(plugin)
    reference, generated = session.generate(name)
    first, *others = generated["tokens"]
    _require_equal(first, others)
    return _compare(reference, generated, MODEL_BOUND)


def start(session: ServerSession) -> dict:
    """`vllm serve` starts and answers.

    The server died without a message, or hung: https://github.com/vllm-project/vllm/issues/32180
    """
    return {"seconds": round(session.server.start_seconds, 1)}


def graphs(session: ServerSession) -> dict:
    """The server captured HIP graphs of decoding.

    Capturing the graphs hung, which --enforce-eager hides:
    https://github.com/vllm-project/vllm/issues/32180
    """
    log = read_log(session.server.log)
    require(_CAPTURED in log, f"the log has no {_CAPTURED!r}: the server ran without graphs")
    return {"captured": log.count(_CAPTURED)}


def attention_backend(session: ServerSession) -> dict:
    """The server's log names its attention backend, and this is not ROCM_ATTN.

    ROCM_ATTN, upstream's default for AMD GPUs, decodes 7 times slower than TRITON_ATTN on gfx1151:
    https://github.com/ROCm/vllm/issues/994
    """
    log = read_log(session.server.log)
    names = [first or second for first, second in _CHOSEN_BACKEND.findall(log)]
    require(names, "the log names no attention backend")
    require("ROCM_ATTN" not in names, "the server chose ROCM_ATTN, which is slow on gfx1151")
    return {"backend": ", ".join(dict.fromkeys(names))}


def completion(session: ServerSession) -> dict:
    """/v1/completions gives the same tokens as offline decoding.

    Graph capture and scheduling must not change the tokens:
    https://github.com/vllm-project/vllm/issues/32180
    """
    tokens = session.answer.tokens
    expected = session.offline["tokens"][0]
    require(tokens == expected, f"the tokens are {tokens[:8]}..., but offline {expected[:8]}...")
    return {"tokens": len(tokens)}


def decode(session: ServerSession) -> dict:
    """Each token that the server decodes is the likeliest one according to transformers in float32.

    The token's log probability agrees as well. In a reported bug, the first token, which prefill
    gives, was correct, but all later tokens were garbage:
    https://github.com/lemonade-sdk/vllm-rocm/issues/24
    """
    answer = session.answer
    scored = session.score(answer.tokens)
    error = judges.largest_difference(answer.logprobs, scored["logprobs"])
    require(
        error <= LOGPROB_BOUND,
        f"a log probability is off by {error:.3f} nats, {LOGPROB_BOUND} allowed",
    )
    gap = judges.largest_difference(scored["best"], scored["logprobs"])
    require(
        gap <= LOGPROB_BOUND,
        f"a token is not the likeliest: another token's log probability is {gap:.3f} nats higher",
    )
    return {"logprobs": {"error": error, "bound": LOGPROB_BOUND}}


def prefill(session: ServerSession) -> dict:
    """Require that prefill gives the decoded tokens the same log probabilities as decoding did."""
    server = session.server.endpoint
    return judges.judge_greedy(server, session.answer, bound=LOGPROB_BOUND)


def prefix(session: ServerSession) -> dict:
    """A prompt whose beginning is cached gives the same log probabilities as without the cache.

    Cached blocks of another prompt would change them:
    https://github.com/vllm-project/vllm/issues/5543
    """
    server = session.server.endpoint
    prompt = [*PROMPT, *OTHERS[0]]
    answers = [server.generate(prompt, TOKENS) for _ in range(2)]
    return judges.judge_greedy(server, *answers, bound=LOGPROB_BOUND)


def together(session: ServerSession) -> dict:
    """Each of eleven simultaneous prompts, batched by four, gets its own answer.

    vLLM mixed up rows of a batch or blocks of the cache:
    https://github.com/vllm-project/vllm/issues/15730
    """
    server = session.server.endpoint
    measured = {}
    for load in (2, 11):
        measured = judges.judge_together(server, OTHERS[:load], load, TOKENS, LOGPROB_BOUND)
    return measured


def usage(session: ServerSession) -> dict:
    """Require that the answer's usage counts its tokens correctly."""
    return judges.judge_usage(session.answer, TOKENS)


def finish_reason(session: ServerSession) -> dict:
    """An answer states why it ended: by the token limit, or by a stop string, which it leaves out.

    https://docs.vllm.ai/en/latest/serving/openai_compatible_server/
    """
    judges.judge_finish(session.answer, "length")
    words = session.answer.text.split()
    new_words = [word for word in words if words.index(word) >= 2]
    require(new_words, f"the answer repeats one or two words: {words[:8]}")
    stop_word = new_words[0]
    answer = session.server.endpoint.generate(PROMPT, TOKENS, stop=[f"{stop_word} "])
    judges.judge_finish(answer, "stop")
    expected = words[: words.index(stop_word)]
    require(
        answer.text.split() == expected,
        f"the text before the stop string is {answer.text!r}, expected {expected}",
    )
    return {"stop": stop_word}


def probabilities(session: ServerSession) -> dict:
    """Require that listed values are log probabilities of the model's tokens."""
    return judges.judge_probabilities(session.server.endpoint, PROMPT)


def chat(session: ServerSession) -> dict:
    """/v1/chat/completions applies the model's chat template.

    The answer is the same as for the prompt that the template produces:
    https://docs.vllm.ai/en/latest/serving/openai_compatible_server/
    """
    server = session.server.endpoint
    messages = [
        {"role": "user", "content": "w5 w7"},
        {"role": "assistant", "content": "w11"},
    ]
    body = {
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.ask("/v1/chat/completions", body)
    expected = server.generate([3, 5, 7, 4, 11, 4], TOKENS)
    prompt = answer["prompt_token_ids"]
    require(
        prompt == expected.prompt,
        f"the server made the prompt {prompt} of a chat, but the template gives {expected.prompt}",
    )
    tokens = answer["choices"][0]["token_ids"]
    require(
        tokens == expected.tokens,
        f"the tokens are {tokens[:8]}..., but for the same prompt without a chat "
        f"{expected.tokens[:8]}...",
    )
    return {"tokens": len(tokens)}


def streaming(session: ServerSession) -> dict:
    """Require that a stream gives the same answer as without streaming, in parts."""
    return judges.judge_stream(session.server.endpoint, PROMPT, TOKENS)


def abort(session: ServerSession) -> dict:
    """Require that the next answer is correct after clients have disconnected."""
    return judges.judge_abort(session.server.endpoint, PROMPT, TOKENS, LOGPROB_BOUND)


def latency(session: ServerSession) -> dict:
    """A warm server's first token comes within two seconds.

    Users reported servers that compiled a kernel in each request, or waited for a timeout:
    https://github.com/vllm-project/vllm/issues/32180
    """
    server = session.server.endpoint
    first_tokens = [server.stream(OTHERS[i], 4).seconds[0] for i in range(3)]
    seconds = min(first_tokens)
    require(seconds <= FIRST_TOKEN_LIMIT, f"{seconds:.1f} s to the first token")
    return {"first_token_ms": 1e3 * seconds}


def stop(session: ServerSession) -> dict:
    """The server ends on SIGTERM and leaves no process.

    A process that is left would keep the GPU's memory:
    https://github.com/vllm-project/vllm/issues/32180
    """
    status = session.server.stop(session.stop_limit)
    require(status in (0, -signal.SIGTERM), f"exit status {status}")
    return {"status": status}


def _from_docstring(judge: Callable[[ServerSession], dict]) -> ServerCheck:
    """Return a check whose purpose is its function's docstring."""
    return ServerCheck(judge, read_purpose(judge))


def _model_check(name: str) -> ServerCheck:
    purpose = (
        f"vLLM's first token with the tiny model {name} agrees with transformers. "
        f"Catches {MODELS[name].bug}"
    )
    return ServerCheck(partial(_judge_model, name), purpose)


#: The checks of the tiny models in the order in which they run. The last check stops the server.
#: The argument of each judge is the session.
SESSION_CHECKS: dict[str, ServerCheck] = {
    "offline-repeats": _from_docstring(offline_repeats),
    "offline-logits": _from_docstring(offline_logits),
    **{f"model-{name}": _model_check(name) for name in MODELS},
    "start": _from_docstring(start),
    "graphs": _from_docstring(graphs),
    "attention-backend": _from_docstring(attention_backend),
    "completion": _from_docstring(completion),
    "decode": _from_docstring(decode),
    "prefill": ServerCheck(prefill, PREFILL),
    "prefix": _from_docstring(prefix),
    "together": _from_docstring(together),
    "usage": ServerCheck(usage, USAGE),
    "finish-reason": _from_docstring(finish_reason),
    "probabilities": ServerCheck(probabilities, PROBABILITIES),
    "chat": _from_docstring(chat),
    "streaming": ServerCheck(streaming, STREAMING),
    "abort": ServerCheck(abort, ABORT),
    "latency": _from_docstring(latency),
    "stop": _from_docstring(stop),
}

TIER = Tier(checks, run, applies=applies, announce=announce)
