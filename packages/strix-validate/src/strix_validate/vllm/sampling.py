# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's sampling: what a step does with logits, by the kernels of its second model runner.

Of what is drawn at random, only how often each token comes is compared: which one is a matter of
vLLM's version.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.source import VllmCall

_SAMPLE = "vllm.v1.worker.gpu.sample"
#: Standard deviations by which a count of draws may be off: one of 2 million healthy runs is.
SIGMAS = 5.0


class _Elsewhere(Tensor):
    """A tensor in host memory that says it is on a GPU: vLLM chooses tiles and kernels by that."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def _kept(logits: Tensor) -> dict[str, Tensor]:
    """Return which of the masked logits are left, and their values."""
    left = logits > float("-inf")
    return {"kept": left.double(), "logits": logits.double().masked_fill(~left, 0)}


def _shape_end(logits: Tensor, count: int, ties: int, gap: float) -> None:
    """Change the logits around the last one that is let through, in place; see truncated."""
    order = logits.sort(descending=True)
    if ties:
        around = slice(count - ties // 2, count - ties // 2 + ties)
        logits[order.indices[around]] = order.values[count]
    logits[order.indices[count:]] -= gap


def truncated(
    randn: Randn,
    *,
    keys: tuple[int, ...],
    nuclei: tuple[int, ...],
    vocabulary=9000,
    low=0.0,
    masked=False,
    ties=0,
    gap=0.0,
) -> tuple[VllmCall, Expected]:
    """Build a call of apply_top_k_top_p_triton: of each row the largest logits, and of these the
    most likely.

    keys: top-k of each row, 0 is all. nuclei: tokens that each row's top-p lets through, 0 is all;
    the threshold lies in the middle of the last one's probability, so that no rounding decides.
    low: added to all logits. masked: each third token is forbidden, as grammars do, and rows are
    padded. ties: as many logits are equal at the end of what is let through, of which the first
    ones stay. gap: by which the logits behind what is let through are lower: without top-k the
    kernel searches in five rounds, and tells no nearer ones apart.
    """
    logits = randn(len(keys), vocabulary) * 3 + low
    if masked:
        logits[:, ::3] = float("-inf")
    for row, count in enumerate(n or k for k, n in zip(keys, nuclei, strict=True)):
        _shape_end(logits[row], count, ties, gap)
    order = logits.double().sort(descending=True, stable=True)
    left = torch.zeros(logits.shape, dtype=torch.bool)
    p = torch.ones(len(keys))
    for row, (k, nucleus) in enumerate(zip(keys, nuclei, strict=True)):
        first = order.values[row, : k or vocabulary].softmax(-1)
        if nucleus:
            p[row] = float(first[: nucleus - 1].sum() + first[nucleus - 1] / 2)
        left[row, order.indices[row, : min(nucleus or vocabulary, len(first))]] = True
    tensors = {"logits": logits}
    if any(keys):
        tensors["k"] = torch.tensor([k or vocabulary for k in keys], dtype=torch.int32)
    if any(nuclei):
        tensors["p"] = p

    def expected(dtype: Precision) -> dict[str, Tensor]:
        return _kept(logits.masked_fill(~left, float("-inf")))

    return VllmCall(_truncate, tensors, {"padding": 8 * masked}), expected


def _truncate(
    logits: Tensor, k: Tensor | None = None, p: Tensor | None = None, *, padding: int
) -> dict[str, Tensor]:
    # behind a row lies what would win
    rows = torch.nn.functional.pad(logits, (0, padding), value=1e4)
    logits = rows[:, : logits.shape[1]]
    module = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
    if logits.device.type == "cpu":
        logits = logits.as_subclass(_Elsewhere)
    return _kept(module.apply_top_k_top_p_triton(logits, k, p).as_subclass(Tensor))


def penalized(randn: Randn, *, vocabulary=9000, prompt=40, made=30) -> tuple[VllmCall, Expected]:
    """Build a call of bincount and apply_penalties: of tokens in the prompt, in the output, and in
    a draft.

    Four requests, not in the order of their states: all penalties, one of each kind, none. The
    first has two drafted tokens, which count from the next position on.
    """
    states = torch.tensor([3, 0, 2, 1])
    rows = torch.tensor([3, 3, 3, 0, 2, 1], dtype=torch.int32)
    logits = randn(len(rows), vocabulary) * 3
    uniform = torch.special.ndtr(randn(len(states), prompt + made).double())
    tokens = (uniform * 60).int() * 151 % vocabulary
    # behind a block of the kernel are tokens that it does not have
    tokens[:, 1024 : prompt - 9] += 7
    lengths = torch.tensor([prompt - 1, prompt, prompt - 9, prompt - 3], dtype=torch.int32)
    drafts = tokens[3, -1:].expand(len(rows)).clone()
    tensors = {
        "logits": logits,
        "rows": rows,
        "states": states,
        "tokens": tokens,
        "prompts": lengths,
        "ends": lengths + made - 5,
        "local": torch.tensor([0, 1, 2, 0, 0, 0], dtype=torch.int32),
        "drafts": drafts,
        "repetition": torch.tensor([1.3, 1.0, 1.0, 1.7]),
        "frequency": torch.tensor([0.0, 0.0, 0.4, 0.3]),
        "presence": torch.tensor([0.0, 0.0, 0.0, -0.6]),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        found = logits.to(reference.working(dtype)).clone()
        for i, row in enumerate(rows.tolist()):
            begin, end = int(lengths[row]), int(tensors["ends"][row])
            count = torch.zeros(vocabulary, dtype=found.dtype)
            seen = torch.zeros(vocabulary, dtype=torch.bool)
            count.index_add_(0, tokens[row, begin:end], torch.ones(end - begin).to(found))
            for j in range(int(tensors["local"][i])):
                count[int(drafts[i - int(tensors["local"][i]) + j + 1])] += 1
            seen[tokens[row, :begin].long()] = True
            seen |= count > 0
            repetition, frequency, presence = (
                float(tensors[name][row]) for name in ("repetition", "frequency", "presence")
            )
            x = found[i]
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
            if dtype == reference.TERMS:
                x, frequency, presence = x.abs(), -abs(frequency), -abs(presence)
            found[i] = x - frequency * count - presence * (count > 0)
        return {"logits": reference.stored(found, dtype)}

    return VllmCall(_penalize, tensors), expected


def _penalize(
    logits: Tensor, rows: Tensor, states: Tensor, tokens: Tensor, prompts: Tensor, ends: Tensor,
    local: Tensor, drafts: Tensor, **penalties: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    module = importlib.import_module(f"{_SAMPLE}.penalties")
    count, vocabulary = len(states), logits.shape[1]
    place = {"dtype": torch.int32, "device": logits.device}
    # what another request left there
    seen = torch.full((count, -(-vocabulary // 32)), -1, **place)
    counts = torch.full((count, vocabulary), 7, **place)
    module.bincount(states, tokens, prompts, ends, seen, counts, int(ends.max()))
    own = [penalties[name] for name in ("repetition", "frequency", "presence")]
    module.apply_penalties(logits, rows, drafts, local, *own, seen, counts)
    return {"logits": logits}


def scaled(randn: Randn, *, vocabulary=9000) -> tuple[VllmCall, Expected]:
    """Build a call of apply_temperature, then apply_min_p, of requests that are not in the order of
    their states.

    As many tokens are left as `least` says; the threshold lies between two logits.
    """
    rows, least = torch.tensor([2, 0, 1, 2], dtype=torch.int32), (40, 0, 3, 700)
    logits, temperature = randn(len(rows), vocabulary) * 3, torch.tensor([0.0, 1.0, 0.6])
    heat = torch.where(temperature == 0, 1.0, temperature)[rows.long()].double()[:, None]
    right = logits.double() / heat
    order = right.sort(descending=True).values
    owner = {2: 0, 0: 1, 1: 2}  # of a state, the row that its threshold is chosen by
    min_p = torch.zeros(3)
    for state, row in owner.items():
        if n := least[row]:
            middle = (order[row, n - 1] + order[row, n]) / 2
            min_p[state] = float((middle - order[row, 0]).exp())
    lowest = order[:, :1] + min_p[rows.long()].double().log()[:, None]

    def expected(dtype: Precision) -> dict[str, Tensor]:
        found = reference.stored(logits.to(reference.working(dtype)) / heat, dtype)
        return _kept(found.masked_fill(right < lowest, float("-inf")))

    tensors = {"logits": logits, "rows": rows, "temperature": temperature, "min_p": min_p}
    return VllmCall(_scale, tensors), expected


def _scale(logits: Tensor, rows: Tensor, temperature: Tensor, min_p: Tensor) -> dict[str, Tensor]:
    importlib.import_module(f"{_SAMPLE}.gumbel").apply_temperature(logits, rows, temperature)
    importlib.import_module(f"{_SAMPLE}.min_p").apply_min_p(logits, rows, min_p)
    return _kept(logits)


def _one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    """Encode tokens one-hot, also those of a kernel that was only compiled: none is a token."""
    return (tokens[:, None] == torch.arange(vocabulary, device=tokens.device)).double()


def beyond(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return for each token 1 where its count, of draws from one distribution, is SIGMAS off, else
    0.
    """
    shares = logits.double().softmax(-1)
    counts = _one_hot(tokens.flatten(), len(shares)).sum(0)
    sigma = (len(tokens) * shares * (1 - shares)).sqrt() + 0.5
    return ((counts - len(tokens) * shares).abs() > SIGMAS * sigma).double()


