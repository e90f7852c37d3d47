"""Loops as users write them, from their result file to docs/user_loops.md.

    for case in gpt2 vit resnet t5 lora qwen own two_models gan dpo diffusion speech unfreeze; do
        PYTHONPATH=tests python tests/gpu/user_loops.py $case --store docs/results/user-loops.json --commit HASH
    done
    PYTHONPATH=tests python -m gpu.user_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphoffload.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "results" / "user-loops.json", ROOT / "docs" / "user_loops.md"
LOOPS = {
    "gpt2": "GPT-2 of Transformers: bfloat16 autocast, four microbatches a step, clipping, AdamW, dropout; by blocks",
    "vit": "ViT-L: float16 autocast, GradScaler, clipping, AdamW; as a whole",
    "resnet": "ResNet-50 of timm: channels last, bfloat16 autocast, SGD with momentum, an eager loss; as a whole",
    "t5": "T5: bfloat16 autocast, AdamW, three lengths that take turns; as a whole",
    "lora": "Llama with LoRA of peft on every linear: bfloat16 autocast, AdamW; by blocks",
    "qwen": "Qwen3 in bfloat16: two microbatches a step, AdamW, evaluations between steps; by blocks",
    "own": "the same with an update of the user's own in place of an optimizer; by blocks",
    "two_models": "a student and its frozen teacher: bfloat16 autocast, AdamW; each as a whole",
    "gan": "DCGAN in float32: critic and generator in turn, two optimizers; each as a whole",
    "dpo": "DPO of a Llama with LoRA, the reference with its adapters disabled: bfloat16 autocast, AdamW; as a whole",
    "diffusion": "a diffusion transformer: noise drawn on the device, bfloat16 autocast, AdamW, an EMA copy; as a whole",
    "speech": "Whisper: float16 autocast, GradScaler, clipping, AdamW; both halves by blocks",
    "unfreeze": "ViT-L of 16 layers: its head alone for two steps, then all of it; bfloat16 autocast, AdamW; by blocks",
}
TEXT = """# Loops as users write them

Each loop is trained twice under plain `torch.compile` and once under graphoffload, in one process of its own, with no option
but `device_budget`: what is allocated between steps, and a share of what a plain step takes above it. `tests/gpu/user_loops.py`
has the loops, and `tests/gpu/user_page.py` the commands that made this page of `docs/results/user-loops.json`.

* **planned, slower**: what the plan says of forward and backward, and what a whole step took longer, data and optimizer
  included. Where the host is the limit, a step is slower than planned, and a line says so while it is planned.
  "beside others": several loops ran on one GPU at a time, so that the time of a step says nothing.
  Whisper's host keeps its GPU idle for a fifth of a plain step already, and blocks that compute again have 150 kernels more to
  launch, many of them casts of weights; runs beside plain ones took 6 to 28 % longer, by how fast the host was.
  T5's plain steps keep an H200 busy for 9 to 19 ms, and its host takes 24 to 28 ms to issue their 700 kernels; steps of one
  program differ by 20 % there. Planned ones took 12 % longer on an H100 and up to 65 % on an H200, and less than plain ones in
  a third run, of two layers: the host is what is measured, and since 2026-11-29 a line says so. Its
  excess was the same to the byte with another plan of the longest length. So it seems to be the first length's, whose graph
  keeps everything: ends of blocks, where sizes change from step to step.
* **losses**: the largest difference from plain training in any of twelve steps (six of the GAN), as a share; and that of two
  plain trainings.

"""


def page(results: Mapping[str, Any]) -> str:
    """The page of a result file."""
    names = "loop GPU between,steps plain budget predicted taken planned slower losses,(two,plain) warnings"
    lines = [f"| {' | '.join(names.split()).replace(',', ' ')} |", "|---|---|" + "---:|" * 9]
    for case, what in LOOPS.items():
        found = results.get(case)
        lines.append(f"| {what} | " + (" | ".join(cells(found)) if found else "not run" + " |" * 9) + " |")
    made = sorted({f"{r['date']}, {r['device']}, torch {r['torch']}, {r['commit']}" for r in results.values()})
    return TEXT + "\n".join([*lines, "", *(f"* {each}" for each in made)]) + "\n"


def cells(found: Mapping[str, Any]) -> list[str]:
    """What one loop came to."""
    sizes = [str(found["device"]).removeprefix("NVIDIA ").split()[0]]
    sizes += [format_bytes(found[name]) for name in ("static_bytes", "plain_bytes", "budget_bytes")]
    if "peak_bytes" not in found:
        return [*sizes, "refused", "", "", "", "", ""]
    sizes += [format_bytes(found[name]) for name in ("predicted_bytes", "peak_bytes")]
    slower = f"{found['step_s'] / min(found['plain_s'], found['plain_again_s']) - 1:+.1%}"
    names = sorted(text.split(":")[0] for text in found["warnings"])
    return [
        *sizes,
        f"{found['predicted_slowdown']:+.1%}",
        "beside others" if found.get("beside_others") else slower,
        f"{found['loss_error']:.0e} ({found['loss_noise']:.0e})" + (" **wrong**" if found["wrong"] else ""),
        ", ".join(f"`{name}`" for name in names) or "none",
    ]


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
