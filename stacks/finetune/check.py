# SPDX-License-Identifier: BSD-3-Clause
"""Train a LoRA of a tiny Llama on this machine's GPU, and compare it with float64 on the CPU.

trl's trainer takes twenty steps with transformers' model, peft's adapters and torch's AdamW. The
training is repeated with weights that bitsandbytes keeps in four bits. On a GPU, it is also
repeated with flash-attn, and with Liger's kernels. The loss and the gradient's norm of
each step must match a reference: the same model, adapters and optimiser, written out below in
float64. The weights are random; nothing is downloaded.

Exit status: 0 if all results are correct, 1 if one is wrong, 3 if torch found no GPU and the
results of the CPU are correct.
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

# The optimiser (AdamW).
STEPS = 20
LEARNING_RATE = 5e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
MAX_NORM = 0.5
# The adapters.
RANK = 8
ALPHA = 16
# The model.
VOCAB_SIZE = 96
HIDDEN_SIZE = 128
HEAD_DIM = 64
NUM_HEADS = 2
NUM_KV_HEADS = 1
NUM_LAYERS = 2
INTERMEDIATE_SIZE = 192
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-5
#: The values of QLoRA's data type NF4. A weight is one of them, times the largest absolute value in
#: its block of 64 weights.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
#: The largest relative errors, in any step, of a correct loss and a correct gradient's norm. On the
#: CPU, correct runs had errors of 3e-7 and 6e-7 in float32, and 3e-3 and 7e-3 in bfloat16. With
#: transformers 4, which rounds a loss to four places, the error in float32 was 4e-5.
BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (1e-2, 3e-2)}
FLASH = "flash_attention_2"
# A training run: the loss and the gradient's norm of each step.
Curve = list[tuple[float, float]]
Weights = dict[str, Tensor]


def make_config(attention: str) -> LlamaConfig:
    """Return the configuration of the model, with one of transformers' kinds of attention."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rope_theta=ROPE_THETA,
        rms_norm_eps=RMS_NORM_EPS,
        attn_implementation=attention,
    )


def draw_numbers() -> tuple[Weights, Weights, Tensor]:
    """Draw the model's weights and the adapters, in float64, and the tokens to train on.

    The numbers are rounded to bfloat16, so that they are the same in every dtype.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, spread: float) -> Tensor:
        return (spread * torch.randn(shape, generator=generator)).bfloat16().double()

    q_size = NUM_HEADS * HEAD_DIM
    kv_size = NUM_KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q_size, HIDDEN_SIZE),
        "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.v_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.o_proj": (HIDDEN_SIZE, q_size),
        "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    weights = {}
    adapters = {}
    for index in range(NUM_LAYERS):
        layer = f"model.layers.{index}"
        for name, (rows, columns) in shapes.items():
            spread = columns**-0.5
            weights[f"{layer}.{name}.weight"] = normal(rows, columns, spread=spread)
            adapters[f"{layer}.{name}.lora_A"] = normal(RANK, columns, spread=spread)
            adapters[f"{layer}.{name}.lora_B"] = normal(rows, RANK, spread=0.01)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = 1 + normal(HIDDEN_SIZE, spread=0.125)
    weights["model.embed_tokens.weight"] = normal(VOCAB_SIZE, HIDDEN_SIZE, spread=1)
    weights["model.norm.weight"] = 1 + normal(HIDDEN_SIZE, spread=0.125)
    weights["lm_head.weight"] = normal(VOCAB_SIZE, HIDDEN_SIZE, spread=HIDDEN_SIZE**-0.5)
    weights = {name: value.bfloat16().double() for name, value in weights.items()}
    return weights, adapters, torch.randint(VOCAB_SIZE, (8, 48), generator=generator)


def train_reference(weights: Weights, adapters: Weights, tokens: Tensor) -> Curve:
    """Return the loss and the gradient's norm of each step, computed with torch in float64."""
    adapters = {name: value.clone().requires_grad_() for name, value in adapters.items()}
    first = {name: torch.zeros_like(value) for name, value in adapters.items()}
    second = {name: torch.zeros_like(value) for name, value in adapters.items()}
    curve = []
    for step in range(1, STEPS + 1):
        loss = compute_loss(weights, adapters, tokens)
        gradients = torch.autograd.grad(loss, [*adapters.values()])
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        curve.append((loss.item(), norm))
        with torch.no_grad():
            for (name, value), gradient in zip(adapters.items(), gradients, strict=True):
                gradient = gradient * min(1, MAX_NORM / (norm + 1e-6))
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient.square()
                mean = first[name] / (1 - BETAS[0] ** step)
                variance = second[name] / (1 - BETAS[1] ** step)
                value -= LEARNING_RATE * (WEIGHT_DECAY * value + mean / (variance.sqrt() + 1e-8))
    return curve


