"""Figures of bench/house.py for small trees: sizes, cycles, import depth, unused definitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.common import Better, Figure
from bench.house import Measured, code_lines, components, figures, floors, measure, same_names
from bench.house_code import Code, imports, read, unused


def tree(root: Path, files: Mapping[str, str]) -> Code:
    """Write files and parse them as a tree."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read(root)


def names(code: Code) -> tuple[set[str], set[str]]:
    """Return the unused names, and those that only tests use."""
    dead, tested = unused(code)
    return {d.name for d in dead}, {d.name for d in tested}


def dead_in(root: Path, text: str) -> set[str]:
    """Return the unused names of one module."""
    return names(tree(root, {"kcdsl/a.py": text}))[0]


def test_module_cycles_ignore_imports_inside_functions(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/a.py": "from kcdsl import b\n",
            "kcdsl/b.py": "try:\n    import kcdsl.c\nexcept ImportError:\n    pass\n",
            "kcdsl/c.py": "from .a import f\nfrom kcdsl.d import g\n",
            "kcdsl/d.py": "def g():\n    from kcdsl.c import h\n    return h\n",
        },
    )
    loaded, _ = imports(code)
    assert loaded["kcdsl.b"] == {"kcdsl.c"}
    assert loaded["kcdsl.d"] == set()
    assert frozenset({"kcdsl.a", "kcdsl.b", "kcdsl.c"}) in components(loaded)
    found = measure(code)
    assert found.values["cycles of modules"] == 1
    assert found.values["cycles of folders"] == 0
    assert found.values["floors"] == 2
    assert found.listed[0] == "cycle of modules: kcdsl.a kcdsl.b kcdsl.c"


def test_type_checking_imports_are_counted_separately(tmp_path: Path) -> None:
    guard = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kcdsl.b import B\n"
    code = tree(tmp_path, {"kcdsl/a.py": guard, "kcdsl/b.py": "from kcdsl.a import A\n"})
    loaded, typed = imports(code)
    assert (loaded["kcdsl.a"], typed["kcdsl.a"]) == (set(), {"kcdsl.b"})
    values = measure(code).values
    assert values["cycles of modules"] == 0
    assert values["cycles of modules, with imports for types"] == 1
    assert values["imports for types"] == 1


def test_mutually_importing_folders_are_a_cycle(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/one/__init__.py": "",
            "kcdsl/one/a.py": "import kcdsl.two.b\n",
            "kcdsl/one/c.py": "",
            "kcdsl/two/b.py": "from ..one.c import g\n",
        },
    )
    found = measure(code)
    assert found.values["cycles of modules"] == 0
    assert found.values["cycles of folders"] == 1
    assert found.remarks["cycles of folders"] == "of 2 folders"
    assert found.listed[0] == "cycle of folders: kcdsl/one kcdsl/two"


def test_import_depth_is_the_longest_chain_inside_a_folder(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/a.py": "",
            "kcdsl/b.py": "import kcdsl.a\n",
            "backends/kcdsl_backends/empirical/c.py": "from kcdsl.b import x\n",
            "backends/kcdsl_backends/empirical/d.py": "from . import c\nimport kcdsl.a\n",
            "backends/kcdsl_backends/empirically.py": "import kcdsl_backends.empirical.d\n",
        },
    )
    values = measure(code).values
    assert values["floors"] == 5
    assert values["floors: kcdsl"] == 2
    assert values["floors: kcdsl_backends"] == 3
    assert values["floors: kcdsl_backends.empirical"] == 2
    assert values["floors: kcdsl_certs"] == 0
    assert floors({"a": {"b"}, "b": {"a", "c"}, "c": set(), "d": {"a"}}) == 3