def drawn(randn: Randn, *, draws=200, greedy=6, vocabulary=1030) -> tuple[VllmCall, Expected]:
    """Build a call of gumbel_sample: rows that draw, each with a seed and a position of its own,
    and greedy ones.

    A few tokens, of both blocks of the vocabulary, are likely; temperature is applied by the
    kernel.
    """
    logits = torch.full((vocabulary,), -40.0)
    likely = torch.tensor([0, 5, 700, 1023, 1024, 1029])
    logits[likely] = randn(len(likely)) / 2
    best = randn(greedy, vocabulary)
    seeds = torch.arange(draws, dtype=torch.int64) // 2 * 0x9E3779B97F4A7C1 % (1 << 62)
    tensors = {"logits": logits, "greedy": best, "seeds": seeds}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        found, zero = _one_hot(best.argmax(-1), vocabulary), torch.zeros(vocabulary).double()
        return {"greedy": found, "beyond": zero, "alike": zero[:1]}

    return VllmCall(_draw, tensors, {"temperature": 0.5}), expected


def _draw(
    logits: Tensor, greedy: Tensor, seeds: Tensor, *, temperature: float
) -> dict[str, Tensor]:
    module, place = importlib.import_module(f"{_SAMPLE}.gumbel"), {"device": greedy.device}
    (count, vocabulary), draws = greedy.shape, len(seeds)
    heat = torch.tensor([temperature] * draws + [0.0] * count, **place)
    rows = torch.arange(draws + count, dtype=torch.int32, **place)
    sampled = module.gumbel_sample(
        torch.cat([logits.expand(draws, -1), greedy]),
        rows, heat, torch.cat([seeds, seeds[:count]]),
        # each seed is drawn with at two positions
        rows.long() % 2 + 7, True, False,
    )  # fmt: skip
    pairs = sampled[: draws // 2 * 2].view(-1, 2)
    return {
        "greedy": _one_hot(sampled[draws:], vocabulary),
        "beyond": beyond(sampled[:draws], logits / temperature),
        "alike": (pairs[:, 0] == pairs[:, 1]).all().double()[None],
    }


def accepted(randn: Randn, *, requests=16, vocabulary=6) -> tuple[VllmCall, Expected]:
    """Build a call of rejection_sample of two drafted tokens for each request.

    Three requests are greedy: none, one or both drafted tokens are what the model would choose.
    For three, draft and model agree: both are accepted. For the others the model gives two tokens
    half each and the draft one of them all, so a token behind rejection is the other one.
    """
    greedy, same = randn(3, 3, vocabulary), randn(3, 3, vocabulary)
    best, agreed = greedy.argmax(-1), same.argmax(-1)[:, :2]
    right = torch.arange(3)
    drafts = torch.where(torch.arange(2) < right[:, None], best[:, :2], (best[:, :2] + 1) % 6)
    tensors = {"greedy": greedy, "same": same, "drafts": torch.cat([drafts, agreed])}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        tokens = torch.where(torch.arange(3) <= right[:, None], best, -1)
        zero = torch.zeros(1, dtype=torch.float64)
        return {"greedy": tokens.double(), "agreed": agreed.double(), "wrong": zero, "alike": zero}

    return VllmCall(_accept, tensors, {"requests": requests}), expected


def _accept(greedy: Tensor, same: Tensor, drafts: Tensor, *, requests: int) -> dict[str, Tensor]:
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    place = {"device": greedy.device}
    vocabulary, count = greedy.shape[-1], 6 + requests
    halves = torch.full((requests, 3, vocabulary), -60.0, **place)
    halves[..., [1, 4]] = 0
    one = torch.full((requests, 2, vocabulary), -60.0, **place)
    one[..., 1] = 0
    target = torch.cat([greedy, same, halves])
    draft = torch.cat([greedy[:, :2], same[:, :2], one])
    drafts = torch.cat([drafts, torch.ones(requests, 2, dtype=torch.int64, **place)])
    states = torch.arange(count, dtype=torch.int32, **place)
    sampled, number = module.rejection_sample(
        target.view(-1, vocabulary), draft.contiguous(),
        # the first of three is the token that was sampled before
        torch.nn.functional.pad(drafts, (1, 0)).flatten(),
        torch.arange(count + 1, dtype=torch.int32, **place) * 3,
        torch.arange(3, **place).repeat(count) + 11, states, states.repeat_interleave(3),
        torch.arange(3, dtype=torch.int32, **place).repeat(count),
        torch.tensor([0.0] * 3 + [1.0] * (count - 3), **place),
        torch.arange(count, dtype=torch.int64, **place) * 0x9E3779B97F4A7C1 % (1 << 62), 2,
    )  # fmt: skip
    sampled = torch.where(torch.arange(3, **place) < number[:, None], sampled, -1)
    tokens, number = sampled[6:], number[6:]
    last = tokens.gather(1, number.long()[:, None] - 1)[:, 0]
    wrong = (tokens[:, :2] == 1).sum(1) < (number - 1)  # accepted, and another token
    wrong |= torch.where(number < 3, last != 4, (last != 4) & (last != 1))
    alike = len(number.unique()) == 1
    return {
        "greedy": sampled[:3].double(),
        "agreed": sampled[3:6, :2].double(),
        "wrong": wrong.double().sum()[None],
        "alike": torch.tensor([float(alike)]),
    }


def scored(randn: Randn, *, vocabulary=9000, count=20, low=0.0) -> tuple[VllmCall, Expected]:
    """Build a call of compute_token_logprobs, of rows that are padded.

    count: tokens of each row. low: added to all logits.
    """
    logits = randn(3, vocabulary) * 3 + low
    tokens = (torch.arange(3 * count) * 157 % vocabulary).view(3, count)
    tokens[:, 0] = vocabulary - 1

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        x = logits.to(work)
        size = x.logsumexp(-1, keepdim=True)
        terms = dtype == reference.TERMS
        found = x.abs() + size.abs() if terms else x - size
        return {"logprobs": reference.stored(found.gather(1, tokens), dtype)}

    return VllmCall(_score, {"logits": logits, "tokens": tokens}), expected


def _score(logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    # behind a row lies what would win
    rows = torch.nn.functional.pad(logits, (0, 8), value=1e4)[:, : logits.shape[1]]
    module = importlib.import_module(f"{_SAMPLE}.logprob")
    return {"logprobs": module.compute_token_logprobs(rows, tokens)}


_TOP = "a token of top-k or top-p too many or too few: models that ramble, or repeat themselves"
_PENALTY = "a penalty of another request, or of tokens that another one has used"
_HEAT = "another request's temperature, or a min-p threshold of the logits before it"
_SCORE = "log probabilities over another vocabulary or row, or a last block counted whole"
_DRAW = "noise that is the same at each position, or favours some tokens"
_ACCEPT = "speculation that changes what a model says"
_FLOAT32: dict = {"dtype": torch.float32}
_FULL: dict = _FLOAT32 | {"size": Size.FULL}
COMPUTED = {
    "top-k-top-p": Case(
        partial(truncated, keys=(1, 50, 3000, 0, 20), nuclei=(0, 20, 0, 0, 1)), _TOP, **_FLOAT32
    ),
    "top-k-top-p-low": Case(
        partial(truncated, keys=(50, 0, 40), nuclei=(0, 20, 10), vocabulary=3000, low=-1000.0),
        reference.WHY_LOW,
        **_FLOAT32,
    ),
    "top-p": Case(
        partial(truncated, keys=(0, 0), nuclei=(30, 400), vocabulary=15000), _TOP, **_FULL
    ),
    "top-k-top-p-masked": Case(
        partial(truncated, keys=(50, 0, 40), nuclei=(0, 20, 10), vocabulary=3000, masked=True),
        "forbidden tokens counted, or rows that are padded read as if they were not",
        **_FLOAT32,
    ),
    "top-k-ties": Case(
        partial(truncated, keys=(50, 5), nuclei=(0, 0), vocabulary=3000, ties=6),
        "tokens of equal logits all kept, or all left out",
        **_FLOAT32,
    ),
    # more rows than half of the processors: each row is one part, of several blocks
    "top-p-alone": Case(
        partial(truncated, keys=(0,) * 12, nuclei=(30, 5, 12) * 4, gap=0.5),
        _TOP,
        **_FLOAT32,
    ),
    # more rows than gfx1151 has workgroup processors
    "top-k-batch": Case(
        partial(truncated, keys=(5,) * 45, nuclei=(0,) * 45, vocabulary=300), _TOP, **_FLOAT32
    ),
    "logprobs-many": Case(partial(scored, vocabulary=3000, count=1100), _SCORE, **_FLOAT32),
    "logprobs": Case(scored, _SCORE, **_FLOAT32),
    "logprobs-low": Case(partial(scored, low=-1000.0, count=1), _SCORE, **_FLOAT32),
    # a prompt of several blocks of 1,024
    "penalties": Case(partial(penalized, prompt=1100), _PENALTY, **_FLOAT32),
    "temperature-min-p": Case(scaled, _HEAT, **_FLOAT32),
    "gumbel": Case(drawn, _DRAW, **_FULL),
    "rejection": Case(accepted, _ACCEPT, **_FULL),
}