def compute_loss(weights: Weights, adapters: Weights, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens after the first, given the tokens before each."""

    def linear(x: Tensor, name: str) -> Tensor:
        a = adapters[f"{name}.lora_A"]
        b = adapters[f"{name}.lora_B"]
        return x @ weights[f"{name}.weight"].T + ALPHA / RANK * (x @ a.T @ b.T)

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return weights[f"{name}.weight"] * x / (mean + RMS_NORM_EPS).sqrt()

    length = tokens.shape[1]
    angles = torch.outer(
        torch.arange(length).double(),
        ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM),
    )

    def split_heads(x: Tensor, rotate: bool) -> Tensor:
        x = x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        if rotate:
            left, right = x.chunk(2, -1)
            x = torch.cat(
                (
                    left * angles.cos() - right * angles.sin(),
                    right * angles.cos() + left * angles.sin(),
                ),
                -1,
            )
        return x.repeat_interleave(NUM_HEADS // x.shape[1], 1)

    mask = torch.ones(length, length).triu(1).bool()  # True for later keys
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(NUM_LAYERS):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        y = norm(x, f"{layer}.input_layernorm")
        query = split_heads(linear(y, f"{attention}.q_proj"), rotate=True)
        key = split_heads(linear(y, f"{attention}.k_proj"), rotate=True)
        value = split_heads(linear(y, f"{attention}.v_proj"), rotate=False)
        scores = (query @ key.mT / HEAD_DIM**0.5).masked_fill(mask, -math.inf)
        output = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + linear(output, f"{attention}.o_proj")
        mlp = f"{layer}.mlp"
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(y, f"{mlp}.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(y, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    logits = norm(x, "model.norm") @ weights["lm_head.weight"].T
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def round_to_nf4(weights: Weights) -> Weights:
    """Return the model's weights, with the matrices of its layers rounded to NF4."""
    table = torch.tensor(NF4, dtype=torch.float64)

    def round_matrix(weight: Tensor) -> Tensor:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = (blocks / largest)[..., None].sub(table).abs().argmin(-1)
        return (table[codes] * largest).view_as(weight)

    rounded = {}
    for name, weight in weights.items():
        rounded[name] = round_matrix(weight) if name.endswith("_proj.weight") else weight
    return rounded


def load_in_four_bits(model: LlamaForCausalLM, device: str) -> LlamaForCausalLM:
    """Save the model, and let bitsandbytes load it again with its layers' matrices in NF4."""
    dtype = model.dtype
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=four_bits, device_map={"": device}
        )


