"""Print what a device and its link to the host can do: every figure with its unit and where it comes from.

    python -m graphoffload hardware                          one GPU, alone
    torchrun --nproc-per-node 4 -m graphoffload hardware     four, copying at the same time; one rank of each host prints
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
from collections.abc import Iterator

import torch

from graphoffload.cli.output import DONE, CommandError, print_lines
from graphoffload.compiler import ranks
from graphoffload.compiler.link import hardware_of, measure_with_ranks
from graphoffload.hardware import numa
from graphoffload.hardware.measurement import cache_path, kept, resolve_hardware
from graphoffload.hardware.profile import LINK_RATES, PROFILES, HardwareProfile
from graphoffload.units import format_bytes

_MEET_S = 120.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", nargs="?", help="a named profile; without one this machine's GPU, measured once and cached")
    parser.add_argument("--list", action="store_true", help="names of the profiles that are known")
    parser.add_argument(
        "--device", type=int, metavar="INDEX", help="which CUDA device to measure (default: 0; under torchrun each rank's)"
    )
    parser.add_argument("--json", action="store_true", help="the profile as JSON")


def start(args: argparse.Namespace) -> int:
    """Print a profile, or what there is instead; returns the exit status."""
    if args.list:
        print_lines(*_profile_lines())
        return DONE
    if args.name not in (None, "measure"):
        profile = resolve_hardware(args.name)
        print_lines(profile.to_json() if args.json else "\n".join(profile.table_lines()))
        return DONE
    if not torch.cuda.is_available():
        print_lines(
            "No CUDA device here: there is nothing to measure, and nothing to gain from offloading.",
            "To plan for a GPU that is not there, name one (--hardware NAME of explain, hardware=NAME in code):",
            "",
            *_profile_lines(),
        )
        return DONE
    profile = _measured(_device(args))
    if ranks.local_rank() > 0:
        return DONE
    print_lines(profile.to_json() if args.json else "\n".join([*profile.table_lines(), "", *_host_lines(profile)]))
    return DONE


def _device(args: argparse.Namespace) -> int:
    """The CUDA device of this process."""
    several = _processes() > 1
    if several and args.device is not None:
        raise CommandError("--device: each process measures the GPU of its LOCAL_RANK. Leave it out under torchrun.")
    index = max(0, ranks.local_rank()) if several else args.device or 0
    if index not in range(torch.cuda.device_count()):
        given = f"LOCAL_RANK={index}" if several else f"--device {index}"
        raise CommandError(f"{given}: this machine has CUDA devices 0 to {torch.cuda.device_count() - 1}.")
    return index


def _measured(index: int) -> HardwareProfile:
    """The profile of a device; measured by all processes that a launcher started, if there are several."""
    with _group():
        measure_with_ranks("measure", f"cuda:{index}")
        return hardware_of("measure", f"cuda:{index}")


def _processes() -> int:
    """How many the launcher started, on all hosts."""
    given = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(given) if given.isdigit() else 1


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """A process group in which ranks find each other, where a launcher started several.

    Raises:
        CommandError: they do not all come.
    """
    distributed = torch.distributed
    if _processes() < 2 or not distributed.is_available():
        yield
        return
    try:
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=_MEET_S))
    except (RuntimeError, ValueError) as error:
        raise CommandError(f"the {_processes()} processes of the launcher did not find each other: {error}") from error
    try:
        yield
        with contextlib.suppress(RuntimeError):  # one of them is gone
            distributed.barrier()  # the store is in one of them, and the others may still read it
    finally:
        distributed.destroy_process_group()


def _host_lines(profile: HardwareProfile) -> list[str]:
    """The link by the number of local ranks that copied at once, the NUMA node of each GPU, and where the profile is kept."""
    count, version = torch.cuda.device_count(), str(torch.__version__)
    numbers = range(1, max(count, profile.measured_by_ranks) + 1)
    paths = {number: cache_path(profile.name, version, number) for number in numbers}
    known = {number: found for number, path in paths.items() if (found := kept(path)) is not None}
    known[profile.measured_by_ranks] = profile
    lines = ["link by local ranks that copy at once"]
    lines += [f"  {number:<8}{_rates(found)}" for number, found in sorted(known.items())]
    if count > 1 and max(known) == 1:
        lines.append(f"  torchrun --nproc-per-node {count} -m graphoffload hardware measures with {count}")
    lines.append("NUMA node of each GPU: its host memory is allocated there")
    lines += [f"  cuda:{number:<3}{numa.node_of(number) or 'unknown: memory is allocated on any'}" for number in range(count)]
    path = paths[profile.measured_by_ranks]
    where = f"kept in {path}; delete it to measure again" if path.exists() else "not kept on disk: it is measured again"
    return [*lines, "", where] if profile.source == "measured" else lines


def _rates(profile: HardwareProfile) -> str:
    d2h, h2d, both = (getattr(profile, field) / 1e9 for field in LINK_RATES)
    both_ways = f"both ways at once {both:.1f} GB/s" if both else "both ways at once not known"
    return f"D2H {d2h:.1f} GB/s, H2D {h2d:.1f} GB/s, {both_ways}"


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
