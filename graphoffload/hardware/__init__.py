"""The speed of the device and of its link to the host, and the host's memory: the numbers that every plan uses.

profile.py        one device as a value, and the named profiles; without torch
host_memory.py    the host's memory, and the part of it that is available to this process
numa.py           the NUMA node of a GPU, and threads that run there while they make memory for its copies
measurement.py    a profile measured on this device, and kept on disk
"""

from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import PROFILES, HardwareProfile

__all__ = ["PROFILES", "HardwareProfile", "resolve_hardware"]
