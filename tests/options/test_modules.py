"""Patterns, paths and Megatron names: over strings, and on traced layers with the bytes that each name selects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import graphoffload
from graphoffload.analysis.module_paths import module_path, module_stack
from graphoffload.analysis.saved_values import GraphPair, real_uses, saved_placeholders, saved_table
from graphoffload.errors import PatternError
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.options.megatron_aliases import MEGATRON_NAMES
from graphoffload.options.patterns import Resolution, ancestors, clean_path, matches, near_misses, resolve, selects
from graphoffload.testing import observe

PART = st.text("abcdefgh_0123456789", min_size=1, max_size=6).filter(lambda part: part not in ("self", "_modules"))
PATH = st.lists(PART, min_size=1, max_size=5).map(".".join)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']", ""),
        ("L['s'].l", "l"),
        ('L["self"].layers[0].mlp', "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']._orig_mod.layers.0", "layers.0"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("self.layers.0", "layers.0"),
        ("L['fn'].model.norm", "model.norm"),
        ("G['model'].norm", "norm"),
        ("L['blocks'][3].attn", "3.attn"),
        ("L['self'].heads['x'].out", "heads.x.out"),
        ("getattr(L['self'].layers, '0').mlp", "layers.0.mlp"),
        ("getattr(getattr(L['self'].layers, '0'), 'mlp').act", "layers.0.mlp.act"),
        ("L['self'].layers[slice(None, 2, None)][1].mlp", "layers.1.mlp"),
        ("L['self'].layers.__getitem__(1).mlp", "layers.1.mlp"),
        ("L['self'].layers.0.mlp@2", "layers.0.mlp"),
        ("", ""),
    ],
)
def test_clean_path(raw: str, path: str) -> None:
    """What tracing calls a module, and what named_modules calls it."""
    assert clean_path(raw) == path


@given(PATH)
def test_every_spelling_of_a_path_is_cleaned_alike(path: str) -> None:
    """Attribute, index, dictionary and wrapped forms of one path; and cleaning is idempotent."""
    parts = path.split(".")
    spellings = [
        "L['self']." + path,
        "L['s']" + "".join(f"._modules['{part}']" for part in parts),
        "self." + "._orig_mod.".join(parts),
        "L['self']" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts),
    ]
    assert [clean_path(spelling) for spelling in spellings] == [path] * 4
    assert clean_path(path) == path


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.self_attn", "model.layers.0.self_attn", True),
        ("*.self_attn", "self_attn", True),
        ("*.self_attn", "model.layers.0.self_attn.q_proj", False),
        ("*.self_attn", "my_self_attn", False),
        ("self_attn", "layers.0.self_attn", False),
        ("layers.*.mlp", "layers.3.mlp", True),
        ("layers.[01].mlp", "layers.1.mlp", True),
        ("layers.?.mlp", "layers.10.mlp", False),
        ("*norm*", "layers.0.input_layernorm", True),
        ("*.Self_Attn", "self_attn", False),
    ],
)
def test_matches(pattern: str, path: str, expected: bool) -> None:
    """Globs span dots and are case-sensitive."""
    assert matches(pattern, path) is expected


@given(PATH, st.data())
def test_a_pattern_made_from_a_path_matches_it(path: str, data: st.DataObject) -> None:
    """Replace any stretch by "*": it still matches; append a letter: it does not."""
    start = data.draw(st.integers(0, len(path)))
    stop = data.draw(st.integers(start, len(path)))
    assert matches(path[:start] + "*" + path[stop:], path)
    assert not matches(path + "x", path)
    assert matches("*." + path.rsplit(".", maxsplit=1)[-1], path)


@given(PATH)
def test_ancestors_go_outwards(path: str) -> None:
    """From the path itself to its first part; each is the prefix of the one before."""
    found = ancestors(path)
    assert found[0] == path
    assert len(found) == path.count(".") + 1
    assert all(inner.startswith(outer + ".") for inner, outer in itertools.pairwise(found))


def tensor(name: str = "x", **facts: Any) -> SavedTensor:
    """A fact with the fields that patterns look at."""
    plain = {"views": (name,), "nbytes": 4, "dtype": "float32", "shape": (1,), "strides": (1,), "op": "aten.mm.default"}
    return SavedTensor(name=name, **{**plain, **facts})


def test_needed_inside_for_offload_and_produced_inside_for_recompute() -> None:
    """A norm's input is what it saves; its output is what recomputing it drops."""
    residual = tensor("residual", module="layers.0", saved_by=("layers.0", "layers.0.norm"))
    normed = tensor("normed", module="layers.0.norm", saved_by=("layers.0", "layers.0.mlp", "layers.0.mlp.up"))
    norm = resolve(["*.norm"], ["layers.0.norm", "layers.0.mlp.up"])["*.norm"]
    assert [selects(norm, t, "offload") for t in (residual, normed)] == [True, False]
    assert [selects(norm, t, "keep") for t in (residual, normed)] == [True, False]
    assert [selects(norm, t, "recompute") for t in (residual, normed)] == [False, True]


