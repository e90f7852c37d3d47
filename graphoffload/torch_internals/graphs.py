"""fx graphs: metadata of tensors, and expressions over symbolic sizes written as nodes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Proxy
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def tensor_metadata(value: torch.Tensor) -> Any:
    """What torch keeps in `node.meta["tensor_meta"]`. Without it: passes of torch that read it miss our nodes."""
    return _extract_tensor_metadata(value)


def write_out(expression: sympy.Expr, environment: dict[sympy.Symbol, Proxy]) -> Any:
    """The value of an expression over proxies, whose operations become nodes. Without it: no tensor of a symbolic size can be
    reloaded."""
    return sympy_interp(PythonReferenceAnalysis, environment, expression)
