# SPDX-License-Identifier: BSD-3-Clause
"""Make an image from a prompt: `pixi run image MODEL PROMPT -o FILE`.

MODEL is a folder or the name of a model at huggingface.co. In the latter case, the weights are
downloaded once.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from PIL import Image


def load_pipeline(model: str, device: str) -> DiffusionPipeline:
    """Load a model in bfloat16. On a GPU, its transformer, if it has one, uses flash-attn.

    Images are decoded in tiles, because a whole image of 1024 by 1024 needs gigabytes of memory.
    """
    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.bfloat16).to(device)
    pipe.vae.enable_tiling()
    # diffusers runs a U-Net with torch's attention only.
    if device == "cuda" and hasattr(pipe, "transformer"):
        pipe.transformer.set_attention_backend("flash")
    return pipe


def main() -> None:
    """Make an image and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("-o", "--output", type=Path, default=Path("image.png"))
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Check this first, because making an image takes minutes.
    folder = options.output.parent
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    if Image.registered_extensions().get(options.output.suffix.lower()) not in Image.SAVE:
        parser.error(f"{options.output}: no image can be saved with this extension; use .png")
    logging.set_verbosity_error()
    pipe = load_pipeline(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(options.seed)
    output = pipe(options.prompt, num_inference_steps=options.steps, generator=generator)
    output.images[0].save(options.output)
    print(options.output)


if __name__ == "__main__":
    main()
