# SPDX-License-Identifier: BSD-3-Clause
"""Package test: run a tiny random Gated DeltaNet in Triton's interpreter, and compare with float64.

The test compares the loss, the gradient of every weight, the logits of a complete sequence, and
those of tokens that are given one by one, with a cache. The reference below computes token by
token. No GPU is needed. Set TRITON_INTERPRET=1.
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
# Hide warnings: exp2 of a masked number overflows, and fla warns about the fused loss.
warnings.simplefilter("ignore")

from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM  # noqa: E402 (after the stand-in)

NUM_HEADS = 2
HEAD_DIM = 16
HIDDEN_SIZE = 32
VOCAB_SIZE = 48
LENGTH = 70  # tokens: two chunks, of which the second is not full
# The largest allowed error, relative to the root mean square of the reference. With four seeds, the
# errors were at most 8e-5.
BOUND = 1e-3
# Parts that are left out of the reference in turn, to show that the bound would detect each fault.
FAULTS = ("decay", "beta", "gate", "convolution", "norm")
ATTENTION = "model.layers.0.attn"
MLP = "model.layers.0.mlp"


def make_model() -> GatedDeltaNetForCausalLM:
    """Return a model of one layer, with convolutions, gates and fused norms, in float32."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        hidden_size=HIDDEN_SIZE,
        head_dim=HEAD_DIM,
        num_heads=NUM_HEADS,
        expand_v=1.0,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        intermediate_size=HIDDEN_SIZE,
        initializer_range=0.3,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
    )
    model = GatedDeltaNetForCausalLM(config)
    with torch.no_grad():  # weights of 1 would hide that the weight of a norm is not used
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
    return model.eval()


class Reference:
    """The model for one sequence, as the model's paper and configuration define it.

    Attributes:
        weights: The weights by name, in float64.
        fault: The part of FAULTS that is left out; empty for a correct reference.
    """

    def __init__(self, weights: dict[str, Tensor], fault: str = "") -> None:
        self.weights = weights
        self.fault = fault

    def norm(self, x: Tensor, name: str, eps: float = 1e-6) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return self.weights[f"{name}.weight"] * x / (mean_square + eps).sqrt()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return q, k or v of each head, after projection, convolution and activation."""
        projected = self.linear(x, f"{ATTENTION}.{name}_proj").T[None]
        if self.fault != "convolution":
            kernel = self.weights[f"{ATTENTION}.{name}_conv1d.weight"]
            padded = pad(projected, (kernel.shape[-1] - 1, 0))
            projected = conv1d(padded, kernel, groups=len(kernel))
        return silu(projected)[0].T.unflatten(-1, (NUM_HEADS, HEAD_DIM))

    def attention(self, x: Tensor) -> Tensor:
        """Return the gated delta rule's output, (tokens, heads, head_dim)."""
        q = self.project(x, "q")
        k = self.project(x, "k")
        v = self.project(x, "v")
        if self.fault != "norm":
            q = normalize(q, dim=-1)
            k = normalize(k, dim=-1)
        beta = self.linear(x, f"{ATTENTION}.b_proj").sigmoid()
        bias = self.weights[f"{ATTENTION}.dt_bias"]
        rate = softplus(self.linear(x, f"{ATTENTION}.a_proj") + bias)
        decay = (-self.weights[f"{ATTENTION}.A_log"].exp() * rate).exp()
        if self.fault == "beta":
            beta = torch.ones_like(beta)
        if self.fault == "decay":
            decay = torch.ones_like(decay)
        state = torch.zeros(NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype=x.dtype)
        outputs = []
        for t in range(len(x)):
            key = k[t][..., None]
            state = state * decay[t][:, None, None]
            recalled = (state * key).sum(-2)
            update = beta[t][:, None] * (v[t] - recalled)
            state = state + key * update[:, None]
            query = q[t][..., None]
            outputs.append((state * query).sum(-2) * HEAD_DIM**-0.5)
        return torch.stack(outputs)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        hidden = self.weights["model.embeddings.weight"][tokens]
        x = self.norm(hidden, "model.layers.0.attn_norm")
        output = self.norm(self.attention(x), f"{ATTENTION}.o_norm")
        if self.fault != "gate":
            gate = self.linear(x, f"{ATTENTION}.g_proj")
            output = output * silu(gate.unflatten(-1, (NUM_HEADS, HEAD_DIM)))
        hidden = hidden + self.linear(output.flatten(-2), f"{ATTENTION}.o_proj")
        x = self.norm(hidden, "model.layers.0.mlp_norm")
        x = silu(self.linear(x, f"{MLP}.gate_proj")) * self.linear(x, f"{MLP}.up_proj")
        hidden = hidden + self.linear(x, f"{MLP}.down_proj")
        return self.linear(self.norm(hidden, "model.norm"), "lm_head")


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest error, divided by the root mean square of the expected values."""
    largest = (result.double() - expected).abs().max()
    return (largest / expected.square().mean().sqrt()).item()


def generate(model: GatedDeltaNetForCausalLM, tokens: Tensor) -> Tensor:
    """Give tokens to the model one by one, with its cache, and return their logits."""
    cache = None
    logits = []
    for token in tokens:
        output = model(input_ids=token[None, None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def main() -> None:
    """Compare the model with the reference. End the program at the first wrong result."""
    model = make_model()
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,))
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = weight.detach().double().requires_grad_()
    expected = Reference(weights).logits(tokens)
    expected_loss = cross_entropy(expected[:-1], tokens[1:])
    expected_loss.backward()
    output = model.train()(input_ids=tokens[None], labels=tokens[None])
    output.loss.backward()
    errors = {"loss": relative_error(output.loss.detach(), expected_loss.detach())}
    for name, weight in model.named_parameters():
        errors[name] = relative_error(weight.grad, weights[name].grad)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0]
        errors["logits"] = relative_error(logits, expected)
        fault_errors = {}
        for fault in FAULTS:
            wrong = Reference(weights, fault).logits(tokens)
            fault_errors[fault] = relative_error(logits, wrong)
        errors["logits, one by one"] = relative_error(generate(model, tokens[:8]), expected[:8])
    for name, error in errors.items():
        require(error <= BOUND, f"{name}: off by {error:.1e}, at most {BOUND:.0e}")
    for name, error in fault_errors.items():
        require(error > BOUND, f"the check does not detect that {name} is left out")
    print(
        f"{len(errors)} results are correct, with errors of at most {max(errors.values()):.1e}; "
        f"faults would give errors of at least {min(fault_errors.values()):.1e}"
    )


if __name__ == "__main__":
    main()
