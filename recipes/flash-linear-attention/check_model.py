# SPDX-License-Identifier: BSD-3-Clause
"""Package test: a tiny random Gated DeltaNet in Triton's interpreter, against float64.

Its loss, the gradient of every weight, and its words one by one from a cache. The reference is
written out below, token by token. It needs no GPU: run with TRITON_INTERPRET=1.
"""

import os
import warnings

import torch
from strix_validate import testing
from torch import Tensor
from torch.nn.functional import conv1d, cross_entropy, normalize, pad, silu, softplus

from checks.verdict import require

require(os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1: there may be no GPU")
testing.stand_in()
testing.complete_interpreter()
warnings.simplefilter("ignore")  # exp2 of a masked number overflows; fla warns of the loss below

from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM  # noqa: E402

HEADS, LANES, HIDDEN, WORDS, LENGTH = 2, 16, 32, 48, 70  # two chunks, the second not full
#: Of the root mean square of what is correct. Four seeds came to 8e-5.
BOUND = 1e-3
#: What the reference leaves out to show that the bound would find it.
FAULTS = ("decay", "share", "gate", "convolution", "norm")


def model() -> GatedDeltaNetForCausalLM:
    """One layer, with convolutions, gates and fused norms, in float32."""
    torch.manual_seed(0)
    made = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=HIDDEN, head_dim=LANES, num_heads=HEADS, expand_v=1.0, vocab_size=WORDS,
            num_hidden_layers=1, intermediate_size=HIDDEN, initializer_range=0.3,
            fuse_cross_entropy=False, fuse_linear_cross_entropy=True,
        )
    )  # fmt: skip
    with torch.no_grad():  # ones would hide a norm's weight that is left out
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
    return made.eval()


def logits_of(weights: dict[str, Tensor], words: Tensor, without: str = "") -> Tensor:
    """The model as its paper and its configuration have it, for one sequence; without: a fault."""

    def norm(x: Tensor, name: str, eps: float = 1e-6) -> Tensor:
        return weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def mixed(x: Tensor, name: str) -> Tensor:
        kernel = weights[f"{layer}.{name}_conv1d.weight"]
        wide = linear(x, f"{layer}.{name}_proj").T[None]
        if without != "convolution":
            wide = conv1d(pad(wide, (kernel.shape[-1] - 1, 0)), kernel, groups=len(kernel))
        return silu(wide)[0].T.unflatten(-1, (HEADS, LANES))

    x, layer = weights["model.embeddings.weight"][words], "model.layers.0.attn"
    y = norm(x, "model.layers.0.attn_norm")
    q, k = (mixed(y, name) for name in "qk")
    if without != "norm":
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    v, share = mixed(y, "v"), linear(y, f"{layer}.b_proj").sigmoid()
    rate = softplus(linear(y, f"{layer}.a_proj") + weights[f"{layer}.dt_bias"])
    keep = (-weights[f"{layer}.A_log"].exp() * rate).exp()
    state, rows = torch.zeros(HEADS, LANES, LANES, dtype=x.dtype), []
    for t in range(len(words)):
        state = state * (1 if without == "decay" else keep[t][:, None, None])
        new = (1 if without == "share" else share[t][:, None]) * (
            v[t] - (state * k[t][..., None]).sum(-2)
        )
        state = state + k[t][..., None] * new[:, None]
        rows.append((state * q[t][..., None]).sum(-2) * LANES**-0.5)
    gate = linear(y, f"{layer}.g_proj").unflatten(-1, (HEADS, LANES))
    seen = norm(torch.stack(rows), f"{layer}.o_norm") * (1 if without == "gate" else silu(gate))
    x = x + linear(seen.flatten(-2), f"{layer}.o_proj")
    y, mlp = norm(x, "model.layers.0.mlp_norm"), "model.layers.0.mlp"
    y = silu(linear(y, f"{mlp}.gate_proj")) * linear(y, f"{mlp}.up_proj")
    x = x + linear(y, f"{mlp}.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


def off(got: Tensor, want: Tensor) -> float:
    """The largest error, as part of the root mean square of what is correct."""
    return ((got.double() - want).abs().max() / want.square().mean().sqrt()).item()


def main() -> None:
    """Compare; the first wrong number ends it."""
    made, words = model(), torch.randint(WORDS, (LENGTH,))
    exact = {
        name: weight.detach().double().requires_grad_() for name, weight in made.named_parameters()
    }
    want = logits_of(exact, words)
    loss = cross_entropy(want[:-1], words[1:])
    loss.backward()
    found = made.train()(input_ids=words[None], labels=words[None])
    found.loss.backward()
    errors = {"loss": off(found.loss.detach(), loss.detach())}
    errors |= {name: off(weight.grad, exact[name].grad) for name, weight in made.named_parameters()}
    made.eval()
    with torch.no_grad():
        got = made(input_ids=words[None]).logits[0]
        errors["words"] = off(got, want)
        missed = {name: off(got, logits_of(exact, words, without=name)) for name in FAULTS}
        past, last = None, []
        for word in words[:8]:
            answer = made(input_ids=word[None, None], past_key_values=past, use_cache=True)
            past = answer.past_key_values
            last.append(answer.logits[0, -1])
        errors["words one by one"] = off(torch.stack(last), want[:8])
    for name, error in errors.items():
        require(error <= BOUND, f"{name}: off by {error:.1e}, at most {BOUND:.0e}")
    for name, error in missed.items():
        require(error > BOUND, f"{name}: left out of the reference, and the model agrees")
    print(
        f"{len(errors)} results are correct; the furthest off by {max(errors.values()):.1e}, "
        f"with a fault by {min(missed.values()):.1e} and more"
    )


if __name__ == "__main__":
    main()