def test_what_is_inside_a_module_belongs_to_it() -> None:
    """Also where the table names only the innermost module."""
    inner = tensor(saved_by=("layers.0.mlp.up",), module="layers.0.mlp.act")
    mlp = resolve(["*.mlp"], ["layers.0.mlp.up"])["*.mlp"]
    assert selects(mlp, inner, "offload")
    assert selects(mlp, inner, "recompute")
    assert not selects(resolve(["*.up"], ["layers.0.mlp.up"])["*.up"], inner, "recompute")


def test_a_star_selects_what_has_no_module() -> None:
    """The loss region belongs to no module."""
    assert selects(resolve(["*"], [])["*"], tensor(module=""), "offload")
    assert not selects(resolve(["*.a"], ["x.a"])["*.a"], tensor(module=""), "offload")


def test_operations_and_boundaries() -> None:
    """ "op:" globs on the producer, boundary names before Megatron names."""
    ops = {"layers.0.mlp": ["aten.silu.default"]}
    found = resolve(
        ["op:aten.silu*", "op:silu", "op:aten.gelu*", "core_attn"], ["layers.0.mlp"], {"core_attn": ["layers.0.mlp"]}, ops
    )
    assert found.unmatched == ("op:aten.gelu*",)
    silu = tensor(op="aten.silu.default", module="layers.0.mlp", boundaries=("core_attn",))
    assert selects(found["op:aten.silu*"], silu)
    assert selects(found["op:silu"], silu)
    assert not selects(found["op:aten.silu*"], tensor(op="aten.mm.default"))
    assert found["core_attn"].boundaries == {"core_attn"}
    assert selects(found["core_attn"], silu)
    assert selects(found["core_attn"], silu, "recompute")
    assert not selects(found["core_attn"], replace(silu, boundaries=(), module=""))


