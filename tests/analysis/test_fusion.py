"""What a fusing compiler makes of a graph: one kernel for operations that share data, and lives that follow kernels."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from analysis.as_on_a_gpu import exists
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.scheduler import Scheduler
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis import addmm
from graphoffload.analysis.costs import Measured, node_costs
from graphoffload.analysis.fusion import FARTHEST, fusion_of
from graphoffload.analysis.reductions import axis_of, loops
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.compiler.inner_compile import AS_PLANNED, planned_fusions
from graphoffload.hardware.profile import PROFILES
from graphoffload.torch_internals.inductor import in_graph_order, mixes_sums, most_reads


def traced(function: Callable[..., object], *shapes: tuple[int, ...], decomposed: bool = False) -> Graph:
    """The graph of a function of tensors of these shapes; `decomposed`: into what Inductor takes."""
    table = select_decomp_table() if decomposed else None
    return make_fx(function, table, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes)).graph


def named(graph: Graph, name: str) -> Node:
    """A node by its name."""
    return next(node for node in graph.nodes if node.name == name)


def gated(gate: Tensor, up: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a gated MLP: three products read what pointwise operations make of the same three tensors."""
    gradient = d @ w
    active = torch.sigmoid(gate)
    return (active * up).t() @ d, (gradient * up * active).t() @ d, (gradient * active * gate).t() @ d


def test_operations_that_share_data_are_one_kernel_even_where_products_stand_between_them() -> None:
    graph = traced(gated, (64, 32), (64, 32), (64, 16), (16, 32))
    fusion = fusion_of(graph, fuses=True)
    products = [node for node in graph.nodes if "mul" in node.name and exists(fusion, node)]
    assert len(products) == 3
    assert len({fusion.spans[node] for node in products}) == 1, "all three are written, and in memory, at once"
    assert not exists(fusion, named(graph, "sigmoid")), "computed where it is read"
    start, end = fusion.spans[products[0]]
    assert end - start == 2
    assert set(fusion.order[start : end + 1]) == set(products)
    assert fusion.kernels == 5, "four products, and these"


def test_what_a_kernel_needs_runs_before_it_and_every_node_runs_once() -> None:
    graph = traced(gated, (64, 32), (64, 32), (64, 16), (16, 32))
    fusion = fusion_of(graph, fuses=True)
    assert sorted(node.name for node in fusion.order) == sorted(node.name for node in graph.nodes)
    at = {node: position for position, node in enumerate(fusion.order)}
    for node in fusion.spans:
        for identity in fusion.read_by(node):
            makers = [m for m in fusion.spans if (v := fake(m)) is not None and storage_id(v) == identity]
            assert all(at[maker] < at[node] for maker in makers), (node, makers)
    assert at[named(graph, "mm")] < min(at[node] for node in fusion.spans if "mul" in node.name)


def test_a_value_is_read_when_the_kernel_runs_that_computes_it_inline() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        wide = x.double()  # never in memory: computed where the sum reads it
        y = w @ w
        return (wide * y).sum()

    graph = traced(function, (32, 32), (32, 32))
    fusion = fusion_of(graph, fuses=True)
    x = fake(next(iter(graph.nodes)))
    assert x is not None
    readers = fusion.readers[storage_id(x)]
    assert [node.name for node in readers] == ["sum_1"]
    assert fusion.spans[readers[0]][0] > fusion.spans[named(graph, "mm")][1]


