# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a user's server, with any model: one that runs already, or one of a folder."""

from collections.abc import Callable

from strix_validate.checks import require
from strix_validate.serving import caches, chats, judges, sampling, speed, structures
from strix_validate.serving.endpoint import COUNTS, Endpoint

PREFILL = (
    "The server's prefill finds its own decoded tokens as likely: other kernels, the same model. "
    "https://github.com/vllm-project/vllm/issues/56021"
)
USAGE = (
    "Tokens of the prompt and of the answer are counted; clients pay and cut by that: "
    "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/"
)
PROBABILITIES = (
    "Listed values of a step are log probabilities, of the model's own tokens, and sum to no more "
    "than one: temperature or a softmax of the wrong length. "
    "https://github.com/vllm-project/vllm/issues/56021"
)
STREAMING = (
    "Streaming gives the same tokens, text and usage in several parts and ends with [DONE]; parts "
    "were lost or doubled: https://github.com/vllm-project/vllm/issues/32180"
)
ABORT = (
    "A client that leaves in the middle does not spoil or delay the next one's answer: "
    "https://github.com/vllm-project/vllm/issues/24584"
)


def describe(judge: Callable[..., dict], reason: str) -> Callable[..., dict]:
    """Give a check's function the bug that it would catch, with a link."""
    judge.__doc__ = reason
    return judge


def _of_user(judge: Callable[..., dict], reason: str) -> Callable[..., dict]:
    return describe(lambda server, *more: judge(server, *more), f"The user's server: {reason}")


def _judge_usage(server: Endpoint) -> dict:
    prompt = judges.PROMPTS[0]
    for number in (1, 2, 24):
        found = server.generate(prompt, number)
        judges.judge_finish(found, "length")
        usage = judges.judge_usage(found, number)
        judges.judge_text_of(found, prompt)
    several = server.generate_choices(prompt, 8, n=2, temperature=1.0, seed=1)
    require(len(several) == 2, f"n is 2, and {len(several)} choices are answered")
    written = sum(len(each.tokens) for each in several)
    counts = (len(several[0].prompt), written, len(several[0].prompt) + written)
    expected = dict(zip(COUNTS, counts, strict=True))
    require(
        several[0].usage == expected, f"usage of n=2 says {several[0].usage}, expected {expected}"
    )
    return usage


def _judge_long_answer(server: Endpoint) -> dict:
    context = server.context()
    number = min(judges.LONG, context - 64) if context else judges.LONG
    found = server.generate(judges.PROMPTS[0], number)
    judges.judge_usage(found, number)
    return judges.judge_greedy(server, found)


def _judge_streams(server: Endpoint) -> dict:
    measured = judges.judge_stream(server, judges.PROMPTS[0])
    letters = judges.judge_stream(server, judges.LETTERS, 48)["letters"]
    return measured | {"letters": letters}


#: By name, in the order in which they run.
USERS: dict[str, Callable[..., dict]] = {
    "url-text": _of_user(
        judges.judge_text,
        "texts that every model knows are likely, everywhere in 1,200 tokens. Random weights agree "
        "with themselves as well: https://github.com/vllm-project/vllm/issues/15730",
    ),
    "url-prefill": _of_user(_judge_long_answer, PREFILL),
    "url-together": _of_user(
        lambda server: judges.judge_twice_together(server, judges.MANY, judges.TOGETHER),
        "of prompts that are each sent twice, 32 at a time, each gets its own answer. Of two equal "
        "requests the second was wrong: https://github.com/vllm-project/vllm/issues/41331",
    ),
    "url-long-together": _of_user(
        caches.judge_long_pairs,
        "of prompts of 2,144 tokens that are each sent twice at once, each gets its own answer. "
        "Long ones were swapped: https://github.com/ggml-org/llama.cpp/issues/27579",
    ),
    "url-prefix": _of_user(
        caches.judge_prefix,
        "prompts that share more than a block of the cache get their own answers, at first sight, "
        "together and in later turns. A block of a hybrid cache has up to thousands of tokens, and "
        "repeated a wrong state: https://github.com/vllm-project/vllm/issues/53912",
    ),
    "url-speculation": _of_user(
        caches.judge_speculation,
        "drafted tokens, of MTP or n-grams, are those that prefill finds without drafts. With a "
        "cached prefix they were others: https://github.com/vllm-project/vllm/issues/43559",
    ),
    **{
        f"url-recall-{length}": _of_user(
            lambda server, length=length: judges.judge_recall(server, length),
            f"five numbers in each of two prompts of {length} tokens are found again. Attention "
            "that is wrong, or a cache that is, beyond a length: "
            "https://github.com/vllm-project/vllm/issues/42684",
        )
        for length in judges.RECALLED
    },
    "url-context": _of_user(
        caches.judge_context,
        "tokens and log probabilities are right up to the last token of the context. Garbage "
        "beyond a length: https://github.com/vllm-project/vllm/issues/42684",
    ),
    "url-usage": _of_user(_judge_usage, USAGE),
    "url-stop": _of_user(
        lambda server: judges.judge_stop(server, judges.PROMPTS[0]),
        "an answer ends before a stop string, whole or in a stream, and says why it ends. "
        "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-probabilities": _of_user(
        lambda server: judges.judge_probabilities(server, judges.PROMPTS[0]), PROBABILITIES
    ),
    "url-sampling": _of_user(
        sampling.judge_sampling,
        "tokens are drawn as often as temperature, top_k, top_p and min_p let them; seeds, n and "
        "logit_bias do what they should. Wrong samplers: "
        "https://github.com/vllm-project/vllm/issues/4091",
    ),
    "url-penalties": _of_user(
        sampling.judge_penalties,
        "each token is the likeliest once penalties are subtracted: they were ignored or counted "
        "tokens of another request. https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-chat": _of_user(
        chats.judge_chat,
        "the chat template is applied to each message, with its role. Answers of a chat without it "
        "look like a bad model: https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    ),
    "url-chat-answer": _of_user(
        chats.judge_chat_answer,
        "a chat's answer is in its content, and the same in a stream. Content was null or empty: "
        "https://github.com/vllm-project/vllm/issues/43650",
    ),
    "url-tools": _of_user(
        structures.judge_tools,
        "a tool call comes as structure that keeps the tool's schema, not as text: "
        "https://github.com/lemonade-sdk/lemonade/issues/2977",
    ),
    "url-schema": _of_user(
        structures.judge_schema,
        "an answer keeps the JSON schema that was asked for, and a stream does not break letters. "
        "https://docs.vllm.ai/en/latest/features/structured_outputs/",
    ),
    "url-streaming": _of_user(_judge_streams, STREAMING),
    "url-abort": _of_user(lambda server: judges.judge_abort(server, judges.PROMPTS[0]), ABORT),
    "url-questions": _of_user(
        judges.judge_questions,
        "of 50 questions about small sums, in words, as many have the right answer as --questions "
        "says: a model that answers well, and less well than it should: "
        "https://github.com/lemonade-sdk/vllm-rocm/issues/24",
    ),
    **{
        f"url-load-{load}": describe(
            lambda server, load=load: speed.measure(server, load, judges.PROMPTS),
            f"Time to the first token and tokens a second, {load} requests at a time. A server "
            "that is slower than published numbers: https://github.com/ROCm/vllm/issues/994",
        )
        for load in speed.LOADS
    },
    "url-bench": describe(
        speed.bench_serve,
        "What `vllm bench serve` says of 32 requests, 16 at a time, for comparison with published "
        "numbers, which it measures: https://docs.vllm.ai/en/latest/benchmarking/cli/",
    ),
}
