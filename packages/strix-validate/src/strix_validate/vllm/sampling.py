# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's sampling from logits, by the kernels of its Model Runner V2.

For random draws, frequencies are compared instead of the drawn tokens, because these tokens depend
on vLLM's version.
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
#: Allowed deviation of a token's count, in standard deviations. One token's count exceeds it by
#: chance about once in 2 million runs.
SIGMAS = 5.0
#: Factor that spreads consecutive numbers over all bits of a seed.
_SEED_FACTOR = 0x9E3779B97F4A7C1
_SEEDS = 1 << 62
#: The tokens that the draft gives a higher, and a lower probability than the model does.
_OVERRATED = 1
_UNDERRATED = 4
#: Probabilities of these two tokens in the model, and in the draft. Half of the drafted tokens are
#: accepted. A kernel that leaves out the draft's probability accepts three of ten.
_TARGET_SHARES = (0.3, 0.7)
_DRAFT_SHARES = (0.6, 0.4)
#: Logit that fills the padding after a row. A kernel that reads the padding finds the largest logit
#: there.
_WINNING = 1e4


class _Elsewhere(Tensor):
    """A tensor in host memory whose device is reported as a GPU.

    vLLM chooses tiles and kernels by a tensor's device.
    """

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def describe_kept(logits: Tensor) -> dict[str, Tensor]:
    """Return which logits are kept, and their values; the other values are 0.

    Logits of -inf are those that a kernel did not keep. NaN counts as kept, so that a comparison
    finds it.
    """
    is_kept = logits != float("-inf")
    return {
        "kept": is_kept.double(),
        "logits": logits.double().masked_fill(~is_kept, 0),
    }


def _shape_end(logits: Tensor, count: int, ties: int, gap: float) -> None:
    """Change a row's logits in place, around the last logit that top-k or top-p keeps.

    Args:
        logits: The row, (vocabulary,).
        count: Number of logits that the kernel must keep.
        ties: See truncated.
        gap: See truncated.
    """
    order = logits.sort(descending=True)
    if ties:
        first = count - ties // 2
        logits[order.indices[first : first + ties]] = order.values[count]
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
    """Build a call of apply_top_k_top_p_triton.

    The function keeps the k largest logits of each row (top-k), and of these the most likely ones
    whose probabilities add up to p (top-p).

    Args:
        randn: Draws the numbers.
        keys: k of each row; 0 is all.
        nuclei: Number of tokens that top-p keeps in each row; 0 is all. p lies in the middle of the
            last token's share, so that rounding does not change the result.
        vocabulary: Size of the vocabulary.
        low: Number that is added to all logits.
        masked: Whether each third token is forbidden, as by a grammar, and rows are padded.
        ties: Number of equal logits around the last one that is kept. The first of them are kept.
        gap: Number that is subtracted from all logits that are not kept. Without top-k, the kernel
            searches for the threshold in five rounds, and cannot separate logits that are too
            close.
    """
    logits = randn(len(keys), vocabulary) * 3 + low
    if masked:
        logits[:, ::3] = float("-inf")
    for row, (k, nucleus) in enumerate(zip(keys, nuclei, strict=True)):
        _shape_end(logits[row], nucleus or k, ties, gap)
    order = logits.double().sort(descending=True, stable=True)
    is_kept = torch.zeros(logits.shape, dtype=torch.bool)
    p = torch.ones(len(keys))
    for row, (k, nucleus) in enumerate(zip(keys, nuclei, strict=True)):
        count = k or vocabulary
        if nucleus:
            shares = order.values[row, :count].softmax(-1)
            p[row] = float(shares[: nucleus - 1].sum() + shares[nucleus - 1] / 2)
            count = min(nucleus, count)
        is_kept[row, order.indices[row, :count]] = True
    tensors = {"logits": logits}
    if any(keys):
        tensors["k"] = torch.tensor([k or vocabulary for k in keys], dtype=torch.int32)
    if any(nuclei):
        tensors["p"] = p

    def expected(dtype: Precision) -> dict[str, Tensor]:
        return describe_kept(logits.masked_fill(~is_kept, float("-inf")))

    return VllmCall(_truncate, tensors, {"padding": 8 * masked}), expected


