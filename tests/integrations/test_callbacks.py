"""Callbacks of trainers: the switch is on while they train, and their logs have the figures of steps."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import ConfigError, UntestedTrainerWarning
from graphoffload.integrations import switch
from graphoffload.integrations.figures import PREFIX, StepFigures
from graphoffload.integrations.releases import check_release

OPTIONS: dict[str, Any] = {"policy": "offload", "min_tensor_bytes": 1, "inner": "aot_eager"}
NAMES = {"predicted_peak_bytes", "predicted_slowdown", "stall_ms", "offloaded_bytes", "reloaded_bytes"}


class Net(nn.Module):
    """What is trained."""

    def __init__(self) -> None:
        """Of width 16."""
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """With a loss, as a Transformers model returns it."""
        y = self.down(torch.tanh(self.up(x)))
        return {"loss": y.pow(2).mean(), "y": y}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Equal batches, so that every step copies as much."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((16,), index / 64)}


def named(entries: Any) -> list[dict[str, float]]:
    """Figures of ours in a trainer's log, without their prefix."""
    found = [{name.removeprefix(PREFIX): entry[name] for name in entry if name.startswith(PREFIX)} for entry in entries]
    return [entry for entry in found if entry]


def check(found: list[dict[str, float]], count: int) -> None:
    """Every logged step has all figures, the last ones of a step that copied."""
    assert len(found) == count
    for entry in found:
        assert set(entry) == NAMES | ({"peak_bytes"} if torch.cuda.is_available() else set())
        assert entry["offloaded_bytes"] == entry["reloaded_bytes"] > 0
        assert entry["predicted_peak_bytes"] > 0


@pytest.fixture(autouse=True)
def _off() -> Any:
    torch._dynamo.reset()
    yield
    switch.uninstall()
    torch._dynamo.reset()


@pytest.mark.parametrize("before", [False, True], ids=["alone", "the switch is on"])
def test_transformers(tmp_path: Path, before: bool) -> None:
    """In state.log_history, and in what every other callback gets; a switch that was on has its options back afterwards."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    transformers = pytest.importorskip("transformers")
    from graphoffload.integrations.transformers import GraphOffloadCallback

    seen: list[dict[str, float]] = []

    class Logger(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    if before:
        graphoffload.install(policy="keep")
    arguments = transformers.TrainingArguments(
        str(tmp_path), torch_compile=True, max_steps=6, per_device_train_batch_size=4, logging_steps=2, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[Logger()])
    GraphOffloadCallback(**OPTIONS).add_to(trainer)
    trainer.train()
    check(named(trainer.state.log_history), 3)
    check(named(seen), 3)
    assert [active.how for active in switch._ACTIVE] == (["graphoffload.install()"] if before else [])


@pytest.mark.parametrize(
    ("options", "logs"),
    [
        ({"logging_strategy": "epoch", "num_train_epochs": 2}, 2),
        ({"logging_steps": 2, "max_steps": 4, "logging_first_step": True}, 3),
    ],
    ids=["epochs", "first"],
)
def test_every_log_of_training(tmp_path: Path, options: dict[str, Any], logs: int) -> None:
    """Whatever the Trainer logs by, each log has figures."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    transformers = pytest.importorskip("transformers")
    from graphoffload.integrations.transformers import GraphOffloadCallback

    arguments = transformers.TrainingArguments(
        str(tmp_path), torch_compile=True, per_device_train_batch_size=16, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **options,
    )  # fmt: skip
    trainer = transformers.Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[GraphOffloadCallback(**OPTIONS)])
    trainer.train()
    check(named(trainer.state.log_history), logs)


class StepsOf:
    """Of Lightning's Trainer, what its callback reads: a loop in which each batch takes `stride` optimizer steps."""

    def __init__(self, stride: int, every: int) -> None:
        self.stride, self.log_every_n_steps, self.global_step = stride, every, 0
        self.logged: list[int] = []
        self.loggers = [self]

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.logged.append(step)

    def train(self, callback: Any, batches: int) -> list[int]:
        for batch in range(batches):
            callback.on_train_batch_start(self, None, None, batch)
            self.global_step += self.stride
            callback.on_train_batch_end(self, None, None, None, batch)
        return self.logged