def test_a_pattern_that_matches_nothing_names_near_misses() -> None:
    """What, where, what there is, and what to write."""
    found = resolve(["*.slf_attn", "*.mlp"], ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp"])
    assert found.unmatched == ("*.slf_attn",)
    error = found.error("offload_modules")
    assert error is not None
    for part in ("offload_modules", "'*.slf_attn'", "'*.self_attn'", "model.layers.0", '"*.self_attn"', "mark_boundary"):
        assert part in str(error), error
    assert resolve(["*.mlp"], ["a.mlp"]).error() is None
    assert "carry no module names" in str(resolve(["*.mlp"], []).error())
    missing = str(resolve(["shared_experts"], ["layers.0.mlp.gate_proj"]).error())
    assert "shared experts" in missing
    assert "Near: 'shared_experts'" not in missing
    assert missing.startswith("policy or offload_modules:")


def test_near_is_what_the_model_has() -> None:
    """Names that Megatron users know come only where no module of the model is near."""
    error = str(resolve(["*nrm*"], ["blocks.0.norm", "blocks.0.up", "blocks.0.act_fn"]).error())
    assert "Near: '*.norm'." in error
    assert not any(name in error for name in MEGATRON_NAMES), error
    assert near_misses("core_atn", ["blocks.0.norm"])[0] == "core_attn"
    assert near_misses("*.moe_acts", ["blocks.0.norm"])[0] == "moe_act"


@given(st.lists(PATH, min_size=1, max_size=8), st.text("abcdef.*", min_size=1, max_size=8))
def test_near_misses_are_known_names(paths: list[str], pattern: str) -> None:
    """Whatever is suggested matches something, or is a name."""
    for suggestion in near_misses(pattern, paths):
        assert suggestion in MEGATRON_NAMES or any(matches(suggestion, path) for path in paths)


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[SavedTable, Resolution]:
    """The saved activations of a module's joint graph, and the meaning of every Megatron name in it."""
    found: list[tuple[SavedTable, Resolution]] = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
        ops: dict[str, list[str]] = {}
        for node in nodes:
            ops.setdefault(module_path(node), []).append(str(node.target))
        graphs = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        pair = GraphPair(*graphs, num_fwd_outputs)
        paths = [path for node in nodes for path in module_stack(node)]
        found.append((with_readers(pair, saved_table(pair)), resolve(MEGATRON_NAMES, paths, ops_by_path=ops)))
        return graphs

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
    out = torch.compile(module, backend=backend, fullgraph=True)(*args, **kwargs)
    assert out is not None
    (result,) = found
    return result


def with_readers(pair: GraphPair, table: SavedTable) -> SavedTable:
    """Who needs each activation, from the definition: backward operations, through what torch recomputes in between."""
    forward_names = {node.name for node in pair.forward.graph.nodes}
    readers: dict[str, list[torch.fx.Node]] = {}
    for node, placeholder in saved_placeholders(pair):
        pending, needed = list(real_uses(placeholder)), readers.setdefault(node.name, [])
        while pending:
            user = pending.pop(0)
            if user.op == "call_function" and user.name in forward_names:
                pending.extend(user.users)
            elif user.op == "call_function":
                needed.append(user)
    result = []
    for t in table.tensors:
        nodes = [reader for view in t.views for reader in readers[view]]
        saved_by = tuple(dict.fromkeys(path for node in nodes for path in module_stack(node)))
        result.append(replace(t, saved_by=saved_by, saved_by_ops=tuple(f"{node.target}@{module_path(node)}" for node in nodes)))
    return SavedTable(tuple(result))


@functools.cache
def llama() -> tuple[SavedTable, Resolution]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    return trace(transformers.LlamaForCausalLM(config), torch.zeros(2, 16, dtype=torch.long), use_cache=False)


@functools.cache
def gpt2() -> tuple[SavedTable, Resolution]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=97, n_positions=32)
    return trace(transformers.GPT2LMHeadModel(config), torch.zeros(2, 16, dtype=torch.long), use_cache=False)


@functools.cache
def qwen3_moe() -> tuple[SavedTable, Resolution]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=97,
    )  # fmt: skip
    return trace(transformers.Qwen3MoeForCausalLM(config), torch.zeros(2, 16, dtype=torch.long), use_cache=False)


class Act(nn.Module):
    """fc1 and fc2 with the activation called as a function between them, as in Megatron's MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        out: Tensor = self.linear_fc2(F.silu(gate) * up)
        return out


class Router(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).softmax(-1)


class MoE(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts, self.shared_experts = Router(width, 2), Act(width, 24), Act(width, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x) * self.router(x)[..., :1] + self.shared_experts(x)
        return out


class CoreAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.core_attention, self.heads = CoreAttention(), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.linear_qkv(x).chunk(3, dim=-1))
        out: Tensor = self.linear_proj(self.core_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class MegatronLayer(nn.Module):
    """A layer with Megatron-LM's module names."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention, self.mlp = SelfAttention(width, heads), MoE(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.pre_mlp_layernorm(x))
        return out


@functools.cache
def megatron() -> tuple[SavedTable, Resolution]:
    model = nn.Sequential(nn.Linear(64, 64), MegatronLayer())
    return trace(model, torch.randn(2, 16, 64))


