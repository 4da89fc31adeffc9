# SPDX-License-Identifier: BSD-3-Clause
"""Package test: write audio and read it again, also with torchaudio, and read ten video frames."""

import sys
from pathlib import Path

import torch
import torchaudio
from torchcodec.decoders import AudioDecoder, VideoDecoder
from torchcodec.encoders import AudioEncoder

from checks.verdict import require

RATE = 16000
STEP = 2**-15  # WAV and FLAC have 16 bits
FREQUENCY = 440

phase = torch.arange(RATE) * (FREQUENCY * 2 * torch.pi / RATE)
wave = torch.sin(phase)[None] * 0.5
AudioEncoder(wave, sample_rate=RATE).to_file("own.flac")
samples = AudioDecoder("own.flac").get_all_samples()
rate = samples.sample_rate
require(rate == RATE, f"own.flac has {rate} samples per second, not {RATE}")
torch.testing.assert_close(samples.data, wave, rtol=0, atol=2 * STEP)

torchaudio.save("torchaudio.wav", wave, RATE)
loaded, rate = torchaudio.load("torchaudio.wav")
size = Path("torchaudio.wav").stat().st_size
require(size > RATE, f"torchaudio.save wrote only {size} bytes")
require(rate == RATE, f"torchaudio.load returned {rate} samples per second, not {RATE}")
torch.testing.assert_close(loaded, wave, rtol=0, atol=2 * STEP)
print("audio: FLAC by torchcodec and WAV by torchaudio are read as they were written")

frames = VideoDecoder(sys.argv[1])
require(len(frames) == 10, f"{len(frames)} frames of 10")
first = frames[0]
last = frames[9]
shape = tuple(first.shape)
require(shape == (3, 48, 64), f"a frame of {shape}, not (3, 48, 64)")
require(not torch.equal(first, last), "the video's first and last frames are equal")
print("video: ten frames")
