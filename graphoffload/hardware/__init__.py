"""What the device and its link to the host can do: the numbers that a plan stands on.

profile.py        one device as a value, and the named profiles; without torch
host_memory.py    what the host has, and what of it is available to this process
measurement.py    the same numbers measured on this device, and kept on disk
"""

from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import PROFILES, HardwareProfile

__all__ = ["PROFILES", "HardwareProfile", "resolve_hardware"]
