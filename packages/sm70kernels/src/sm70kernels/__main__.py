"""The ops from the command line.

    python -m sm70kernels list             table of all ops
    python -m sm70kernels show OP          manual entry of one op, and what its kernels take, count and would cost on a V100
    python -m sm70kernels roofline         estimates of all ops that have a kernel, at the model's sizes
    python -m sm70kernels build [OP ...]   compile the images the package ships
    python -m sm70kernels bench OP ...     test and time ops on a GPU; estimates without one

Exit status 2 when there is no such op, 1 when something asked for cannot be had; the message says what to do.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import sm70kernels
from sm70kernels import manual
from sm70kernels.bench import NoCases
from sm70kernels.nvrtc import CompileError
from sm70kernels.resources import NoDisassembler


class UnknownOp(ValueError):
    """No op has this name; the text offers near ones."""


def find(names: Sequence[str]) -> list[Any]:
    """Return the ops of these names, in order. Raises UnknownOp."""
    for name in names:
        if name not in sm70kernels.OPS:
            near = get_close_matches(name, sm70kernels.OPS, 3)
            raise UnknownOp(f"no op {name}" + (f"; did you mean {' or '.join(near)}?" if near else "; see list"))
    return [getattr(sm70kernels, name) for name in names]


def main(argv: list[str] | None = None) -> int:
    """Do what the command asks for; return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UnknownOp as error:
        print(error, file=sys.stderr)
        return 2
    except (CompileError, NoCases, NoDisassembler) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sm70kernels", description="Operators for SM70 (V100) with reference implementations.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="table of all ops").set_defaults(run=_list)
    show = commands.add_parser("show", help="manual entry of one op, with the resources and the estimate of its kernel")
    show.add_argument("op")
    show.set_defaults(run=_show)
    roofline = commands.add_parser("roofline", help="estimates of all ops with a kernel, for a V100")
    roofline.add_argument("--rows", type=int, nargs="+", default=[1, 5], help="numbers of rows (default: 1 5)")
    roofline.set_defaults(run=_roofline)
    build = commands.add_parser("build", help="compile the images the package ships; needs no GPU")
    build.add_argument("op", nargs="*", help="only these ops (default: all)")
    build.add_argument("--tests", action="store_true", help="also the small sizes that tests draw")
    build.add_argument("--out", type=Path, help="where to (default: into the package)")
    build.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
    build.set_defaults(run=_build)
    bench = commands.add_parser("bench", help="test and time ops on a GPU; estimates without one")
    bench.add_argument("op", nargs="*")
    bench.add_argument("--all", action="store_true", help="every op that has a kernel")
    bench.add_argument("--rows", type=int, nargs="+", default=[], help="numbers of rows (default: those of bench/ops)")
    bench.add_argument("--configs", action="store_true", help="every configuration, not only the chosen one")
    bench.add_argument("--json", type=Path, help="where the record goes (default: bench/results)")
    bench.add_argument("--commit", help="what to record where the tree is no clone")
    bench.add_argument("--draw", type=Path, metavar="RECORD", help="only draw the plot of a record")
    bench.set_defaults(run=_bench)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    print(manual.table(find(sm70kernels.OPS)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    (op,) = find([arguments.op])
    print(manual.entry(op))
    if op.launch is not None:
        print()
        for line in manual.kernels(op):
            print(line, flush=True)
    return 0


def _roofline(arguments: argparse.Namespace) -> int:
    from sm70kernels.bench import cases, report
    from sm70kernels.build import launching
    from sm70kernels.roofline import estimate

    print(report.estimate_head())
    for op in launching():
        for case in (case for declared in cases.standing(op) for case in declared.each(arguments.rows)):
            print(report.estimate_row(op.name, case.name, estimate(case)), flush=True)
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from sm70kernels import build
    from sm70kernels.cuda import SHIPPED

    begun = time.perf_counter()
    ops = find(arguments.op) or build.launching()
    for op in ops:
        if op.launch is None:
            print(f"{op.name} has no kernel to build; see list", file=sys.stderr)
            return 2
    rows = build.build(ops, arguments.out or SHIPPED, tests=arguments.tests, jobs=arguments.jobs, every=not arguments.op)
    print(build.table(rows, time.perf_counter() - begun))
    errors = [error for row in rows for error in row.errors]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def _bench(arguments: argparse.Namespace) -> int:
    import json

    from sm70kernels.bench import report, run
    from sm70kernels.build import launching

    if arguments.draw:
        drawn = report.draw(arguments.draw.with_suffix(".png"), json.loads(arguments.draw.read_text(encoding="utf-8")))
        print(arguments.draw.with_suffix(".png") if drawn else "no plot: pip install matplotlib")
        return 0 if drawn else 1
    ops = launching() if arguments.all else find(arguments.op)
    if not ops:
        print("name an op, or say --all; see list", file=sys.stderr)
        return 2
    return run.main([op.name for op in ops], arguments.rows, arguments.json, arguments.configs, arguments.commit)


if __name__ == "__main__":
    sys.exit(main())
