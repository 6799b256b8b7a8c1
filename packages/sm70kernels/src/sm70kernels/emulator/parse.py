"""PTX text -> modules. Only the grammar is known here; what an instruction means is the business of the translation.

Source: PTX ISA 8.7, chapters 4, 5 and 11.
"""

import re
from bisect import bisect_right
from dataclasses import replace

from sm70kernels.emulator.faults import UnknownInstruction
from sm70kernels.emulator.syntax import WIDTHS, Function, Instruction, Module, Operand, Variable, split_list

_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_SPACE = re.compile(r"\s+")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_VARIABLE = re.compile(rf"\.(?P<type>\w+)\s+(?P<name>{_NAME})\s*(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$", re.DOTALL)
_REGISTER = re.compile(rf"({_NAME})(?:<(\d+)>)?$")
_SPACES = ("global", "const", "shared", "local", "param")


def variable(text: str, space: str) -> Variable:
    """Parse a declaration without its leading state space, as `.align 4 .b8 name[16] = {...}`."""
    align = 0
    text = text.strip()
    while match := re.match(r"\.(align|ptr|global|const|shared|local|v2|v4)\b\s*(\d+)?\s*", text):
        if match[1] in ("v2", "v4"):
            raise UnknownInstruction(f"{text}: vector variables are not implemented")
        if match[1] == "align":
            align = max(align, int(match[2]))
        text = text[match.end() :]
        if match[1] == "ptr":  # `.u64 .ptr .global .align 16 name`: qualifiers of the pointee
            while qualifier := re.match(r"\.(?:global|const|shared|local|align\s+\d+)\b\s*", text):
                text = text[qualifier.end() :]
            align = 0
    # The pointee's qualifiers stand between the type and the name.
    text = re.sub(r"^(\.\w+)\s+\.ptr\b(?:\s*\.(?:global|const|shared|local|align\s+\d+)\b)*\s*", r"\1 ", text)
    match = _VARIABLE.match(text)
    if not match or match["type"] not in WIDTHS:
        raise UnknownInstruction(f".{space} {text}: not a declaration the emulator knows")
    width = WIDTHS[match["type"]]
    size = width
    for dim in re.findall(r"\[(\d*)\]", match["dims"]):
        size *= int(dim) if dim else 0
    return Variable(match["name"], space, match["type"], size, align or width, match["init"], bool(match["dims"]))