def late(gate: Tensor, up: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the product that the kernel needs behind the first one that reads it, as recomputation leaves it."""
    active = torch.relu(gate)  # what CPUs find dear is stored at once
    first = (active * up).t() @ d
    gradient = d @ w
    return first, (gradient * up * active).t() @ d, (gradient * active * gate).t() @ d


def looked_up(gate: Tensor, up: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels are shifted first and looked up in the last product, as in the loss of a language model: they are one kernel."""
    labels = torch.cat([gate[1:, :1], gate[:1, :1]]).abs().long() % 32
    first = gate.t() @ up
    logits = d @ w
    loss = logits.float().logsumexp(1, keepdim=True) - logits.gather(1, labels)
    return first, loss.sum(), logits.t() @ d


def products_before_marks(graph: Graph) -> dict[int, list[str]]:
    """Of a mark in front of each of a graph's operations, one compile each: the products that Inductor runs before it."""
    found: dict[int, list[str]] = {}
    operations = [at for at, node in enumerate(graph.nodes) if node.op == "call_function"]

    def noting(scheduler: Scheduler) -> None:
        ran: list[str] = []
        for node in (part for whole in scheduler.nodes for part in whole.get_nodes()):
            made = node.node
            if "graphoffload" in str(getattr(made, "op_overload", "")):
                found[at] = [name for name in ran if name.startswith("mm")]
            elif made is not None and (origin := made.get_origin_node()) is not None:
                ran.append(origin.name)
        raise StopIteration

    for at in operations:
        marked = Graph()
        marked.output(marked.graph_copy(graph, {}))
        nodes = list(marked.nodes)
        value = fake(nodes[0])
        assert value is not None
        with marked.inserting_before(nodes[at]), value.fake_mode:  # type: ignore[attr-defined]
            memory = marked.call_function(torch.ops.aten.empty.memory_format, ([1],), {"device": value.device})
            memory.meta["val"] = torch.empty(1)
            marked.call_function(torch.ops.graphoffload.wait.default, (memory, memory, "mark", 0)).meta["val"] = None
        module = GraphModule({}, marked)
        inputs = [fake(node) for node in nodes if node.op == "placeholder"]
        settings = torch._inductor.config.patch({**AS_PLANNED, "fx_graph_cache": False})
        stopped = mock.patch.object(Scheduler, "codegen", noting), contextlib.suppress(Exception)
        with settings, planned_fusions(None), in_graph_order(), stopped[0], stopped[1]:
            compile_fx_inner(module, inputs)
    return found


@pytest.mark.parametrize("function", [gated, late, looked_up])
def test_what_stands_in_front_of_an_operation_runs_where_inductor_runs_it(function: Callable[..., object]) -> None:
    """A kernel's turn is that of the first of its readers, or comes when what it needs is there; nothing runs early for it."""
    graph = traced(function, (64, 32), (64, 32), (64, 16), (16, 32), decomposed=True)
    fusion = fusion_of(graph, fuses=True)
    found = products_before_marks(graph)
    assert len(found) == sum(node.op == "call_function" for node in graph.nodes)
    for at, products in found.items():
        run = [node.name for node in fusion.order[: fusion.begun[at]] if node.name.startswith("mm")]
        assert sorted(run) == sorted(products), (at, list(graph.nodes)[at])


def test_an_op_has_a_place_between_the_last_product_and_the_loss() -> None:
    """Memory that the loss takes may be waited for when the product is there."""
    graph = traced(looked_up, (64, 32), (64, 32), (64, 16), (16, 32), decomposed=True)
    fusion = fusion_of(graph, fuses=True)
    product = named(graph, "mm_1")
    behind = list(graph.nodes).index(product) + 1
    assert fusion.order[fusion.begun[behind] - 1] is product


def test_operations_over_other_sizes_or_with_a_product_between_them_stay_apart() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x.sin() @ w
        b = (a + x).cos() @ w  # needs the product of the first
        return a, b, (x[:4] * 2) @ w

    graph = traced(function, (32, 32), (32, 32))
    fusion = fusion_of(graph, fuses=True)
    spans = [fusion.spans[named(graph, name)] for name in ("sin", "cos", "mul")]
    assert len(set(spans)) == 3


def test_without_fusion_every_value_exists_and_order_is_the_graphs() -> None:
    graph = traced(gated, (64, 32), (64, 32), (64, 16), (16, 32))
    fusion = fusion_of(graph, fuses=False)
    assert fusion.order == list(graph.nodes)
    assert exists(fusion, named(graph, "sigmoid"))
    assert fusion.kernels == 10, "one each, but for transposes"


def test_a_measured_kernel_brings_its_time_and_its_workspace() -> None:
    graph = traced(lambda x, w: (x @ w).sin(), (32, 32), (32, 32))
    fusion = fusion_of(graph, fuses=True)
    known = Measured(1.0, 4096)
    costs = node_costs(fusion, PROFILES["h200-sxm"], measured=lambda node: known if node.name == "mm" else None)
    by_name = {node.name: cost for node, cost in zip(fusion.order, costs, strict=True)}
    assert (by_name["mm"].time_s, by_name["mm"].workspace_bytes) == (1.0, 4096)
    assert by_name["sin"].workspace_bytes == 0


def test_attention_has_flops_and_its_backward_a_workspace_on_a_gpu() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = op(q, k, v, 0.0, True)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(d, q, k, v, out, logsumexp, 0.0, True)

    shape = (2, 4, 64, 16)
    graph = traced(function, shape, shape, shape, shape)
    fusion = fusion_of(graph, fuses=True)
    costs = [cost for cost in node_costs(fusion, PROFILES["h200-sxm"]) if cost.flops]
    whole = 4 * 2 * 4 * 64 * 64 * 16
    assert [cost.flops for cost in costs] == [whole // 2, whole * 5 // 2 // 2]
    assert [cost.workspace_bytes for cost in costs] == [0, 4 * 2 * 4 * 64 * 16 + 4 * 2 * 4 * 64]
    assert all(cost.workspace_bytes == 0 for cost in node_costs(fusion, PROFILES["cpu"]))


def test_attention_with_its_random_state_costs_what_it_does() -> None:
    """Under a checkpoint torch saves the state of the random numbers before attention, and puts it back to run it again."""
    from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]

    shape = (2, 4, 64, 16)
    (plain,) = (n for n in traced(attention, shape, shape, shape).nodes if "attention" in n.name)
    graph, values = torch.fx.Graph(), dict[Node, Node]()
    for argument in plain.all_input_nodes:
        values[argument] = graph.node_copy(argument)
    arguments = torch.fx.map_arg(plain.args, values.__getitem__)
    saving = graph.call_function(run_and_save_rng_state, (plain.target, *arguments))
    saving.meta["val"] = (torch.empty(5056, dtype=torch.uint8, device="meta"), plain.meta["val"])
    again = graph.call_function(run_with_rng_state, (saving, plain.target, *arguments))
    again.meta["val"] = plain.meta["val"]
    on_gpu = graph.call_function(graphsafe_run_with_rng_state, (plain.target, *arguments), {"rng_state": saving})
    for at, value in enumerate(plain.meta["val"]):  # torch leaves a value on the parts alone
        graph.call_function(operator.getitem, (on_gpu, at)).meta["val"] = torch.empty_like(value)
    (expected,) = node_costs(fusion_of(plain.graph, fuses=True), PROFILES["h200-sxm"])[3:4]
    fusion = fusion_of(graph, fuses=True)
    found = dict(zip(fusion.order, node_costs(fusion, PROFILES["h200-sxm"]), strict=True))
    assert found[saving].flops == found[again].flops == found[on_gpu].flops == expected.flops > 0
    assert found[again].time_s == pytest.approx(expected.time_s, rel=0.05)
    assert found[on_gpu].time_s == pytest.approx(expected.time_s, rel=0.05)


def test_what_merely_reads_the_same_data_far_apart_stays_apart() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = (x * 2) @ w
        between = w
        for _ in range(FARTHEST + 2):
            between = between @ w
        return first, between + (x * 3) @ w

    graph = traced(function, (32, 32), (32, 32))
    fusion = fusion_of(graph, fuses=True)
    assert fusion.spans[named(graph, "mul")] != fusion.spans[named(graph, "mul_1")]


def test_what_is_computed_from_something_made_far_away_does_not_join_its_kernel() -> None:
    """The kernel would run where its first part does, and all that the far part needs would have to run before."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        early = (x * 2).sum(0, keepdim=True) * 3
        soon, late = early.expand(32, 32) @ w, w
        for _ in range(FARTHEST + 2):
            late = late @ w
        return soon * early + late, early + late[:1]

    graph = traced(function, (32, 32), (32, 32))
    fusion = fusion_of(graph, fuses=True)
    assert fusion.spans[named(graph, "add_1")] != fusion.spans[named(graph, "mul_1")]
    at = {node: position for position, node in enumerate(fusion.order)}
    assert at[named(graph, "mul_1")] < at[named(graph, "mm_1")]


def test_a_sum_of_many_values_is_stored_in_parts() -> None:
    """The first part frees what it has added up, instead of everything being in memory until the end."""
    count = 2 * most_reads("cpu")

    def function(x: Tensor, w: Tensor) -> Tensor:
        total = torch.bmm(x, w)  # a sum with a product of matrices is stored with it, each
        for number in range(1, count):
            total = total + torch.bmm(x * number, w)
        return total

    graph = traced(function, (1, 32, 32), (1, 32, 32))
    fusion = fusion_of(graph, fuses=True)
    sums = [node for node in graph.nodes if node.name.startswith("add")]
    assert [node for node in sums if exists(fusion, node)] == [sums[most_reads("cpu") - 1], sums[-1]]
    first = fake(named(graph, "bmm"))
    assert first is not None
    assert fusion.readers[storage_id(first)] == [sums[most_reads("cpu") - 1]]


def shared_weight(x: Tensor, y: Tensor, z: Tensor, d: Tensor) -> Tensor:
    """The gradient of a weight that was used three times; something pointwise reads no sum of it."""
    return x.t() @ d + y.t() @ d + z.t() @ d


def test_a_sum_runs_with_the_product_that_it_adds() -> None:
    """As addmm: where it stands, not at the end of the graph, and the product's own result does not exist."""
    graph = traced(shared_weight, (16, 8), (16, 8), (16, 8), (16, 4))
    fusion = fusion_of(graph, fuses=True)
    sums, products = ([node for node in graph.nodes if node.name.startswith(name)] for name in ("add", "mm"))
    assert [exists(fusion, node) for node in (*sums, *products)] == [True, True, True, False, False]
    assert [fusion.added[node] for node in sums] == products[1:]
    assert fusion.kernels == 3
    order = [node.name for node in fusion.order if node in sums or node in products]
    assert order == ["mm", "mm_1", "add", "mm_2", "add_1"]
    costs = node_costs(fusion, PROFILES["h200-sxm"])
    charged = dict(zip(fusion.order, costs, strict=True))
    assert [charged[node].moved_bytes for node in sums] == [8 * 4 * 4] * 2, "the summand alone: the product is charged the rest"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w, b: torch.relu(x @ w + b), {"cpu": 1, "cuda": 0}),  # a GPU leaves it to the relu
        (lambda x, w, b: (x @ w + b) @ w, {"cpu": 1, "cuda": 1}),
        (lambda x, w, b: (x @ w + b).t() @ x, {"cpu": 1, "cuda": 1}),
        (lambda x, w, b: torch.relu((x @ w + b).t()), {"cpu": 1, "cuda": 0}),
        (lambda x, w, b: b[:1] + x @ w, {"cpu": 1, "cuda": 1}),
        (lambda x, w, b: (x @ w)[:1] + b, {"cpu": 0, "cuda": 0}),
        (lambda x, w, b: ((y := x @ w) + b, y), {"cpu": 0, "cuda": 0}),
        (lambda x, w, b: x @ w + 1, {"cpu": 0, "cuda": 0}),
        (lambda x, w, b: (x @ w + b + x @ b) @ w, {"cpu": 2, "cuda": 2}),  # the second is a product now, and so is the first
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_which_sums_inductor_makes_part_of_products(
    function: Callable[..., object], found: dict[str, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = traced(function, (8, 8), (8, 8), (8, 8), decomposed=True)
    monkeypatch.setattr(addmm, "_is_on_gpu", lambda value: device == "cuda")
    assert len(fusion_of(graph, fuses=True).added) == found[device]
    if device == "cpu":  # and Inductor's own pass on the same graph
        patterns = post_grad.pass_patterns[2]
        patterns.apply(graph)
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)) == found[device]


