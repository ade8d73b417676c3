"""Mutations of the tree of a document, serialised in random styles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source import yaml_nodes as yaml
from tests.fuzz.vocabulary import EXPRESSIONS, FIELDS, NUMBERS, YAML

EXPRESSION_FIELDS = {"require", "where", "budget", "threshold", "value"}
_QUANTIFIER = re.compile(r"(forall|exists)\s+(\w+)\s+in\s+(\w+\([^()]*\))\s*:")
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[0-9][0-9.eE]*")
_NOT_PLAIN = re.compile(r"^[-?:,\[\]{}#&*!|>'\"%@`\s]|^$|: | #|:$|\s$|[\n\r]|[,\[\]{}]")


@dataclass(slots=True)
class Leaf:
    """A scalar."""

    text: str
    style: str


@dataclass(slots=True)
class Branch:
    """A list, whose keys are None, or a mapping."""

    mapping: bool
    parts: list[tuple[Leaf | None, Tree]] = field(default_factory=list)


Tree = Leaf | Branch


def read(data: bytes) -> Tree | None:
    """Return the tree of a document; None where it is not YAML."""
    try:
        source = SourceFile("seed", data.decode("utf-8"))
    except UnicodeDecodeError:
        return None
    root = yaml.parse_yaml(source, Sink())
    return None if root is None else _tree(root)


def _tree(node: yaml.Node) -> Tree:
    match node:
        case yaml.Scalar():
            return Leaf(node.text, node.style)
        case yaml.SequenceNode(items=items):
            return Branch(False, [(None, _tree(item)) for item in items])
        case yaml.Mapping(entries=entries):
            pairs: list[tuple[Leaf | None, Tree]] = [
                (Leaf(e.key.text, e.key.style), _tree(e.value)) for e in entries
            ]
            return Branch(True, pairs)


def copied(tree: Tree) -> Tree:
    """Return a deep copy of a tree."""
    if isinstance(tree, Leaf):
        return Leaf(tree.text, tree.style)
    return Branch(
        tree.mapping,
        [(None if k is None else Leaf(k.text, k.style), copied(v)) for k, v in tree.parts],
    )


def branches(tree: Tree) -> Iterator[Branch]:
    """Yield every list and mapping."""
    if isinstance(tree, Branch):
        yield tree
        for _, value in tree.parts:
            yield from branches(value)


def _leaves(tree: Tree) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
        return
    for key, value in tree.parts:
        if key is not None:
            yield key
        yield from _leaves(value)


def expressions(tree: Tree) -> list[Leaf]:
    """Return the scalars that hold expressions."""
    return [
        value
        for branch in branches(tree)
        for key, value in branch.parts
        if key is not None and key.text in EXPRESSION_FIELDS and isinstance(value, Leaf)
    ]


def change(tree: Tree, other: Tree, random: Random) -> None:
    """Make one change to a tree; `other` is a source of parts."""
    places = [(branch, i) for branch in branches(tree) for i in range(len(branch.parts))]
    written = expressions(tree)
    if written and random.random() < 0.4:
        _rewrite(random.choice(written), written, random)
        return
    if not places:
        return
    branch, i = random.choice(places)
    key, value = branch.parts[i]
    match random.randrange(10):
        case 0:
            target, j = random.choice(places)
            theirs, their_value = target.parts[j]
            if not _within(target, value) and not _within(branch, their_value):
                branch.parts[i], target.parts[j] = (key, their_value), (theirs, value)
        case 1:
            branch.parts.insert(random.randint(0, len(branch.parts)), (_twin(key), copied(value)))
        case 2:
            del branch.parts[i]
        case 3:
            name = Leaf(random.choice(FIELDS), "plain") if branch.mapping else None
            branch.parts.insert(i, (name, _some(tree, other, random)))
        case 4:
            branch.parts[i] = (key, _other_kind(value, random))
        case 5:
            leaves = list(_leaves(tree))
            random.choice(leaves).text = random.choice(leaves).text
        case 6:
            branch.parts[i] = (key, _some(tree, other, random))
        case 7:
            leaf = random.choice(list(_leaves(tree)))
            leaf.style = random.choice(("plain", "'", '"', "|", ">"))
        case 8:
            random.choice(list(_leaves(tree))).text = random.choice((*NUMBERS, *YAML))
        case _:
            deep: Tree = copied(value)
            for _ in range(random.choice((1, 2, 38, 60))):
                deep = Branch(False, [(None, deep)])
            branch.parts[i] = (key, deep)


def _within(branch: Branch, tree: Tree) -> bool:
    return any(found is branch for found in branches(tree))


def _twin(key: Leaf | None) -> Leaf | None:
    return None if key is None else Leaf(key.text, key.style)


def _some(tree: Tree, other: Tree, random: Random) -> Tree:
    """Return a copy of some subtree, or a new scalar."""
    if random.random() < 0.3:
        return Leaf(random.choice((*NUMBERS, *EXPRESSIONS)), "plain")
    from_tree = random.choice((tree, other))
    found = [value for branch in branches(from_tree) for _, value in branch.parts]
    return copied(random.choice(found)) if found else Leaf("", "plain")


def _other_kind(value: Tree, random: Random) -> Tree:
    match value:
        case Leaf():
            key = Leaf(random.choice(FIELDS), "plain")
            forms = (Branch(False, [(None, value)]), Branch(True, [(key, value)]), Branch(True))
            return random.choice(forms)
        case Branch(mapping=True):
            return random.choice((Branch(False, [(None, v) for _, v in value.parts]), Leaf("", "")))
        case Branch():
            key = Leaf("0", "plain")
            return Branch(
                True, [(Leaf(f"{key.text}{n}", '"'), v) for n, (_, v) in enumerate(value.parts)]
            )


def _rewrite(leaf: Leaf, others: list[Leaf], random: Random) -> None:
    """Change an expression by the rules of expressions."""
    text = leaf.text
    words = _WORD.findall(" ".join(other.text for other in others)) or ["x"]
    match random.randrange(10):
        case 0:
            new = random.choice(("forall", "exists")), random.choice(("x", "y", "all"))
            place = random.choice(("points(all)", "ball(all, 1e-3)", "box(all, 0)", "points(none)"))
            text = _QUANTIFIER.sub("", text)
            text = f"{new[0]} {new[1]} in {place}: {text}"
        case 1:
            text = _QUANTIFIER.sub("", text)
        case 2:
            text = f"not ({text})"
        case 3:
            other = random.choice(others).text
            text = f"({text}) {random.choice(('and', 'or', 'implies', '<=', '+'))} ({other})"
        case 4:
            text = _once(_NUMBER, text, random.choice(NUMBERS), random)
        case 5:
            text = _once(_WORD, text, random.choice(words), random)
        case 6:
            times = random.choice((1, 3, 30, 300))
            text = "(" * times + text + ")" * times
        case 7:
            text = f"{text} {random.choice(EXPRESSIONS)}"
        case 8:
            text = text.replace(" ", random.choice(("  ", "\n", "\t", "", " \n\n "))) or "x"
        case _:
            text = _once(_WORD, text, random.choice(EXPRESSIONS), random)
    leaf.text = text
    leaf.style = random.choice((leaf.style, leaf.style, "'", '"', "|", ">", "plain"))


def _once(pattern: re.Pattern[str], text: str, new: str, random: Random) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    at = random.choice(found)
    return text[: at.start()] + new + text[at.end() :]


class Writer:
    """Write a tree with random block or flow style, indentation, quotation marks and comments."""

    def __init__(self, random: Random, comments: float) -> None:
        self._random = random
        self._comments = comments
        self._noted = 0

    def text(self, tree: Tree) -> str:
        """Return the document."""
        lines = self._block(tree, 0) if isinstance(tree, Branch) else [self._scalar(tree, False)]
        return "\n".join(lines) + "\n"

    def _note(self) -> str:
        self._noted += 1
        return f"# note {self._noted}"

    def _behind(self, line: str) -> str:
        return f"{line}  {self._note()}" if self._random.random() < self._comments else line

    def _block(self, tree: Branch, indent: int) -> list[str]:
        lines: list[str] = []
        pad = " " * indent
        for key, value in tree.parts:
            if self._random.random() < self._comments:
                lines.append(self._random.choice((pad, "", pad + " ")) + self._note())
            if self._random.random() < self._comments:
                lines.append("")
            lead = f"{pad}-" if key is None else f"{pad}{self._scalar(key, True, True)}:"
            lines += self._value(lead, value, indent)
        return lines

    def _value(self, lead: str, value: Tree, indent: int) -> list[str]:
        step = self._random.choice((1, 2, 2, 4))
        if isinstance(value, Leaf):
            if value.style in {"|", ">"} or ("\n" in value.text and self._random.random() < 0.5):
                return [
                    self._behind(f"{lead} {self._header(value)}"),
                    *self._body(value, indent + step),
                ]
            return [self._behind(f"{lead} {self._scalar(value, False)}".rstrip(" "))]
        if not value.parts or self._random.random() < 0.4:
            return [
                self._behind(line) for line in f"{lead} {self._flow(value, indent + 1)}".split("\n")
            ]
        return [self._behind(lead), *self._block(value, indent + step)]

    def _header(self, leaf: Leaf) -> str:
        sign = leaf.style if leaf.style in {"|", ">"} else "|"
        return sign + self._random.choice(("", "", "-", "+"))

    def _body(self, leaf: Leaf, indent: int) -> list[str]:
        return [" " * indent + line if line else "" for line in leaf.text.split("\n")]

    def _flow(self, tree: Tree, indent: int) -> str:
        if isinstance(tree, Leaf):
            return self._scalar(tree, True)
        parts = [
            self._flow(v, indent)
            if k is None
            else f"{self._scalar(k, True, True)}: {self._flow(v, indent)}"
            for k, v in tree.parts
        ]
        gap = self._random.choice((", ", ", ", " , ", ",\n" + " " * indent))
        first, last = "{}" if tree.mapping else "[]"
        return first + gap.join(parts) + self._random.choice(("", "", " ")) + last

    def _scalar(self, leaf: Leaf, flow: bool, key: bool = False) -> str:
        text, style = leaf.text, leaf.style
        if not key and self._random.random() < 0.1:
            style = self._random.choice(("'", '"', "plain"))
        plain = not _NOT_PLAIN.search(text) if flow else not re.search(r": | #|\n|:$|^[^\w.]", text)
        if style not in {"'", '"'} and (plain or self._random.random() < 0.05):
            return text
        if style == "'" and "\n" not in text:
            return "'" + text.replace("'", "''") + "'"
        return '"' + "".join(self._character(c) for c in text) + '"'

    def _character(self, char: str) -> str:
        if char in '"\\':
            return "\\" + char
        if char == "\n":
            return "\\n"
        if not char.isprintable() or self._random.random() < 0.01:
            return f"\\U{ord(char):08x}"
        return char


Change = Callable[[bytes, bytes, Random], bytes]


def trees(data: bytes, other: bytes, random: Random) -> bytes:
    """Change a tree in a few places and serialise it."""
    tree, theirs = read(data), read(other)
    if tree is None:
        return data
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        change(tree, theirs if theirs is not None else tree, random)
    written = Writer(random, random.choice((0.0, 0.1, 0.4))).text(tree)
    return written.encode("utf-8", "replace")


TREES: tuple[Change, ...] = (trees,)
