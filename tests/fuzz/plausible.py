"""Mutations that an author could have made, so that most results are valid.

They change layout, names, numbers, operators and clauses.
"""

from __future__ import annotations

import re
from random import Random

from tests.fuzz.texts import Change
from tests.fuzz.trees import Branch, Leaf, Tree, Writer, branches, copied, expressions, read

_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?(?![\w.])")
_SIGN = re.compile(r"[(),\[\]]|[<>=!]=|[<>+*/-]")
_NOTES = (
    b"# why", b"#", b"# a: b, {c} [d]", b"# 'quoted", b"# \xc3\xa9t\xc3\xa9 \xf0\x9f\x9a\x80",
    b"# kcdsl: ignore[KC603] we know", b"#\ttab",
)  # fmt: skip
_NAMES = (
    "e1", "x", "y", "kl", "no", "Inf", "_", "__", "r2d2", "forall_", "length", "été", "N-1", "a.b",
    "points", "L4", "true_", "O", "slice", "on", "null", "1a", "k" * 90,
)  # fmt: skip
_ALIKE = (
    ("<=", "<"), (">=", ">"), ("<=", ">="), ("==", "!="), ("and", "or", "implies"),
    ("L1", "L2", "L3"), ("forall", "exists"), ("ball", "points"), ("+", "-", "*", "/"),
    ("kl", "js", "tv", "log_ratio", "top1_overlap", "latency", "throughput"),
    ("mean", "max", "p50", "p90", "p95", "p99", "rate"), ("ms", "s", "us", "min"),
    ("norm_inf", "norm_2", "norm_1"), ("requests", "windows", "tokens"), ("true", "false"),
    ("log", "guard", "fallback", "rollback", "higher_precision"), ("all", "long"),
    ("proof", "census", "sample", "probabilistic"), ("attn_0", "attn_1", "mlp_0", "model"),
)  # fmt: skip


# --- bytes ----------------------------------------------------------------------------------------


def digit(data: bytes, _: bytes, random: Random) -> bytes:
    """Replace a digit by another one."""
    found = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if not found:
        return data
    at = random.choice(found)
    return data[:at] + b"%d" % random.randrange(10) + data[at + 1 :]


def gap(data: bytes, _: bytes, random: Random) -> bytes:
    """Widen white space inside a line or at its end."""
    found = [m.end() for m in re.finditer(rb"(?<=[^\s]) |(?<=[^\s])(?=\r?\n)", data)]
    if not found:
        return data
    at = random.choice(found)
    return data[:at] + random.choice((b" ", b"  ", b"     ", b" " * 60)) + data[at:]


def note(data: bytes, _: bytes, random: Random) -> bytes:
    """Insert a comment behind a line or above one, or an empty line."""
    at = random.choice([0, *(m.end() for m in re.finditer(rb"\n", data))])
    written = random.choice(_NOTES)
    if random.random() < 0.4 and at:
        end = at - 2 if data[at - 2 : at - 1] == b"\r" else at - 1
        return data[:end] + random.choice((b" ", b"   ")) + written + data[end:]
    pad = random.choice((b"", b"", b"  ", b"     "))
    return data[:at] + random.choice((pad + written + b"\n", b"\n", b"\n \n")) + data[at:]


def margin(data: bytes, _: bytes, random: Random) -> bytes:
    """Change the line ends, the beginning or the end of the document."""
    match random.randrange(5):
        case 0:
            return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        case 1:
            return b"\xef\xbb\xbf" + data.removeprefix(b"\xef\xbb\xbf")
        case 2:
            return data.rstrip()
        case 3:
            return data + random.choice((b"\n\n\n", b"  ", b"...\n", b"# end"))
        case _:
            return random.choice((b"---\n", b"\n\n", b"# begin\n--- # go\n")) + data


# --- tokens ---------------------------------------------------------------------------------------


def alike(data: bytes, _: bytes, random: Random) -> bytes:
    """Replace a word or sign by another of its kind."""
    text = data.decode("utf-8", "replace")
    group = random.choice(_ALIKE)
    pattern = "|".join(
        rf"\b{re.escape(word)}\b" if word[0].isalpha() else rf"(?<= ){re.escape(word)}(?= )"
        for word in sorted(group, key=len, reverse=True)
    )
    found = list(re.finditer(pattern, text))
    if not found:
        return spread(data, b"", random)
    at = random.choice(found)
    return (text[: at.start()] + random.choice(group) + text[at.end() :]).encode()


