"""Which registers a piece of code must leave behind: those that some later piece reads before it writes them."""


def live_out(pieces: dict[int, tuple[list[int], set[int], set[int]]]) -> dict[int, set[int]]:
    """Return the registers live at the end of every piece. pieces: number -> (successors, registers read first, registers written)."""
    before: dict[int, set[int]] = {number: set(reads) for number, (_, reads, _) in pieces.items()}
    after: dict[int, set[int]] = {number: set() for number in pieces}
    came_from: dict[int, list[int]] = {number: [] for number in pieces}
    for number, (targets, _, _) in pieces.items():
        for target in targets:
            came_from[target].append(number)
    todo = set(pieces)
    while todo:
        number = max(todo)
        todo.discard(number)
        targets, reads, writes = pieces[number]
        after[number] = set().union(*(before[target] for target in targets))
        new = reads | (after[number] - writes)
        if new != before[number]:
            before[number] = new
            todo.update(came_from[number])
    return after