def test_sizes_count_product_code_only(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/__init__.py": '"""What it is.\n\nMore.\n"""\n\nX = """a\nb"""  # two\n',
            "kcdsl/cli/a.py": "# nothing\n\n\ndef f(\n    x,\n):\n    '''Say.'''\n    return x\n",
            "kcdsl/cli/b.py": "",
            "certs/vectors/make.py": "pass\n",
            "grammar/editors/node_modules/x.py": "pass\n",
            "tests/test_a.py": "pass\n",
        },
    )
    by_path = {module.path: module for module in code.product}
    assert code_lines(by_path["kcdsl/__init__.py"]) == 2
    assert code_lines(by_path["kcdsl/cli/a.py"]) == 4
    found = measure(code)
    assert [found.values[f"files{of}"] for of in ("", ": kcdsl", ": certs")] == [4, 3, 1]
    assert [found.values[f"lines{of}"] for of in ("", ": kcdsl", ": grammar")] == [16, 15, 0]
    assert found.values["lines of code"] == 7
    assert found.values["largest folder"] == 2
    assert found.remarks["largest folder"] == "kcdsl/cli"


def test_unused_and_test_only_names_are_distinguished(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/__init__.py": "from kcdsl.a import offered\n\n__all__ = ['offered']\n",
            "kcdsl/sub/__init__.py": "from kcdsl.a import idle\n\n__all__ = ['idle']\n",
            "kcdsl/a.py": """\
def offered(): ...
def idle(): return helper() + idle()
def helper(): ...
def tried(): return below()
def below(): ...
class Kept:
    def asked(self): ...
    def never(self): ...
    @property
    def seen(self): ...
print(Kept().asked())
""",
            "tests/test_a.py": "from kcdsl.a import tried\nassert tried()\n",
            "bench/make.py": "from kcdsl.a import Kept\nprint(Kept().seen)\n",
        },
    )
    assert names(code) == ({"idle", "helper", "Kept.never"}, {"tried", "below", "Kept.seen"})
    listed = measure(code).listed
    assert "unused: kcdsl/a.py:2 idle" in listed
    assert "only of tests: kcdsl/a.py:10 Kept.seen" in listed


def test_members_of_an_unused_class_are_not_reported_again(tmp_path: Path) -> None:
    text = "class Gone:\n    def lost(self): ...\n    class In:\n        def deep(self): ...\n"
    assert dead_in(tmp_path, text) == {"Gone"}


@pytest.mark.parametrize(
    "text",
    [
        "@rule('x')\ndef registered(): ...\n",
        "@registry.handles\ndef registered(): ...\n",
        "class A(Library):\n    def visit_Name(self): ...\nA()\n",
        "class A(Library): ...\nclass B(A):\n    def hook(self): ...\nB()\n",
        "class A:\n    def send(self): return self.inner.send()\nA()\n",
        "class A:\n    def __len__(self): ...\nA()\n",
        "def named(): ...\nTABLE = {'k': 'kcdsl.a:named'}\n",
        "def named(): ...\ngetattr(module, 'named')\n",
        "class Hint: ...\nx: 'Hint | None' = None\n",
        "def named(): ...\nprogram = 'from kcdsl.a import named; named()'\n",
        "from kcdsl.a import other as o\ndef other(): ...\n",
        "class A:\n    def part(self): ...\nmatch x:\n    case A(part=1): ...\n",
    ],
)
def test_possibly_called_methods_are_not_reported(tmp_path: Path, text: str) -> None:
    assert dead_in(tmp_path, text) == set()


@pytest.mark.parametrize(
    "text",
    [
        "class A(ValueError):\n    def gone(self): ...\nA()\n",
        "class B(A):\n    def gone(self): ...\nclass A(Protocol): ...\nB()\n",
        "class A:\n    def gone(self): return self.gone()\nA()\n",
        "class A:\n    @staticmethod\n    def gone(): ...\nA()\nprint('it has gone')\n",
    ],
)
def test_method_without_a_caller_is_reported(tmp_path: Path, text: str) -> None:
    assert {name.rpartition(".")[2] for name in dead_in(tmp_path, text)} == {"gone"}


def test_names_in_data_and_entry_points_count_as_used(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/a.py": "def main(): ...\ndef clause(): ...\ndef shown(): ...\ndef gone(): ...\n",
            "kcdsl/page.html.j2": "{{ row.shown }}\n",
            "kcdsl/x.schema.json": '{"title": "gone"}\n',
            "grammar/kcdsl_grammar/g.lark": "clause: WORD\n",
            "pyproject.toml": '[project.scripts]\nkcdsl = "kcdsl.a:main"\n',
        },
    )
    assert names(code)[0] == {"gone"}


def test_public_classes_with_equal_names_are_reported(tmp_path: Path) -> None:
    code = tree(
        tmp_path,
        {
            "kcdsl/a.py": "class Row: ...\nclass _Own: ...\nclass One: ...\n",
            "backends/kcdsl_backends/b.py": "class Row: ...\nclass _Own: ...\n",
            "certs/kcdsl_certs/c.py": "class One: ...\n",
        },
    )
    assert same_names(code) == ["kcdsl.a.Row", "kcdsl_backends.b.Row"]


def test_figures_are_shown_beside_those_of_the_commit() -> None:
    now = Measured({"files": 451, "floors": 3}, {}, [])
    before = Measured({"files": 1200, "floors": 4}, {"floors": "somewhere"}, [])
    assert figures(now, before, "abc") == [
        Figure("files", 451, Better.LOWER, 450, "abc: 1,200"),
        Figure("floors", 3, Better.LOWER, None, "abc: 4 (somewhere)"),
    ]
    assert not figures(now, before, "abc")[0].within
