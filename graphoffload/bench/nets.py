"""Networks in plain torch that the measurements train: a Llama stack and five that are not Llamas. No downloads.

Each `forward(*batch)` returns the loss, so that head and loss are inside the compiled region.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm in float32, scaled in the input's dtype."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, tokens, head_dim) by halves."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, linears without bias."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class DenseExperts(nn.Module):
    """Mixture of experts with dense routing: every expert computes every token, weighted by the router."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).float().softmax(-1).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        result: Tensor = (outputs * weights.unsqueeze(-1)).sum(-2)
        return result


class LlamaBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, experts: int = 0) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.self_attn = LlamaAttention(dim, heads, kv_heads)
        self.mlp = DenseExperts(dim, hidden, experts) if experts else SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_norm(x))
        return result


class LlamaStack(nn.Module):
    """Embedding, blocks, final norm, head, logits in float32, cross entropy on shifted tokens."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, *, layers: int, dim: int, hidden: int, heads: int, kv_heads: int, vocab: int, tokens: int, experts: int = 0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, hidden, heads, kv_heads, experts) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        head_dim = dim // heads
        inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), inverse).repeat(1, 2)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


class Attention(nn.Module):
    """Multi-head attention with biases, to itself or to `context`; full or causal."""

    def __init__(self, dim: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            layer(value).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, value in ((self.q, x), (self.k, source), (self.v, source))
        )
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return result


class EncoderBlock(nn.Module):
    """Pre-norm transformer block; with `cross` it also attends to a second sequence."""

    def __init__(self, dim: int, heads: int, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal=causal)
        self.norm3 = nn.LayerNorm(dim) if cross else None
        self.cross = Attention(dim, heads) if cross else None
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x))
        if self.cross is not None and self.norm3 is not None:
            x = x + self.cross(self.norm3(x), context)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(nn.Module):
    """Patches, blocks, mean, classes."""

    def __init__(self, *, layers: int, dim: int, heads: int, image: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2, dim) * 0.02)
        self.layers = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


class EncoderDecoder(nn.Module):
    """Encoder over source tokens, causal decoder with cross attention over target tokens."""

    def __init__(self, *, layers: int, dim: int, heads: int, vocab: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.encoder = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(EncoderBlock(dim, heads, causal=True, cross=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        context = self.embed(source) + self.positions[: source.shape[1]]
        for layer in self.encoder:
            context = layer(context)
        x = self.embed(target) + self.positions[: target.shape[1]]
        for layer in self.decoder:
            x = layer(x, context)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))


class ResidualConv(nn.Module):
    """Two 3 x 3 convolutions with group norm and SiLU, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        result: Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        return result


class UNet(nn.Module):
    """Denoiser with skip connections: early activations live until late in forward, so lifetimes differ from a chain's."""

    def __init__(self, *, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(ResidualConv(widths[max(i - 1, 0)], w) for i, w in enumerate(widths))
        self.middle = nn.ModuleList([ResidualConv(widths[-1], widths[-1])])
        self.up = nn.ModuleList(ResidualConv(2 * w, widths[max(i - 1, 0)]) for i, w in reversed(list(enumerate(widths))))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, skips = self.stem(images + noise), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle[0](x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, skips.pop()), dim=1))
        return F.mse_loss(self.head(x).float(), noise.float())


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7 convolution, norm over channels, and an MLP of four times the width, as a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        result: Tensor = x + (self.scale * y).permute(0, 3, 1, 2)
        return result


class ConvNeXt(nn.Module):
    """Four stages of ConvNeXt blocks, of which the third has `middle` and the others have three; width doubles, sides halve."""

    def __init__(self, *, width: int, middle: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(4)]
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.halve = nn.ModuleList(nn.Conv2d(before, after, 2, 2) for before, after in itertools.pairwise(widths))
        for number, (dim, depth) in enumerate(zip(widths, (3, 3, middle, 3), strict=True)):
            self.add_module(f"stage{number}", nn.ModuleList(ConvNeXtBlock(dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for number in range(4):
            if number:
                x = self.halve[number - 1](x)
            for block in self.get_submodule(f"stage{number}").children():
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))).float(), labels)
