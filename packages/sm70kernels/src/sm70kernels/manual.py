"""The reference manual: an op's declaration as Markdown, and the table of all ops."""

from collections.abc import Iterable
from typing import Any

from sm70kernels.dims import describe
from sm70kernels.op import Op, Ratio
from sm70kernels.spec import Arg


def summary(op: Op[Any]) -> str:
    """Return the first sentence of an op's docstring, without the op's name and the colon after it."""
    first = op.doc.partition("\n\n")[0].replace("\n", " ")
    return first.removeprefix(f"{op.name}: ").strip()


def table(ops: Iterable[Op[Any]]) -> str:
    """Return one Markdown table row per op: name, what it computes, determinism class, whether it has a kernel."""
    lines = ["| op | computes | bits | kernel |", "|---|---|---|---|"]
    lines += [f"| `{op.name}` | {summary(op)} | {op.determinism.name} | {'yes' if op.launch else 'reference only'} |" for op in ops]
    return "\n".join(lines)


def entry(op: Op[Any]) -> str:
    """Return the manual entry of an op: maths, arguments, dims, guarantees."""
    tolerance = f"error at most {op.tolerance.n:g} times the yardstick's" if isinstance(op.tolerance, Ratio) else "equal to the definition"
    lines = [f"# {op.name}", "", op.doc.strip(), "", "## Arguments", "", "| argument | form | role |", "|---|---|---|"]
    lines += [f"| `{arg.name}` | `{arg.text.replace('|', chr(92) + '|')}` | {_role(arg)} |" for arg in op.args]
    lines += ["", "## Dims", "", "| dim | values |", "|---|---|"]
    lines += [f"| {name} | {describe(dim)} |" for name, dim in op.dims.items()]
    lines += ["", "## Guarantees", ""]
    lines += [f"* bits ({op.determinism.name}): {op.determinism.value}", f"* accuracy: {tolerance}"]
    lines += ["* CUDA: " + ("yes" if op.launch else "no kernel; CUDA tensors raise NoKernel")]
    return "\n".join(lines)


def _role(arg: Arg) -> str:
    """Return who provides and who writes an argument."""
    if arg.is_out:
        role = "output, allocated when omitted"
    elif arg.is_inout:
        role = "changed in place"
    elif arg.is_scratch:
        role = "workspace of the kernel"
    else:
        role = "input"
    if arg.when is not None:
        role += f", given exactly when {arg.when} is"
    elif arg.may_be_none:
        role += ", may be None"
    return role + (", rows may be strided" if "strided" in arg.flags else "")
