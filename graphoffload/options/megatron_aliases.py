"""Names of `--offload-modules` in Megatron-LM, and their meaning on Hugging Face and Megatron layers. Pure strings.

A name selects modules by the last part of their paths ("q_proj"), inside an attention module, an MLP or the routed experts. If
the model calls a function and has no such module, the name selects the operations that run directly in the body of the module
around the call: the attention operation in `self_attn`, the expert matrix products in `experts`.

router_fc1 and router_fc2 are the two matrix products of the *routed experts* (Megatron-LM #1752 applies them in TEGroupedMLP);
expert_fc1 is the later name of the first. In a dense model they mean the MLP. No name means shared experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from graphoffload.facts.saved_tensors import SavedTensor

MEGATRON_NAMES: dict[str, str] = {
    "attn_norm": "the norm before attention (input_layernorm, ln_1)",
    "qkv_linear": "the linears that make q, k and v (linear_qkv, q_proj + k_proj + v_proj, c_attn)",
    "core_attn": "the attention operation itself (core_attention, or the operation inside self_attn)",
    "attn_proj": "the linear after attention (linear_proj, o_proj, c_proj)",
    "mlp_norm": "the norm before the MLP (pre_mlp_layernorm, post_attention_layernorm, ln_2)",
    "router_fc1": "the first linear of the routed experts, or of a dense MLP",
    "router_fc2": "the second linear of the routed experts, or of a dense MLP",
    "shared_experts": "the shared experts of an MoE layer (shared_experts, shared_expert, shared_mlp)",
    "expert_fc1": "the first linear of the routed experts, or of a dense MLP (linear_fc1, gate_proj + up_proj, c_fc)",
    "moe_act": "the activation function between them (activation_func, act_fn, act), gate included",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ATTENTION = _words(
    "self_attn self_attention attn attention cross_attn crossattention cross_attention encoder_attn inter_attention"
)
_QKV = _words(
    "linear_qkv qkv_linear qkv_proj q_proj k_proj v_proj c_attn q_attn query_key_value qkv wqkv Wqkv wq wk wv query key value "
    "linear_q linear_kv linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj to_q to_k to_v "
    "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj"
)
_CORE = _words("core_attention core_attn")
_PROJ = _words("linear_proj attn_proj attn_linear o_proj c_proj out_proj dense wo proj to_out")
_FC1 = _words("linear_fc1 fc1 gate_proj up_proj gate_up_proj c_fc fc_in dense_h_to_4h w1 w3 wi wi_0 wi_1 input_linear")
_FC2 = _words("linear_fc2 fc2 down_proj c_proj fc_out dense_4h_to_h w2 wo output_linear")
_ACT = _words("act_fn act activation activation_fn activation_func moe_act gelu_impl")
_SHARED = _words("shared_experts shared_expert shared_mlp")
# The first row that matches wins. If a norm is named after the MLP, one named after attention is another norm.
_ATTN_NORM = (_words("attn_norm input_layernorm ln_1 attention_norm self_attn_layer_norm input_norm norm1"),)
_MLP_NORM = (
    _words("mlp_norm pre_mlp_layernorm pre_feedforward_layernorm ffn_norm"),
    _words("post_attention_layernorm post_attention_norm ln_2 norm2"),
)

_ATTENTION_OPS = ("*scaled_dot_product*", "*flash_attn*", "*flash_attention*", "*efficient_attention*", "*flex_attention*")
_UNFUSED_OPS = ("aten.bmm*", "aten.baddbmm*", "aten.matmul*", "aten.*softmax*")
_UNFUSED_READERS = (*_UNFUSED_OPS, "aten.native_dropout_backward*")
_MASKS = ("aten.native_dropout*", "aten.gt.*", "aten.bernoulli*")
_UNFUSED_PRODUCTS = (*_UNFUSED_OPS, *_MASKS, "*getitem*", "aten.exp.*", "aten.amax.*", "aten.sum.*", "aten.div.*")
_MATRIX_OPS = ("*.mm.*", "*.addmm.*", "*.bmm.*", "*grouped_mm*", "*grouped_gemm*", "*.gmm*")
_POINTWISE = tuple(
    f"aten.{name}*" for name in ("mul.", "silu", "gelu", "sigmoid", "tanh", "relu", "threshold_backward", "pow.")
)


@dataclass(frozen=True, slots=True)
class BodyRule:
    """Operations that run directly in the body of some modules, in no module of their own.

    Attributes:
        needed: globs on backward operations; an activation that one of them reads there is selected.
        produced: globs on forward operations; for recompute, their results there are selected.
        masks: globs on forward operations whose results there are selected for offload and keep too.
        modules: where they run, innermost module exactly; None: anywhere.
        made_here: narrows `needed` by the producer. True: one of `_POINTWISE` in these modules; False: any other.
    """

    needed: tuple[str, ...]
    produced: tuple[str, ...]
    masks: tuple[str, ...] = ()
    modules: frozenset[str] | None = None
    made_here: bool | None = None

    def needs(self, tensor: SavedTensor) -> bool:
        """Whether an operation of this rule needs the activation for backward."""
        if self.masks and self._here(tensor.module) and _any(self.masks, tensor.op):
            return True
        if self.made_here is not None and self.made_here != (self._here(tensor.module) and _any(_POINTWISE, tensor.op)):
            return False
        return any(
            _any(self.needed, op) and self._here(path) for op, _, path in (r.partition("@") for r in tensor.saved_by_ops)
        )

    def produces(self, tensor: SavedTensor) -> bool:
        """Whether an operation of this rule produced the activation."""
        return self._here(tensor.module) and _any(self.produced, tensor.op)

    def _here(self, path: str) -> bool:
        return self.modules is None or path in self.modules


def _any(globs: Iterable[str], op: str) -> bool:
    return any(fnmatchcase(op, glob) for glob in globs)


def _last(path: str) -> str:
    return path.rsplit(".", maxsplit=1)[-1]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _in_attention(path: str) -> bool:
    return not _ATTENTION.isdisjoint(_parent(path).split("."))


def rules_for(
    name: str, paths: tuple[str, ...], ops_by_path: Mapping[str, Collection[str]] | None
) -> tuple[frozenset[str], tuple[BodyRule, ...]]:
    """(modules, body rules) that a Megatron name means among the paths; both empty if the model has nothing of the kind."""
    if name == "core_attn":
        return _core_attention(paths, ops_by_path)
    if name in ("attn_norm", "mlp_norm"):
        for row in _ATTN_NORM if name == "attn_norm" else _MLP_NORM:
            found = frozenset(path for path in paths if _last(path) in row)
            if found:
                return found, ()
        return frozenset(), ()
    if name in ("qkv_linear", "attn_proj"):
        wanted = _QKV if name == "qkv_linear" else _PROJ
        return frozenset(path for path in paths if _last(path) in wanted and _in_attention(path)), ()
    if name == "shared_experts":
        return frozenset(path for path in paths if _last(path) in _SHARED), ()
    if name == "moe_act":
        return _activation(paths)
    return _expert_linear(paths, second=name == "router_fc2")


def _core_attention(
    paths: tuple[str, ...], ops_by_path: Mapping[str, Collection[str]] | None
) -> tuple[frozenset[str], tuple[BodyRule, ...]]:
    modules = frozenset(path for path in paths if _last(path) in _CORE)
    around = {_parent(path) for path in modules}
    bodies = frozenset(
        p for p in paths if (_last(p) in _ATTENTION or (_last(p) == "self" and _in_attention(p))) and p not in around
    )
    if modules and not bodies:
        return modules, ()
    ops = None if ops_by_path is None else [op for path in ops_by_path for op in ops_by_path[path]]
    inside = None if ops_by_path is None else [op for path in bodies for op in ops_by_path.get(path, ())]
    rules = []
    if any(_any(_ATTENTION_OPS, op) for op in ops) if ops is not None else bodies:
        rules.append(BodyRule(needed=_ATTENTION_OPS, produced=_ATTENTION_OPS))
    if any(_any((*_UNFUSED_OPS, *_ATTENTION_OPS), op) for op in inside) if inside is not None else bodies:
        rules.append(BodyRule(_UNFUSED_READERS, _UNFUSED_PRODUCTS, masks=_MASKS, modules=bodies))
    return modules, tuple(rules)


def _routed(paths: Iterable[str]) -> list[str]:
    """Paths of routed experts if a model has them, else all paths of dense MLPs; shared experts are neither."""
    found = [p for p in paths if _SHARED.isdisjoint(p.split(".")) and not _in_attention(p) and _last(p) not in _ATTENTION]
    routed = [path for path in found if "experts" in path.split(".")]
    return routed or found


def _expert_linear(paths: tuple[str, ...], *, second: bool) -> tuple[frozenset[str], tuple[BodyRule, ...]]:
    routed = _routed(paths)
    modules = frozenset(path for path in routed if _last(path) in (_FC2 if second else _FC1))
    bodies = frozenset(path for path in routed if _last(path) == "experts")
    if modules or not bodies:
        return modules, ()
    # The experts' weights are one tensor, and the body calls products as functions. The second product reads a result of the
    # gate's multiplication in this body. The first product may read one too (Llama 4 multiplies the hidden state with the
    # routing weight), but one from outside this body.
    return modules, (BodyRule(_MATRIX_OPS, _MATRIX_OPS, modules=bodies, made_here=second),)


def _activation(paths: tuple[str, ...]) -> tuple[frozenset[str], tuple[BodyRule, ...]]:
    routed = _routed(paths)
    modules = frozenset(path for path in routed if _last(path) in _ACT)
    around = frozenset(_parent(path) for path in routed if _last(path) in _FC1)
    # In a body that only calls functions (HF experts) a multiplication may be the routing weight's, so only the activation
    # function is selected.
    rules = (BodyRule(_POINTWISE, _POINTWISE, modules=around),) if around else ()
    return modules, rules
