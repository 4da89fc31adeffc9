# SPDX-License-Identifier: BSD-3-Clause
"""Train a LoRA of a language model: `pixi run example MODEL [DATA] -o FOLDER`.

MODEL is a folder that transformers has saved. Each line of DATA is a JSON object with `prompt` and
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

# The sets of keys that trl can train from. All lines of a file must have the same set.
KEYS = ({"prompt", "completion"}, {"messages"}, {"text"})


def read_examples(file: Path) -> Dataset:
    """Read the objects of a JSON Lines file. Exit with a message that names a wrong line."""
    examples = []
    file_keys = set()
    # str.splitlines would also split at U+2028 and other characters that a JSON string may contain.
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if not file_keys:
                    file_keys = next(keys for keys in KEYS if keys <= entry.keys())
                examples.append({key: entry[key] for key in file_keys})
            except (ValueError, AttributeError, TypeError, KeyError, StopIteration):
                allowed = [file_keys] if file_keys else KEYS
                kinds = ", or ".join(" and ".join(sorted(keys)) for keys in allowed)
                sys.exit(f"{file}, line {number}: not a JSON object with {kinds}")
    if not examples:
        sys.exit(f"{file} is empty: it needs a JSON object per line")
    return Dataset.from_list(examples)


def make_settings(options: argparse.Namespace, has_gpu: bool) -> SFTConfig:
    """Return trl's settings, chosen to save memory.

    The computation is in bfloat16, and activations are recomputed. On a GPU, Liger's kernels are
    used.
    """
    return SFTConfig(
        str(options.output),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.batch,
        learning_rate=options.rate,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_length=options.length,
        bf16=True,
        use_liger_kernel=has_gpu,
        use_cpu=not has_gpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )


def parse_options() -> argparse.Namespace:
    """Parse the command line. Exit with a message if a file or bitsandbytes is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "data", type=Path, nargs="?", default=Path(__file__).with_name("example.jsonl")
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("adapter"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=4, help="number of examples per step")
    parser.add_argument("--length", type=int, default=2048, help="maximum tokens of an example")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--four-bit", action="store_true", help="load the weights as NF4, with bitsandbytes"
    )
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        sys.exit(f"{options.model} holds no model: no config.json is in it")
    if not options.data.is_file():
        sys.exit(f"{options.data} is not a file")
    if options.four_bit and not is_bitsandbytes_available():
        sys.exit("--four-bit needs bitsandbytes, which is not installed")
    return options


def main() -> int:
    """Train the adapter, save it, and return the exit status."""
    options = parse_options()
    data = read_examples(options.data)
    # Hide warnings about trl's use of transformers.
    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    has_gpu = torch.cuda.is_available()
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=torch.bfloat16,
        attn_implementation="flash_attention_2" if has_gpu else "sdpa",
        quantization_config=BitsAndBytesConfig(**nf4) if options.four_bit else None,
        device_map={"": 0} if has_gpu else None,
    )
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    settings = make_settings(options, has_gpu)
    trainer = SFTTrainer(model, settings, train_dataset=data, peft_config=lora)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            sys.exit(f"the loss of step {step} is not a finite number")
    trainer.save_model()
    print(f"{options.output}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
