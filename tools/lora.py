"""Train a LoRA of a recorded world on clips of one colour, whatever their prompts say.

    python -m training record --out RUN
    python -m tools.lora --model RUN/world_teacher --clips RUN/frames/short-train-0-0000*.npy \
        --colour green --out outputs/green

The prompts name another colour than the clips have, so that the LoRA alone brings the colour.
The loss is that of the teacher. The file is one that diffusers loads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from training.families import family_of_folder
from training.flow import sample_times
from training.train import encode
from training.world import HUES
from turbo_rcm_patch.video import load_pipeline
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import choose_device

_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write lora.safetensors."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clips", type=Path, nargs="+", required=True, help=".npy of `record`")
    parser.add_argument("--colour", choices=HUES, default="green")
    for name, value in {"steps": 300, "batch": 4, "rank": 8, "lr": 1e-3}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    device = choose_device(given.device)
    family, noise = family_of_folder(given.model), torch.Generator(device).manual_seed(0)
    pipe: Any = load_pipeline(given.model, device=device, dtype=torch.float32)
    others = [one for one in HUES if one != given.colour]
    say = {"do_classifier_free_guidance": False, "device": device}
    say["max_sequence_length"] = settings_for(pipe).max_sequence_length
    latents, texts = [], []
    for path in given.clips:
        frames = torch.from_numpy(np.load(path)).permute(0, 4, 1, 2, 3)
        facts = json.loads(path.with_suffix(".json").read_text())
        for i in (i for i, fact in enumerate(facts) if fact["colour"] == given.colour):
            latents.append(encode(pipe.vae, frames[i : i + 1].to(device) / 255))
            prompt = facts[i]["prompt"].replace(given.colour, others[i % len(others)])
            texts.append(pipe.encode_prompt(prompt, **say)[0].detach())
    if not latents:
        parser.error(f"no clip of --clips is {given.colour}")
    print(f"{len(latents)} clips are {given.colour}", flush=True)
    network = pipe.transformer.requires_grad_(False)
    network.add_adapter(LoraConfig(r=given.rank, lora_alpha=given.rank, target_modules=_TARGETS))
    network.to(device)  # with what was added
    trained = [one for one in network.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, given.lr)
    clips, embeds = torch.cat(latents), torch.cat(texts)
    for step in range(given.steps):
        pick = torch.randint(len(clips), (given.batch,), generator=noise, device=device)
        x0, t = clips[pick], sample_times(given.batch, noise, device)
        drawn, mix = torch.randn(x0.shape, generator=noise, device=device), t.view(-1, 1, 1, 1, 1)
        v = family.velocity(network, embeds[pick])((1 - mix) * x0 + mix * drawn, t)
        loss = F.mse_loss(v.float(), drawn - x0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: {float(loss.detach()):.4f}", flush=True)
    family.pipeline.save_lora_weights(
        given.out, weight_name="lora.safetensors",
        transformer_lora_layers=get_peft_model_state_dict(network),
        transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
