"""Attention that is told which tokens belong together: FlexAttention with a block mask, packed sequences, nested tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net.dense import SMALL, decoder
from net.small import Decoder, linear, tokens
from net.step import OwnStep
from net.table import Built, architecture, ids

LENGTHS = (7, 4, 5)
"""Sequences that are packed into one row."""


def documents(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Of each token, which document it belongs to."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Of each token, where it stands in its document."""
    return torch.cat([torch.arange(length) for length in lengths])


def offsets(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Where documents begin, and where the last one ends (cu_seqlens)."""
    return torch.tensor((0, *lengths)).cumsum(0)


def flexible(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any) -> Tensor:
    """FlexAttention within the blocks of a mask."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=block_mask)  # type: ignore[return-value]


class Flexible(OwnStep):
    """A decoder that is given a causal block mask for the documents of a row; the mask is made outside of what is compiled."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.model = Decoder(attend=flexible, **fields)

    def parts(self) -> list[nn.Module]:
        return [self.model]

    def step(self, input_ids: Tensor, document: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document[query] == document[key])

        length = input_ids.shape[1]
        mask = create_block_mask(visible, None, None, length, length, device=input_ids.device)
        loss: Tensor = self.model(input_ids, block_mask=mask)["loss"]
        loss.backward()
        return loss


@architecture("flex-documents", "packed documents, FlexAttention with a block mask")
def flex_documents() -> Built:
    return Flexible(layers=1), {**tokens(length=16), "document": documents()}


def within(q: Tensor, k: Tensor, v: Tensor, *, document: Tensor) -> Tensor:
    """Attention to the tokens before in the same document."""
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & (document[:, None] == document[None]))


@architecture("packed-documents", "packed documents, a mask made in the graph")
def packed_documents() -> Built:
    return Decoder(attend=within, layers=1), {**tokens(), "document": documents()}


class Nested(nn.Module):
    """Layers over sequences of different lengths as a jagged tensor, padded for the attention alone.

    Attention of jagged tensors themselves has no backward under saved_tensors_hooks on a CPU (torch 2.13).
    """

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(128, width), heads
        self.qkv, self.up, self.head = linear(width, 3 * width), linear(width, width), linear(width, 128)

    def forward(self, input_ids: Tensor, offsets: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(self.embed(input_ids), offsets, min_seqlen=1, max_seqlen=8)
        rows = rows + F.gelu(self.up(rows))
        padded = self.qkv(rows).to_padded_tensor(0.0, (offsets.numel() - 1, 8, 96))
        q, k, v = padded.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        there = torch.arange(8, device=offsets.device) < offsets.diff()[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None]).transpose(1, 2).flatten(2)
        return self.head(y) * there[..., None]


@architecture("nested-jagged", "packed documents, a jagged nested tensor")
def nested_jagged() -> Built:
    return Nested(), {"input_ids": ids(16), "offsets": offsets()}


@architecture("llama-packed", "packed documents, positions that begin anew (transformers)")
def llama_packed() -> Built:
    model, inputs = decoder("LlamaConfig", batch=1, tokens=16, **SMALL)
    return model, {**inputs, "position_ids": positions()[None]}


def flash(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, longest: int) -> Tensor:
    """torch's flash attention over packed sequences of one row (a GPU, 16 bits)."""
    packed = (part[0].transpose(0, 1) for part in (q, k, v))
    found = torch.ops.aten._flash_attention_forward(*packed, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False)
    return found[0].transpose(0, 1)[None]