@pytest.mark.parametrize(
    ("stride", "every", "steps"), [(1, 3, [3, 6]), (2, 4, [4, 8, 12]), (2, 5, [6, 10]), (3, 2, [6, 9, 12, 15, 18]), (1, 0, [])]
)
def test_lightning_with_several_optimizers(stride: int, every: int, steps: list[int]) -> None:
    """Lightning counts each optimizer's steps, so that some numbers are stepped over; 0 logs nothing."""
    pytest.importorskip("lightning")
    from graphoffload.integrations.lightning import GraphOffloadCallback

    assert StepsOf(stride, every).train(GraphOffloadCallback(), 6) == steps


def test_lightning(tmp_path: Path) -> None:
    """In the logger, once for each logged step of the optimizer; off afterwards, also after a failure."""
    pytest.importorskip("lightning")
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

    from graphoffload.integrations.lightning import GraphOffloadCallback

    logged: list[dict[str, float]] = []

    class Kept(Logger):  # type: ignore[misc]
        name, version = "kept", 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append({**metrics, "step": step})

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    class Module(pl.LightningModule):  # type: ignore[misc]
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.net.compile()

        def training_step(self, batch: Any, index: int) -> Any:
            if self.fails:
                raise RuntimeError("as asked")
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer() -> Any:
        return pl.Trainer(
            max_steps=6, accelerator="auto", devices=1, logger=Kept(), log_every_n_steps=2, accumulate_grad_batches=2,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[GraphOffloadCallback(**OPTIONS)], default_root_dir=tmp_path,
        )  # fmt: skip

    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    trainer().fit(Module(), loader)
    check(named(logged), 3)
    assert [entry["step"] for entry in logged if PREFIX + "stall_ms" in entry] == [2, 4, 6]
    assert switch._ACTIVE == []
    module = Module()
    module.fails = True
    with pytest.raises(RuntimeError, match="as asked"):
        trainer().fit(module, loader)
    assert switch._ACTIVE == []


def test_figures_of_a_step_that_was_not_begun() -> None:
    """None; and a step that never ended is dropped."""
    figures = StepFigures()
    assert not figures.end()
    figures.begin()
    figures.begin()
    assert figures.is_open
    assert set(figures.end()) >= {PREFIX + name for name in NAMES}
    assert not figures.end()


def test_without_options_a_switch_stays() -> None:
    """A callback that is there for its figures changes nothing."""
    graphoffload.install(policy="keep")
    (active,) = switch._ACTIVE
    told = switch.SwitchedOn("a callback", {})
    told.begin()
    assert [active] == switch._ACTIVE
    told.end()
    assert [active] == switch._ACTIVE


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as they began", "the last one first"])
@pytest.mark.parametrize("before", [False, True], ids=["off", "on"])
def test_two_at_once(order: tuple[int, int], before: bool) -> None:
    """The last one's options hold while it goes on; after both, all is as it was before the first."""
    if before:
        graphoffload.install(policy="keep")
    was = [active.how for active in switch._ACTIVE]
    both = [switch.SwitchedOn("one", {"policy": "keep"}), switch.SwitchedOn("two", {"policy": "offload"})]
    for each in both:
        each.begin()
    both[order[0]].end()
    assert [active.how for active in switch._ACTIVE] == [both[order[1]].how]
    both[order[1]].end()
    assert [active.how for active in switch._ACTIVE] == was


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old: an error with the name and the releases; newer than tested: a warning with them; missing: an error."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.5.1+cu1")
    assert check_release("trainer", "2.5", "2.5") == "2.5.1+cu1"
    assert check_release("trainer", "1.9", "3") == "2.5.1+cu1"
    with pytest.raises(ConfigError, match=r"trainer 2\.5\.1\+cu1 is too old: this integration needs 2\.6 to 3"):
        check_release("trainer", "2.6", "3")
    with pytest.warns(UntestedTrainerWarning, match=r"trainer 2\.5\.1\+cu1 is newer .* \(2\.3 to 2\.4\)"):
        check_release("trainer", "2.3", "2.4")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no-such-trainer is not installed; this integration needs no-such-trainer 1 to 2"):
        check_release("no-such-trainer", "1", "2")
