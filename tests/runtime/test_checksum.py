"""Digests tell changed bits and exchanged elements, and allocate next to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphoffload.runtime.checksum import digest

COLUMNS = 4096
NUMBERS = [1, 3, 4, 5, COLUMNS - 1, COLUMNS, COLUMNS + 1, 5 * COLUMNS + 7]


def random(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (number * size,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("number", NUMBERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_one_bit_always_tells(number: int, dtype: torch.dtype, data: Any) -> None:
    """The first sum changes by a power of two below 2 ** 32."""
    one = random(number, dtype) if dtype != torch.bool else random(number, torch.uint8) > 127
    other = one.clone()
    raw = other.view(torch.uint8)
    at = data.draw(st.integers(0, raw.numel() - 1))
    raw[at] = (1 - raw[at]) if dtype == torch.bool else raw[at] ^ (1 << data.draw(st.integers(0, 7)))
    assert torch.equal(digest(one), digest(one.clone()))
    assert digest(one)[0] != digest(other)[0]


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 3 * COLUMNS - 1), second=st.integers(0, 3 * COLUMNS - 1), times=st.sampled_from([1, 2, 2**16]))
def test_exchanged_elements_tell(first: int, second: int, times: int) -> None:
    """The sum stays, a weighted one does not."""
    one = torch.arange(3 * COLUMNS, dtype=torch.int32) * times
    other = one.clone()
    other[first], other[second] = one[second], one[first]
    assert digest(one)[0] == digest(other)[0]
    assert torch.equal(digest(one), digest(other)) == (first == second)


def test_large_tensors_are_summed_in_their_own_type() -> None:
    """A GPU sums in another type only after a copy of the whole tensor in it: 8 bytes for each word."""
    copies: list[str] = []
    large = torch.randn(64, COLUMNS)
    theirs = large.untyped_storage().data_ptr()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            large_ones = [one for one in args if isinstance(one, torch.Tensor) and one.numel() > COLUMNS]
            if any((kwargs or {}).get("dtype") not in (None, one.dtype) for one in large_ones):
                copies.append(f"{func} in {kwargs}")
            if out.untyped_storage().data_ptr() != theirs and out.numel() > COLUMNS:
                copies.append(f"{func} gives {tuple(out.shape)}")
            return out

    with Watch():
        digest(large)
    assert copies == []
