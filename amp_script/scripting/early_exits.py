"""Regions as TorchScript can compile them around, behind and in front of early exits.

Its pass for ``return``, ``break`` and ``continue`` puts what follows an exit that may happen into a
branch. It does not look into ``with`` blocks while it does: it aborts, or leaves a program in which
a value is used outside of the branch that makes it. It also evaluates the condition of a ``while``
loop where a ``continue`` stands, so inside of a region. A function is therefore compiled without
``with`` blocks. :func:`with_marks` writes a mark where each begins and ends, as a call of the
region's ``__exit__`` with a text that nobody else gives it; :func:`nest_regions` makes
``prim::Enter`` and ``prim::Exit`` of the marks in the graph, both in one block, and so what
TorchScript makes of a ``with`` block that has no exits in it.

Where an exit was, the end of a region stands in one branch, with what follows it. The branch is cut
in two there, under the same condition, and the end comes between: the other branch, which is taken
after the exit, left the region at the same place.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from itertools import count

from ..errors import LoweringError
from ..lowering._graph import Block, Editor, Graph, Node, Value, constant, is_constant, source_of

__all__ = ["nest_regions", "with_marks"]

_BEGIN, _END = "amp_script: begin of region ", "amp_script: end of region "
_VARIABLE = "_amp_script_region_"


# Source -------------------------------------------------------------------------------------------


def with_marks(tree: ast.Module) -> ast.Module:
    """Put marks in the place of ``with`` blocks; every node keeps its line and column.

    Args:
        tree: a function definition; it stays as it is.
    """
    if not any(isinstance(node, ast.With) for node in ast.walk(tree)):
        return tree
    marked: ast.Module = _Marks().visit(copy.deepcopy(tree))
    return marked


class _Marks(ast.NodeTransformer):
    def __init__(self) -> None:
        self._numbers = count()

    def visit_While(self, node: ast.While) -> ast.AST:
        """Evaluate the condition in the loop, if a ``continue`` leads to it out of a region."""
        if _continues_from_region(node.body):
            leave = ast.copy_location(ast.Break(), node.test)
            choice = ast.copy_location(ast.If(node.test, node.body, [leave]), node.test)
            node.test = ast.copy_location(ast.Constant(True), node.test)
            node.body = [choice]
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """Write the marks around the body."""
        self.generic_visit(node)
        if any("_IgnoreContextManager" in ast.unparse(item.context_expr) for item in node.items):
            return node
        begins: list[ast.stmt] = []
        ends: list[ast.stmt] = []
        for item in node.items:
            number = next(self._numbers)
            name = _Name(f"{_VARIABLE}{number}")
            made: list[ast.stmt] = [
                ast.Assign([ast.Name(name, ast.Store())], item.context_expr),
                _mark(name, _BEGIN, number),
                _statement(item.optional_vars, _call(name, "__enter__")),
            ]
            begins += (_placed(each, item.context_expr) for each in made)
            ends.insert(0, _placed(_mark(name, _END, number), item.context_expr))
        return [*begins, *node.body, *ends]


class _Name(str):
    """A name that is not in the source, and takes the room of one character there.

    Torch takes a name to end as many characters behind its place as it has, and reads on from there
    to find an attribute's place: past the end of the source, if the name is longer than the rest.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return 1


def _continues_from_region(statements: Sequence[ast.AST], inside: bool = False) -> bool:
    """Whether a ``continue`` of the loop that the statements are in stands in a region."""
    return any(
        (inside and isinstance(each, ast.Continue))
        or (
            not isinstance(each, (ast.For, ast.While))
            and _continues_from_region(
                list(ast.iter_child_nodes(each)), inside or isinstance(each, ast.With)
            )
        )
        for each in statements
    )


def _mark(name: str, text: str, number: int) -> ast.stmt:
    nothing = ast.Constant(None)
    return ast.Expr(_call(name, "__exit__", nothing, nothing, ast.Constant(f"{text}{number}")))


def _call(name: str, method: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(
        ast.Attribute(ast.Name(name, ast.Load()), _Name(method), ast.Load()), list(arguments), []
    )


def _statement(target: ast.expr | None, value: ast.expr) -> ast.stmt:
    return ast.Expr(value) if target is None else ast.Assign([target], value)


def _placed(statement: ast.stmt, place: ast.expr) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(statement, place))


# Graphs -------------------------------------------------------------------------------------------


def nest_regions(graph: Graph) -> None:
    """Make ``prim::Enter`` and ``prim::Exit`` of the marks in a graph, in place.

    Raises:
        LoweringError: a region ends where no branch of an early exit is.
    """
    if any(_text_of(call) for call in graph.findAllNodes("prim::CallMethod")):
        _Nesting(Editor(graph)).settle(graph.block())


