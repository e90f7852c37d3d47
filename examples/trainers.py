"""One model, one switch, five trainers: what to write where. Nothing in a trainer's own code is about graphoffload.

    GRAPHOFFLOAD=1 GRAPHOFFLOAD_DEVICE_BUDGET=40GiB python examples/trainers.py transformers
    python -m graphoffload run --device-budget 40GiB examples/trainers.py lightning
    python examples/trainers.py all                 # turned on by graphoffload.install(), each that is installed here

Each trains the same small Llama for a few steps on random tokens and prints its losses, so that they can be compared; `loop` is
a plain loop without torch.compile. `trl` trains a LoRA adapter, `regional` is accelerate with its repeated blocks compiled one
by one, and `lightning` logs the figures of graphoffload's callback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphoffload

BATCH, TOKENS, LEARNING_RATE = 4, 64, 1e-3
GPU = torch.cuda.is_available()


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every run."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(2, 256, (rows, TOKENS), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama() -> Any:
    """A Llama of three layers with random weights, the same in every run."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, bos_token_id=0, eos_token_id=1, pad_token_id=0))


def batches(steps: int) -> Any:
    """A loader of so many batches, in order."""
    return torch.utils.data.DataLoader(Tokens(steps * BATCH), batch_size=BATCH)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW as each trainer here uses it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def loop(steps: int) -> list[float]:
    """No trainer and no compile: what the others are compared with."""
    model = llama().cuda() if GPU else llama()
    optimizer, losses = optimizer_of(model), []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = model(**{name: value.to(model.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def transformers(steps: int) -> list[float]:
    """`torch_compile=True` is all."""
    from transformers import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        trainer = InOrder(llama(), _arguments(folder, steps, torch_compile=True), train_dataset=Tokens(steps * BATCH))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _arguments(folder: str, steps: int, kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not GPU, **options,
    )  # fmt: skip


def trl(steps: int) -> list[float]:
    """SFTTrainer with LoRA: `torch_compile=True`, and no gradient checkpointing, which TRL turns on by itself."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = models.WordLevel({str(token): token for token in range(256)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1", unk_token="0")
    rows = Dataset.from_dict({"input_ids": Tokens(steps * BATCH).rows.tolist()})
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    with tempfile.TemporaryDirectory() as folder:
        options = {"torch_compile": True, "gradient_checkpointing": False, "bf16": GPU}
        arguments = _arguments(folder, steps, SFTConfig, **options)
        trainer = SFTTrainer(llama(), arguments, train_dataset=rows, peft_config=adapter, processing_class=tokenizer)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def accelerate(steps: int, *, regional: bool = False) -> list[float]:
    """`TorchDynamoPlugin(backend="inductor")`, or `accelerate launch --dynamo_backend inductor`."""
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=not GPU, dynamo_plugin=plugin)
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), batches(steps))
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def regional(steps: int) -> list[float]:
    """The same with `use_regional_compilation=True`: the blocks of the model are planned as one step."""
    return accelerate(steps, regional=True)


def lightning(steps: int) -> list[float]:
    """Compile what `training_step` calls. The callback is there for its figures in the log; it can turn graphoffload on too."""
    import lightning.pytorch as pl

    from graphoffload.integrations.lightning import GraphOffloadCallback

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()
            self.net.compile()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "callbacks": [GraphOffloadCallback()]}
    pl.Trainer(max_steps=steps, accelerator="gpu" if GPU else "cpu", devices=1, **quiet).fit(Module(), batches(steps))
    return losses


def fabric(steps: int) -> list[float]:
    """torch.compile before `setup`, as Fabric asks for it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="gpu" if GPU else "cpu", devices=1)
    model = torch.compile(llama())
    model, optimizer = fabric.setup(model, optimizer_of(model))
    losses = []
    for batch in fabric.setup_dataloaders(batches(steps)):
        optimizer.zero_grad()
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


TRAINERS: dict[str, tuple[Callable[[int], list[float]], str]] = {
    "loop": (loop, "torch"),
    "transformers": (transformers, "accelerate"),
    "trl": (trl, "trl"),
    "accelerate": (accelerate, "accelerate"),
    "regional": (regional, "accelerate"),
    "lightning": (lightning, "lightning"),
    "fabric": (fabric, "lightning"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train with one trainer, or with each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=[*TRAINERS, "all"], nargs="?", default="all")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    if args.trainer == "all" and not os.environ.get("GRAPHOFFLOAD"):
        small: dict[str, Any] = {} if GPU else {"policy": "offload", "min_tensor_bytes": 1, "inner": "aot_eager"}
        graphoffload.install(**small)
    for name in TRAINERS if args.trainer == "all" else (args.trainer,):
        train, needs = TRAINERS[name]
        if importlib.util.find_spec(needs) is None:
            print(f"{name:<13} is not installed")
            continue
        torch._dynamo.reset()
        graphoffload.reset_stats()
        with contextlib.redirect_stdout(io.StringIO()):  # what trainers print themselves
            losses = train(args.steps)
        copied = graphoffload.stats()["d2h_bytes"]
        print(f"{name:<13} losses {' '.join(f'{loss:.4f}' for loss in losses)}; {copied} bytes copied to the host")


if __name__ == "__main__":
    main()
