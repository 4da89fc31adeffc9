# SPDX-License-Identifier: BSD-3-Clause
"""Compare tiny diffusion models with random weights on this machine's GPU with float64 on the CPU.

A U-Net (Stable Diffusion) and a transformer (Flux) take two denoising steps each. A decoder turns
random latents into an image, once whole and once in tiles. All run with torch's attention, in
float32 and in bfloat16. The U-Net and the transformer also run with flash-attn, in bfloat16 on the
GPU. No weights are downloaded.

Exit status: 0 if all results are correct, 1 if one is wrong, 3 if torch found no GPU and the
results of the CPU are correct.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FluxTransformer2DModel,
    UNet2DConditionModel,
)
from diffusers.utils import logging
from torch import Tensor

#: The root mean square of the errors may be this part of that of the result. Correct runs on the
#: CPU came to 1.5e-6 and 2.1e-2.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
#: In bfloat16, the rounding errors of all layers hide a fault in one layer. So a GPU's error may be
#: at most this many times the CPU's. A softmax scale that is wrong by a factor of 1.2 makes the
#: error 1.5 times the CPU's in the U-Net, and 1.06 times in the transformer, where this check does
#: not see it. In float32, the same fault gives at least 17 times the bound. flash-attn does not run
#: in float32 here; strix-validate checks flash-attn itself.
MARGIN = 1.3
STEPS = 2


def unet() -> UNet2DConditionModel:
    """Stable Diffusion's, with two levels and heads of 64."""
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=1,
        norm_num_groups=16,
    )


def transformer() -> FluxTransformer2DModel:
    """Flux's, one block of each kind, two heads of 64."""
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
    )


def decoder() -> AutoencoderKL:
    """Stable Diffusion's, for latents of 16 by 16 and images four times as wide."""
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 32),
        sample_size=32,
    )
    model.tile_latent_min_size = 8
    return model


def _denoised(predict: Callable[[Tensor, Tensor], Tensor], latents: Tensor) -> Tensor:
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    for step in scheduler.timesteps:
        noise = predict(latents, step.to(latents.device))
        latents = scheduler.step(noise.cpu().double(), step, latents.cpu().double()).prev_sample
        latents = latents.to(noise)
    return latents


def run_unet(model: UNet2DConditionModel, draw: Callable[..., Tensor]) -> Tensor:
    """Two steps from noise, beside seven words; returns latents (1, 4, 16, 16)."""
    words = draw(1, 7, 64)
    return _denoised(lambda x, step: model(x, step, words).sample, draw(1, 4, 16, 16))


def run_transformer(model: FluxTransformer2DModel, draw: Callable[..., Tensor]) -> Tensor:
    """Two steps from noise, beside seven words; returns latents (1, 70, 16)."""
    words, pooled, latents = draw(1, 7, 64), draw(1, 64), draw(1, 70, 16)
    places = torch.zeros(70, 3, device=latents.device)
    places[:, 1] = torch.arange(70) // 10
    places[:, 2] = torch.arange(70) % 10

    def predict(x: Tensor, step: Tensor) -> Tensor:
        when = (step / 1000).reshape(1).to(x)
        none = torch.zeros(7, 3, device=x.device)
        return model(x, words, pooled, when, places, none).sample

    return _denoised(predict, latents)


def run_decoder(model: AutoencoderKL, draw: Callable[..., Tensor]) -> Tensor:
    """An image, (1, 3, 64, 64)."""
    return model.decode(draw(1, 4, 16, 16)).sample


MODELS = {
    "U-Net": (unet, run_unet),
    "transformer": (transformer, run_transformer),
    "decoder": (decoder, run_decoder),
    "decoder, in tiles": (decoder, run_decoder),
}


def results(device: str) -> Iterator[tuple[str, float, float]]:
    """What was computed how, the error, and its bound."""
    backends = ("native", "flash") if device == "cuda" else ("native",)
    for name, (make, run) in MODELS.items():
        torch.manual_seed(0)
        exact = make().eval().double()
        if name.endswith("tiles"):
            exact.enable_tiling()
        want = compute(exact, run, "cpu", torch.float64)
        for dtype, bound in BOUNDS.items():
            model = copy.deepcopy(exact).to(dtype)
            if device != "cpu" and dtype == torch.bfloat16:
                rounded = compute(model, run, "cpu", dtype).double()
                bound = min(bound, MARGIN * relative(rounded, want))
            model = model.to(device)
            for backend in backends:
                if backend == "flash" and (dtype == torch.float32 or run is run_decoder):
                    continue  # flash-attn takes no float32; the decoder has one head of 32
                model.set_attention_backend(backend)
                got = compute(model, run, device, dtype).cpu().double()
                kind = str(dtype).removeprefix("torch.")
                yield f"{name}, {kind}, {backend}", relative(got, want), bound


def relative(got: Tensor, want: Tensor) -> float:
    """The root mean square of the errors as part of that of the reference."""
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


def compute(model: torch.nn.Module, run: Callable, device: str, dtype: torch.dtype) -> Tensor:
    """The model's result for numbers that are the same for every device and type."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        # rounded to 16 bits, so that all types begin with the same numbers
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    with torch.no_grad():
        return run(model, draw)


def main() -> int:
    """Print a line for each result; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    asked = parser.parse_args().device
    logging.set_verbosity_error()  # of modules to keep in float32: there are none
    device = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    wrong = 0
    for what, error, bound in results(device):
        correct = error <= bound  # false for NaN
        wrong += not correct
        print(
            f"{'correct' if correct else 'WRONG'}  {what}: error {error:.1e}, at most {bound:.0e}"
        )
    if asked == "auto" and device == "cpu":
        print("torch sees no GPU: only the CPU was checked. `pixi run doctor` says why")
        return 1 if wrong else 3
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
