"""A process of the bench as text: MODEL[,SIZE=N...][,optimizer=NAME][,precision=NAME][,baseline=NAME][,steps=N][@VARIANT...].

    stack32k@checkpoint@over:12.1GB
    llama3-1b,optimizer=adamw,precision=cast,steps=20@total:21.39GB@total:22.07GB
    qwen3-8b,batch=1,tokens=16384,baseline=checkpoint@hf-checkpoint@over:peak(hf-checkpoint)

Everything else is a size. Without variants: full checkpointing, and graphoffload with checkpointing's measured peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphoffload.bench.models import MODELS
from graphoffload.bench.recipe import PLAIN, Recipe
from graphoffload.bench.results import subject_of
from graphoffload.bench.run_options import BASELINES, Options
from graphoffload.bench.runner import Runner
from graphoffload.bench.variants import parse
from graphoffload.errors import ConfigError

FORM = "MODEL[,SIZE=N...][,optimizer=NAME][,precision=NAME][,steps=N][@VARIANT...]"
DEFAULT = ("checkpoint", "over:peak(checkpoint)")


@dataclass(frozen=True)
class Process:
    """A model as it is trained, and what it is measured under.

    Attributes:
        sizes: those that differ from the model's own. steps: measured ones a side; None: as many as the others take.
        baseline: what others are compared with, if it trains.
    """

    model: str
    sizes: dict[str, int] = field(default_factory=dict)
    recipe: Recipe = PLAIN
    steps: int | None = None
    baseline: str = "keep"
    variants: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """As result files name it."""
        return subject_of(self.model, {**self.sizes, **self.recipe.changes()})

    @property
    def baselines(self) -> tuple[str, ...]:
        """What others are compared with, in the order in which it is tried."""
        return tuple(dict.fromkeys((self.baseline, *BASELINES)))

    def measure(self, runner: Runner, at_once: int) -> None:
        """Run all but the end of it, `at_once` variants in turns with the baseline."""
        runner.start()
        names = [name for name in self.variants or DEFAULT if name != runner.facts["baseline"]]
        for first in range(0, len(names), at_once):
            runner.run_in_turns(names[first : first + at_once])

    def fill(self, options: Options) -> Options:
        """Write into options what the process has of its own."""
        options.sizes, options.recipe, options.baselines = self.sizes or None, self.recipe, self.baselines
        options.steps = self.steps or options.steps
        return options


def parse_process(text: str) -> Process:
    """The process that a text means.

    Raises:
        ConfigError: an unknown model or variant, or a size that is no NAME=N.
    """
    first, *variants = text.split("@")
    model, *changes = first.split(",")
    if model not in MODELS:
        raise ConfigError(f"unknown model {model!r}; known: {', '.join(MODELS)}")
    try:
        given = dict(change.split("=") for change in changes)
        named = {name: given.pop(name) for name in ("optimizer", "precision", "baseline") if name in given}
        sizes = {name: int(value) for name, value in given.items()}
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}; a process is {FORM}.") from None
    baseline = named.pop("baseline", "keep")
    for name in (baseline, *variants):
        parse(name)
    return Process(model, sizes, Recipe(**named), sizes.pop("steps", None), baseline, tuple(variants))