def _truncate(
    logits: Tensor,
    k: Tensor | None = None,
    p: Tensor | None = None,
    *,
    padding: int,
) -> dict[str, Tensor]:
    rows = torch.nn.functional.pad(logits, (0, padding), value=_WINNING)
    logits = rows[:, : logits.shape[1]]
    module = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
    if logits.device.type == "cpu":
        logits = logits.as_subclass(_Elsewhere)
    truncated_logits = module.apply_top_k_top_p_triton(logits, k, p)
    return describe_kept(truncated_logits.as_subclass(Tensor))


def penalized(
    randn: Randn,
    *,
    vocabulary=9000,
    prompt=40,
    generated=30,
) -> tuple[VllmCall, Expected]:
    """Build a call of bincount and apply_penalties.

    The kernels count the tokens of the prompt, of the output, and of a draft. There are four
    requests, which are not in the order of their states. They have all penalties, one penalty each,
    or none. The first request has two drafted tokens, each of which counts from the next position
    on.

    Args:
        randn: Draws the numbers.
        vocabulary: Size of the vocabulary.
        prompt: Number of tokens of the longest prompt.
        generated: Number of tokens of the output of each request, plus five.
    """
    states = torch.tensor([3, 0, 2, 1])
    rows = torch.tensor([3, 3, 3, 0, 2, 1], dtype=torch.int32)
    logits = randn(len(rows), vocabulary) * 3
    uniform = torch.special.ndtr(randn(len(states), prompt + generated).double())
    tokens = (uniform * 60).int() * 151 % vocabulary
    # The tokens after the kernel's first block differ from the tokens in that block.
    tokens[:, 1024 : prompt - 9] += 7
    # The drafted tokens differ, to reveal a kernel that counts another draft.
    drafts = (tokens[3, -1] + torch.arange(len(rows), dtype=torch.int32)) % vocabulary
    prompts = torch.tensor([prompt - 1, prompt, prompt - 9, prompt - 3], dtype=torch.int32)
    tensors = {
        "logits": logits,
        "rows": rows,
        "states": states,
        "tokens": tokens,
        "prompts": prompts,
        "ends": prompts + generated - 5,
        "local": torch.tensor([0, 1, 2, 0, 0, 0], dtype=torch.int32),
        "drafts": drafts,
        "repetition": torch.tensor([1.3, 1.0, 1.0, 1.7]),
        "frequency": torch.tensor([0.0, 0.0, 0.4, 0.3]),
        "presence": torch.tensor([0.0, 0.0, 0.0, -0.6]),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        penalized_logits = logits.to(reference.working_dtype(dtype)).clone()
        for i in range(len(rows)):
            penalized_logits[i] = _penalize_row(tensors, i, penalized_logits[i], dtype)
        return {"logits": reference.store(penalized_logits, dtype)}

    return VllmCall(_penalize, tensors), expected


def _penalize_row(tensors: dict[str, Tensor], i: int, x: Tensor, dtype: Precision) -> Tensor:
    """Apply the penalties to a row of logits.

    Args:
        tensors: The tensors of the call; see penalized.
        i: Index of the row.
        x: The row's logits in the working dtype.
        dtype: Precision; see cases.Expected.
    """
    request = int(tensors["rows"][i])
    begin = int(tensors["prompts"][request])
    end = int(tensors["ends"][request])
    tokens = tensors["tokens"][request]
    counts = torch.zeros(len(x), dtype=x.dtype)
    counts.index_add_(0, tokens[begin:end], torch.ones(end - begin).to(x))
    drafted = int(tensors["local"][i])
    first_draft = i - drafted + 1
    for draft in tensors["drafts"][first_draft : first_draft + drafted].tolist():
        counts[draft] += 1
    is_used = counts > 0
    is_repeated = is_used.clone()
    is_repeated[tokens[:begin].long()] = True
    repetition = float(tensors["repetition"][request])
    frequency = float(tensors["frequency"][request])
    presence = float(tensors["presence"][request])
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(is_repeated, repeated, x)
    if dtype == reference.TERMS:
        x = x.abs()
        frequency = -abs(frequency)
        presence = -abs(presence)
    return x - frequency * counts - presence * is_used


def _penalize(
    logits: Tensor,
    rows: Tensor,
    states: Tensor,
    tokens: Tensor,
    prompts: Tensor,
    ends: Tensor,
    local: Tensor,
    drafts: Tensor,
    **penalties: Tensor,
) -> dict[str, Tensor]:
    module = importlib.import_module(f"{_SAMPLE}.penalties")
    count = len(states)
    vocabulary = logits.shape[1]
    place = {"dtype": torch.int32, "device": logits.device}
    # Both tensors have values of an earlier request, which the kernels must overwrite.
    prompt_mask = torch.full((count, -(-vocabulary // 32)), -1, **place)
    counts = torch.full((count, vocabulary), 7, **place)
    module.bincount(states, tokens, prompts, ends, prompt_mask, counts, int(ends.max()))
    module.apply_penalties(
        logits,
        rows,
        drafts,
        local,
        penalties["repetition"],
        penalties["frequency"],
        penalties["presence"],
        prompt_mask,
        counts,
    )
    return {"logits": logits}


def scaled(randn: Randn, *, vocabulary=9000) -> tuple[VllmCall, Expected]:
    """Build a call of apply_temperature, then apply_min_p.

    Requests are not in the order of their states. min-p's threshold lies in the middle between two
    logits.
    """
    rows = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    # Number of tokens that min-p keeps in the first three rows; 0 is all. The last row has the
    # state of the first one, and thus the same min-p.
    kept_counts = (40, 0, 3)
    logits = randn(len(rows), vocabulary) * 3
    temperature = torch.tensor([0.0, 1.0, 0.6])
    # A temperature of 0 leaves the logits as they are.
    divisor = torch.where(temperature == 0, 1.0, temperature)[rows.long()].double()[:, None]
    scaled_logits = logits.double() / divisor
    order = scaled_logits.sort(descending=True).values
    min_p = torch.zeros(3)
    # The logits of one row determine the min-p of a state. The dict maps each state to this row.
    for state, row in {2: 0, 0: 1, 1: 2}.items():
        count = kept_counts[row]
        if count:
            middle = (order[row, count - 1] + order[row, count]) / 2
            min_p[state] = float((middle - order[row, 0]).exp())
    threshold = order[:, :1] + min_p[rows.long()].double().log()[:, None]

    def expected(dtype: Precision) -> dict[str, Tensor]:
        results = logits.to(reference.working_dtype(dtype)) / divisor
        results = reference.store(results, dtype)
        return describe_kept(results.masked_fill(scaled_logits < threshold, float("-inf")))

    tensors = {"logits": logits, "rows": rows, "temperature": temperature, "min_p": min_p}
    return VllmCall(_scale, tensors), expected


def _scale(logits: Tensor, rows: Tensor, temperature: Tensor, min_p: Tensor) -> dict[str, Tensor]:
    importlib.import_module(f"{_SAMPLE}.gumbel").apply_temperature(logits, rows, temperature)
    importlib.import_module(f"{_SAMPLE}.min_p").apply_min_p(logits, rows, min_p)
    return describe_kept(logits)


def _one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    """Encode tokens one-hot, with zeros for numbers that are not tokens.

    If a kernel was only compiled, its output contains such numbers.
    """
    return (tokens[:, None] == torch.arange(vocabulary, device=tokens.device)).double()


def find_outliers(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return for each token of the vocabulary 1 if its count is off by more than SIGMAS, else 0.

    Args:
        tokens: Tokens drawn from one distribution.
        logits: The logits of the distribution, (vocabulary,).
    """
    shares = logits.double().softmax(-1)
    counts = _one_hot(tokens.flatten(), len(shares)).sum(0)
    return _is_outlier(counts, len(tokens), shares)


def _is_outlier(counts: Tensor, trials: Tensor | int, probabilities: Tensor | float) -> Tensor:
    """Return 1 for each count of a binomial distribution that is off by SIGMAS, else 0."""
    means = trials * torch.as_tensor(probabilities, dtype=torch.float64, device=counts.device)
    sigma = (means * (1 - probabilities)).sqrt() + 0.5
    return ((counts - means).abs() > SIGMAS * sigma).double()


def drawn(
    randn: Randn,
    *,
    draws=200,
    greedy=6,
    vocabulary=1030,
) -> tuple[VllmCall, Expected]:
    """Build a call of gumbel_sample.

    In some rows, the kernel draws a token at random, from the row's seed and position. Other rows
    are greedy. Only a few tokens are likely; they are in both blocks of the vocabulary. The kernel
    applies the temperature.

    Args:
        randn: Draws the numbers.
        draws: Number of rows in which a token is drawn.
        greedy: Number of greedy rows.
        vocabulary: Size of the vocabulary.
    """
    logits = torch.full((vocabulary,), -40.0)
    likely = torch.tensor([0, 5, 700, 1023, 1024, 1029])
    logits[likely] = randn(len(likely)) / 2
    best = randn(greedy, vocabulary)
    seeds = torch.arange(draws, dtype=torch.int64) // 2 * _SEED_FACTOR % _SEEDS
    tensors = {"logits": logits, "greedy": best, "seeds": seeds}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        zeros = torch.zeros(vocabulary).double()
        return {
            "greedy": _one_hot(best.argmax(-1), vocabulary),
            "beyond": zeros,
            "alike": zeros[:1],
        }

    return VllmCall(_draw, tensors, {"temperature": 0.5}), expected


def _draw(
    logits: Tensor,
    greedy: Tensor,
    seeds: Tensor,
    *,
    temperature: float,
) -> dict[str, Tensor]:
    module = importlib.import_module(f"{_SAMPLE}.gumbel")
    device = greedy.device
    count, vocabulary = greedy.shape
    draws = len(seeds)
    temperatures = torch.tensor([temperature] * draws + [0.0] * count, device=device)
    rows = torch.arange(draws + count, dtype=torch.int32, device=device)
    # Each seed is used at two positions.
    positions = rows.long() % 2 + 7
    sampled = module.gumbel_sample(
        torch.cat([logits.expand(draws, -1), greedy]),
        rows,
        temperatures,
        torch.cat([seeds, seeds[:count]]),
        positions,
        True,
        False,
    )
    pairs = sampled[: draws // 2 * 2].view(-1, 2)
    return {
        "greedy": _one_hot(sampled[draws:], vocabulary),
        "beyond": find_outliers(sampled[:draws], logits / temperature),
        "alike": (pairs[:, 0] == pairs[:, 1]).all().double()[None],
    }


def rejection_sampling(randn: Randn, *, requests=200, vocabulary=6) -> tuple[VllmCall, Expected]:
    """Build a call of rejection_sample, with two drafted tokens for each request.

    Three requests are greedy. Of their drafted tokens, the model would choose none, one and both.
    In three other requests, the draft and the model agree, so both tokens are accepted. In the
    remaining requests, the model and the draft give different probabilities to two tokens, and the
    draft proposes the token that it overrates. The kernel accepts this token with a probability
    that is the model's divided by the draft's, and replaces a rejected token by the other one.

    Args:
        randn: Draws the numbers.
        requests: Number of the remaining requests.
        vocabulary: Size of the vocabulary.
    """
    greedy = randn(3, 3, vocabulary)
    same = randn(3, 3, vocabulary)
    best = greedy.argmax(-1)
    agreed = same.argmax(-1)[:, :2]
    # How many drafted tokens the model would choose, for each greedy request.
    matches = torch.arange(3)[:, None]
    is_match = torch.arange(2) < matches
    drafts = torch.where(is_match, best[:, :2], (best[:, :2] + 1) % vocabulary)
    tensors = {"greedy": greedy, "same": same, "drafts": torch.cat([drafts, agreed])}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        tokens = torch.where(torch.arange(3) <= matches, best, -1)
        zero = torch.zeros(1, dtype=torch.float64)
        return {
            "greedy": tokens.double(),
            "agreed": agreed.double(),
            "wrong": zero,
            "accepted": zero,
            "drawn": zero,
        }

    return VllmCall(_accept, tensors, {"requests": requests}), expected


def _accept(greedy: Tensor, same: Tensor, drafts: Tensor, *, requests: int) -> dict[str, Tensor]:
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    device = greedy.device
    vocabulary = greedy.shape[-1]
    count = 6 + requests
    tokens = torch.tensor([_OVERRATED, _UNDERRATED])
    target_row = torch.full((vocabulary,), -60.0)
    target_row[tokens] = torch.tensor(_TARGET_SHARES).log()
    draft_row = torch.full((vocabulary,), -60.0)
    draft_row[tokens] = torch.tensor(_DRAFT_SHARES).log()
    target = torch.cat([greedy, same, target_row.to(device).expand(requests, 3, -1)])
    draft = torch.cat([greedy[:, :2], same[:, :2], draft_row.to(device).expand(requests, 2, -1)])
    proposed = torch.full((requests, 2), _OVERRATED, dtype=torch.int64, device=device)
    # The first of a request's three tokens is the last token of the previous step.
    previous = torch.nn.functional.pad(torch.cat([drafts, proposed]), (1, 0)).flatten()
    states = torch.arange(count, dtype=torch.int32, device=device)
    sampled, lengths = module.rejection_sample(
        target.view(-1, vocabulary),
        draft.contiguous(),
        previous,
        torch.arange(count + 1, dtype=torch.int32, device=device) * 3,
        torch.arange(3, device=device).repeat(count) + 11,
        states,
        states.repeat_interleave(3),
        torch.arange(3, dtype=torch.int32, device=device).repeat(count),
        torch.tensor([0.0] * 3 + [1.0] * (count - 3), device=device),
        torch.arange(count, dtype=torch.int64, device=device) * _SEED_FACTOR % _SEEDS,
        2,
    )
    is_token = torch.arange(3, device=device) < lengths[:, None]
    sampled = torch.where(is_token, sampled, -1)
    return {
        "greedy": sampled[:3].double(),
        "agreed": sampled[3:6, :2].double(),
        **judge_rejections(sampled[6:], lengths[6:]),
    }


def judge_rejections(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Judge the requests whose draft proposes the overrated token twice.

    Args:
        tokens: (requests, 3), -1 beyond the length.
        lengths: Number of tokens of each request.

    Returns:
        `wrong`, the number of requests with an impossible token. `accepted`, 1 if the number of
        accepted tokens is off by SIGMAS, else 0. `drawn`, 1 if the number of overrated third tokens
        is off by SIGMAS, else 0.
    """
    last = tokens.gather(1, lengths.long()[:, None] - 1)[:, 0]
    accepted = lengths - 1
    is_rejection = lengths < 3
    is_overrated = last == _OVERRATED
    is_underrated = last == _UNDERRATED
    is_wrong = (tokens[:, :2] == _OVERRATED).sum(1) < accepted
    is_wrong |= torch.where(is_rejection, ~is_underrated, ~is_overrated & ~is_underrated)
    # The second token is judged only if the first one was accepted.
    decisions = len(lengths) + (lengths > 1).sum()
    ratio = _TARGET_SHARES[0] / _DRAFT_SHARES[0]
    complete = (~is_rejection).sum()
    draws = (is_overrated & ~is_rejection).sum()
    return {
        "wrong": is_wrong.double().sum()[None],
        "accepted": _is_outlier(accepted.sum(), decisions, ratio)[None],
        "drawn": _is_outlier(draws, complete, _TARGET_SHARES[0])[None],
    }


def token_logprobs(
    randn: Randn,
    *,
    vocabulary=9000,
    count=20,
    low=0.0,
) -> tuple[VllmCall, Expected]:
    """Build a call of compute_token_logprobs with padded rows.

    Args:
        randn: Draws the numbers.
        vocabulary: Size of the vocabulary.
        count: Number of tokens whose log probabilities are computed in each row.
        low: Number that is added to all logits.
    """
    logits = randn(3, vocabulary) * 3 + low
    tokens = (torch.arange(3 * count) * 157 % vocabulary).view(3, count)
    tokens[:, 0] = vocabulary - 1

    def expected(dtype: Precision) -> dict[str, Tensor]:
        x = logits.to(reference.working_dtype(dtype))
        lse = x.logsumexp(-1, keepdim=True)
        logprobs = x.abs() + lse.abs() if dtype == reference.TERMS else x - lse
        return {"logprobs": reference.store(logprobs.gather(1, tokens), dtype)}

    return VllmCall(_score, {"logits": logits, "tokens": tokens}), expected


def _score(logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    rows = torch.nn.functional.pad(logits, (0, 8), value=_WINNING)
    rows = rows[:, : logits.shape[1]]
    module = importlib.import_module(f"{_SAMPLE}.logprob")
    return {"logprobs": module.compute_token_logprobs(rows, tokens)}


_TOP = "top-k or top-p that keeps too many or too few tokens: models ramble or repeat themselves"
_PENALTY = "the penalty of another request, or a penalty for tokens of another request"
_HEAT = "another request's temperature, or a min-p threshold from logits before the temperature"
_SCORE = "log probabilities that are those of another row, or include the padding of the last block"
_DRAW = "noise that is the same at each position, or favours some tokens"
_ACCEPT = "speculation that changes the distribution of a model's tokens"
_FLOAT32: dict = {"dtype": torch.float32}
_FULL: dict = _FLOAT32 | {"size": Size.FULL}
_three_rows = partial(truncated, keys=(50, 0, 40), nuclei=(0, 20, 10), vocabulary=3000)
COMPUTED = {
    "top-k-top-p": Case(
        partial(truncated, keys=(1, 50, 3000, 0, 20), nuclei=(0, 20, 0, 0, 1)),
        _TOP,
        **_FLOAT32,
    ),
    "top-k-top-p-low": Case(
        partial(_three_rows, low=-1000.0), reference.LOW_SCORES_FAULT, **_FLOAT32
    ),
    "top-p": Case(
        partial(truncated, keys=(0, 0), nuclei=(30, 400), vocabulary=15000),
        _TOP,
        **_FULL,
    ),
    "top-k-top-p-masked": Case(
        partial(_three_rows, masked=True),
        "forbidden tokens included, or padded rows read with the wrong stride",
        **_FLOAT32,
    ),
    "top-k-ties": Case(
        partial(truncated, keys=(50, 5), nuclei=(0, 0), vocabulary=3000, ties=6),
        "tokens with equal logits that are all kept, or all left out",
        **_FLOAT32,
    ),
    # The number of rows exceeds half the number of the GPU's workgroup processors, and the
    # vocabulary is small, so the kernel does not split a row into parts. A row has several blocks.
    "top-p-alone": Case(
        partial(truncated, keys=(0,) * 12, nuclei=(30, 5, 12) * 4, gap=0.5),
        _TOP,
        **_FLOAT32,
    ),
    # There are more rows than gfx1151 has workgroup processors.
    "top-k-batch": Case(
        partial(truncated, keys=(5,) * 45, nuclei=(0,) * 45, vocabulary=300),
        _TOP,
        **_FLOAT32,
    ),
    "logprobs-many": Case(partial(token_logprobs, vocabulary=3000, count=1100), _SCORE, **_FLOAT32),
    "logprobs": Case(token_logprobs, _SCORE, **_FLOAT32),
    "logprobs-low": Case(partial(token_logprobs, low=-1000.0, count=1), _SCORE, **_FLOAT32),
    # The prompt has more than one block of 1,024 tokens.
    "penalties": Case(partial(penalized, prompt=1100), _PENALTY, **_FLOAT32),
    "temperature-min-p": Case(scaled, _HEAT, **_FLOAT32),
    "gumbel": Case(drawn, _DRAW, **_FULL),
    "rejection": Case(rejection_sampling, _ACCEPT, **_FULL),
}
