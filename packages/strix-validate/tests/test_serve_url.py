# SPDX-License-Identifier: BSD-3-Clause
"""`serve --url` with correct servers, which differ in legal ways, and with faulty ones."""

import contextlib
import io
import threading
import tomllib
from importlib.resources import files
from types import SimpleNamespace

import pytest
import trained_chat
import trained_server
from strix_validate import runner, skips
from strix_validate.checks import CheckFailed, RunOptions, State
from strix_validate.reporting.record import Device
from strix_validate.serving import chats, costs, endpoint, judges, speed
from strix_validate.serving.messages import Reply
from strix_validate.serving.users_server import USER_CHECKS
from strix_validate.tiers import serve


@contextlib.contextmanager
def serving(handler=trained_chat.Handler, **options):
    """Run a server of trained_chat in a thread."""
    with trained_server.Server(handler=handler, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def judged(monkeypatch):
    """A function that runs all checks of a server or the named ones; it returns results by name."""
    # The machine's vllm must not be found.
    monkeypatch.setattr(speed, "shutil", SimpleNamespace(which=lambda *_, **__: None))

    def run(names=None, **options):
        with serving(**options) as server:
            options = RunOptions(url=f"http://127.0.0.1:{server.server_port}/v1", model="any")
            checks = [c for c in serve.checks() if serve.applies(c, options)]
            if names:
                checks = [c for c in checks if c.id.removeprefix("serve/url-") in names]
            results = [
                skips.judge(r, Device(type="cpu", architecture="x86_64"))
                for r in serve.run(checks, options)
            ]
        return {result.check.id.removeprefix("serve/url-"): result for result in results}

    return run


#: Options of correct servers, which differ in legal ways, and the checks that are skipped for each.
RIGHT: list[tuple[dict, set[str]]] = [
    ({}, {"speculation"}),
    ({"delay": 0.05}, {"speculation"}),
    ({"fault": "noise"}, {"speculation"}),
    ({"style": "ties"}, {"speculation"}),
    ({"drafts": True, "block": 1056}, set()),
    ({"style": "no-chat"}, {"speculation", "chat", "chat-answer", "tools", "schema"}),
    ({"style": "no-parser"}, {"speculation", "tools"}),
    ({"style": "no-tools"}, {"speculation"}),
    ({"style": "no-system"}, {"speculation"}),
    ({"style": "no-ids"}, {"speculation"}),
    ({"context": 1536}, {"speculation", "recall-8192", "recall-32768", "long-together"}),
    ({"style": "thinks"}, {"speculation"}),
    ({"style": "thinks-on"}, {"speculation", "chat-answer"}),
]


@pytest.mark.parametrize(("server", "skipped"), RIGHT, ids=[str(server) for server, _ in RIGHT])
def test_a_right_server_passes(server, skipped, judged):
    results = judged(**server)
    assert results.pop("bench").state is State.SKIPPED
    assert {name for name, r in results.items() if r.state is State.SKIPPED} == skipped, results
    assert {name: r.reason for name, r in results.items() if r.state is State.FAILED} == {}


def test_the_sums_of_the_listed_probabilities_are_recorded(judged):
    measured = judged({"probabilities"})["probabilities"].measured
    assert 0 < measured["least_sum"] <= measured["largest_sum"] <= 1.001


def test_chat_that_is_not_an_interface_is_skipped(judged):
    """A server may offer completions without chats."""
    results = judged({"chat"}, handler=trained_server.Handler)
    assert results["chat"].state is State.SKIPPED
    assert "the server has no chat" in results["chat"].measured["own_reason"]


@pytest.mark.parametrize(
    "style", ["comments", "lines", "returns", "windows", "tight", "mark", "chunks"]
)
def test_a_stream_in_each_legal_form_passes(style, judged):
    """The checks that read streams accept each form."""
    names = {"stop", "streaming", "abort", *(f"load-{load}" for load in speed.LOADS)}
    results = judged(names, style=style)
    assert {name: r.state for name, r in results.items()} == dict.fromkeys(names, State.PASSED), (
        results
    )


def test_a_short_context_is_skipped(judged):
    results = judged(context=9000)
    assert {name for name, r in results.items() if r.state is State.SKIPPED} == {
        "bench",
        "recall-32768",
        "speculation",
    }
    assert not [r for r in results.values() if r.state is State.FAILED]


@pytest.mark.parametrize("context", [600, 1023])
def test_a_context_without_room_for_a_check_is_skipped(context, judged):
    """The checks need room for the known text, or for a prompt with a tool and the answer."""
    names = {"text", "prefix", "speculation", "context", "tools"}
    for result in judged(names, context=context, drafts=True).values():
        assert result.state is State.SKIPPED, result
        reason = result.measured["own_reason"]
        assert f"the server's context of {context} tokens is shorter than the 1024" in reason


def test_a_context_without_room_for_a_tool_is_skipped(judged):
    result = judged({"tools"}, context=256)["tools"]
    assert result.state is State.SKIPPED, result
    assert "256 tokens is shorter than the 1024" in result.measured["own_reason"]


def test_a_prompt_that_the_context_does_not_hold_is_skipped(judged):
    results = judged({"recall-8192"}, context=8447)
    assert results["recall-8192"].state is State.SKIPPED
    assert "8447 tokens is shorter than the 8448" in results["recall-8192"].measured["own_reason"]


@pytest.mark.parametrize(("context", "short"), [(1024, 512), (40_960, 1024)])
def test_the_end_of_the_context_is_compared_with_a_shorter_prompt(context, short, judged):
    result = judged({"context"}, context=context, fault="context-unread")["context"]
    assert result.state is State.FAILED
    reason = (
        "0% of the tokens of a repeated passage are right, but 100% in a short text of "
        f"{short} tokens"
    )
    assert f"at the end of the context of {context} tokens, {reason}" in result.reason


def test_a_block_that_the_context_does_not_hold_is_skipped(judged):
    results = judged({"prefix"}, context=4096, block=8320)
    assert results["prefix"].state is State.SKIPPED


#: Each fault of a server, the checks that it makes fail, and part of their reasons.
FAULTS: list[tuple[str, set[str], str]] = [
    ("random", {"text"}, "as random weights do"),
    ("text-beyond-256", {"text"}, "the model guesses in the 256 tokens from token 256 on"),
    ("garbage-31", {"prefill"}, "640 values exceed this bound"),
    ("garbage-513", {"prefill"}, "less likely than another"),
    ("beyond-256", {"recall-8192", "recall-32768"}, "depth"),
    ("short-window", {"recall-8192", "recall-32768"}, "attention at this length"),
    ("pairs-swapped", {"recall-8192", "recall-32768"}, "two long prompts that were sent at once"),
    ("context-garbage", {"context"}, "at the end of the context of 40960 tokens"),
    ("context-logprobs", {"context"}, "at the end of the context of 40960 tokens"),
    ("context-scores", {"context"}, "at the end of the context of 40960 tokens"),
    ("swapped", {"together"}, "less likely"),
    ("twins", {"together"}, "two equal requests at once"),
    ("long-swapped", {"long-together"}, "among several prompts of 2144 tokens at once"),
    ("leak", {"prefix"}, "less likely"),
    ("hybrid", {"prefix"}, "after a repeated beginning of 2208 tokens"),
    ("drafts-cache", {"prefix", "speculation"}, "less likely"),
    ("limit", {"together"}, "HTTP 503"),
    ("no-stop", {"stop"}, "before the stop string"),
    ("with-stop", {"stop"}, "before the stop string"),
    ("stream-no-stop", {"stop"}, "before the stop string"),
    ("finish", {"usage"}, "expected 'length'"),
    ("usage", {"usage", "prefill", "together", "prefix"}, "usage says"),
    ("usage-n", {"usage", "sampling"}, "usage"),
    ("one-more", {"usage", "prefill"}, "were requested"),
    ("echo", {"usage"}, "it is an echo"),
    ("probabilities", {"probabilities"}, "sum to"),
    ("raw-logits", {"probabilities"}, "differ by"),
    ("positive-logits", {"probabilities"}, "are no log probabilities"),
    ("other-listed", {"probabilities"}, "top_logprobs leave out the tokens"),
    ("logprobs", {"prefill", "together", "prefix", "abort"}, "decoding and prefill differ"),
    ("greedy", {"sampling"}, "temperature 1 is ignored or wrong"),
    ("temperature-ignored", {"sampling"}, "temperature 0.25 with top_k 10 is ignored or wrong"),
    ("top_k-ignored", {"sampling"}, "is ignored or wrong"),
    ("top_p-ignored", {"sampling"}, "top_p for 3 tokens is ignored or wrong"),
    ("min_p-ignored", {"sampling"}, "min_p for 3 tokens is ignored or wrong"),
    ("seed-ignored", {"sampling"}, "the seed is ignored"),
    ("seed-constant", {"sampling"}, "two seeds give the same tokens"),
    ("n-equal", {"sampling"}, "all choices of n are equal"),
    ("n-one", {"sampling", "usage"}, "but the answer has"),
    ("logit_bias-ignored", {"sampling"}, "logit_bias is ignored"),
    ("frequency_penalty-ignored", {"penalties"}, "frequency_penalty is ignored"),
    ("presence_penalty-ignored", {"penalties"}, "presence_penalty is ignored"),
    ("repetition_penalty-ignored", {"penalties"}, "repetition_penalty is ignored"),
    ("no-template", {"chat"}, "the chat template is not applied"),
    ("roles", {"chat"}, "the chat template is not applied"),
    ("last-only", {"chat"}, "the system message is dropped, the first turn"),
    ("no-system", {"chat"}, "the system message is dropped"),
    ("no-history", {"chat"}, "the first turn of the user is forgotten"),
    ("reversed", {"chat"}, "not in their order"),
    ("not-opened", {"chat"}, "does not open the assistant's turn"),
    ("chat-garbage", {"chat", "chat-answer"}, "in a chat a token is less likely"),
    ("chat-usage", {"chat", "chat-answer", "tools"}, "usage of a chat says"),
    ("chat-one-more", {"chat", "chat-answer"}, "tokens, but max_tokens is"),
    ("content-null", {"chat-answer", "schema"}, "is null"),
    ("content-empty", {"chat-answer", "schema"}, "is empty"),
    ("in-reasoning", {"chat-answer", "schema"}, "is null"),
    ("early-end", {"chat-answer"}, "in a chat a token is less likely"),
    ("chat-echo", {"chat-answer"}, "it is an echo"),
    ("chat-other-text", {"chat-answer"}, "is not the text of its tokens"),
    ("chat-no-stop", {"chat-answer"}, "expected the text before the stop string"),
    ("chat-lost", {"chat-answer", "schema", "tools"}, "of a streamed chat"),
    ("chat-one-part", {"chat-answer"}, "in one part"),
    ("chat-letters", {"schema"}, "content of a streamed chat"),
    ("calls-as-text", {"tools"}, "no tool_calls with a named tool_choice: the answer is text"),
    ("auto-as-text", {"tools"}, "a tool call came as text"),
    ("arguments-object", {"tools"}, "are no string of JSON"),
    ("arguments-cut", {"tools"}, "are not JSON"),
    ("arguments-lost", {"tools"}, "loses harbour, day"),
    ("other-tool", {"tools"}, "the model calls the tool 'other'"),
    ("call-finish", {"tools"}, "finish_reason of a call is 'stop'"),
    ("no-result", {"tools"}, "the result of a tool is not in the chat's prompt"),
    ("schema-ignored", {"schema"}, "the JSON schema is ignored"),
    ("schema-broken", {"schema"}, "breaks the JSON schema"),
    ("abort", {"abort"}, "less likely"),
    ("lost", {"streaming"}, "tokens of a stream"),
    ("doubled", {"streaming"}, "text of a stream"),
    ("letters", {"streaming"}, "a stream breaks letters in two"),
    ("stream-usage", {"streaming"}, "usage of a stream"),
    ("one-part", {"streaming"}, "one part"),
    ("no-done", {"streaming", "stop"}, "without [DONE]"),
    ("broken", {"streaming", "stop"}, "broke off"),
    ("stream-error", {"streaming", "stop"}, "EngineCore died"),
    ("cut-json", {"streaming", "stop", "abort"}, "not JSON"),
    ("no-json", {"text", "prefill", "recall-8192", "streaming"}, "not JSON"),
]


@pytest.mark.parametrize(("fault", "failing", "reason"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_wrong_server_fails_where_it_is_wrong(fault, failing, reason, judged):
    results = judged(failing, fault=fault, drafts=fault == "drafts-cache", context=40_960)
    assert {name for name, r in results.items() if r.state is State.FAILED} == failing, results
    assert all(reason in result.reason for result in results.values()), results


@pytest.mark.parametrize(
    ("fault", "failing", "reason"),
    [
        ("no-template", "chat", "the chat template is not applied"),
        ("no-system", "chat", "the system's message is dropped"),
        ("no-history", "chat", "the user's message is dropped"),
        ("last-only", "chat", "the system's message is dropped"),
        ("content-null", "chat-answer", "is null"),
        ("chat-echo", "chat-answer", "it is an echo"),
        ("calls-as-text", "tools", "the answer is text"),
        ("schema-ignored", "schema", "the JSON schema is ignored"),
        ("chat-no-prompt-count", "chat", "counts no tokens of its prompt"),
    ],
)
def test_a_chat_without_token_ids_is_judged_as_well(fault, failing, reason, judged):
    results = judged({failing}, fault=fault, style="no-ids")
    assert results[failing].state is State.FAILED
    assert reason in results[failing].reason


def test_after_clients_that_left_an_answer_has_a_minute(monkeypatch):
    limits = []
    server = SimpleNamespace(
        generate=lambda _prompt, _number, limit=None: limits.append(limit),
        stream_parts=lambda *_: (part for part in "ab"),
    )
    monkeypatch.setattr(judges, "judge_greedy", lambda *_, **__: None)
    judges.judge_abort(server, "prompt")
    assert limits[0] is None
    assert limits[1] >= 60


def test_a_stream_that_differs_is_requested_three_times(monkeypatch):
    """The answer without streaming is requested again before each comparison but the first."""
    calls = []

    def ask(name, content):
        calls.append(name)
        return Reply([], [], [], content, "", [], "stop", {})

    monkeypatch.setattr(chats, "chat", lambda *_: ask("chat", "whole"))
    monkeypatch.setattr(chats, "stream_chat", lambda *_: ask("stream", "streamed"))
    reply = chats.chat()
    with pytest.raises(CheckFailed, match="content of a streamed chat: streamed"):
        chats.judge_reply_stream(None, [], reply, 48)
    assert calls == ["chat", "stream"] * 3


def test_a_slow_server_has_an_hour_for_each_request(judged, monkeypatch):
    limits = set()
    open_url = endpoint.open_url

    def note(request, seconds):
        limits.add(seconds)
        return open_url(request, seconds)

    monkeypatch.setattr(endpoint, "open_url", note)
    judged({"prefill", "together", "prefix", "recall-8192", "context", "sampling", "chat-answer"})
    assert min(limits) >= 3600


def test_a_silent_server_is_asked_once(monkeypatch):
    """If each check asked the server, each check would wait for an hour."""
    requests = []

    def open_url(request, seconds):
        requests.append(request)
        raise TimeoutError("timed out")

    monkeypatch.setattr(endpoint, "open_url", open_url)
    options = RunOptions(url="http://127.0.0.1:9", model="any")
    checks = [c for c in serve.checks() if serve.applies(c, options)]
    results = list(serve.run(checks, options))
    assert {r.state for r in results if r.check.id != "serve/url-bench"} == {State.FAILED}
    assert len(requests) == 1
    assert "sent nothing for 3600 s" in results[0].reason
    assert results[1].reason.startswith("no request was sent, because of")


def test_costs_are_said_before_the_first_request_of_a_check(monkeypatch):
    """The costs are in tokens, and in minutes at the server's measured speed."""
    monkeypatch.setenv("PATH", "")
    lines = []
    with serving() as server:
        options = RunOptions(url=f"http://127.0.0.1:{server.server_port}", model="any")
        runner.run(["serve"], options, ["serve/url-usage"], print_line=lines.append)
    assert lines[0] == "serve: 1 checks"
    assert "reads about 100 tokens and generates 50" in lines[1]
    assert "as just measured" in lines[1]
    assert "--skip serve/url-usage" in lines[1]


def test_the_check_with_the_largest_costs_is_named():
    """The check url-sampling reads 600 tokens and generates 2,000; url-text reads 900."""
    line = costs.describe_costs(["url-text", "url-sampling"], None)
    assert "serve/url-sampling needs the most tokens, 2,600: --skip serve/url-sampling" in line


@pytest.mark.parametrize(("context", "read"), [(8447, 0), (8448, 84_000), (0, 84_000)])
def test_a_prompt_that_does_not_fit_costs_nothing(context, read):
    """url-recall-8192 needs a context of 8,192 + 256 tokens. A context of 0 counts as unknown."""
    assert costs.estimate_cost("url-recall-8192", costs.Server(context))[0] == read


@pytest.mark.parametrize(
    "name", [n for n in USER_CHECKS if n not in ("url-bench", "url-questions")]
)
def test_the_costs_of_a_check_are_what_it_costs(name, monkeypatch):
    """Estimates may be off by a factor of two plus 200 read or 100 generated tokens.

    Models differ in how many tokens a text has.
    """
    with serving(drafts=True) as server:
        options = RunOptions(url=f"http://127.0.0.1:{server.server_port}", model="any")
        read, generated = costs.estimate_cost(name, costs.Server(server.context, server.block))
        list(serve.run([c for c in serve.checks() if c.id == f"serve/{name}"], options))
        assert server.read / 2 - 200 <= read <= 2 * server.read + 200, server.read
        assert server.generated / 2 - 100 <= generated <= 2 * server.generated + 100


def test_a_server_that_is_not_there_costs_what_others_do():
    (line,) = serve.announce(
        [c for c in serve.checks() if c.id == "serve/url-text"],
        RunOptions(url="http://127.0.0.1:9", model="any"),
    )
    assert "as an example" in line


def compare(server, plain):
    """Run url-speculation with a second server."""
    options = RunOptions(url=make_url(server), model="any", plain_url=make_url(plain))
    (result,) = serve.run([SPECULATION], options)
    return skips.judge(result, Device(type="cpu", architecture="x86_64"))


def make_url(server):
    return f"http://127.0.0.1:{server.server_port}"


SPECULATION = next(c for c in serve.checks() if c.id == "serve/url-speculation")


@pytest.mark.parametrize("style", ["", "ties"])
def test_a_server_is_compared_with_one_without_speculation(style):
    """The costs that are announced for the server without speculation are right."""
    with serving(drafts=True, style=style) as server, serving(style=style) as plain:
        result = compare(server, plain)
        (_, announcement) = serve.announce(
            [SPECULATION], RunOptions(url=make_url(server), model="any", plain_url=make_url(plain))
        )
    assert result.state is State.PASSED, result.reason
    assert result.measured["without_speculation"]["answers"] == 12
    assert f"{make_url(plain)} reads about {costs.PLAIN:,} tokens, and generates 12" in announcement
    assert costs.PLAIN / 2 <= plain.read <= 2 * costs.PLAIN


def test_drafts_that_the_servers_own_prefill_finds_likely_fail_against_another():
    with serving(drafts=True, fault="drafts-alike") as server, serving() as plain:
        alone = compare(server, server)
        result = compare(server, plain)
    assert alone.state is State.SKIPPED
    assert "or the server at --plain-url was started with it" in alone.reason
    assert result.state is State.FAILED
    assert "compared with the server without speculation" in result.reason
    assert "less likely" in result.reason


def test_drafts_that_are_wrong_alike_pass_alone(judged):
    assert judged({"speculation"}, drafts=True, fault="drafts-alike")["speculation"].state is (
        State.PASSED
    )


def test_a_server_of_another_api_costs_what_others_do(monkeypatch):
    """Some servers list their models as an array, which must not end the estimate of costs."""
    monkeypatch.setattr(endpoint, "open_url", lambda *_: io.BytesIO(b"[]"))
    server = endpoint.Endpoint("http://strix", "any")
    assert costs.probe(server) == costs.Server()
    with pytest.raises(CheckFailed, match="is this server vLLM"):
        server.context()


def test_this_machine_is_asked_without_a_proxy(monkeypatch):
    """The variable http_proxy is set in many networks, and no_proxy is not."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        assert endpoint.Endpoint(url, "any").context() > 0
        with pytest.raises(CheckFailed, match="does not answer"):
            endpoint.Endpoint(url.replace("127.0.0.1", "strix.invalid"), "any").context()


def test_a_load_is_measured_in_milliseconds():
    answer = SimpleNamespace(seconds=[0.25, 0.5], tokens=[1, 2])
    server = SimpleNamespace(stream=lambda *_: answer)
    assert speed.measure(server, 3, ["prompt"])["first_token_ms"] == 250


def test_events_follow_the_standard():
    lines = [
        ":ping\n",
        "event: a\n",
        "data: 1\n",
        "data:2\n",
        "\n",
        "\n",
        "datum: 3\n",
        "data\n",
        "\n",
    ]
    assert list(endpoint.events(lines)) == ["1\n2", ""]


class Pupil:
    """Answers the first `number` questions correctly. All other answers are wrong by one."""

    def __init__(self, number):
        self.number = number

    def generate(self, prompt, number, stop):
        questions = [q["ask"] for q in QUESTIONS]
        (place,) = (i for i, q in enumerate(questions) if f"Question: {q}\nAnswer:" in prompt)
        number = QUESTIONS[place]["is"] + (place >= self.number)
        text = f"It is 7 + 8. The answer is {number:,}."
        return endpoint.Generation([], [], [], text, "stop", {})


QUESTIONS = tomllib.loads((files("strix_validate.serving") / "questions.toml").read_text())[
    "question"
]


def test_questions_are_counted():
    assert judges.judge_questions(Pupil(41), 41) == {"right": 41, "asked": 50}
    with pytest.raises(CheckFailed, match="41 of 50 answers are right, 42 were expected"):
        judges.judge_questions(Pupil(41), 42)


def test_questions_are_asked_where_it_is_said():
    (check,) = (c for c in serve.checks() if c.id == "serve/url-questions")
    assert not serve.applies(check, RunOptions(url="http://x", model="any"))
    assert serve.applies(check, RunOptions(url="http://x", model="any", questions=30))
