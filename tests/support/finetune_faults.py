# SPDX-License-Identifier: BSD-3-Clause
"""Plant faults in the training that the finetune stack's check judges, and in example.py's input.

This program runs in the finetune stack: `finetune_faults.py STACK-FOLDER SCRATCH-FOLDER`. The last
line that it prints is a JSON object with these keys:

- `whole`: the exit status and the output of the check without a fault;
- `check`: the exit status of a shorter check for each fault in the training;
- `four bits`: the exit status of the whole check for each fault in the reference's weights, if
  bitsandbytes is installed;
- `recipe`: the last line that example.py prints for each input, or its error; and, as `adapters`,
  how many adapters it has trained, and, as `separators`, the texts that it reads from a file with
  U+2028.
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
    "no causal mask": lambda *qkv, **options: sdpa(*qkv),
    "scale of the scores": lambda q, *kv, **options: sdpa(1.01 * q, *kv, **options),
}


def run_check() -> int:
    """Run the check, and return its exit status."""
    with patch.object(sys, "argv", ["check.py", "--device", "cpu"]):
        return check.main()


def capture_check() -> tuple[int, str]:
    """Run the check, and return its exit status and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return run_check(), output.getvalue()


def check_faults() -> dict[str, int]:
    """Return, for each fault, the exit status of a check of four steps in float32."""
    statuses = {}
    make_trainer = check.make_trainer
    check.STEPS = 4
    check.BOUNDS = {torch.float32: check.BOUNDS[torch.float32]}
    for name, plant in FAULTS.items():

        def faulty(*arguments: object, plant: Callable[[SFTTrainer], None] = plant) -> SFTTrainer:
            run = make_trainer(*arguments)
            plant(run)
            return run

        with patch.object(check, "make_trainer", faulty):
            statuses[name] = run_check()
    for name, attention in ATTENTION.items():
        with patch.object(functional, "scaled_dot_product_attention", attention):
            statuses[name] = run_check()
    return statuses


def round_to_table(table: list[float], size: int = 64) -> Callable[[check.Weights], check.Weights]:
    """Return a variant of check.round_to_nf4 with other numbers, or blocks of another size."""
    numbers = torch.tensor(table, dtype=torch.float64)

    def nearest(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.reshape(-1, size)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = (blocks / largest)[..., None].sub(numbers).abs().argmin(-1)
        return (numbers[codes] * largest).view_as(weight)

    def round_weights(weights: check.Weights) -> check.Weights:
        result = dict(weights)
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                result[name] = nearest(weight)
        return result

    return round_weights


FP4 = [sign * x / 192 for x in (0, 1, 128, 192, 64, 96, 32, 48) for sign in (1, -1)]
FOUR_BITS = {
    "none": check.round_to_nf4,
    "not rounded": lambda weights: weights,
    "blocks of 128": round_to_table(check.NF4, 128),
    "FP4": round_to_table(FP4),
    "scale": round_to_table([1.01 * x for x in check.NF4]),
}


def check_faults_in_four_bits() -> dict[str, int]:
    """Return, for each fault in the reference's weights, the exit status of the check."""
    statuses = {}
    for name, round_weights in FOUR_BITS.items():
        with patch.object(check, "round_to_nf4", round_weights):
            statuses[name] = run_check()
    return statuses


def save_model(folder: Path) -> None:
    """Save a tiny Llama and a tokenizer of bytes."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = check.make_config("sdpa")
    config.vocab_size = len(letters) + 1
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {token: n for n, token in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def run_example(*words: object) -> str:
    """Run example.py, and return the last line that it prints, or its error."""
    with (
        patch.object(sys, "argv", ["example.py", *map(str, words)]),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        try:
            example.main()
        except SystemExit as error:
            return str(error)
    return output.getvalue().splitlines()[-1]


def run_examples() -> dict[str, str]:
    """Return the object `recipe` that the module's docstring describes."""
    folder = SCRATCH / "model"
    out = SCRATCH / "adapter"
    save_model(folder)
    quick = ("--epochs", 8, "--rate", 0.005)
    results = {"good": run_example(folder, "-o", out, *quick)}
    adapter = AutoPeftModelForCausalLM.from_pretrained(out).state_dict()
    learned = [value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name]
    results["adapters"] = f"{sum(learned)} of {len(learned)}"
    results["no model"] = run_example(SCRATCH)
    results["no data"] = run_example(folder, SCRATCH / "none.jsonl")
    with patch.object(example, "is_bitsandbytes_available", lambda: False):
        results["no bitsandbytes"] = run_example(folder, "--four-bit")
    if is_bitsandbytes_available():
        options = ("-o", SCRATCH / "four", "--four-bit", *quick)
        results["four bits"] = run_example(folder, *options)
    results["no number"] = run_example(folder, "-o", out, "--rate", "inf")
    for name, text in {
        "empty": "",
        "no JSON": '{"text": "a"}\n{"text"\n',
        "no object": "[]\n",
        "other keys": '{"prompt": "a"}\n',
        "mixed": '{"text": "a"}\n{"prompt": "a", "completion": "b"}\n',
    }.items():
        file = SCRATCH / f"{name}.jsonl"
        file.write_text(text)
        results[name] = run_example(folder, file)
    file = SCRATCH / "separators.jsonl"
    file.write_text('{"text": "a\u2028b\x85c"}\n{"text": "d"}\n')
    results["separators"] = example.read_examples(file)["text"][:]
    return results


four_bits = check_faults_in_four_bits() if is_bitsandbytes_available() else {}
# capture_check has to run before check_faults, which reduces the number of steps.
results = {"whole": capture_check(), "check": check_faults()}
results |= {"four bits": four_bits, "recipe": run_examples()}
print(json.dumps(results))
