"""A step of the bench's Llama in JAX, in a process of its own: `python -m graphoffload.bench.jax_step FOLDER POLICY STEPS`.

    FOLDER/weights.safetensors, FOLDER/batch.json   in: the torch model's weights by name, token ids and sizes (jax_row.py)
    FOLDER/gradients.safetensors                    out: by the same names
    the last line of the output                     out: milliseconds of each step, bytes, loss

Plain functions, as a user of JAX writes them: one `scan` over stacked layers, each under `jax.checkpoint` with a policy,
cuDNN's attention where there is a GPU. A step takes the last one's gradients and overwrites them (donation), so what is
allocated between steps is what it is in torch: parameters, gradients, the batch. Without a GPU the peak is XLA's own figure
for a step's temporary memory.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphoffload.bench.packages import needed

POLICIES = ("everything", "nothing", "dots", "offload", "offload-dots")
"""everything_saveable, nothing_saveable, dots_saveable; inputs of layers to the host; outputs of all products to the host."""

LAYER = "model.layers.{}."
STACKED = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
WARM_UP = 3


def policy_of(jax: Any, name: str) -> Any:
    """A policy of jax.checkpoint by its name here."""
    policies = jax.checkpoint_policies
    if name == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["layer"], offload_src="device", offload_dst="pinned_host"
        )
    if name == "offload-dots":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return getattr(policies, f"{name}_saveable")


def _norm(jnp: Any, x: Any, weight: Any, epsilon: float) -> Any:
    wide = x.astype(jnp.float32)
    return weight * (wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)).astype(x.dtype)


def _turned(jnp: Any, x: Any, cos: Any, sin: Any) -> Any:
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate((-high, low), -1) * sin


def make_loss(jax: Any, sizes: dict[str, Any], policy: str) -> Callable[[dict[str, Any], Any], Any]:
    """(weights, token ids) to the mean cross entropy on the next token."""
    jnp, epsilon = jax.numpy, sizes["epsilon"]
    on_gpu = jax.default_backend() == "gpu"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else None)

    def layer(x: Any, own: dict[str, Any], cos: Any, sin: Any) -> Any:
        x = needed("jax.ad_checkpoint", "jax").checkpoint_name(x, "layer")
        heads = (*x.shape[:2], -1, sizes["dim"] // sizes["heads"])
        y = _norm(jnp, x, own["input_layernorm"], epsilon)
        q, k, v = ((y @ own[f"self_attn.{name}_proj"].T).reshape(heads) for name in "qkv")
        attended = attend(_turned(jnp, q, cos, sin), _turned(jnp, k, cos, sin), v)
        x = x + attended.reshape(x.shape) @ own["self_attn.o_proj"].T
        y = _norm(jnp, x, own["post_attention_layernorm"], epsilon)
        return x + (jax.nn.silu(y @ own["mlp.gate_proj"].T) * (y @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T

    def loss(weights: dict[str, Any], ids: Any) -> Any:
        angles = jnp.outer(jnp.arange(ids.shape[1], dtype=jnp.float32), weights["inv_freq"])
        angles = jnp.concatenate((angles, angles), -1)[None, :, None]
        embedding = weights["model.embed_tokens.weight"]
        x = embedding[ids]
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        block = jax.checkpoint(lambda x, own: (layer(x, own, cos, sin), None), policy=policy_of(jax, policy))
        x, _ = jax.lax.scan(block, x, {name: weights[name] for name in STACKED})
        x = _norm(jnp, x, weights["model.norm.weight"], epsilon)
        logits = (x[:, :-1] @ weights.get("lm_head.weight", embedding).T).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return loss


def stacked(jax: Any, flat: dict[str, Any], layers: int) -> dict[str, Any]:
    """Weights of equal layers in one array each."""
    result = {name: value for name, value in flat.items() if not name.startswith("model.layers.")}
    for name in STACKED:
        result[name] = jax.numpy.stack([flat[f"{LAYER.format(index)}{name}.weight"] for index in range(layers)])
    return result


def unstacked(tree: dict[str, Any], layers: int) -> dict[str, Any]:
    """Back to the torch model's names."""
    result = {name: value for name, value in tree.items() if name not in STACKED}
    for name in STACKED:
        result |= {f"{LAYER.format(index)}{name}.weight": tree[name][index] for index in range(layers)}
    return result


def run(folder: Path, policy: str, steps: int) -> dict[str, Any]:
    """Train, write the gradients, and return what was measured."""
    jax, files = needed("jax", "jax"), needed("safetensors.flax", "safetensors")
    batch = json.loads((folder / "batch.json").read_text())
    sizes = batch["sizes"]
    weights = stacked(jax, files.load_file(folder / "weights.safetensors"), sizes["layers"])
    fixed = {"inv_freq": weights.pop("inv_freq")}
    ids = jax.numpy.asarray(batch["ids"], dtype=jax.numpy.int32)
    loss = make_loss(jax, sizes, policy)

    def step(weights: dict[str, Any], last: dict[str, Any], ids: Any) -> Any:
        return jax.value_and_grad(lambda own: loss({**own, **fixed}, ids))(weights)

    gradients = jax.tree.map(jax.numpy.zeros_like, weights)
    device = jax.devices()[0]
    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=1, keep_unused=True).lower(weights, gradients, ids).compile()
    compile_s = time.perf_counter() - began
    static = (device.memory_stats() or {}).get("bytes_in_use")
    found = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        value, gradients = compiled(weights, gradients, ids)
        jax.block_until_ready(gradients)
        found.append((time.perf_counter() - began) * 1e3)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    temporary = int(compiled.memory_analysis().temp_size_in_bytes)
    files.save_file(unstacked(gradients, sizes["layers"]), folder / "gradients.safetensors")
    own = sum(leaf.nbytes for leaf in jax.tree.leaves((weights, gradients, ids)))
    peak_bytes = temporary if peak is None or static is None else int(peak) - int(static)
    return {
        "ms": found[WARM_UP:], "compile_s": compile_s, "static_bytes": static or own, "peak_bytes": peak_bytes,
        "temporary_bytes": temporary, "loss": float(value), "jax": jax.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))), flush=True)
