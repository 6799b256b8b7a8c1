"""An order of pieces in which lanes that parted meet again as early as they can.

Everything inside a loop comes before what follows the loop, and both sides of a branch before where they join: lanes at the earliest piece
run first, and those ahead wait for them. It is a weak topological order, by strongly connected components within components. Source:
Bourdoncle, "Efficient chaotic iteration strategies with widenings" (1993); Tarjan 1972 for the components.
"""


def components(nodes: set[int], targets: dict[int, list[int]]) -> list[list[int]]:
    """Return the strongly connected components of a subgraph, each before those it leads to."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()
    found: list[list[int]] = []
    for root in sorted(nodes, reverse=True):
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        waiting.add(root)
        todo = [(root, iter(sorted(set(targets[root]) & nodes, reverse=True)))]
        while todo:
            node, following = todo[-1]
            for target in following:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    waiting.add(target)
                    todo.append((target, iter(sorted(set(targets[target]) & nodes, reverse=True))))
                    break
                if target in waiting:
                    low[node] = min(low[node], index[target])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == index[node]:
                    place = stack.index(node)
                    found.append(stack[place:])
                    waiting.difference_update(stack[place:])
                    del stack[place:]
    return found[::-1]


def meeting_order(nodes: set[int], entry: int, targets: dict[int, list[int]]) -> list[int]:
    """Return the pieces of a function in the order in which their lanes run."""
    result: list[int] = []
    for part in components(nodes, targets):
        members = set(part)
        if len(part) == 1:
            result += part
            continue
        entered = {target for node in nodes - members for target in targets[node]} & members
        head = entry if entry in members else min(entered or members)
        result += [head, *meeting_order(members - {head}, head, targets)]
    return result
