# SPDX-License-Identifier: BSD-3-Clause
"""Faults planted in the training that the finetune stack's check looks at, and its recipe's input.

Runs in that stack: `finetune_faults.py STACK-FOLDER SCRATCH-FOLDER`. The last line that it prints
is JSON: the whole check's exit status and words, its status for each fault, of four bits as well
where bitsandbytes is installed, and what the recipe said of each input.
"""

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

STACK, SCRATCH = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(STACK))

import check  # noqa: E402
import example  # noqa: E402
import torch  # noqa: E402
from peft import AutoPeftModelForCausalLM  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import is_bitsandbytes_available  # noqa: E402
from trl import SFTTrainer  # noqa: E402

sdpa = functional.scaled_dot_product_attention


def parameters(run: SFTTrainer, part: str) -> list[torch.nn.Parameter]:
    return [value for name, value in run.model.named_parameters() if part in name]


def scaled_gradient(run: SFTTrainer) -> None:
    for value in parameters(run, "lora_"):
        value.register_hook(lambda gradient: 1.01 * gradient)


def frozen_adapter(run: SFTTrainer) -> None:
    for value in parameters(run, "layers.1.self_attn.v_proj.lora_A"):
        value.requires_grad_(False)


def thawed_weight(run: SFTTrainer) -> None:
    for value in parameters(run, "layers.0.mlp.up_proj.base_layer"):
        value.requires_grad_()


def wrong_alpha(run: SFTTrainer) -> None:
    for module in run.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 1.01


def other_optimiser(run: SFTTrainer) -> None:
    run.args.adam_beta2 = 0.99


def lost_step(run: SFTTrainer) -> None:
    run.args.max_steps -= 1


def not_a_number(run: SFTTrainer) -> None:
    parameters(run, "lora_B")[0].data[0, 0] = math.nan


FAULTS: dict[str, Callable[[SFTTrainer], None]] = {
    "none": lambda run: None,
    "scaled gradient": scaled_gradient,
    "frozen adapter": frozen_adapter,
    "thawed weight": thawed_weight,
    "wrong alpha": wrong_alpha,
    "other optimiser": other_optimiser,
    "lost step": lost_step,
    "not a number": not_a_number,
}
ATTENTION = {
    "no causal mask": lambda *qkv, **more: sdpa(*qkv),
    "scale of the scores": lambda q, *kv, **more: sdpa(1.01 * q, *kv, **more),
}


def status() -> int:
    with patch.object(sys, "argv", ["check.py", "--device", "cpu"]):
        return check.main()


def whole() -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return status(), said.getvalue()


def checked() -> dict[str, int]:
    """The exit status for each fault, of four steps in float32."""
    found, make = {}, check.trainer
    check.STEPS, check.BOUNDS = 4, {torch.float32: check.BOUNDS[torch.float32]}
    for name, plant in FAULTS.items():

        def faulty(*given: object, plant: Callable[[SFTTrainer], None] = plant) -> SFTTrainer:
            run = make(*given)
            plant(run)
            return run

        with patch.object(check, "trainer", faulty):
            found[name] = status()
    for name, attention in ATTENTION.items():
        with patch.object(functional, "scaled_dot_product_attention", attention):
            found[name] = status()
    return found


def with_table(table: list[float], size: int = 64) -> Callable[[check.Weights], check.Weights]:
    """check.rounded with other numbers, or blocks of another size."""
    numbers = torch.tensor(table, dtype=torch.float64)

    def nearest(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.reshape(-1, size)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = (blocks / largest)[..., None].sub(numbers).abs().argmin(-1)
        return (numbers[codes] * largest).view_as(weight)

    return lambda weights: {
        n: nearest(x) if n.endswith("_proj.weight") else x for n, x in weights.items()
    }


FP4 = [sign * x / 192 for x in (0, 1, 128, 192, 64, 96, 32, 48) for sign in (1, -1)]
FOUR_BITS = {
    "none": check.rounded,
    "not rounded": lambda weights: weights,
    "blocks of 128": with_table(check.NF4, 128),
    "FP4": with_table(FP4),
    "scale": with_table([1.01 * x for x in check.NF4]),
}


def checked_in_four_bits() -> dict[str, int]:
    """The exit status for each fault of the weights that the reference has."""
    found = {}
    for name, weights in FOUR_BITS.items():
        with patch.object(check, "rounded", weights):
            found[name] = status()
    return found


def model(folder: Path) -> None:
    """A tiny Llama with a tokenizer of bytes, as transformers saves them."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = check.config("sdpa")
    config.vocab_size = len(letters) + 1
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.BPE({word: n for n, word in enumerate([*letters, "<end>"])}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def told(*words: object) -> str:
    """What the recipe said last, or why it ended."""
    with (
        patch.object(sys, "argv", ["example.py", *map(str, words)]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        try:
            example.main()
        except SystemExit as end:
            return str(end)
    return said.getvalue().splitlines()[-1]


def recipe() -> dict[str, str]:
    """The recipe's words for a good file, and for each bad input."""
    there, out = SCRATCH / "model", SCRATCH / "adapter"
    model(there)
    quick = ("--epochs", 8, "--rate", 0.005)
    found = {"good": told(there, "-o", out, *quick)}
    adapter = AutoPeftModelForCausalLM.from_pretrained(out).state_dict()
    learned = [value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name]
    found["adapters"] = f"{sum(learned)} of {len(learned)}"
    found["no model"] = told(SCRATCH)
    found["no data"] = told(there, SCRATCH / "none.jsonl")
    with patch.object(example, "is_bitsandbytes_available", lambda: False):
        found["no bitsandbytes"] = told(there, "--four-bit")
    if is_bitsandbytes_available():
        found["four bits"] = told(there, "-o", SCRATCH / "four", "--four-bit", *quick)
    found["no number"] = told(there, "-o", out, "--rate", "inf")
    for name, text in {
        "empty": "",
        "no JSON": '{"text": "a"}\n{"text"\n',
        "no object": "[]\n",
        "other keys": '{"prompt": "a"}\n',
        "mixed": '{"text": "a"}\n{"prompt": "a", "completion": "b"}\n',
    }.items():
        file = SCRATCH / f"{name}.jsonl"
        file.write_text(text)
        found[name] = told(there, file)
    return found


four_bits = checked_in_four_bits() if is_bitsandbytes_available() else {}
# the whole check first: those after it take fewer steps
found = {"whole": whole(), "check": checked(), "four bits": four_bits, "recipe": recipe()}
print(json.dumps(found))
