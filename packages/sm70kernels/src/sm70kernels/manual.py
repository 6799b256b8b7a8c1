"""The reference manual: an op's declaration as Markdown, what its kernels take and would cost, and the table of all ops."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sm70kernels.dims import describe
from sm70kernels.op import Op, Ratio
from sm70kernels.spec import Arg

if TYPE_CHECKING:
    from sm70kernels.cuda import Need
    from sm70kernels.roofline import Work


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


def kernels(op: Op[Any], rows: Iterable[int] = (1, 5)) -> Iterator[str]:
    """Yield, line by line, what an op's kernels take of a V100, and what calls at the model's sizes do and would cost.

    Every kernel of every configuration is listed; the counts are those of the chosen configuration at each size, and of the others at
    the first. Raises resources.NoDisassembler and CompileError.
    """
    from sm70kernels import build, roofline  # these compile and emulate, which the rest of the manual does not need
    from sm70kernels.bench import cases, report

    yield from ["## Kernels", "", "| kernel | registers | shared bytes | spilled | blocks/SM | instructions | of these |"]
    yield "|---|---|---|---|---|---|---|"
    needs = dict.fromkeys(need for call in build.calls(op, op.shapes) for need in call.needs)
    yield from dict.fromkeys(_kernel(need) for need in needs)
    yield from ["", f"## At the model's sizes ({roofline.LABEL})", "", "```", report.estimate_head()]
    for declared in cases.standing(op):
        for number, case in enumerate(declared.each(tuple(rows))):
            dims, chosen = op.sizes(case.dims), op.config(op.sizes(case.dims))
            others = [config for config in build.configurations(op, dims) if config != chosen]
            for config in [chosen, *others] if number == 0 else [chosen]:
                found = roofline.estimate(case, config=config)
                yield report.estimate_row(op.name, case.name if config is None else f"{case.name} {build.brief(config)}", found)
                yield from (f"    {counts(work)}" for work in found.works)
    yield "```"


def counts(work: "Work") -> str:
    """Return what one launch does as a line."""
    return (
        f"{work.kernel}: {work.blocks:,.0f} blocks, {work.instructions:,.0f} warp instructions, {work.mma:,.0f} mma, "
        f"{work.sectors:,.0f} sectors, {work.wavefronts:,.0f} shared wavefronts, {work.bytes:,.0f} bytes touched"
    )


def _kernel(need: "Need") -> str:
    """Return the resources and the instruction mix of one kernel as a row."""
    from sm70kernels import build, resources

    image = build.fetch(need.op, need.defines)
    took, mix = resources.read_report(image.report, need.entry), resources.mix(image, need.entry)
    cells = (
        f"`{need.entry}` {build.describe(need.defines)}",
        took.registers,
        took.shared + need.shared,
        took.spill_stores + took.spill_loads,
        took.blocks(resources.threads(need.block), need.shared),
        mix.total,
        mix.summary(),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


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