def add_adapters(model: LlamaForCausalLM, adapters: Weights) -> PeftModel:
    """Add peft's adapters with given weights to a model."""
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    remaining = {name: value for name, value in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, value in adapters.items():
            remaining.pop(f"base_model.model.{name}.default.weight").copy_(value)
    if remaining:
        raise RuntimeError(f"peft has adapters for other layers: {', '.join(remaining)}")
    return model


def make_trainer(
    model: PeftModel,
    tokens: Tensor,
    device: str,
    liger: bool,
    folder: str,
) -> SFTTrainer:
    """Make trl's trainer. Each step uses all of the tokens."""
    count, length = tokens.shape
    tokenizer = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    settings = SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=count,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM,
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
        # The mask excludes the first token, because no token precedes it. Without the mask,
        # transformers 4 would count the first token for the mean.
        train_dataset=Dataset.from_dict(
            {"input_ids": tokens.tolist(), "completion_mask": [[0] + [1] * (length - 1)] * count}
        ),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
        ),
    )


def train(model: PeftModel, tokens: Tensor, device: str, liger: bool) -> Curve:
    """Train with trl. Return the loss and the gradient's norm that it logs for each step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, tokens, device, liger, folder)
        trainer.pop_callback(PrinterCallback)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in steps]


def measure_errors(curve: Curve, reference: Curve) -> tuple[float, float]:
    """Return the largest relative errors of the loss and of the gradient's norm.

    They are infinite if the numbers of steps differ, or if a value is not a number.
    """
    if len(curve) != len(reference):
        return math.inf, math.inf
    ratios = torch.tensor(curve, dtype=torch.float64) / torch.tensor(reference, dtype=torch.float64)
    loss, norm = (ratios - 1).abs().nan_to_num(math.inf).amax(0).tolist()
    return loss, norm


def compare_all(device: str) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Train in each way; yield a description, the errors of loss and norm, and their bounds."""
    weights, adapters, tokens = draw_numbers()
    reference = train_reference(weights, adapters, tokens)
    # Each run: the kind of attention, whether to use Liger's kernels, whether weights are NF4, and
    # the reference.
    runs = [("sdpa", False, False, reference)]
    if is_bitsandbytes_available():
        nf4_reference = train_reference(round_to_nf4(weights), adapters, tokens)
        runs.append(("sdpa", False, True, nf4_reference))
    if device == "cuda":
        # Liger changes transformers' classes for good, so runs without Liger come first.
        for liger, attention in ((False, FLASH), (True, "sdpa"), (True, FLASH)):
            runs.append((attention, liger, False, reference))
    for attention, liger, four_bits, expected in runs:
        for dtype, bounds in BOUNDS.items():
            if dtype == torch.float32 and (attention == FLASH or four_bits):
                # There is nothing to compare in float32: flash-attn does not support it, and trl
                # computes in bfloat16 if the weights have four bits.
                continue
            model = LlamaForCausalLM(make_config(attention))
            model.load_state_dict(weights)
            model = model.to(dtype)
            if four_bits:
                model = load_in_four_bits(model, device)
            model = add_adapters(model, adapters)
            words = [str(dtype).removeprefix("torch."), attention]
            if liger:
                words.append("Liger")
            if four_bits:
                words.append("NF4")
            curve = train(model, tokens, device, liger)
            yield ", ".join(words), measure_errors(curve, expected), bounds


def main() -> int:
    """Print a line for each result, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    requested = parser.parse_args().device
    # Hide warnings about trl's use of transformers.
    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    device = requested
    if requested == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    has_wrong = False
    for name, (loss, norm), (loss_bound, norm_bound) in compare_all(device):
        is_correct = loss <= loss_bound and norm <= norm_bound
        has_wrong = has_wrong or not is_correct
        verdict = "correct" if is_correct else "WRONG"
        print(
            f"{verdict}  {name}: error of the loss {loss:.1e}, at most {loss_bound:.0e};"
            f" error of the gradient's norm {norm:.1e}, at most {norm_bound:.0e}"
        )
    if not is_bitsandbytes_available():
        print("SKIPPED  NF4: bitsandbytes is not installed")
    if requested == "auto" and device == "cpu":
        print("torch finds no GPU: only the CPU was checked. `pixi run doctor` prints why")
        return 1 if has_wrong else 3
    return 1 if has_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