def test_inductor_is_held_to_the_same_distance() -> None:
    from types import SimpleNamespace

    from torch._inductor.virtualized import V

    def node(order: int, writes: int = 1000, reads: str = "buf0") -> SimpleNamespace:
        return SimpleNamespace(
            min_order=order,
            max_order=order,
            unmet_dependencies=[SimpleNamespace(name=reads)],
            get_buffer_names=lambda: {f"buf{order}"},
            get_write_buffer_sizes=lambda: writes,
            get_read_write_buffers_sizes=lambda: 2000,
        )

    class Scheduler:
        """operators: the nodes that are no kernels of Inductor."""

        def __init__(self, **operators: tuple[int, object]) -> None:
            self.name_to_node = {
                name: SimpleNamespace(node=operator, min_order=order) for name, (order, operator) in operators.items()
            }

    before = type(V.choices)
    with planned_fusions(None):
        only = Scheduler()
        assert not V.choices.can_fuse_horizontal(only, node(0), node(FARTHEST + 1), 10**9)
        assert not V.choices.can_fuse_vertical(only, node(0), node(FARTHEST + 1), 10**9)
        assert V.choices.can_fuse_vertical(only, node(0), node(FARTHEST), 10**9)
        assert V.choices.can_fuse_vertical(only, node(0), node(FARTHEST + 1, writes=20), 10**9), "next to nothing"
        assert not V.choices.can_fuse_vertical(only, node(0), node(FARTHEST + 1, writes=21), 10**9)
        assert not V.choices.can_fuse_vertical(only, node(0), node(FARTHEST + 1, writes=20, reads="buf1"), 10**9)
        offload = SimpleNamespace(op_overload=torch.ops.graphoffload.offload.default)
        product = SimpleNamespace(op_overload=torch.ops.aten.mm.default)
        ours = Scheduler(op1=(1, offload), op2=(2, SimpleNamespace(inputs=[offload])), op3=(3, product), op9=(99, offload))
        for pair in ((node(0), node(FARTHEST + 2)), (node(FARTHEST + 2), node(0))):
            assert V.choices.can_fuse_vertical(ours, *pair, 10**9), "an offload and its handle are in between"
        assert not V.choices.can_fuse_vertical(ours, node(0), node(FARTHEST + 3), 10**9), "and a product"
        assert isinstance(V.choices, before)
    assert type(V.choices) is before


