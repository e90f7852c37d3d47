"""What torch calls at the end of `import torch`: the entry point `graphoffload` in the group `torch.backends`.

    GRAPHOFFLOAD unset or 0    nothing happens, and nothing is imported but this file
    GRAPHOFFLOAD=1             the switch is on (integrations/switch.py)
    GRAPHOFFLOAD=40GiB         an error, at the first graph that would be planned: `import torch` never fails
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GRAPHOFFLOAD"
ON, OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


def at_import() -> None:
    """Turn the switch on if the environment asks for it."""
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() in OFF:
        return
    try:
        from graphoffload.integrations.switch import turn_on_by_environment

        turn_on_by_environment(text)
    except Exception as error:  # of a torch without what the switch needs, or an installation that is not complete
        sys.stderr.write(f"graphoffload: {VARIABLE}={text} has no effect: {type(error).__name__}: {error}\n")
