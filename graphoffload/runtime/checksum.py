"""Digests of tensors, computed on their device, for checksum mode."""

from __future__ import annotations

import torch

_COLUMNS = 4096


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor's bits in logical order: int64, shape (3,), on the tensor's device.

    The words of the tensor are arranged as (n / 4096, 4096). The digest is the sum of the sums of rows, that sum weighted by
    row, and the sum of the sums of columns weighted by column. Integer arithmetic wraps and is exact, so equal bits give equal
    digests whatever kernel sums them. A single changed bit always changes the first sum; two exchanged elements change a
    weighted one. The function reads the tensor and allocates only the sums: they have the type of the words, because a GPU
    copies the whole tensor before it sums in another type. A non-contiguous tensor is copied first.
    """
    if tensor.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=tensor.device)
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = raw[: raw.numel() // 4 * 4].view(torch.int32) if raw.numel() >= 4 else raw.to(torch.int32)
    tail = raw[raw.numel() // 4 * 4 :] if raw.numel() >= 4 else raw[:0]
    rows = words.numel() // _COLUMNS
    rest = words[rows * _COLUMNS :]
    total = torch.sum(rest, dtype=torch.int64) + torch.sum(tail, dtype=torch.int64)
    if rows == 0:
        weights = torch.arange(1, words.numel() + 1, device=tensor.device)
        return torch.stack([total, torch.sum(words.to(torch.int64) * weights), total])
    grid = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    by_row = torch.sum(grid, dim=1, dtype=torch.int32).to(torch.int64)
    by_column = torch.sum(grid, dim=0, dtype=torch.int32).to(torch.int64)
    row_weights = torch.arange(1, rows + 1, device=tensor.device)
    column_weights = torch.arange(1, _COLUMNS + 1, device=tensor.device)
    return torch.stack([total + by_row.sum(), torch.sum(by_row * row_weights), torch.sum(by_column * column_weights)])
