# SPDX-License-Identifier: BSD-3-Clause
"""A LoRA of a tiny random Llama on this machine's GPU, against float64 on the CPU.

trl's trainer takes twenty steps with transformers' model, peft's adapters, torch's AdamW and each
attention that is here, with Liger's kernels and without, and with weights that bitsandbytes keeps
in four bits. The loss and the gradient's norm of each step must be those of the same model,
adapters and optimiser as they are written out below. No weights are downloaded. Exit status: 0 all
correct, 1 a wrong number, 3 nothing but the CPU was there.
"""

import argparse
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from datasets.utils import logging as datasets_logging
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from transformers.utils import is_bitsandbytes_available, logging
from trl import SFTConfig, SFTTrainer

STEPS, RATE, BETAS, DECAY, NORM = 20, 5e-3, (0.9, 0.95), 0.01, 0.5
RANK, ALPHA = 8, 16
VOCABULARY, HIDDEN, HEAD, HEADS, KEYS, LAYERS, INNER = 96, 128, 64, 2, 1, 2, 192
THETA, EPSILON = 10000.0, 1e-5
#: QLoRA's numbers, of which each weight is one, times the largest of its block of 64.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
#: By how much of the reference a loss and a norm may be off, at the step that is the furthest off.
#: Correct runs on the CPU came to 3e-7 and 6e-7 in float32, 3e-3 and 7e-3 in bfloat16;
#: transformers 4 rounds a loss to four places, which made 4e-5 of it.
BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (1e-2, 3e-2)}
FLASH = "flash_attention_2"
Curve = list[tuple[float, float]]
Weights = dict[str, Tensor]


def config(attention: str) -> LlamaConfig:
    """Llama's, two layers, two heads that share one of keys."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=HEAD,
        rope_theta=THETA,
        rms_norm_eps=EPSILON,
        attn_implementation=attention,
    )


def draw() -> tuple[Weights, Weights, Tensor]:
    """The model, the adapters and the tokens, in float64; all types begin with these numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, spread: float) -> Tensor:
        # rounded to 16 bits, which float32 and bfloat16 hold
        return (spread * torch.randn(shape, generator=generator)).bfloat16().double()

    width, narrow = HEADS * HEAD, KEYS * HEAD
    shapes = {"self_attn.q_proj": (width, HIDDEN), "self_attn.k_proj": (narrow, HIDDEN)}
    shapes |= {"self_attn.v_proj": (narrow, HIDDEN), "self_attn.o_proj": (HIDDEN, width)}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, INNER)}
    weights, adapters = {}, {}
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        for name, (rows, columns) in shapes.items():
            spread = columns**-0.5
            weights[f"{layer}.{name}.weight"] = normal(rows, columns, spread=spread)
            adapters[f"{layer}.{name}.lora_A"] = normal(RANK, columns, spread=spread)
            adapters[f"{layer}.{name}.lora_B"] = normal(rows, RANK, spread=0.01)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = 1 + normal(HIDDEN, spread=0.125)
    weights["model.embed_tokens.weight"] = normal(VOCABULARY, HIDDEN, spread=1)
    weights["model.norm.weight"] = 1 + normal(HIDDEN, spread=0.125)
    weights["lm_head.weight"] = normal(VOCABULARY, HIDDEN, spread=HIDDEN**-0.5)
    weights = {name: value.bfloat16().double() for name, value in weights.items()}
    return weights, adapters, torch.randint(VOCABULARY, (8, 48), generator=generator)


def reference(weights: Weights, adapters: Weights, tokens: Tensor) -> Curve:
    """Loss and gradient's norm of each step, by nothing but torch's operations in float64."""
    adapters = {name: value.clone().requires_grad_() for name, value in adapters.items()}
    first = {name: torch.zeros_like(value) for name, value in adapters.items()}
    second = {name: torch.zeros_like(value) for name, value in adapters.items()}
    curve = []
    for step in range(1, STEPS + 1):
        loss = loss_of(weights, adapters, tokens)
        found = torch.autograd.grad(loss, [*adapters.values()])
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in found))
        curve.append((loss.item(), norm))
        with torch.no_grad():
            for (name, value), gradient in zip(adapters.items(), found, strict=True):
                gradient = gradient * min(1, NORM / (norm + 1e-6))
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient.square()
                mean, spread = (
                    state[name] / (1 - beta**step)
                    for state, beta in zip((first, second), BETAS, strict=True)
                )
                value -= RATE * (DECAY * value + mean / (spread.sqrt() + 1e-8))
    return curve