def test_crumbs_are_no_reason_for_one_kernel() -> None:
    """Chunks of a loss read the same scalar, and are to follow each other; what is as large as they are is worth a kernel."""

    def chunks(x: Tensor, y: Tensor, shared: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x.exp() * shared) @ w, (y.exp() * shared) @ w

    for shape, together in (((1,), False), ((64, 32), True)):
        graph = traced(chunks, (64, 32), (64, 32), shape, (32, 16))
        fusion = fusion_of(graph, fuses=True)
        assert (fusion.spans[named(graph, "mul")] == fusion.spans[named(graph, "mul_1")]) is together


def test_large_operations_run_apart_where_a_plan_asks_for_it() -> None:
    """Unless one needs the other: the three results of a gated MLP's backward, but not what a norm sums of its own result."""
    graph = traced(gated, (64, 32), (64, 32), (64, 16), (16, 32))
    for unfused_bytes, kernels in ((None, 1), (64 * 32 * 4 + 1, 1), (64 * 32 * 4, 3)):
        fusion = fusion_of(graph, fuses=True, unfused_bytes=unfused_bytes)
        products = [node for node in graph.nodes if "mul" in node.name and exists(fusion, node)]
        assert len({fusion.spans[node] for node in products}) == kernels
    graph = traced(norm_backward, (64, 32), (64, 32), (64, 1))
    together = [fusion_of(graph, fuses=True, unfused_bytes=unfused_bytes).spans for unfused_bytes in (None, 1024)]
    assert together[0] == together[1]