def _text_of(node: Node) -> str:
    """The text of a mark, or an empty one if the node is none."""
    if node.kind() != "prim::CallMethod" or node.s("name") != "__exit__":
        return ""
    inputs = list(node.inputs())
    if len(inputs) != 4 or not is_constant(inputs[3]):
        return ""
    text = constant(inputs[3])
    return text if isinstance(text, str) and text.startswith((_BEGIN, _END)) else ""


class _Nesting:
    """Brings the begin and the end of each region into one block.

    Args:
        editor: of the graph.
    """

    def __init__(self, editor: Editor) -> None:
        self._editor = editor

    def settle(self, block: Block) -> list[Node]:
        """Nest the regions that begin in a block.

        Returns:
            The ends in it of regions that began outside, in the order in which they run.
        """
        open_regions: list[tuple[str, Value]] = []
        ends: list[Node] = []
        nodes = list(block.nodes())
        while nodes:
            node = nodes.pop(0)
            text = _text_of(node)
            if text.startswith(_BEGIN):
                open_regions.append((text.removeprefix(_BEGIN), node.inputsAt(0)))
                self._enter(node, nodes.pop(0))
            elif text:
                if open_regions and open_regions[-1][0] == text.removeprefix(_END):
                    open_regions.pop()
                    self._exit(node, node.inputsAt(0))
                else:
                    ends.append(node)
            else:
                leading_out = [end for inner in node.blocks() for end in self.settle(inner)]
                if leading_out:
                    nodes[:0] = self._cut(node, leading_out[0])
        # Every way through the rest of these leads out of the block.
        for _, region in reversed(open_regions):
            self._exit(block.returnNode(), region, keep=True)
        return ends

    def _enter(self, mark: Node, call: Node) -> None:
        entered = self._editor.node_before(mark, "prim::Enter", mark.inputsAt(0))
        entered.copyMetadata(mark)
        entered.output().setType(call.output().type())
        call.output().replaceAllUsesWith(entered.output())
        call.destroy()
        mark.destroy()

    def _exit(self, node: Node, region: Value, *, keep: bool = False) -> None:
        left = self._editor.node_before(node, "prim::Exit", region)
        if not keep:
            left.copyMetadata(node)
            node.destroy()

    def _cut(self, branch: Node, end: Node) -> list[Node]:
        """Cut a branch in two at the end of a region, and put the end between.

        Returns:
            The end and the second half.
        """
        if branch.kind() != "prim::If":
            raise LoweringError(
                "autocast",
                "its region ends in a block that is not a branch",
                source=source_of(end),
                advice="leave the region before, by an else in the place of an early exit",
            )
        first = list(branch.blocks())
        second = self._editor.node_before(branch, "prim::If", branch.inputsAt(0), outputs=0)
        second.moveAfter(branch)
        second.copyMetadata(branch)
        cut = next(i for i, block in enumerate(first) if end in list(block.nodes()))
        halves = [second.addBlock(), second.addBlock()]
        before, after = _around(list(first[cut].nodes()), end)
        end.moveAfter(branch)
        for node in after:
            node.moveBefore(halves[cut].returnNode())
        results = [list(block.outputs()) for block in first]
        outputs = list(branch.outputs())
        for block, half, values in zip(first, halves, results, strict=True):
            for value in values:
                half.registerOutput(value)
            for _ in values:
                block.returnNode().removeInput(0)
        for output in outputs:
            made = second.addOutput().setType(output.type())
            made.copyMetadata(output)
            output.replaceAllUsesWith(made)
        for index in reversed(range(len(outputs))):
            branch.eraseOutput(index)
        self._carry(branch, second, cut, before)
        self._carry(branch, second, 1 - cut, list(first[1 - cut].nodes()))
        return [end, second]

    def _carry(self, first: Node, second: Node, side: int, nodes: Sequence[Node]) -> None:
        """Carry what the second half uses of one side of the first half out of it."""
        for value in (value for node in nodes for value in node.outputs()):
            if not any(use.user.isAfter(first) for use in value.uses()):
                continue
            for number, block in enumerate(first.blocks()):
                block.registerOutput(value if number == side else self._nothing(value))
            carried = first.addOutput().setType(value.type())
            carried.copyMetadata(value)
            value.replaceAllUsesAfterNodeWith(first, carried)

    def _nothing(self, like: Value) -> Value:
        made = self._editor.node_before(self._editor.first(), "prim::Uninitialized").output()
        made.setType(like.type())
        return made


def _around(nodes: Sequence[Node], end: Node) -> Iterator[Sequence[Node]]:
    index = nodes.index(end)
    yield nodes[:index]
    yield nodes[index + 1 :]
