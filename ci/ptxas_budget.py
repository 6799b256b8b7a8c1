"""What kernels may take of a V100, by table: every kernel the package ships, of every op, configuration and shape of the model.

    python ci/ptxas_budget.py [--write [--why REASON]] [OP ...]

The table is ci/ptxas_budget.json: registers, bytes of shared memory, blocks per multiprocessor, tensor instructions (HMMA), the share of
global loads that move 16 bytes a lane. Violations are spills, local memory, more registers or shared memory than the table says, fewer
blocks, another number of HMMA, a smaller share of wide loads, a kernel that is not in the table, an entry no kernel has, and fewer than two
blocks a multiprocessor with no reason in the entry's "why". `--write` takes over what is measured and keeps the reasons; spills and local
memory stay violations. Exit status 1 and one line per violation.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("ptxas_budget.json")
WANTED_BLOCKS = 2
"""Blocks a multiprocessor needs to read while another waits; fewer need a reason."""


@dataclass(frozen=True)
class Row:
    """One kernel: spill bytes and local memory instructions must be 0, the rest is in the table. Shares are rounded to hundredths."""

    registers: int
    shared: int
    blocks: int
    hmma: int
    wide_loads: float
    spills: int = 0
    local: int = 0


Rows = dict[str, dict[str, Row]]
"""Rows by op and by kernel ("rms_norm E=2560 THREADS=256")."""


def violations(measured: Mapping[str, Mapping[str, Row]], table: Mapping[str, Mapping[str, Any]], ops: Collection[str]) -> Iterator[str]:
    """Yield one line per way in which the kernels of `ops` differ from the table for the worse, or the table from the kernels."""
    for op in sorted({*measured, *table}):
        rows, entries = measured.get(op, {}), table.get(op, {})
        if op not in ops:
            continue
        for kernel in sorted({*rows, *entries}):
            place = f"{op}: {kernel}"
            if kernel not in rows:
                yield f"{place}: in the table, but no call needs it: run ci/ptxas_budget.py --write"
            elif kernel not in entries:
                yield f"{place}: not in the table: run ci/ptxas_budget.py --write and review what it takes"
            else:
                yield from (f"{place}: {problem}" for problem in _compared(rows[kernel], entries[kernel]))
            if kernel in rows:
                yield from (f"{place}: {problem}" for problem in _forbidden(rows[kernel], entries.get(kernel, {}).get("why", "")))


def _compared(row: Row, entry: Mapping[str, Any]) -> Iterator[str]:
    for name, word, worse in (
        ("registers", "registers", row.registers > entry["registers"]),
        ("shared", "bytes of shared memory", row.shared > entry["shared"]),
        ("blocks", "blocks a multiprocessor", row.blocks < entry["blocks"]),
        ("hmma", "HMMA instructions", row.hmma != entry["hmma"]),
        ("wide_loads", "of the global loads move 16 bytes", row.wide_loads < entry["wide_loads"]),
    ):
        if worse:
            yield f"{getattr(row, name)} {word}, the table has {entry[name]}: mend the kernel, or take it over with --write and say why"


def _forbidden(row: Row, why: str) -> Iterator[str]:
    if row.spills:
        yield f"spills {row.spills} bytes: fewer values must be alive at once"
    if row.local:
        yield f"{row.local} instructions on local memory: index arrays with constants after unrolling"
    if row.blocks < WANTED_BLOCKS and not why.strip():
        yield f'{row.blocks} blocks a multiprocessor hide no latency: take less, or give the reason in the entry\'s "why"'


def merged(
    measured: Rows, table: Mapping[str, Mapping[str, Any]], ops: Collection[str], reason: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the table with the rows of `ops` replaced by what was measured; reasons stay where their kernel does.

    `reason` is that of kernels with too few blocks that have none yet.
    """
    kept = {op: dict(entries) for op, entries in table.items() if op not in ops}
    for op, rows in measured.items():
        kept[op] = {}
        for kernel, row in sorted(rows.items()):
            entry = {name: value for name, value in asdict(row).items() if name not in ("spills", "local")}
            why = table.get(op, {}).get(kernel, {}).get("why") or (reason if row.blocks < WANTED_BLOCKS else None)
            kept[op][kernel] = entry | ({"why": why} if why else {})
    return {op: kept[op] for op in sorted(kept)}


