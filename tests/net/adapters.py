"""Adapters of peft on a small Llama whose own weights are frozen."""

from __future__ import annotations

from typing import Any

from net.dense import ONE, decoder
from net.table import Built, architecture

NEEDS = ("peft",)


def adapted(config: str, **fields: Any) -> Built:
    """A Llama with an adapter, by the name of its config."""
    import peft

    model, inputs = decoder("LlamaConfig", **ONE)
    return peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **fields)), inputs


@architecture("lora", "adapter, low rank", needs=NEEDS)
def lora() -> Built:
    return adapted("LoraConfig", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])


@architecture("lora-dropout", "adapter, low rank, dropout 0.1", needs=NEEDS, random=True)
def lora_dropout() -> Built:
    return adapted("LoraConfig", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


@architecture("dora", "adapter, low rank and magnitude", needs=NEEDS)
def dora() -> Built:
    return adapted("LoraConfig", r=4, use_dora=True, target_modules=["q_proj", "v_proj"])


@architecture("prefix-tuning", "adapter, learned keys and values", needs=NEEDS)
def prefix_tuning() -> Built:
    return adapted("PrefixTuningConfig", num_virtual_tokens=4)


@architecture("prompt-tuning", "adapter, learned tokens", needs=NEEDS)
def prompt_tuning() -> Built:
    return adapted("PromptTuningConfig", num_virtual_tokens=4)


@architecture("ia3", "adapter, scaled activations", needs=NEEDS)
def ia3() -> Built:
    return adapted("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])


@architecture("lora-checkpointed", "adapter, low rank, under gradient checkpointing as Trainer does it", needs=NEEDS)
def lora_checkpointed() -> Built:
    model, inputs = lora()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model, inputs
