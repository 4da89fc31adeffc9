# SPDX-License-Identifier: BSD-3-Clause
"""An image from a prompt: `pixi run image MODEL PROMPT -o FILE`.

MODEL is a folder, or a name at huggingface.co, whose weights are downloaded once.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging


def pipeline(model: str, device: str) -> DiffusionPipeline:
    """The model in bfloat16, with flash-attn where its attention can use it.

    Images are decoded in tiles: a whole one of 1024 by 1024 takes gigabytes of memory at once.
    """
    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.bfloat16).to(device)
    pipe.vae.enable_tiling()
    network = getattr(pipe, "transformer", None) or pipe.unet
    if device == "cuda":
        network.set_attention_backend("flash")
    return pipe


def main() -> None:
    """Make one image and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("-o", "--output", type=Path, default=Path("image.png"))
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.set_verbosity_error()
    pipe = pipeline(asked.model, "cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(asked.seed)
    found = pipe(asked.prompt, num_inference_steps=asked.steps, generator=generator)
    found.images[0].save(asked.output)
    print(asked.output)


if __name__ == "__main__":
    main()