def text(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table as JSON with one kernel a line, so that a change of one kernel is a change of one line."""
    blocks = []
    for op, entries in table.items():
        lines = ",\n".join(f"  {json.dumps(kernel)}: {json.dumps(entry)}" for kernel, entry in entries.items())
        blocks.append(f" {json.dumps(op)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return the committed table; an empty one when there is no file."""
    if not path.is_file():
        return {}
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def measure(ops: Collection[str]) -> tuple[Rows, list[str]]:
    """Compile for sm_70 and disassemble every kernel that ships; returns rows, and one line per kernel that does not compile.

    A kernel that is launched in several ways counts at its worst. Ends the program where there is no disassembler.
    """
    from sm70kernels import build, resources  # here, because they need torch and the tests of this file do not

    launching = [op for op in build.launching() if op.name in ops]
    needed = {op.name: {need for call in build.calls(op, build.real(op)) for need in call.needs} for op in launching}
    errors = build.prepare((need.op, need.defines) for needs in needed.values() for need in needs)
    rows: Rows = {op: {} for op in needed}
    with ThreadPoolExecutor(2) as pool:  # the disassembler is a process of its own
        for op, needs in needed.items():
            kinds = {(need.op, need.defines) for need in needs} - errors.keys()
            images = {kind: build.fetch(*kind) for kind in kinds}
            try:
                mixes = dict(zip(images, pool.map(resources.mixes, images.values()), strict=True))
            except resources.NoDisassembler as error:
                raise SystemExit(f"ptxas_budget: {error}") from error
            for need in needs:
                if (need.op, need.defines) in errors:
                    continue
                report = resources.read_report(images[need.op, need.defines].report, need.entry)
                mix = mixes[need.op, need.defines][need.entry]
                blocks = report.blocks(resources.threads(need.block), need.shared)
                row = Row(
                    registers=report.registers, shared=report.shared + need.shared, blocks=blocks, hmma=mix.count("HMMA"),
                    wide_loads=round(mix.wide_loads, 2), spills=report.spill_stores + report.spill_loads, local=mix.local,
                )  # fmt: skip
                kernel = f"{need.entry} {build.describe(need.defines)}".strip()
                other = rows[op].get(kernel, row)
                rows[op][kernel] = replace(row, shared=max(row.shared, other.shared), blocks=min(row.blocks, other.blocks))
    return rows, [f"{op}: {build.describe(defines)}: {_reason(error)}" for (op, defines), error in sorted(errors.items())]


def _reason(error: str) -> str:
    """The line of a compiler's log that says why, or all of it in one line."""
    said = [line.strip() for line in error.splitlines() if "error" in line.lower() and "NVRTC_ERROR" not in line]
    return f"does not compile: {said[0] if said else ' '.join(error.split())}"


def names() -> list[str]:
    """Return the names of all ops that have a kernel."""
    from sm70kernels import build

    return [op.name for op in build.launching()]


def main(argv: list[str] | None = None) -> int:
    """Compare the kernels with the table; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare what kernels take of a V100 with the committed table.")
    parser.add_argument("op", nargs="*", help="only these ops (default: all)")
    parser.add_argument("--write", action="store_true", help="take over what is measured")
    parser.add_argument("--why", metavar="REASON", help="with --write: why kernels of these ops that lack a reason may have too few blocks")
    arguments = parser.parse_args(argv)
    table = read_table(TABLE)
    known = {*names(), *table}
    for op in arguments.op:
        if op not in known:
            parser.error(f"no op {op} with a kernel; there are {', '.join(sorted(known))}")
    ops = set(arguments.op or known)
    measured, failed = measure(ops)
    if arguments.write:
        table = merged(measured, table, ops, arguments.why)
        TABLE.write_text(text(table), encoding="utf-8")
        print(f"{TABLE.name}: written")
    found = [*failed, *violations(measured, table, ops)]
    for line in found:
        print(line)
    print(f"ptxas_budget: {sum(map(len, measured.values()))} kernels of {len(measured)} ops: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
