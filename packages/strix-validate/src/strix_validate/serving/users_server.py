# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a user's server, which already runs, or is started for the folder of a model."""

from collections.abc import Callable
from dataclasses import dataclass

from strix_validate.checks import require
from strix_validate.serving import caches, chats, judges, sampling, speed, structures
from strix_validate.serving.endpoint import COUNTS, Endpoint

PREFILL = (
    "Prefill, which uses other kernels, finds the decoded tokens as likely as decoding did. "
    "https://github.com/vllm-project/vllm/issues/56021"
)
USAGE = (
    "The tokens of the prompt and of the answer are counted correctly. Clients pay and truncate by "
    "these counts: "
    "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/"
)
PROBABILITIES = (
    "Each step lists the right log probability for each token, and the probabilities sum to at "
    "most one. A temperature makes them wrong, and so does a softmax over too few tokens: "
    "https://github.com/vllm-project/vllm/issues/56021"
)
STREAMING = (
    "A streamed answer has the tokens, text and usage of an unstreamed one, comes in several parts "
    "and ends with [DONE]. A server lost or doubled parts: "
    "https://github.com/vllm-project/vllm/issues/32180"
)
ABORT = (
    "A client that disconnects during its answer does not spoil or delay the next client's answer: "
    "https://github.com/vllm-project/vllm/issues/24584"
)


@dataclass(frozen=True)
class ServerCheck:
    """A check of a server.

    Attributes:
        judge: Returns the measured values, or raises CheckFailed. If the server has a tiny model,
            the argument is the session. If it is a user's server, the arguments are the server and,
            for some checks, further values; see strix_validate.tiers.serve.
        purpose: The bug that the check would catch, with a link. The first sentence is its title.
    """

    judge: Callable[..., dict]
    purpose: str


def _users_check(judge: Callable[..., dict], purpose: str) -> ServerCheck:
    return ServerCheck(judge, f"The user's server: {purpose}")


def _judge_usage(server: Endpoint) -> dict:
    prompt = judges.PROMPTS[0]
    usage: dict = {}
    for number in (1, 2, 24):
        answer = server.generate(prompt, number)
        judges.judge_finish(answer, "length")
        usage = judges.judge_usage(answer, number)
        judges.judge_echo(answer, prompt)
    choices = server.generate_choices(prompt, 8, n=2, temperature=1.0, seed=1)
    require(len(choices) == 2, f"n is 2, but the answer has {len(choices)} choices")
    first = choices[0]
    num_generated = sum(len(choice.tokens) for choice in choices)
    counts = (len(first.prompt), num_generated, len(first.prompt) + num_generated)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(
        first.usage == expected,
        f"usage with n=2 says {first.usage}, expected {expected}",
    )
    return usage


def _judge_long_answer(server: Endpoint) -> dict:
    number = judges.LONG
    context = server.context()
    if context:
        number = min(number, context - 64)
    answer = server.generate(judges.PROMPTS[0], number)
    judges.judge_usage(answer, number)
    return judges.judge_greedy(server, answer)


def _judge_streams(server: Endpoint) -> dict:
    measured = judges.judge_stream(server, judges.PROMPTS[0])
    of_letters = judges.judge_stream(server, judges.LETTERS, 48)
    return measured | {"letters": of_letters["letters"]}


def _judge_together(server: Endpoint) -> dict:
    return judges.judge_twice_together(server, judges.MANY, judges.TOGETHER)


def _judge_stop(server: Endpoint) -> dict:
    return judges.judge_stop(server, judges.PROMPTS[0])


def _judge_probabilities(server: Endpoint) -> dict:
    return judges.judge_probabilities(server, judges.PROMPTS[0])


def _judge_abort(server: Endpoint) -> dict:
    return judges.judge_abort(server, judges.PROMPTS[0])


def _recall_check(length: int) -> ServerCheck:
    return _users_check(
        lambda server: judges.judge_recall(server, length),
        f"the model repeats the five numbers that a prompt of {length} tokens contains, when two "
        "such prompts with different numbers are sent at once. Attention or the cache may be wrong "
        "only in prompts beyond some length: "
        "https://github.com/vllm-project/vllm/issues/42684",
    )


def _load_check(load: int) -> ServerCheck:
    return ServerCheck(
        lambda server: speed.measure(server, load, judges.PROMPTS),
        f"Time to the first token and tokens per second, with {load} requests at a time. A server "
        "was slower than published numbers: https://github.com/ROCm/vllm/issues/994",
    )


