"""Lightning: a callback that turns graphoffload on and logs what its plans did.

    from graphoffload.integrations.lightning import GraphOffloadCallback

    self.net.compile()                                                  # in the LightningModule: what training_step calls
    Trainer(callbacks=[GraphOffloadCallback(device_budget="40GiB")])
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same package under its older name
    from pytorch_lightning import Callback

from graphoffload.integrations.figures import StepFigures
from graphoffload.integrations.releases import check_release
from graphoffload.integrations.switch import SwitchedOn

_OLDEST, _NEWEST = "2.4", "2.6"


class GraphOffloadCallback(Callback):  # type: ignore[misc]
    """Turns graphoffload on during fit, and logs its figures (integrations/figures.py) every `log_every_n_steps` steps.

    Compile what `training_step` calls: `self.net.compile()`. Lightning never calls the LightningModule itself, so that
    compiling that has no effect.

    Args:
        options: as of graphoffload.install(), until fit ends. Without any, the environment's (GRAPHOFFLOAD=1) hold.

    Raises:
        ConfigError: an unknown option, a bad value, or a Lightning that is too old.
    """

    def __init__(self, **options: Any) -> None:
        check_release("lightning" if Callback.__module__.startswith("lightning.") else "pytorch-lightning", _OLDEST, _NEWEST)
        self._switched = SwitchedOn("GraphOffloadCallback", options)
        self._figures = StepFigures()
        self._before, self._stride = 0, 1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before fit: what is compiled from now on is planned."""
        if stage == "fit":
            self._switched.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After fit, also after one that failed."""
        self._figures.drop()
        self._switched.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Time the waits of a step that is logged."""
        self._before, every = trainer.global_step, trainer.log_every_n_steps
        if not trainer.loggers or not every or self._figures.is_open:
            return
        if (self._before + self._stride) // every > self._before // every:
            self._figures.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, once the optimizer has stepped; until then further batches of the same step are counted in."""
        taken = trainer.global_step - self._before
        if not taken:
            return
        self._stride = taken  # Lightning counts the steps of each optimizer
        found = self._figures.end()
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=trainer.global_step)