def norm_backward(x: Tensor, d: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Of a norm: its input's gradient takes a sum of each row, its weight's a sum over all of them."""
    hat = x * rstd
    return rstd * (d - hat * (d * hat).mean(-1, keepdim=True)), (d * hat).sum(tuple(range(x.dim() - 1)))


ROWS_AND_COLUMNS = [
    pytest.param((8192, 1024), True, id="large"),
    pytest.param((2, 4096, 1024), True, id="batch"),
    pytest.param((64, 32), False, id="small"),
    pytest.param((2048, 4096), False, id="few"),
    pytest.param((8192, 512), False, id="few bytes"),
    pytest.param((65536, 2**15), False, id="long"),
]


def test_a_sum_over_some_of_the_rows_runs_alone() -> None:
    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(-1), x.sin().sum(0)

    graph = traced(sums, (2, 4096, 1024))
    fusion = fusion_of(graph, fuses=True)
    assert fusion.spans[named(graph, "sum_1")] != fusion.spans[named(graph, "sum_2")]


@pytest.mark.parametrize(("shape", "mixed"), ROWS_AND_COLUMNS)
def test_sums_of_rows_and_columns_are_one_kernel_only_if_neither_needs_the_other(shape: tuple[int, ...], mixed: bool) -> None:
    """Inductor mixes the two orders where both merely read the same, and this is large; a sum of rows that the other needs runs
    before it."""

    def computes_rstd(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return norm_backward(x, d, torch.rsqrt(x.square().mean(-1, keepdim=True)))

    graph = traced(norm_backward, shape, shape, (*shape[:-1], 1))
    fusion = fusion_of(graph, fuses=True)
    assert (fusion.spans[named(graph, "sum_1")] == fusion.spans[named(graph, "mean")]) is mixed
    graph = traced(computes_rstd, shape, shape)
    fusion = fusion_of(graph, fuses=True)
    assert fusion.spans[named(graph, "mean")] == fusion.spans[named(graph, "mean_1")]
    assert fusion.spans[named(graph, "sum_1")][0] > fusion.spans[named(graph, "mean")][1]


def test_a_sum_of_columns_shares_no_kernel_for_what_pointwise_operations_read() -> None:
    """A norm's value, computed again, is written by the kernel of the sums of rows, which come later, and read in its order."""

    def backward(x: Tensor, d: Tensor, rstd: Tensor, weight: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        hat = x * rstd
        again, columns = hat * weight, (d * hat).sum(0)
        scaled = d * weight
        return columns, again.t() @ up, rstd * (scaled - hat * (scaled * hat).mean(-1, keepdim=True))

    graph = traced(backward, (512, 128), (512, 128), (512, 1), (128,), (512, 64))
    fusion = fusion_of(graph, fuses=True)
    of = {name: fusion.spans[named(graph, name)] for name in ("sum_1", "mul_1", "mean")}
    assert of["mul_1"] == of["mean"] != of["sum_1"]


@pytest.mark.parametrize(("version", "mixed"), [("2.13.0", False), ("2.15.0", True)])
def test_wide_matrices_are_mixed_from_a_release_on(version: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert mixes_sums(8192, 8192) is mixed
    assert mixes_sums(16384, 8192)


def grouped(x: Tensor, w: Tensor, d: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """A gated layer of experts and gradients of its weight and input, each product followed by pointwise operations."""
    up = torch.ops.aten._grouped_mm(x, w, offsets)
    active = torch.relu(up)
    gradient = d * active
    return torch.ops.aten._grouped_mm(x.t(), gradient, offsets), active.sin(), active.cos()


def experts() -> Graph:
    """The graph of `grouped`: 64 rows of 32 in 4 groups, each with a matrix of 32 x 16."""
    bf16 = torch.bfloat16
    values = torch.empty(64, 32, dtype=bf16), torch.empty(4, 32, 16, dtype=bf16), torch.empty(64, 16, dtype=bf16)
    return make_fx(grouped, tracing_mode="fake")(*values, torch.zeros(4, dtype=torch.int32)).graph


def test_products_of_groups_are_kernels_with_flops_of_their_own() -> None:
    graph = experts()
    fusion = fusion_of(graph, fuses=True)
    up, gradient = (node for node in graph.nodes if "grouped" in str(node.target))
    assert fusion.kinds[up] == fusion.kinds[gradient] == "kernel"
    assert exists(fusion, up), "read by a kernel and by pointwise operations: in memory, and not computed by its readers"
    flops = {node: cost.flops for node, cost in zip(fusion.order, node_costs(fusion, PROFILES["h200-sxm"]), strict=True)}
    assert flops[up] == flops[gradient] == 2 * 64 * 32 * 16, "each row meets the matrix of one group"
    assert {node for node, count in flops.items() if count} == {up, gradient}


def test_the_gradient_of_a_weight_runs_at_its_place_and_not_where_the_graph_returns_it() -> None:
    def function(x: Tensor, d: Tensor, y: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.ops.aten._grouped_mm(x.t(), d, offsets)
        return gradient.transpose(1, 2), y @ y

    values = (torch.empty(64, size, dtype=torch.bfloat16) for size in (32, 16, 64))
    graph = make_fx(function, tracing_mode="fake")(*values, torch.zeros(4, dtype=torch.int32)).graph
    order = [node.name for node in fusion_of(graph, fuses=True).order]
    assert order.index("_grouped_mm") < order.index("mm")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.histc(x, 4, 0, 1) * 2,
        lambda x: torch.cdist(x, x) * 2,
        lambda x: x.masked_scatter(x > 0, x) * 2,
        lambda x: torch.cumsum(x, 0) * 2,
        lambda x: torch.special.zeta(x, x).sin(),
        lambda x: torch.cat((x, x)).sin() * 2,
    ],
)
def test_what_inductor_calls_a_kernel_for_is_a_kernel(function: Callable[[Tensor], Tensor]) -> None:
    """Operations that Inductor does not compute itself, as its scheduler has them, and no others."""
    graph = traced(lambda x: (function(x),), (8, 8), decomposed=True)
    called: set[str] = set()

    def noting(scheduler: Scheduler) -> None:
        for node in scheduler.nodes:
            if node.is_extern() and node.node is not None and (origin := node.node.get_origin_node()) is not None:
                called.add(origin.name)
        raise StopIteration

    module = GraphModule({}, graph)
    settings = torch._inductor.config.patch({**AS_PLANNED, "fx_graph_cache": False})
    inputs = [fake(node) for node in graph.find_nodes(op="placeholder")]
    with settings, mock.patch.object(Scheduler, "codegen", noting), contextlib.suppress(Exception):
        compile_fx_inner(module, inputs)
    fusion = fusion_of(graph, fuses=True)
    kernels = {node.name for node, kind in fusion.kinds.items() if kind == "kernel"}
    assert called == kernels


def test_what_is_scattered_is_in_memory_and_read_from_there() -> None:
    def function(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        summed = torch.zeros(64, 8).index_put((places,), x.sin(), accumulate=True)
        return summed * 2, summed.cos()

    graph = make_fx(function, tracing_mode="fake")(torch.randn(64, 8), torch.zeros(64, dtype=torch.long)).graph
    fusion = fusion_of(graph, fuses=True)
    scattered = named(graph, "index_put")
    assert exists(fusion, scattered)
    readers = {node.name for node in fusion.readers[storage_id(fake(scattered))]}  # type: ignore[arg-type]
    assert readers == {"mul", "cos"}
    assert fusion.read_by(named(graph, "mul")) == {storage_id(fake(scattered))}  # type: ignore[arg-type]


def test_a_number_is_reduced_in_registers() -> None:
    """It has no dimension that could be looped over."""
    graph = make_fx(lambda x: x.sin().sum(), tracing_mode="fake")(torch.tensor(1.0)).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.default)
    assert axis_of(node) == "rows"
    assert not loops(node)
