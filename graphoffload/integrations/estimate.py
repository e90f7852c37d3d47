"""What training a language model of Hugging Face takes on GPUs that are not here, from its configuration alone.

    config.json ─▶ the model on the meta device, ─▶ one step, recorded ─▶ planned for a card  ─▶ Estimate
                   blocks compiled one by one                          └▶ for the next one    ─▶ Estimate

No weights, no GPU, no kernel. The step is planned as training plans it (api/explained_step.py): parameters, gradients,
optimizer state, logits and eager loss count, at the times of a profile (hardware/profile.py). Under FSDP, parameters,
gradients and state are divided among the GPUs, and three blocks and what is in no block are whole on each.

Wrong when: products run slower in a step than alone, as the profile has them; sequences are padded or packed (attention then
reads a mask), communication between GPUs is not hidden by compute although it takes less time, or the host cannot issue kernels
fast enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphoffload.api.explained_step import Sharding
from graphoffload.api.explanation import Explanation, RecordedStep
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.optimizer_state import named_state_bytes
from graphoffload.errors import BudgetError, ConfigError
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import OffloadReport

_WHOLE_BLOCKS = 3  # under FSDP: the one that runs, the one that is gathered ahead, and one's gradients
_ATTENTION = "graphoffload_without_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is to be trained.

    Attributes:
        config: name of a model on the hub, a folder, or a config.json.
        batch: sequences a GPU and step. tokens: of one sequence. gpus: that share parameters, gradients and optimizer state.
        optimizer: one of compiler.optimizer_state.NAMES. lora: rank of adapters on all linears; None: all parameters learn.
        dtype: of parameters and activations.
    """

    config: str
    batch: int = 1
    tokens: int = 4096
    gpus: int = 1
    optimizer: str = "adamw"
    lora: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "gpus", "lora"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One card. Bytes are of one GPU, everything counted; tokens_per_s are of all GPUs.

    plan_bytes, slowdown, tokens_per_s: None where no plan fits; least_bytes is then the least that one would take, None where
    even that is not known. keep_tokens_per_s: as if the memory were there.
    """

    card: str
    device_bytes: int
    budget_bytes: int | None
    keep_bytes: int | None = None
    plan_bytes: int | None = None
    least_bytes: int | None = None
    slowdown: float | None = None
    keep_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0

    @property
    def keep_fits(self) -> bool:
        """Whether plain torch.compile would do."""
        return self.keep_bytes is not None and (self.budget_bytes is None or self.keep_bytes <= self.budget_bytes)


@dataclass(frozen=True, slots=True)
class Model:
    """A model on the meta device, its blocks compiled one by one."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    name: str

    @property
    def parameter_count(self) -> int:
        """Of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def trained_count(self) -> int:
        """Of those that learn."""
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)


def model_of(training: Training) -> Model:
    """The model without its weights.

    Raises:
        ConfigError: transformers (or peft) are missing, the configuration is not found, or it is of no language model.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError("estimate reads configurations with transformers, which is not installed.") from None
    place = Path(training.config).expanduser()
    try:
        config = transformers.AutoConfig.from_pretrained(str(place) if place.exists() else training.config)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no configuration {training.config!r}: {first} Give a config.json, its folder, or a name on the hub if this "
            "machine can reach it."
        ) from None
    config.use_cache = False
    transformers.AttentionInterface.register(_ATTENTION, _attend)
    with torch.device("meta"):
        try:
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, training.dtype))
        except (ValueError, AttributeError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError(
                f"{training.config}: estimate knows causal language models, in a dtype of torch: {why} For any other model: "
                "python -m graphoffload explain SCRIPT.py --meta --hardware NAME."
            ) from None
        if training.lora is not None:
            module = _with_adapters(module, training.lora)
    if hasattr(module, "set_attn_implementation"):
        module.set_attn_implementation(_ATTENTION)
    module.train()
    blocks = tuple(repeated_blocks(module))
    if not blocks:
        raise ConfigError(f"{training.config}: {type(module).__name__} has no repeated blocks to compile one by one.")
    for block in blocks:
        block.compile(backend="graphoffload")
    return Model(module, blocks, getattr(config, "name_or_path", "") or place.stem)


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Causal attention of sequences that are neither padded nor packed. Transformers makes no mask for a name of its users'."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, None, **options)


def _with_adapters(module: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise ConfigError("--lora needs peft, which is not installed.") from None
    adapted: nn.Module = peft.get_peft_model(module, peft.LoraConfig(r=rank, target_modules="all-linear"))
    return adapted


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are repeated: the items of lists of one class."""
    for child in module.children():
        items = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len(items) > 1 and len({type(item) for item in items}) == 1:
            yield from items
        else:
            yield from repeated_blocks(child)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step of a model, recorded once for all cards. state_bytes: of the optimizer."""

    model: Model
    training: Training
    step: RecordedStep
    state_bytes: int


def recorded(model: Model, training: Training, card: str) -> Recorded:
    """Follow one step of the model with fake tensors. What is recorded holds for every card; planning for this one takes less.

    Raises:
        ConfigError: the card is unknown, or the optimizer; or the model's blocks are not planned as a step.
    """
    config, module = _config_of(card), model.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    state = named_state_bytes(training.optimizer, trained)
    ids = torch.zeros(training.batch, training.tokens, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    torch.compiler.reset()
    step = Explanation(module, config, (), inputs, trained, state, _sharding(model, training.gpus)).recorded()
    if isinstance(step, str):
        raise ConfigError(f"the step of {model.name} was not planned: {step or 'its graphs are no step of several calls'}.")
    return Recorded(model, training, step, state)


def estimated(found: Recorded, card: str) -> Estimate:
    """One card's estimate.

    Raises:
        ConfigError: the card is unknown.
    """
    config = _config_of(card)
    hardware = PROFILES[card]
    try:
        report = found.step.planned(config)
    except BudgetError as error:
        trained = found.step.explanation.parameters
        budget = resolve_limits(config, trained[:1], trained).device_budget_bytes
        return Estimate(card=card, device_bytes=hardware.memory_bytes, budget_bytes=budget, least_bytes=error.least_bytes)
    return _estimate_of(report, found, hardware)


def _config_of(card: str) -> OffloadConfig:
    if card not in PROFILES or card == "cpu":
        raise ConfigError(f"{card!r} is no profile; known: {', '.join(name for name in PROFILES if name != 'cpu')}.")
    return OffloadConfig(hardware=card)


def _estimate_of(report: OffloadReport, found: Recorded, hardware: HardwareProfile) -> Estimate:
    model, training = found.model, found.training
    prediction = next(plan.prediction for plan in report.plans if plan.variant and not plan.part)
    slowdown, keep_s = prediction.predicted_slowdown, prediction.keep_time_s
    rest_s = _optimizer_s(model, found.state_bytes, hardware) / training.gpus
    between_s = _communication_s(model, training.gpus, hardware)
    tokens = training.batch * training.tokens * training.gpus

    def rate(step_s: float) -> float:
        return tokens / (max(step_s, between_s) + rest_s)

    return Estimate(
        card=hardware.name,
        device_bytes=hardware.memory_bytes,
        budget_bytes=report.budget_bytes,
        keep_bytes=report.keep_peak_bytes,
        plan_bytes=report.predicted_peak_bytes,
        slowdown=slowdown,
        keep_tokens_per_s=rate(keep_s),
        tokens_per_s=rate(keep_s * (1.0 + slowdown)),
        offloaded_bytes=report.offloaded_bytes,
        recomputed_bytes=report.recomputed_bytes,
    )


def _sharding(model: Model, gpus: int) -> Sharding | None:
    if gpus == 1:
        return None
    blocks = [_nbytes(block.parameters()) for block in model.blocks]
    outside = _nbytes(model.module.parameters()) - sum(blocks)
    return Sharding(gpus, outside + _WHOLE_BLOCKS * max(blocks))


def _optimizer_s(model: Model, state_bytes: int, hardware: HardwareProfile) -> float:
    """An optimizer reads and writes parameters and state, and reads gradients: it is bound by memory."""
    trained = _nbytes(parameter for parameter in model.module.parameters() if parameter.requires_grad)
    return (3 * trained + 2 * state_bytes) / hardware.device_bandwidth_bytes_per_s


def _communication_s(model: Model, gpus: int, hardware: HardwareProfile) -> float:
    """FSDP gathers all parameters in forward and again in backward, and adds up the gradients of those that learn."""
    if gpus == 1:
        return 0.0
    parameters = list(model.module.parameters())
    moved = 2 * _nbytes(parameters) + _nbytes(parameter for parameter in parameters if parameter.requires_grad)
    return moved * (gpus - 1) / gpus / hardware.peer_bytes_per_s


def _nbytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