#: The checks by name, in the order in which they run.
USER_CHECKS: dict[str, ServerCheck] = {
    "url-text": _users_check(
        judges.judge_text,
        "the model finds a well-known text likely, in each window of 256 tokens. A model with "
        "random weights passes checks that compare it with itself: "
        "https://github.com/vllm-project/vllm/issues/15730",
    ),
    "url-prefill": _users_check(_judge_long_answer, PREFILL),
    "url-together": _users_check(
        _judge_together,
        "each prompt gets its own answer, when each is sent twice and 32 requests run at a time. "
        "The second of two equal requests was answered wrongly: "
        "https://github.com/vllm-project/vllm/issues/41331",
    ),
    "url-long-together": _users_check(
        caches.judge_long_pairs,
        "each prompt of about 2,200 tokens gets its own answer if each is sent twice at once. The "
        "answers of long prompts were swapped: https://github.com/ggml-org/llama.cpp/issues/27579",
    ),
    "url-prefix": _users_check(
        caches.judge_prefix,
        "prompts that share more than a block of the cache get right answers if they are sent one "
        "by one, several at once, or in later turns. A block of a hybrid model's cache can have "
        "thousands of tokens, and wrong states were reused: "
        "https://github.com/vllm-project/vllm/issues/53912",
    ),
    "url-speculation": _users_check(
        caches.judge_speculation,
        "tokens that are generated with drafts, by MTP or n-grams, are those that prefill finds "
        "likeliest. After a cached prefix they were different: "
        "https://github.com/vllm-project/vllm/issues/43559",
    ),
    **{f"url-recall-{length}": _recall_check(length) for length in judges.RECALLED},
    "url-context": _users_check(
        caches.judge_context,
        "tokens and log probabilities are right up to the last token of the context. A server "
        "generated garbage beyond a certain number of tokens: "
        "https://github.com/vllm-project/vllm/issues/42684",
    ),
    "url-usage": _users_check(_judge_usage, USAGE),
    "url-stop": _users_check(
        _judge_stop,
        "an answer ends before a stop string, with and without streaming, and gives the reason. "
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-probabilities": _users_check(_judge_probabilities, PROBABILITIES),
    "url-sampling": _users_check(
        sampling.judge_sampling,
        "tokens are drawn as often as temperature, top_k, top_p and min_p imply; seeds, n and "
        "logit_bias have their effects. A sampler was wrong: "
        "https://github.com/vllm-project/vllm/issues/4091",
    ),
    "url-penalties": _users_check(
        sampling.judge_penalties,
        "each token, except at most one, is the likeliest after frequency_penalty or "
        "presence_penalty is subtracted, and repetition_penalty changes the tokens. Penalties may "
        "be ignored, or count the tokens of another request: "
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-chat": _users_check(
        chats.judge_chat,
        "the chat template is applied to each message, with its role. Without it, the answers look "
        "like those of a bad model: "
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-chat-answer": _users_check(
        chats.judge_chat_answer,
        "a chat's answer is in the field content, and is the same in a stream. The content was "
        "null or empty: https://github.com/vllm-project/vllm/issues/43650",
    ),
    "url-tools": _users_check(
        structures.judge_tools,
        "a tool call is in tool_calls with the arguments that the model wrote, and is not text: "
        "https://github.com/lemonade-sdk/lemonade/issues/2977",
    ),
    "url-schema": _users_check(
        structures.judge_schema,
        "an answer follows the requested JSON schema, and a stream does not split letters. "
        "https://docs.vllm.ai/en/latest/features/structured_outputs/",
    ),
    "url-streaming": _users_check(_judge_streams, STREAMING),
    "url-abort": _users_check(_judge_abort, ABORT),
    "url-questions": _users_check(
        judges.judge_questions,
        "at least as many of 50 questions about small sums get the right answer as --questions "
        "requires. A fault may show only in worse answers of a good model: "
        "https://github.com/lemonade-sdk/vllm-rocm/issues/24",
    ),
    **{f"url-load-{load}": _load_check(load) for load in speed.LOADS},
    "url-bench": ServerCheck(
        speed.bench_serve,
        "The results of `vllm bench serve` for 32 requests, 16 at a time. Published numbers come "
        "from this command: https://docs.vllm.ai/en/latest/benchmarking/cli/",
    ),
}
