"""Every case by name: what gradients must survive. Import it on any device; each case says what is awkward about it."""

from __future__ import annotations

from graphoffload.testing.attention import ATTENTION
from graphoffload.testing.case import Case, by_name
from graphoffload.testing.layers import LAYERS
from graphoffload.testing.structure import STRUCTURE

ZOO: dict[str, Case] = by_name((*ATTENTION, *LAYERS, *STRUCTURE))