# Float32, 2 x 16 tokens, width 64: one activation of the width is 8192 bytes, one number a token 128.
TOKENS, WIDTH, ONE = 32, 32 * 64 * 4, 32 * 4
BYTES = {
    # input and reciprocal deviation; mean too where the norm is a LayerNorm.
    "attn_norm": {"llama": WIDTH + ONE, "gpt2": WIDTH + 2 * ONE, "qwen3_moe": WIDTH + ONE, "megatron": WIDTH + 2 * ONE},
    "qkv_linear": {"llama": WIDTH, "gpt2": WIDTH, "qwen3_moe": WIDTH, "megatron": WIDTH},
    # q, k, v, output, one logsumexp a head and token (4 x ONE), a mask of 2 x 16 x 16; Megatron: no mask, q, k, v are one.
    # GPT-2 with dropout: q, k, v, probabilities before and after dropout (2 x 4 x 16 x 16), and the mask of bytes.
    "core_attn": {
        "llama": 4 * WIDTH + 4 * ONE + 2048,
        "gpt2": 3 * WIDTH + 2 * 8192 + 2048,
        "qwen3_moe": 4 * WIDTH + 4 * ONE + 2048,
        "megatron": 4 * WIDTH + 4 * ONE,
    },
    "attn_proj": {"llama": WIDTH, "gpt2": WIDTH, "qwen3_moe": WIDTH, "megatron": WIDTH},
    # The residual; torch recomputes it in Llama and Qwen as embedding + attention's output, so those two are what is needed.
    "mlp_norm": {"llama": 2 * WIDTH + ONE, "gpt2": WIDTH + 2 * ONE, "qwen3_moe": 2 * WIDTH + ONE, "megatron": WIDTH + 2 * ONE},
    # Routed experts: 2 experts a token, and 4 int32 offsets.
    "router_fc1": {"llama": WIDTH, "gpt2": WIDTH, "qwen3_moe": 2 * WIDTH + 16, "megatron": WIDTH},
    "expert_fc1": {"llama": WIDTH, "gpt2": WIDTH, "qwen3_moe": 2 * WIDTH + 16, "megatron": WIDTH},
    "router_fc2": {
        "llama": TOKENS * 160 * 4,
        "gpt2": TOKENS * 256 * 4,
        "qwen3_moe": 2 * TOKENS * 32 * 4,
        "megatron": TOKENS * 24 * 4,
    },
    # Gate and up; GPT-2's tanh approximation keeps its input and the tanh.
    "moe_act": {
        "llama": 2 * TOKENS * 160 * 4,
        "gpt2": 2 * TOKENS * 256 * 4,
        "qwen3_moe": 2 * TOKENS * 64 * 4,
        "megatron": TOKENS * 48 * 4,
    },
    # Input, gate and up in one, and their product.
    "shared_experts": {"megatron": WIDTH + TOKENS * 80 * 4 + TOKENS * 40 * 4},
}
TRACES: dict[str, Callable[[], tuple[SavedTable, Resolution]]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3_moe": qwen3_moe,
    "megatron": megatron,
}


@pytest.mark.parametrize("model", TRACES)
@pytest.mark.parametrize("name", MEGATRON_NAMES)
def test_what_a_megatron_name_selects(name: str, model: str) -> None:
    """The bytes of each name in each model, counted by hand; a model without such a thing says so."""
    table, resolution = TRACES[model]()
    if model not in BYTES[name]:
        assert name == "shared_experts"
        assert resolution.unmatched == ("shared_experts",)
        return
    chosen = [t for t in table.tensors if selects(resolution[name], t)]
    assert sum(t.nbytes or 0 for t in chosen) == BYTES[name][model], [(t.name, t.nbytes) for t in chosen]


