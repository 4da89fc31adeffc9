# SPDX-License-Identifier: BSD-3-Clause
"""A LoRA of a language model: `pixi run example MODEL [DATA] -o FOLDER`.

MODEL is a folder as transformers saves it. Each line of DATA is a JSON object with `prompt` and
`completion`, with `messages` (for a tokenizer with a chat template) or with `text`. Nothing is
downloaded.
"""

import argparse
import json
import math
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available, logging
from trl import SFTConfig, SFTTrainer

KEYS = ({"prompt", "completion"}, {"messages"}, {"text"})


def examples(file: Path) -> Dataset:
    """The file's objects. Raises SystemExit that names a line which is none of that kind."""
    found, wanted = [], set()
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            found.append(json.loads(line))
            wanted = wanted or next(keys for keys in KEYS if keys <= found[0].keys())
            found[-1] = {key: found[-1][key] for key in wanted}
        except (ValueError, AttributeError, TypeError, KeyError, StopIteration):
            kinds = ", or ".join(
                " and ".join(sorted(keys)) for keys in ([wanted] if wanted else KEYS)
            )
            sys.exit(f"{file}, line {number}: not a JSON object with {kinds}")
    if not found:
        sys.exit(f"{file} is empty: it needs a JSON object per line")
    return Dataset.from_list(found)


def settings(asked: argparse.Namespace, cuda: bool) -> SFTConfig:
    """bfloat16, activations computed again, and on a GPU Liger's kernels: what saves memory."""
    return SFTConfig(
        str(asked.output),
        num_train_epochs=asked.epochs,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=asked.batch,
        learning_rate=asked.rate,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_length=asked.length,
        bf16=True,
        use_liger_kernel=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        seed=asked.seed,
    )


def arguments() -> argparse.Namespace:
    """What was asked for. Raises SystemExit for what is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "data", type=Path, nargs="?", default=Path(__file__).with_name("example.jsonl")
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("adapter"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=4, help="examples for a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of an example")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--four-bit", action="store_true", help="the model's weights in NF4, by bitsandbytes"
    )
    asked = parser.parse_args()
    if not (asked.model / "config.json").is_file():
        sys.exit(f"{asked.model} holds no model: no config.json is in it")
    if not asked.data.is_file():
        sys.exit(f"{asked.data} is not a file")
    if asked.four_bit and not is_bitsandbytes_available():
        sys.exit("--four-bit needs bitsandbytes, which is not installed")
    return asked


def main() -> int:
    """Train, and save the adapter; returns the exit status."""
    asked = arguments()
    data = examples(asked.data)
    warnings.simplefilter("ignore", FutureWarning)  # between trl and transformers
    logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    model = AutoModelForCausalLM.from_pretrained(
        asked.model,
        dtype=torch.bfloat16,
        attn_implementation="flash_attention_2" if cuda else "sdpa",
        quantization_config=BitsAndBytesConfig(**nf4) if asked.four_bit else None,
        device_map={"": 0} if cuda else None,
    )
    lora = LoraConfig(
        r=asked.rank, lora_alpha=2 * asked.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(model, settings(asked, cuda), train_dataset=data, peft_config=lora)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if not all(map(math.isfinite, losses)):
        sys.exit(
            "the loss is not a number from step "
            f"{1 + [*map(math.isfinite, losses)].index(False)} on"
        )
    trainer.save_model()
    print(f"{asked.output}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