class _Scope:
    """Names of one `{ }` of a function body: inner registers and variables get a unique name."""

    def __init__(self, outer: "_Scope | None", prefix: str) -> None:
        self.outer = outer
        self.prefix = prefix
        self.names: dict[str, str] = {}

    def declare(self, name: str) -> str:
        self.names[name] = self.prefix + name
        return self.names[name]

    def find(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return name


class Parser:
    """One pass over the text; `module` is the result."""

    def __init__(self, ptx: str) -> None:
        blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731  (line numbers must survive)
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, ptx, flags=re.DOTALL)
        self.starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        self.place = 0
        self.files: dict[str, str] = {number: path.rpartition("/")[2] for number, path in _FILE.findall(self.text)}
        self.module = Module()
        self.source = ""
        self.scopes = 0
        self.branches: list[tuple[int, _Scope]] = []
        self.tables: list[tuple[str, _Scope]] = []
        while self._skip():
            self._top()

    def line(self, place: int) -> int:
        return bisect_right(self.starts, place)

    def _skip(self) -> bool:
        if match := _SPACE.match(self.text, self.place):
            self.place = match.end()
        return self.place < len(self.text)

    def _until(self, stops: str) -> str:
        """Return the text up to one of `stops` outside brackets and strings, and move behind it."""
        depth, place, start = 0, self.place, self.place
        while place < len(self.text):
            char = self.text[place]
            if depth == 0 and char in stops:
                self.place = place + 1
                return self.text[start:place].strip()
            if char == '"':
                place = self.text.index('"', place + 1)
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            place += 1
        raise UnknownInstruction(f"PTX line {self.line(start)}: the text ends inside a statement")

    def _rest_of_line(self) -> str:
        end = self.text.find("\n", self.place)
        end = len(self.text) if end < 0 else end
        text, self.place = self.text[self.place : end], end
        return text

    def _top(self) -> None:
        word = re.compile(r"\.?[\w$]+").match(self.text, self.place)
        name = word[0] if word else self.text[self.place]
        if name in (".version", ".target", ".address_size", ".file"):
            self._rest_of_line()
        elif name == ".section":
            self._until("{")
            self.place -= 1
            self._block()
        elif name == ".pragma":
            self._until(";")
        elif name in (".visible", ".weak", ".extern", ".common"):
            self.place += len(name)
        elif name in (".entry", ".func"):
            self.place += len(name)
            self._function(name == ".entry")
        elif name[1:] in _SPACES:
            self.place += len(name)
            for found in self._declarations(name[1:]):
                self.module.variables[found.name] = found
        else:
            raise UnknownInstruction(f"PTX line {self.line(self.place)}: directive {name} is not implemented")

    def _declarations(self, space: str) -> list[Variable]:
        first, *others = split_list(self._until(";"))
        head = first[: re.search(rf"{_NAME}\s*(?:\[[^\]]*\])*\s*(?:=.*)?$", first, re.DOTALL).start()]  # type: ignore[union-attr]
        return [variable(first, space), *(variable(head + other, space) for other in others)]

    def _block(self) -> str:
        """Skip `{ ... }` and return its inside."""
        self.place += 1
        inside = self._until("}")
        return inside

    def _parameters(self) -> tuple[Variable, ...]:
        self._skip()
        if self.text[self.place] != "(":
            return ()
        self.place += 1
        found = []
        for text in split_list(self._until(")")):
            space = re.match(r"\.(param|reg)\b", text)
            if not space or space[1] == "reg":
                raise UnknownInstruction(f"{text}: only .param parameters are implemented")
            found.append(variable(text[space.end() :], "param"))
        return tuple(found)

    def _function(self, entry: bool) -> None:
        results = () if entry else self._parameters()
        self._skip()
        name = re.compile(_NAME).match(self.text, self.place)
        if not name:
            raise UnknownInstruction(f"PTX line {self.line(self.place)}: a function without a name")
        self.place = name.end()
        function = Function(name[0], entry, self._parameters(), results)
        header = self._until("{;")
        for directive, values in re.findall(r"\.(\w+)([^.]*)", header):
            numbers = tuple(int(number) for number in re.findall(r"\d+", values))
            if directive == "maxntid":
                function.max_threads = int(numbers[0] * (numbers[1] if len(numbers) > 1 else 1) * (numbers[2] if len(numbers) > 2 else 1))
            elif directive == "reqntid":
                function.required_block = (*numbers, 1, 1)[:3]
            elif directive not in ("minnctapersm", "maxnreg", "noreturn", "pragma", "maxnctapersm"):
                raise UnknownInstruction(f".{directive} of {name[0]} is not implemented")
        if self.text[self.place - 1] == "{":
            self.module.functions[function.name] = function
            self._body(function)

    def _body(self, function: Function) -> None:
        scope = _Scope(None, "")
        self.source = ""
        while self._skip():
            here = self.place
            char = self.text[here]
            if char == "{":
                self.scopes += 1
                scope = _Scope(scope, f"{{{self.scopes}}}")
                self.place += 1
            elif char == "}":
                self.place += 1
                if scope.outer is None:
                    self._resolve_labels(function)
                    return
                scope = scope.outer
            elif char == ";":
                self.place += 1
            elif match := _LABEL.match(self.text, here):
                self.place = match.end()
                self._label(function, scope, match[1])
            elif self.text.startswith((".loc ", ".loc\t"), here):
                if found := _LOC.match(self._rest_of_line()):
                    self.source = f"{self.files.get(found[1], 'file ' + found[1])}:{found[2]}"
            elif char == ".":
                self._directive(function, scope)
            else:
                function.body.append(self._instruction(self._until(";"), scope, function, self.line(here)))
                if function.body[-1].base in ("bra", "brx"):
                    self.branches.append((len(function.body) - 1, scope))
        raise UnknownInstruction(f"{function.name}: the text ends inside the function")

    def _resolve_labels(self, function: Function) -> None:
        """Labels may stand behind the branches to them, so branches learn the name of their label at the end."""
        for place, scope in self.branches:
            instruction = function.body[place]
            operands = tuple(replace(operand, text=scope.find(operand.text)) for operand in instruction.operands)
            function.body[place] = replace(instruction, operands=operands)
        for name, scope in self.tables:
            function.tables[name] = tuple(scope.find(label) for label in function.tables[name])
        self.branches.clear()
        self.tables.clear()

    def _label(self, function: Function, scope: _Scope, name: str) -> None:
        self._skip()
        if self.text.startswith(".branchtargets", self.place):
            self.place += len(".branchtargets")
            unique = scope.declare(name)
            function.tables[unique] = tuple(split_list(self._until(";")))
            self.tables.append((unique, scope))
        elif self.text.startswith(".callprototype", self.place):
            self._until(";")
            function.prototypes.add(name)
        else:
            function.labels[scope.declare(name)] = len(function.body)

    def _directive(self, function: Function, scope: _Scope) -> None:
        line = self.line(self.place)
        text = self._until(";")
        word = re.match(r"\.(\w+)\s*", text)
        directive = word[1] if word else ""
        rest = text[word.end() :] if word else text
        if directive == "reg":
            kind, _, names = rest.lstrip(".").partition(" ")
            if kind != "pred" and kind not in WIDTHS:
                raise UnknownInstruction(f"{text}: registers of type .{kind} are not implemented (PTX line {line})")
            for item in split_list(names):
                match = _REGISTER.match(item)
                if not match:
                    raise UnknownInstruction(f"{text}: not a register declaration (PTX line {line})")
                names_of = [match[1]] if match[2] is None else [f"{match[1]}{number}" for number in range(int(match[2]))]
                for name in names_of:
                    function.registers[scope.declare(name)] = kind
        elif directive in ("shared", "local", "param"):
            found = variable(rest, directive)
            unique = scope.declare(found.name)
            function.variables[unique] = Variable(unique, *list(vars(found).values())[1:])
        elif directive != "pragma":
            raise UnknownInstruction(f"{text}: directive .{directive} is not implemented (PTX line {line})")

    def _instruction(self, text: str, scope: _Scope, function: Function, line: int) -> Instruction:
        whole = " ".join(text.split())
        guard = None
        if text.startswith("@"):
            head, _, text = text.partition(" ") if " " in text.split("\t")[0] else text.partition("\t")
            name = scope.find(head.lstrip("@!"))
            guard = Operand("reg", name, negated=head.startswith("@!"))
        opcode, *operands = re.split(r"\s+", text.strip(), maxsplit=1)
        try:
            parsed = tuple(self._operand(part, scope, function) for part in split_list(operands[0])) if operands else ()
        except UnknownInstruction as error:
            raise Instruction((opcode,), (), None, line, self.source, whole).unknown(str(error)) from None
        return Instruction(tuple(opcode.split(".")), parsed, guard, line, self.source, whole)

    def _operand(self, text: str, scope: _Scope, function: Function) -> Operand:
        text = text.strip()
        if text.startswith(("{", "(")):
            return Operand("vec", text, inner=tuple(self._operand(part, scope, function) for part in split_list(text[1:-1])))
        if text.startswith("["):
            base, offset = self._address(text[1:-1])
            return Operand("addr", scope.find(base), offset)
        if "|" in text:
            return Operand("vec", text, inner=tuple(self._operand(part, scope, function) for part in text.split("|")))
        if text.startswith("!"):
            return Operand("reg", scope.find(text[1:].strip()), negated=True)
        if text == "_":
            return Operand("sink", text)
        if re.match(r"-?\s*\d", text):
            return Operand("imm", text.replace(" ", ""))
        if match := re.match(rf"({_NAME})\s*\+\s*(-?\d+)$", text):
            return Operand("name", scope.find(match[1]), int(match[2]))
        name = scope.find(text)
        if name in function.registers:
            return Operand("reg", name)
        return Operand("name", name)

    @staticmethod
    def _address(text: str) -> tuple[str, int]:
        match = re.match(rf"\s*({_NAME}|\d+)\s*(?:\+\s*(-?\s*\w+)|(-\s*\w+))?\s*$", text)
        if not match:
            raise UnknownInstruction(f"[{text}]: not an address the emulator knows")
        return match[1], int((match[2] or match[3] or "0").replace(" ", ""), 0)


def parse(ptx: str) -> Module:
    """Return the module of a PTX text. Raises UnknownInstruction at anything outside the grammar above."""
    return Parser(ptx).module
