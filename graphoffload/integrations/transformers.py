"""transformers.Trainer: a callback that turns graphoffload on and logs what its plans did.

    from graphoffload.integrations.transformers import GraphOffloadCallback

    trainer = Trainer(model, TrainingArguments(torch_compile=True, ...), ...)
    GraphOffloadCallback(device_budget="40GiB").add_to(trainer)
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from graphoffload.integrations.figures import StepFigures
from graphoffload.integrations.releases import check_release
from graphoffload.integrations.switch import SwitchedOn

_OLDEST, _NEWEST = "4.56", "5"
_STEPS_OF_EPOCH = 2  # that are timed where each epoch is logged; the later one's figures are logged


class GraphOffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Turns graphoffload on during train(), and adds its figures (integrations/figures.py) to what the Trainer logs.

    `torch_compile=True` is all that the Trainer needs. As one of `callbacks=[...]` the figures are printed and are in
    `state.log_history`; `add_to(trainer)` puts them before TensorBoard and the like as well, which come first otherwise.

    Args:
        options: as of graphoffload.install(), until train() ends. Without any, the environment's (GRAPHOFFLOAD=1) hold.
            Transformers tell no callback that train() failed: they hold on then until graphoffload.uninstall(), or until
            another train() with this callback ends.

    Raises:
        ConfigError: an unknown option, a bad value, or transformers that are too old.
    """

    def __init__(self, **options: Any) -> None:
        check_release("transformers", _OLDEST, _NEWEST)
        self._switched = SwitchedOn("GraphOffloadCallback", options)
        self._figures = StepFigures()
        self._of_epoch = 0
        self._found: dict[str, float] = {}

    def add_to(self, trainer: Any) -> None:
        """Have the trainer call this one before all that log."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is compiled from now on is planned."""
        self._switched.begin()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluation afterwards saves nothing."""
        self._figures.drop()
        self._switched.end()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count its steps."""
        self._of_epoch = 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Time the waits of a step that is logged."""
        self._of_epoch += 1
        if self._is_logged(args, state):
            self._figures.begin()

    def _is_logged(self, args: TrainingArguments, state: TrainerState) -> bool:
        if args.logging_first_step and state.global_step == 0:
            return True
        if args.logging_strategy == "epoch":  # which step is the last one is not known; the first one compiles
            return self._of_epoch <= _STEPS_OF_EPOCH
        every = state.logging_steps if state.logging_steps and state.logging_steps >= 1 else 1
        return bool(args.logging_strategy == "steps" and (state.global_step + 1) % every == 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the figures for the log, which comes next."""
        self._found = self._figures.end() or self._found

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Add the figures to a log of training."""
        if logs is None or "loss" not in logs:
            return
        logs.update(self._found)
        state.log_history[-1].update(self._found)
