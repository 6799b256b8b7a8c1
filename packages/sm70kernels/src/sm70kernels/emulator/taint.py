"""Which kernel parameters a kernel writes through: those whose value reaches the address of a store or an atomic.

Values loaded from memory carry nothing on: a pointer that is itself kept in memory is noticed when the first write through it happens.
"""

from sm70kernels.emulator.syntax import Function, Operand


def _names(operands: tuple[Operand, ...]) -> list[str]:
    return [name for operand in operands for name in (_names(operand.inner) if operand.inner else [operand.text])]


def written_through(functions: list[Function], frames: dict[tuple[str, str], tuple[str, str]]) -> set[str]:
    """Return names of parameters and variables. frames: (function, name) of a call's .param variable -> that of the callee's parameter."""
    flows: dict[tuple[str, str], set[tuple[str, str]]] = {}
    stores: set[tuple[str, str]] = set()

    def node(function: Function, name: str) -> tuple[str, str]:
        known = function.registers.keys() | function.variables.keys() | {variable.name for variable in function.parameters}
        key = (function.name, name) if name in known or (function.name, name) in frames else ("", name)
        return frames.get(key, key)

    for function in functions:
        for i in function.body:
            if i.base in ("st", "atom", "red") and not {"shared", "local", "param"} & set(i.parts):
                address = next(operand for operand in i.operands if operand.kind == "addr")
                stores.add(node(function, address.text))
            if i.base in ("ld", "ldu", "atom", "red", "st") and "param" not in i.parts:
                continue
            if i.base in ("bra", "call", "bar", "barrier") or not i.operands:
                continue
            targets = {node(function, name) for name in _names(i.operands[:1])}
            for source in {node(function, name) for name in _names(i.operands[1:])}:
                for target in targets:
                    flows.setdefault(target, set()).add(source)
    found, todo = set(stores), list(stores)
    while todo:
        for source in flows.get(todo.pop(), ()):
            if source not in found:
                found.add(source)
                todo.append(source)
    return {name for _, name in found}
