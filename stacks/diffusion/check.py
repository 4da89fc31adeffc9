# SPDX-License-Identifier: BSD-3-Clause
"""Run tiny diffusion models on this machine's GPU, and compare the results with float64 on the CPU.

The models have random weights; nothing is downloaded. A U-Net (Stable Diffusion) and a transformer
(Flux) take two denoising steps each. A decoder turns random latents into an image, once as a whole
and once in tiles. All models run with torch's attention, in float32 and in bfloat16. On the GPU,
the transformer also runs with flash-attn, in bfloat16. diffusers runs the U-Net and the decoder
with torch's attention only, whichever backend is set.

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

#: The largest relative error (see `relative_error`) of a correct result, by dtype. On the CPU,
#: correct runs had relative errors of 1.5e-6 in float32 and 2.1e-2 in bfloat16.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
#: In bfloat16, the rounding errors of all layers hide a fault in one layer. So in addition, the
#: error of a GPU may be at most this many times the error of the CPU. For example, a softmax scale
#: that is wrong by a factor of 1.2 increases the error in the U-Net to 1.5 times the CPU's, and in
#: the transformer to 1.06 times, which this check does not detect. In float32, the same fault gives
#: at least 17 times the bound. flash-attn does not run in float32 here, but strix-validate checks
#: flash-attn itself.
MARGIN = 1.3
STEPS = 2


def make_unet() -> UNet2DConditionModel:
    """Make a U-Net as in Stable Diffusion, with levels of 64 and 128 channels and a single head."""
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


def make_transformer() -> FluxTransformer2DModel:
    """Make a transformer as in Flux, with one block of each kind and two heads of 64."""
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


def make_decoder() -> AutoencoderKL:
    """Make a decoder as in Stable Diffusion, for latents of 16 by 16 and images of 64 by 64."""
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 32),
        sample_size=32,
    )
    model.tile_latent_min_size = 8
    return model


def _denoise(predict: Callable[[Tensor, Tensor], Tensor], latents: Tensor) -> Tensor:
    """Take STEPS denoising steps, and return the latents.

    Args:
        predict: Returns the model's prediction for latents and a time step.
        latents: The latents to begin with.
    """
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    for step in scheduler.timesteps:
        noise = predict(latents, step.to(latents.device))
        latents = scheduler.step(noise.cpu().double(), step, latents.cpu().double()).prev_sample
        latents = latents.to(noise)
    return latents


def run_unet(model: UNet2DConditionModel, draw: Callable[..., Tensor]) -> Tensor:
    """Denoise random latents with a prompt of seven tokens; return latents (1, 4, 16, 16)."""
    prompt = draw(1, 7, 64)
    return _denoise(lambda x, step: model(x, step, prompt).sample, draw(1, 4, 16, 16))


def run_transformer(model: FluxTransformer2DModel, draw: Callable[..., Tensor]) -> Tensor:
    """Denoise random latents with a prompt of seven tokens; return latents (1, 70, 16)."""
    prompt = draw(1, 7, 64)
    pooled_prompt = draw(1, 64)
    latents = draw(1, 70, 16)
    image_ids = torch.zeros(70, 3, device=latents.device)
    image_ids[:, 1] = torch.arange(70) // 10
    image_ids[:, 2] = torch.arange(70) % 10

    def predict(x: Tensor, step: Tensor) -> Tensor:
        timestep = (step / 1000).reshape(1).to(x)
        text_ids = torch.zeros(7, 3, device=x.device)
        return model(x, prompt, pooled_prompt, timestep, image_ids, text_ids).sample

    return _denoise(predict, latents)


def run_decoder(model: AutoencoderKL, draw: Callable[..., Tensor]) -> Tensor:
    """Decode random latents; return an image, (1, 3, 64, 64)."""
    return model.decode(draw(1, 4, 16, 16)).sample


MODELS = {
    "U-Net": (make_unet, run_unet),
    "transformer": (make_transformer, run_transformer),
    "decoder": (make_decoder, run_decoder),
    "decoder, in tiles": (make_decoder, run_decoder),
}


def compare_all(device: str) -> Iterator[tuple[str, float, float]]:
    """Run each model with each dtype and the backends for it; yield a label, error and bound."""
    for name, (make, run) in MODELS.items():
        torch.manual_seed(0)
        exact = make().eval().double()
        if name.endswith("tiles"):
            exact.enable_tiling()
        # Without a backend of its own, a model uses the backend that was last set for any model.
        # That would be flash-attn, which does not support the CPU.
        exact.set_attention_backend("native")
        reference = compute(exact, run, "cpu", torch.float64)
        for dtype, bound in BOUNDS.items():
            model = copy.deepcopy(exact).to(dtype)
            if device != "cpu" and dtype == torch.bfloat16:
                cpu_result = compute(model, run, "cpu", dtype).double()
                bound = min(bound, MARGIN * relative_error(cpu_result, reference))
            model = model.to(device)
            backends = ["native"]
            # flash-attn supports only 16-bit dtypes.
            if device == "cuda" and dtype == torch.bfloat16 and run is run_transformer:
                backends.append("flash")
            for backend in backends:
                model.set_attention_backend(backend)
                result = compute(model, run, device, dtype).cpu().double()
                dtype_name = str(dtype).removeprefix("torch.")
                error = relative_error(result, reference)
                yield f"{name}, {dtype_name}, {backend}", error, bound


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return the root mean square of the errors, divided by that of the reference."""
    return ((result - reference).square().mean() / reference.square().mean()).sqrt().item()


def compute(model: torch.nn.Module, run: Callable, device: str, dtype: torch.dtype) -> Tensor:
    """Return the model's result. The random inputs are the same for every device and dtype."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        # The numbers are rounded to bfloat16, so that they are the same in every dtype.
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    with torch.no_grad():
        return run(model, draw)


def main() -> int:
    """Print a line for each result, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    requested = parser.parse_args().device
    # Hide diffusers' warning about modules that must stay in float32. These models have none.
    logging.set_verbosity_error()
    device = requested
    if requested == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    has_wrong = False
    for name, error, bound in compare_all(device):
        is_correct = error <= bound  # also False if the error is NaN
        has_wrong = has_wrong or not is_correct
        verdict = "correct" if is_correct else "WRONG"
        print(f"{verdict}  {name}: error {error:.1e}, at most {bound:.0e}")
    if requested == "auto" and device == "cpu":
        print("torch finds no GPU: only the CPU was checked. `pixi run doctor` prints why")
        return 1 if has_wrong else 3
    return 1 if has_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
