"""Benchmark results as text, as a record, and as a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm70kernels.roofline import LABEL, Estimate

EMULATED = "emulated MMA"
"""What a newer GPU makes of mma.m8n8k4: its time says nothing about a V100's tensor cores."""


def head() -> str:
    """Return the head of the table of results."""
    return (
        f"{'op':20s} {'case':22s} {'config':10s} {'MB':>9s} {'us':>9s} {'10%':>8s} {'90%':>8s} "
        f"{'GB/s':>7s} {'of copy':>8s} {'of read':>8s} {'TFLOP/s':>8s}"
    )


def row(result: Mapping[str, Any], ceilings: Mapping[str, float]) -> str:
    """Return one result as a line of the table."""
    time = result["time"]
    share = result["gb_s"] / ceilings["copy_gb_s"]
    return (
        f"{result['op']:20s} {result['case']:22s} {result['config']:10s} {result['bytes'] / 1e6:9.3f} {time['median']:9.2f} "
        f"{time['low']:8.2f} {time['high']:8.2f} {result['gb_s']:7.0f} {share:8.0%} {result['of_read_only']:8.0%} {result['tflop_s']:8.2f}"
        + (f"  {EMULATED}" if result["emulated_mma"] else "")
    )


def ceiling_lines(ceilings: Mapping[str, float]) -> list[str]:
    """Return what the machine can do, as lines."""
    return [
        f"copy of 1 GiB {ceilings['copy_gb_s']:.0f} GB/s read and written; read-only kernel {ceilings['read_only_gb_s']:.0f} GB/s "
        f"({ceilings['read_only_of_copy']:.0%} of it); f16 product {ceilings['matmul_tflop_s']:.0f} TFLOP/s",
        "'of copy': bandwidth beside that copy; 'of read': time of the read-only kernel on as many bytes, in the same graph setting",
    ]


def overhead_line(overhead: Mapping[str, Any], target: float) -> str:
    """Return the host's cost of a launch as a line."""
    ratios = [overhead[way] / overhead["driver"] for way in ("function", "checked")]
    verdicts = ["met" if ratio <= target else "MISSED" for ratio in ratios]
    return (
        f"launch of {overhead['op']} on the host: driver {overhead['driver']:.2f} us, function {overhead['function']:.2f} us "
        f"({ratios[0]:.2f}x, {verdicts[0]}), checked op {overhead['checked']:.2f} us ({ratios[1]:.2f}x, {verdicts[1]}); "
        f"target {target}x"
    )


def estimate_head() -> str:
    """Return the head of the table of estimates."""
    return f"{'op':20s} {'case':30s} {'MB':>9s} {'floor us':>9s} {'estimate':>9s} {'share':>6s}  bound by, next (us)    ({LABEL})"


def estimate_row(op: str, case: str, found: Estimate) -> str:
    """Return one estimate as a line of the table."""
    return (
        f"{op:20s} {case:30s} {found.bytes / 1e6:9.3f} {found.floor * 1e6:9.2f} {found.seconds * 1e6:9.2f} {found.share:6.0%}  "
        + ", ".join(f"{part} {seconds * 1e6:.2f}" for part, seconds in list(found.parts.items())[:2])
        + (f"  [{found.scaled}]" if found.scaled else "")
    )


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, record: Mapping[str, Any]) -> bool:
    """Draw how near every case comes to the read-only kernel; returns False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    results: Sequence[Mapping[str, Any]] = record["results"]
    labels = [f"{result['op']} {result['case']}" for result in results]
    figure = Figure(figsize=(9, 1.2 + 0.17 * len(labels)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = ["tab:orange" if result["emulated_mma"] else "tab:blue" for result in results]
    axes.barh(range(len(labels)), [result["of_read_only"] for result in results], color=colours)
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"share of a read-only kernel on as many bytes, L2-cold, in a CUDA graph (orange: {EMULATED})")
    axes.set_title(f"{record['machine']['device']}, commit {record['commit']}", fontsize=9)
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True