def loss_of(weights: Weights, adapters: Weights, tokens: Tensor) -> Tensor:
    """The mean cross entropy of each token after the first, given those before it."""

    def linear(x: Tensor, name: str) -> Tensor:
        a, b = (adapters[f"{name}.lora_{which}"] for which in "AB")
        return x @ weights[f"{name}.weight"].T + ALPHA / RANK * (x @ a.T @ b.T)

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return weights[f"{name}.weight"] * x / (mean + EPSILON).sqrt()

    length = tokens.shape[1]
    turn = torch.outer(
        torch.arange(length).double(), THETA ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    )

    def heads(x: Tensor, rotated: bool) -> Tensor:
        x = x.unflatten(-1, (-1, HEAD)).transpose(1, 2)
        if rotated:
            left, right = x.chunk(2, -1)
            x = torch.cat(
                (
                    left * turn.cos() - right * turn.sin(),
                    right * turn.cos() + left * turn.sin(),
                ),
                -1,
            )
        return x.repeat_interleave(HEADS // x.shape[1], 1)

    later = torch.ones(length, length).triu(1).bool()
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        y, attention = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        query, key = (heads(linear(y, f"{attention}.{name}_proj"), True) for name in "qk")
        scores = (query @ key.mT / HEAD**0.5).masked_fill(later, -math.inf)
        seen = scores.softmax(-1) @ heads(linear(y, f"{attention}.v_proj"), False)
        x = x + linear(seen.transpose(1, 2).flatten(2), f"{attention}.o_proj")
        y, mlp = norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
        gate = linear(y, f"{mlp}.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(y, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    logits = norm(x, "model.norm") @ weights["lm_head.weight"].T
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def rounded(weights: Weights) -> Weights:
    """The weights that four bits leave of them: those of the layers' matrices are NF4."""
    table = torch.tensor(NF4, dtype=torch.float64)

    def nearest(weight: Tensor) -> Tensor:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = (blocks / largest)[..., None].sub(table).abs().argmin(-1)
        return (table[codes] * largest).view_as(weight)

    return {n: nearest(x) if n.endswith("_proj.weight") else x for n, x in weights.items()}


def in_four_bits(model: LlamaForCausalLM, device: str) -> LlamaForCausalLM:
    """The model as transformers reads it with bitsandbytes, in its own type otherwise."""
    dtype = model.dtype
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=four, device_map={"": device}
        )


def adapted(model: LlamaForCausalLM, adapters: Weights) -> PeftModel:
    """transformers' model with peft's adapters, with these numbers in them."""
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    own = {name: value for name, value in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, value in adapters.items():
            own.pop(f"base_model.model.{name}.default.weight").copy_(value)
    if own:
        raise RuntimeError(f"peft has adapters of other layers: {', '.join(own)}")
    return model


def trainer(model: PeftModel, tokens: Tensor, device: str, liger: bool, folder: str) -> SFTTrainer:
    """trl's, for all of the tokens in every step."""
    count, length = tokens.shape
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    settings = SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=count,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=NORM,
        completion_only_loss=True,
        bf16=model.dtype == torch.bfloat16,
        use_liger_kernel=liger,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return SFTTrainer(
        model,
        settings,
        # nothing comes before the first token; transformers 4 counts it when it takes the mean
        train_dataset=Dataset.from_dict(
            {"input_ids": tokens.tolist(), "completion_mask": [[0] + [1] * (length - 1)] * count}
        ),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<end>", pad_token="<end>"
        ),
    )


def trained(model: PeftModel, tokens: Tensor, device: str, liger: bool) -> Curve:
    """Loss and gradient's norm of each step, as the trainer logs them."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(model, tokens, device, liger, folder)
        run.pop_callback(PrinterCallback)
        run.train()
    steps = [entry for entry in run.state.log_history if "grad_norm" in entry]
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in steps]


def errors(got: Curve, want: Curve) -> tuple[float, float]:
    """The largest errors of a loss and of a norm, as parts of the reference; infinite for none."""
    if len(got) != len(want):
        return math.inf, math.inf
    parts = torch.tensor(got, dtype=torch.float64) / torch.tensor(want, dtype=torch.float64) - 1
    loss, norm = parts.abs().nan_to_num(math.inf).amax(0).tolist()
    return loss, norm


def results(device: str) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """What was computed how, the errors, and their bounds."""
    weights, adapters, tokens = draw()
    want = {False: reference(weights, adapters, tokens)}
    kinds = [("sdpa", False, False)]
    if is_bitsandbytes_available():
        want[True] = reference(rounded(weights), adapters, tokens)
        kinds += [("sdpa", False, True)]
    if device == "cuda":
        # Liger stays in transformers' classes: what goes without it comes first
        kinds += [(f, liger, False) for liger, f in ((False, FLASH), (True, "sdpa"), (True, FLASH))]
    for attention, liger, four in kinds:
        for dtype, bounds in BOUNDS.items():
            if dtype == torch.float32 and (attention == FLASH or four):
                continue  # which flash-attn does not take, and for four bits trl makes bfloat16
            model = LlamaForCausalLM(config(attention))
            model.load_state_dict(weights)
            model = model.to(dtype)
            model = adapted(in_four_bits(model, device) if four else model, adapters)
            kind = str(dtype).removeprefix("torch.")
            what = f"{kind}, {attention}{', Liger' if liger else ''}{', NF4' if four else ''}"
            yield what, errors(trained(model, tokens, device, liger), want[four]), bounds


def main() -> int:
    """Print a line for each result; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    asked = parser.parse_args().device
    warnings.simplefilter("ignore", FutureWarning)  # between trl and transformers
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    wrong = 0
    for what, found, bounds in results(device):
        correct = all(error <= bound for error, bound in zip(found, bounds, strict=True))
        wrong += not correct
        (loss, norm), (most, widest) = found, bounds
        print(
            f"{'correct' if correct else 'WRONG'}  {what}: loss off by {loss:.1e},"
            f" at most {most:.0e}; gradient by {norm:.1e}, at most {widest:.0e}"
        )
    if not is_bitsandbytes_available():
        print("SKIPPED  NF4: bitsandbytes is not installed")
    if unseen := asked == "auto" and device == "cpu":
        print("torch sees no GPU: only the CPU was checked. `pixi run doctor` says why")
    return 1 if wrong else 3 * unseen


if __name__ == "__main__":
    sys.exit(main())
