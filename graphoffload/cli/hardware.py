"""Print what a device and its link to the host can do: every figure with its unit and where it comes from."""

from __future__ import annotations

import argparse

import torch

from graphoffload.cli.output import DONE, CommandError, print_lines
from graphoffload.hardware.measurement import cache_path, measure, resolve_hardware
from graphoffload.hardware.profile import PROFILES
from graphoffload.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", nargs="?", help="a named profile; without one this machine's GPU, measured once and cached")
    parser.add_argument("--list", action="store_true", help="names of the profiles that are known")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which CUDA device to measure (default: 0)")
    parser.add_argument("--json", action="store_true", help="the profile as JSON")


def start(args: argparse.Namespace) -> int:
    """Print a profile, or what there is instead; returns the exit status."""
    if args.list:
        print_lines(*_profile_lines())
        return DONE
    if args.name not in (None, "measure"):
        profile = resolve_hardware(args.name)
    elif not torch.cuda.is_available():
        print_lines(
            "No CUDA device here: there is nothing to measure, and nothing to gain from offloading.",
            "To plan for a GPU that is not there, name one (--hardware NAME of explain, hardware=NAME in code):",
            "",
            *_profile_lines(),
        )
        return DONE
    elif args.device not in range(torch.cuda.device_count()):
        raise CommandError(f"--device {args.device}: this machine has CUDA devices 0 to {torch.cuda.device_count() - 1}.")
    else:
        profile = measure(args.device)
    print_lines(profile.to_json() if args.json else "\n".join(profile.table_lines()))
    if args.name in (None, "measure") and profile.source == "measured" and not args.json:
        print_lines("", f"kept in {cache_path(profile.name, str(torch.__version__))}; delete it to measure again")
    return DONE


def _profile_lines() -> list[str]:
    """The known profiles, one a line."""
    lines = [f"{'name':<12}{'memory':>10}{'D2H':>12}{'H2D':>12}{'bfloat16':>14}  source"]
    for name, profile in PROFILES.items():
        lines.append(
            f"{name:<12}{format_bytes(profile.memory_bytes):>10}{profile.d2h_bytes_per_s / 1e9:>7.1f} GB/s"
            f"{profile.h2d_bytes_per_s / 1e9:>7.1f} GB/s{profile.matmul_rate_flops_per_s('bfloat16') / 1e12:>6.4g} TFLOP/s"
            f"  {profile.source}"
        )
    return lines