def renamed(data: bytes, _: bytes, random: Random) -> bytes:
    """Rename a word everywhere."""
    text = data.decode("utf-8", "replace")
    words = _WORD.findall(text)
    if not words:
        return data
    old, new = random.choice(words), random.choice(_NAMES)
    return re.sub(rf"(?<![\w]){re.escape(old)}(?!\w)", new, text).encode()


def spread(data: bytes, _: bytes, random: Random) -> bytes:
    """Insert or remove white space around a sign."""
    text = data.decode("utf-8", "replace")
    found = list(_SIGN.finditer(text))
    if not found:
        return data
    at = random.choice(found)
    before, after = text[: at.start()], text[at.end() :]
    if random.random() < 0.3 and before[-2:-1].strip():
        return (before.rstrip(" ") + at[0] + after.lstrip(" ")).encode()
    return (
        before + random.choice(("", " ")) + at[0] + random.choice(("", " ", "   ")) + after
    ).encode()


def respelled(data: bytes, _: bytes, random: Random) -> bytes:
    """Rewrite a number with the same value, or with one near it."""
    text = data.decode("utf-8", "replace")
    found = list(_NUMBER.finditer(text))
    if not found:
        return data
    at = random.choice(found)
    return (text[: at.start()] + _number(at[0], random) + text[at.end() :]).encode()


def _number(old: str, random: Random) -> str:
    longer = f"{old}0" if "." in old else f"{old}.0"
    return random.choice((longer, f"{old}e0", f"{old}e-1", f"0{old}", f"{old}1", f"({old})", "1/3"))


# --- trees ----------------------------------------------------------------------------------------


def trees_alike(data: bytes, other: bytes, random: Random) -> bytes:
    """Change a tree in a few plausible places and serialise it."""
    tree, theirs = read(data), read(other)
    if tree is None:
        return data
    for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
        _change(tree, theirs if theirs is not None else tree, random)
    return Writer(random, random.choice((0.0, 0.1, 0.4))).text(tree).encode("utf-8", "replace")


def _change(tree: Tree, other: Tree, random: Random) -> None:
    mappings = [branch for branch in branches(tree) if len(branch.parts) > 1]
    clauses, theirs = _section(tree, "clauses"), _section(other, "clauses")
    written = expressions(tree)
    match random.randrange(6):
        case 0 if mappings:
            random.shuffle(random.choice(mappings).parts)
        case 1 if clauses is not None and clauses.mapping and clauses.parts:
            _, body = random.choice(clauses.parts)
            clauses.parts.append((_name(random), copied(body)))
        case 2 if clauses is not None and theirs is not None and theirs.mapping and theirs.parts:
            _, body = random.choice(theirs.parts)
            if clauses.mapping:
                clauses.parts.insert(0, (_name(random), copied(body)))
        case 3 if len(written) > 1:
            random.choice(written).text = random.choice(written).text
        case 4 | 5 if written:
            _reword(random.choice(written), random)
        case _:
            tree.parts.reverse() if isinstance(tree, Branch) else None


def _section(tree: Tree, name: str) -> Branch | None:
    for key, value in tree.parts if isinstance(tree, Branch) else ():
        if key is not None and key.text == name and isinstance(value, Branch):
            return value
    return None


def _name(random: Random) -> Leaf:
    return Leaf(f"C-{random.randrange(10**6)}", random.choice(("plain", "'", '"')))


def _reword(leaf: Leaf, random: Random) -> None:
    text = leaf.text
    found = list(_NUMBER.finditer(text))
    match random.randrange(6):
        case 0:
            text = f"({text})"
        case 1:
            text = f"not (not ({text}))"
        case 2:
            text = f"({text}) {random.choice(('and', 'or', 'implies'))} ({text})"
        case 3 if found:
            at = random.choice(found)
            text = text[: at.start()] + _number(at[0], random) + text[at.end() :]
        case 4:
            text = re.sub(r" ?([<>]=?) ?", r"\1", text)
        case _:
            text = text.replace(" ", random.choice(("  ", "\n", "\t", " \n ")))
    leaf.text = text
    leaf.style = random.choice((leaf.style, "'", '"', "|", ">"))


PLAUSIBLE: dict[str, tuple[Change, ...]] = {
    "bytes": (digit, gap, gap, note, note, margin),
    "tokens": (alike, alike, renamed, spread, respelled),
    "trees": (trees_alike,),
}
