"""An architecture is one file: discovered, parsed without execution, and imported by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcdsl.model import architectures, registry

TOY = """
assert not reading
ENCODER_ONLY = True
READ = ("width",)
FAMILIES = {"toy": {"classes": ("Toy",), "only": {"depth": (1,)}, "needed": ("width",)}}


def build(config):
    return config["width"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of architectures that replaces the default one."""
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    monkeypatch.setattr(architectures, "__path__", [str(tmp_path)])
    caches = (registry.names, registry.declared)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()
    sys.modules.pop("kcdsl.model.architectures.toy", None)


def test_one_file_is_an_architecture(folder: Path) -> None:
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    assert registry.names() == ("toy",)
    found = registry.declared("toy")
    assert (found.encoder_only, found.foreign) == (True, False)
    family = found.families["toy"]
    assert family.classes == ("Toy",)
    assert set(family.read) == set(family.needed) == {"width"}
    assert family.only == {"depth": (1,)}
    assert registry.is_encoder("toy")
    assert not registry.is_encoder("other")
    assert not registry.is_encoder(None)


def test_architecture_module_runs_only_when_loaded(folder: Path) -> None:
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    assert registry.declared("toy").families
    with pytest.raises(NameError, match="reading"):
        registry.load("toy")
    (folder / "toy.py").write_text(TOY.replace("assert not reading", ""), encoding="utf-8")
    assert registry.load("toy").build({"width": 3}) == 3


def test_declarations_are_read_without_torch() -> None:
    program = (
        "import sys; from kcdsl.model import registry; print(*registry.names());"
        "print(*[f for n in registry.names() for f in registry.declared(n).families]);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    names, families = done.stdout.decode().splitlines()
    assert {"bert", "hf", "llama"} <= set(names.split())
    assert {"bert", "llama", "mistral", "qwen2"} <= set(families.split())
