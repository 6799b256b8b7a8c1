"""The ops from the command line.

    python -m sm70kernels list       table of all ops
    python -m sm70kernels show OP    manual entry of one op

Exit status 2 when there is no such op.
"""

import argparse
import sys
from difflib import get_close_matches

import sm70kernels
from sm70kernels import manual


def main(argv: list[str] | None = None) -> int:
    """Print what the command asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sm70kernels", description="Operators for SM70 (V100) with reference implementations.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="table of all ops")
    commands.add_parser("show", help="manual entry of one op").add_argument("op")
    arguments = parser.parse_args(argv)
    if arguments.command == "list":
        print(manual.table(getattr(sm70kernels, name) for name in sm70kernels.OPS))
        return 0
    if arguments.op not in sm70kernels.OPS:
        near = get_close_matches(arguments.op, sm70kernels.OPS, 3)
        print(f"no op {arguments.op}" + (f"; did you mean {' or '.join(near)}?" if near else "; see list"), file=sys.stderr)
        return 2
    print(manual.entry(getattr(sm70kernels, arguments.op)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
