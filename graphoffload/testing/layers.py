"""Cases around single layers: convolution, normalization, embedding, loss, recurrence, precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphoffload.testing.case import Case, Device, activations, batches, draw, draw_ints, of

WIDTH = 16


class ConvNet(nn.Module):
    """Convolution, batch norm with running statistics, pooling with saved indices, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        out: Tensor = self.head(x.flatten(1))
        return out


class ChannelsLast(nn.Module):
    """Convolutions on channels_last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv1(x.to(memory_format=torch.channels_last)))
        return torch.tanh(self.conv2(x) * x.mean())


class BatchNorms(nn.Module):
    """Batch norm, and a running mean that forward updates in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        self.mean.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.second(x)
        return out


class Counted(nn.Module):
    """Backward needs the new value of a buffer that forward counts up in place.

    torch's partitioner (2.13) saves the old value's memory and adds 1 again, after the buffer was written: with
    backend="aot_eager" and "inductor" the gradient of `first` is twice what it should be.
    """

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return torch.tanh(self.first(x)) * self.steps


class CountedView(nn.Module):
    """Backward needs a value computed from a view of a buffer, before forward writes to the buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.ones(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.steps.view(2)[1] * 2.0).exp()
        y = torch.tanh(self.first(x)) * scale
        self.steps.add_(1)
        return y


class Norms(nn.Module):
    """Layer norm, RMS norm, GELU, SiLU: cheap to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.rms_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer_norm(x)
        x = x + self.down(F.gelu(self.up(y)) * F.silu(self.gate(y)))
        out: Tensor = self.rms_norm(x)
        return out


class EmbeddingLoss(nn.Module):
    """Token embedding, a layer, cross entropy: integer inputs, the loss computed in the graph."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(tokens)))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten(), ignore_index=3)


class TiedEmbedding(EmbeddingLoss):
    """The head and the embedding share one weight."""

    def __init__(self) -> None:
        super().__init__(tied=True)


class Indices(nn.Module):
    """Saved integer and bool tensors: argmax, gather, sort, masked fill, where, max over a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        picked = y.gather(-1, y.argmax(-1, keepdim=True)) + y.max(dim=-1, keepdim=True).values
        ordered = y.sort(dim=-1).values
        masked = torch.where(y > 0, ordered, y * 0.1).masked_fill(y.abs() < 0.05, 0.0)
        out: Tensor = self.second(masked * picked)
        return out.index_select(1, torch.arange(0, x.shape[1], 2, device=x.device))


class CellLoop(nn.Module):
    """An LSTM cell unrolled over time: many small saved tensors, gates that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], WIDTH)
        memory = x.new_zeros(x.shape[0], WIDTH)
        for step in x.unbind(1):
            hidden, memory = self.cell(step, (hidden, memory))
        out: Tensor = self.head(hidden)
        return out


class Mlp(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.gelu(self.first(x)))
        return torch.sigmoid(out) * x


class ResidualMlps(nn.Module):
    """Residual MLPs with a norm, of four times the width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


class Frozen(nn.Module):
    """The first half needs no gradient, nor does one layer in the middle of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = Mlp().requires_grad_(False), Mlp()
        self.middle, self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.trained(self.frozen(x)))))
        return out


class Complex(nn.Module):
    """Complex saved tensors, one of them a lazy conjugate: a spectrum is multiplied and transformed back."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.filter = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.mix(x), dim=-1)
        spectrum = spectrum * torch.view_as_complex(self.filter)
        mirrored = (spectrum * spectrum.abs()).conj()
        out: Tensor = torch.fft.irfft(mirrored * mirrored, n=WIDTH, dim=-1)
        return out


class MixedPrecision(nn.Module):
    """Casts by hand: float32 norms around low-precision products, and a float64 accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.up(self.norm(x)).bfloat16())
        z = self.down(y.to(x.dtype))
        out: Tensor = z * z.double().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype)
        return out


def _tokens(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return draw_ints(2, 9, high=50, device=device, seed=seed), draw_ints(2, 9, high=50, device=device, seed=seed + 1)


def _image(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    image = draw(2, 4, 6, 6, device=device, dtype=dtype, seed=seed)
    return (image.contiguous(memory_format=torch.channels_last).requires_grad_(),)


_ROWS = activations(4, 6, WIDTH)

LAYERS = (
    Case(name="conv_net", build=of(ConvNet), inputs=activations(4, 3, 8, 8), why="conv, batch norm, pooling indices"),
    Case(name="channels_last", build=of(ChannelsLast), inputs=_image, why="dense, but not in C order"),
    Case(name="batch_norm", build=of(BatchNorms), inputs=activations(6, WIDTH), why="buffers mutated in forward"),
    Case(name="counted_buffer", build=of(Counted), inputs=_ROWS, reference="eager", why="torch alone gets this one wrong"),
    Case(name="counted_view", build=of(CountedView), inputs=_ROWS, reference="eager", why="the same through a view"),
    Case(name="norms", build=of(Norms), inputs=_ROWS, why="cheap pointwise between products"),
    Case(name="embedding_loss", build=of(EmbeddingLoss), inputs=_tokens, why="integer inputs, log-softmax"),
    Case(name="tied_weights", build=of(TiedEmbedding), inputs=_tokens, why="one parameter used twice"),
    Case(name="indices", build=of(Indices), inputs=_ROWS, why="integer and bool tensors are saved"),
    Case(name="lstm_cells", build=of(CellLoop), inputs=activations(3, 4, WIDTH), why="unrolled, many small tensors"),
    Case(name="frozen", build=of(Frozen), inputs=activations(4, 6, WIDTH, grad=False), why="parts need no gradient"),
    Case(name="complex", build=of(Complex), inputs=_ROWS, why="complex numbers"),
    Case(name="mixed_precision", build=of(MixedPrecision), inputs=_ROWS, why="casts by hand"),
    Case(name="mlp_bf16", build=of(Mlp), inputs=_ROWS, dtype=torch.bfloat16, why="bfloat16"),
    Case(name="mlp_float64", build=of(Mlp), inputs=_ROWS, dtype=torch.float64, why="8 bytes an element"),
    Case(name="tiny", build=of(Mlp), inputs=activations(1, WIDTH), why="tensors of a few bytes"),
    Case(name="dynamic_batch", build=of(Norms), inputs=batches(6, WIDTH), dynamic=True, why="symbolic sizes"),
    Case(name="dynamic_conv", build=of(ConvNet), inputs=batches(3, 8, 8), dynamic=True, why="symbolic sizes, batch norm"),
)
