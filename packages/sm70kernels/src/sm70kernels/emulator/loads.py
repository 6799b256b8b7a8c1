"""ld, st, prefetch, fences: translation of plain memory instructions. Source: PTX ISA 8.7, sections 9.7.9.8 to 9.7.9.13 and 9.7.13.4."""

from typing import Any

from sm70kernels.emulator.emitter import CODES, Emitter, handles
from sm70kernels.emulator.sites import MemorySite
from sm70kernels.emulator.syntax import WIDTHS, Instruction, Operand

SPACES = ("global", "const", "shared", "local", "param")
ORDERS = frozenset({"weak", "volatile", "relaxed", "acquire", "release"})
SCOPES = frozenset({"cta", "gpu", "sys"})
CACHING = frozenset({"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
                     "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B"})  # fmt: skip
"""Hints without meaning here, except nc: memory that stays constant during the launch."""


def site_of(e: Emitter, i: Instruction, address: Operand, width: int, count: int, space: str, **flags: bool) -> str:
    """Describe a memory instruction to the run time and return the name of the description."""
    sites: list[MemorySite] = e.names["SITES"]
    for site in reversed(sites):  # a chain repeats instructions that were translated just before
        if site.instruction.ptx_line == i.ptx_line and site.instruction.text == i.text:
            return f"S{site.number}"
    orders: dict[str, Any] = dict(flags)
    sites.append(MemorySite(len(sites), i, space, width, count, address.offset, **orders))
    e.names[f"S{len(sites) - 1}"] = sites[-1]
    return f"S{len(sites) - 1}"


def address_of(e: Emitter, address: Operand, kind: str = "b64") -> str:
    """The expression of an address without its immediate offset."""
    if address.kind != "addr":
        raise e.unknown(f"{address.text} is no address")
    if address.text.isdigit():
        return e.constant(address.text, "b64")
    if address.text in e.registers:
        _, stored = e.register(address.text)
        if stored not in ("u4", "u8"):
            raise e.unknown(f"{address.text} holds no address")
        return e.value(Operand("reg", address.text), "b32" if stored == "u4" else kind)
    return e.value(Operand("name", address.text), kind)


def _split(i: Instruction) -> tuple[str, str, int, frozenset[str]]:
    """Return (space, type, vector length, other modifiers) of an ld or st."""
    rest = list(i.parts[1:])
    kind = rest.pop() if rest else ""
    if kind not in WIDTHS or kind == "f16x2":
        raise i.unknown(f"no {i.base} of .{kind}")
    count = {"v2": 2, "v4": 4}.get(rest[-1], 1) if rest else 1
    if count > 1:
        rest.pop()
    spaces = [part.removesuffix("::cta") for part in rest if part.removesuffix("::cta") in SPACES]
    others = frozenset(part for part in rest if part.removesuffix("::cta") not in SPACES)
    for part in others - ORDERS - SCOPES - CACHING:
        raise i.unknown(f"modifier .{part} of {i.base} is not implemented")
    if len(spaces) > 1 or len(others & ORDERS) > 1:
        raise i.unknown("two state spaces, or two orders")
    if WIDTHS[kind] * count > 16:
        raise i.unknown("an access has 16 bytes at most")
    return (spaces[0] if spaces else "generic"), kind, count, others


def _flags(i: Instruction, space: str, others: frozenset[str]) -> dict[str, bool]:
    strong = bool(others & {"relaxed", "acquire", "release"}) or ("volatile" in others and space in ("global", "generic"))
    return {"strong": strong, "constant": "nc" in others, "acquire": "acquire" in others, "release": "release" in others}


def _parameter_space(e: Emitter, i: Instruction, address: Operand) -> str:
    """Parameters of the entry are one bank for all lanes; those of device functions lie in each lane's frame."""
    if address.text in e.names["FRAMES"]:
        return "frame"
    if address.text in e.symbols or e.names["ENTRY"]:
        return "param"
    raise i.unknown("a parameter of a device function is addressed through a register")


@handles("ld", "ldu")
def emit_load(e: Emitter, i: Instruction) -> None:
    space, kind, count, others = _split(i)
    if len(i.operands) != 2 or "release" in others:
        raise i.unknown("ld has a destination and an address")
    dst, address = i.operands
    targets = dst.inner if dst.kind == "vec" else (dst,)
    if len(targets) != count:
        raise i.unknown(f"{len(targets)} destinations of {count} words")
    if space == "param":
        space = _parameter_space(e, i, address)
    site = site_of(e, i, address, WIDTHS[kind], count, space, **_flags(i, space, others))
    loaded = e.temporary(f"M.access.load_{space}(G, {site}, {address_of(e, address)})")
    for place, target in enumerate(targets):
        if target.kind != "sink":
            view = "" if CODES[kind] == f"u{WIDTHS[kind]}" else f".view({CODES[kind]})"
            e.set(target, kind, f"{loaded}[{place}]{view}")


@handles("st")
def emit_store(e: Emitter, i: Instruction) -> None:
    space, kind, count, others = _split(i)
    if len(i.operands) != 2 or "acquire" in others or "nc" in others:
        raise i.unknown("st has an address and a source")
    address, source = i.operands
    sources = source.inner if source.kind == "vec" else (source,)
    if len(sources) != count:
        raise i.unknown(f"{len(sources)} sources of {count} words")
    if space == "const":
        raise i.unknown("there is no st.const")
    if space == "param":
        space = _parameter_space(e, i, address)
        if space == "param":
            raise i.unknown("a kernel cannot write its parameters")
    site = site_of(e, i, address, WIDTHS[kind], count, space, **_flags(i, space, others))
    plain = f"b{8 * WIDTHS[kind]}"
    values = ", ".join(e.value(word, kind if word.kind == "imm" else plain) + _bits(word, kind) for word in sources)
    e.emit(f"M.access.store_{space}(G, {site}, {address_of(e, address)}, [{values}])")


def _bits(word: Operand, kind: str) -> str:
    return f".view(u{WIDTHS[kind]})" if word.kind == "imm" and CODES[kind][0] != "u" else ""


@handles("prefetch", "prefetchu")
def emit_hint(e: Emitter, i: Instruction) -> None:
    """Prefetching changes no value."""
    e.emit("pass")


@handles("membar", "fence")
def emit_fence(e: Emitter, i: Instruction) -> None:
    words = set(i.parts[1:])
    known = {"cta", "gl", "sys"} if i.base == "membar" else {"sc", "acq_rel"} | SCOPES
    if not words <= known:
        raise i.unknown(f"modifiers {sorted(words - known)} of {i.base} are not implemented")
    if "cta" not in words:
        e.emit("M.access.fence(G)")
    else:
        e.emit("pass")


@handles("nanosleep")
def emit_sleep(e: Emitter, i: Instruction) -> None:
    if i.parts[1:] != ("u32",):
        raise i.unknown("nanosleep is nanosleep.u32")
    e.emit("pass")