def mixture(name: str) -> tuple[SavedTable, Resolution]:
    """A model of two layers with routed experts, and shared ones where the architecture has them."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Qwen2Moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 4},
        "DeepseekV3": {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        "GraniteMoeShared": {"intermediate_size": 32, "num_local_experts": 4, "shared_intermediate_size": 48},
        "Llama4": {"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16},
    }  # fmt: skip
    config = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=97, pad_token_id=0,
        **({} if name == "Llama4" else {"num_experts_per_tok": 2}), **sizes[name],
    )  # fmt: skip
    return trace(getattr(transformers, f"{name}ForCausalLM")(config), torch.zeros(2, 16, dtype=torch.long), use_cache=False)


# In widths (8192 bytes): two experts a token, or all four where every expert computes every token; 32 or 96 of 64 inside.
MIXTURES: dict[str, dict[str, float]] = {
    "Qwen2Moe": {"expert_fc1": 4, "router_fc2": 2, "moe_act": 4, "shared_experts": 2 * (1 + 3 * 0.75)},
    "DeepseekV3": {"expert_fc1": 2, "router_fc2": 1, "moe_act": 2, "shared_experts": 1 + 3 * 0.5},  # one layer of two is dense
    "GraniteMoeShared": {"expert_fc1": 4, "router_fc2": 2, "moe_act": 4, "shared_experts": 2 * (1 + 3 * 0.75)},
    "Llama4": {"expert_fc1": 8, "router_fc2": 12, "moe_act": 24, "shared_experts": 2 * (1 + 3 * 1.5)},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MIXTURES)
def test_routed_and_shared_experts(model: str) -> None:
    """Hugging Face's mixtures call products as functions in the experts' body, or scale what goes into the first one."""
    table, resolution = mixture(model)
    found = {name: [t for t in table.tensors if selects(resolution[name], t)] for name in (*MIXTURES[model], "router_fc1")}
    widths = {name: sum(t.nbytes or 0 for t in chosen if t.dtype == "float32") / WIDTH for name, chosen in found.items()}
    assert widths == {**MIXTURES[model], "router_fc1": MIXTURES[model]["expert_fc1"]}


@pytest.mark.parametrize("name", MEGATRON_NAMES)
def test_the_backend_offloads_what_a_name_selects(name: str) -> None:
    """offload_modules=(name,) on a Megatron layer: those bytes, but for what may not go, and no others."""
    table, resolution = megatron()
    chosen = {t.name for t in table.tensors if selects(resolution[name], t) and t.eligible}
    options: dict[str, Any] = {"policy": "offload", "offload_modules": (name,), "min_tensor_bytes": 0, "inner": "aot_eager"}
    model = nn.Sequential(nn.Linear(64, 64), MegatronLayer())
    torch._dynamo.reset()
    with observe() as seen:
        torch.compile(model, backend=graphoffload.OffloadBackend(**options))(torch.randn(2, 16, 64)).sum().backward()
    (plan,) = seen.plans
    assert {d.name for d in plan.decisions if d.action == "offload"} == chosen
    assert seen.copied_bytes == sum(table[t].nbytes or 0 for t in chosen) > 0


@pytest.mark.parametrize("name", MEGATRON_NAMES)
def test_the_backend_refuses_a_name_that_means_nothing(name: str) -> None:
    """A model of linears: each name is an error that says what it stands for."""
    torch._dynamo.reset()
    backend = graphoffload.OffloadBackend(offload_modules=(name,), min_tensor_bytes=0, inner="aot_eager")
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), backend=backend)
    with pytest.raises(BackendCompilerFailed) as caught:
        model(torch.randn(2, 64))
    assert isinstance(caught.value.inner_exception, PatternError)
    assert MEGATRON_NAMES[name] in str(caught.value)


@pytest.mark.parametrize("model", TRACES)
def test_recomputing_attention_drops_its_products_alone(model: str) -> None:
    """q, k and v are made elsewhere: recomputing the attention operation reads them."""
    table, resolution = TRACES[model]()
    chosen = {t.name for t in table.tensors if selects(resolution["core_attn"], t, "recompute")}
    needed = {t.name for t in table.tensors if selects(resolution["core_attn"], t, "offload")}
    assert chosen < needed


def test_attention_in_no_attention_module() -> None:
    """core_attn is the operation itself wherever it runs; without one the name is an error."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).sin()

    table, resolution = trace(nn.Sequential(Block()), torch.randn(2, 16, 64))
    assert sum(t.nbytes or 0 for t in table.tensors if selects(resolution["core_attn"], t)) == 2 * WIDTH + 4 * ONE
    _, plain = trace(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(2, 64))
    assert "core_attn" in plain.unmatched


def test_with_routed_experts_dense_layers_are_not_meant() -> None:
    """A model whose first layer is dense: the names mean the experts, and neither the dense MLP nor the shared experts."""
    paths = [
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.act_fn",
        "layers.1.mlp.experts.0.gate_proj",
        "layers.1.mlp.experts.0.act_fn",
        "layers.1.mlp.shared_experts.gate_proj",
    ]
    found = resolve(["expert_fc1", "moe_act", "shared_experts"], paths)
    assert found["expert_fc1"].modules == {"layers.1.mlp.experts.0.gate_proj"}
    assert found["moe_act"].modules == {"layers.1.mlp.experts.0.act_fn"}
    assert found["shared_experts"].modules == {"layers.1.mlp.shared_experts"}
    dense = resolve(["expert_fc1", "moe_act"], paths[:2])
    assert dense["expert_fc1"].modules == {"layers.0.mlp.gate_proj"}
