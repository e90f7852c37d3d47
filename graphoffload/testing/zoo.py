"""All cases by name. A case does not depend on the device, and `Case.why` says why it is hard."""

from __future__ import annotations

from graphoffload.testing.attention import ATTENTION
from graphoffload.testing.case import Case, by_name
from graphoffload.testing.layers import LAYERS
from graphoffload.testing.structure import STRUCTURE

ZOO: dict[str, Case] = by_name((*ATTENTION, *LAYERS, *STRUCTURE))
