"""The loader of models: the program is built, and its weights are read and matched by name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.kernels import is_onnx
from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model import own_code, registry
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.headers import read_headers
from kcdsl.model.checkpoint.modules import (
    Unfilled,
    empty_parameters,
    transposed_names,
)
from kcdsl.model.checkpoint.ranges import changed
from kcdsl.model.checkpoint.served import OF_FILES, ServedWeights, load_served, matched
from kcdsl.model.checkpoint.tensors import (
    EXACT_AS_FLOAT32,
    TYPES,
    Checkpoint,
    StoredTensors,
    is_large,
    load_checkpoint,
    match_tensors,
)
from kcdsl.model.configuration import find_config
from kcdsl.model.files import CHECKPOINT, Artefacts, companion, file_digest
from kcdsl.model.presets import resolve
from kcdsl.model.tokenizer import find_tokenizer
from kcdsl.source.files import shown
from kcdsl.source.modules import find_module
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement.manifest import storage_manifest
from kcdsl_certs.statement.triple import INFER_CHECKPOINT

KeyRule = Callable[[str], "str | None"]
WeightLoader = Callable[[Any, Checkpoint], tuple[nn.Module, Mapping[str, str]]]
"""Loads the weights into a module; returns it and the checkpoint key of every parameter."""


def load_model(ref: ModelRef, base: Path | Artefacts, *, by_block: bool = False) -> Model:
    """Load the model that a contract names.

    `base` is the folder of the contract, or the `Artefacts` that record the digests of the files.
    With `by_block` the weights of a large built-in model are read when a part of it needs them.
    Refuse every defect of the checkpoint, the configuration, the tokenizer or the factory.
    """
    with at(ref.span):
        return _load(ref, Artefacts.of(base), by_block)


def _load(ref: ModelRef, files: Artefacts, by_block: bool) -> Model:
    path = files.find_weights(ref.checkpoint)
    config = find_config(ref, path, files)
    if ref.architecture == ONNX:
        return _of_graph(ref, path, config, files)
    name = ref.architecture
    own = registry.declared(name) if name in registry.names() and name is not None else None
    built_in = ref.module is None and own is not None and not own.foreign
    empty = by_block and built_in and is_large(path, files.admitted)
    with Unfilled() if empty else nullcontext():
        outline, load_weights = _build(ref, config, files)
    checkpoint = load_checkpoint(path, files.admitted)
    files.record(CHECKPOINT, checkpoint.root_digest)
    if empty:
        if not isinstance(checkpoint.tensors, StoredTensors):
            raise changed(path)
        empty_parameters(outline)
    module, keys = load_weights(outline, checkpoint)
    module.eval().requires_grad_(False)
    tokenizer = find_tokenizer(ref, path, files, config)
    served, own_file = None, _served_file(ref, files)
    if ref.served is not None and own_file is None:
        served = _served(ref, module, config, keys, files)
    return Model(
        *(module, checkpoint, config, keys, tokenizer, built_in, files, empty, served),
        served_file=own_file,
    )


def _served_file(ref: ModelRef, files: Artefacts) -> tuple[Path, str] | None:
    """Return the ONNX file of the inference kernel with its digest; None where the kernel has no
    checkpoint of its own or one of another format."""
    if ref.served is None or not is_onnx(ref.served):
        return None
    path = files.find_weights(ref.served)
    try:
        digest = storage_manifest(path).digest
    except Rejected as error:
        raise refuse(
            codes.ONNX_FILE,
            f"{shown(path)}: {error}",
            help="export the file again, with its external data beside it",
        ) from error
    files.record(companion(INFER_CHECKPOINT), digest)
    return path, digest


def _of_graph(ref: ModelRef, path: Path, config: dict[str, Any], files: Artefacts) -> Model:
    """Return the model of an ONNX file."""
    from kcdsl.model.onnx.program import read_program

    module, checkpoint, stated = read_program(path, ref.blocks, files.admitted)
    files.record(CHECKPOINT, checkpoint.root_digest)
    own_file = _served_file(ref, files)
    if ref.served is not None and own_file is None:
        raise refuse(
            codes.UNKNOWN_ARCHITECTURE,
            "with an ONNX file the inference kernel has no checkpoint of its own but another one",
            help="say in `numerics` how the inference kernel stores the weights",
        )
    kernels = [] if ref.infer is None or not ref.infer.claims else [ref.infer]
    for kernel in (*kernels, *ref.others):
        runs_file = kernel.run in ADAPTERS and ADAPTERS[kernel.run].of_file
        with at(kernel.span):
            if runs_file:
                stated.refuse_unserved(kernel.run, resolve(kernel))
            elif kernel is ref.infer:
                stated.refuse_other(resolve(kernel))
    if module.vocabulary is not None:
        config = {**config, "vocab_size": module.vocabulary}
    tokenizer = find_tokenizer(ref, path, files, config)
    return Model(
        *(module, checkpoint, config, module.keys, tokenizer, False, files), served_file=own_file
    )


def _served(
    ref: ModelRef,
    module: nn.Module,
    config: Mapping[str, Any],
    keys: Mapping[str, str],
    files: Artefacts,
    *,
    headers_only: bool = False,
) -> ServedWeights:
    """Return the weights that the inference kernel reads, by the keys of the checkpoint."""
    name = ref.architecture
    built_in = ref.module is None and name is not None and name in registry.names()
    if built_in and name and registry.declared(name).foreign:
        raise refuse(
            codes.UNKNOWN_ARCHITECTURE,
            f"with architecture {name} the inference kernel has no checkpoint of its own",
            help="name an architecture of kcdsl, or leave `checkpoint` of the kernel out and say "
            "in `numerics` how it stores the weights",
        )
    rule: KeyRule = registry.load(name).canonical_key if built_in and name else str
    place = files.find_weights(ref.served or "")
    found = load_served(place, files.admitted, headers_only=headers_only)
    if not headers_only:
        files.record(companion(INFER_CHECKPOINT), found.digest)
    stored = module.state_dict(keep_vars=True)
    first = {id(stored[name]): name for name in keys}
    tied = {n: first[id(t)] for n, t in stored.items() if n not in keys and id(t) in first}
    shapes = {name: tuple(stored[name].shape) for name in keys}
    plain = {n for n, t in stored.items() if not t.is_floating_point()}

    def named(key: str) -> str | None:
        own = rule(key)
        return None if own in plain else own

    def same_program(other: Mapping[str, Any]) -> bool:
        return built_in and _settings(ref, other, files) == _settings(ref, config, files)

    turned = frozenset(keys[name] for name in transposed_names(module) if name in keys)
    return matched(found, config, named, keys, tied, shapes, turned, same_program)


def _settings(ref: ModelRef, config: Mapping[str, Any], files: Artefacts) -> object:
    """Return the part of a configuration that the forward pass depends on; all of it for a program
    that is not built in."""
    plain = {key: value for key, value in config.items() if key not in OF_FILES}
    try:
        with Unfilled():
            return _build(ref, plain, files)[0].settings
    except Refusal:
        return config


def load_structure(ref: ModelRef, base: Path | Artefacts) -> Model | None:
    """Build a model without weights, from config.json and the headers of the checkpoint.

    Returns None for a program that is not built in, which is neither imported nor run. Refuse every
    defect that `load_model` refuses, except those of the values of weights.
    """
    with at(ref.span):
        files = Artefacts.of(base)
        path = files.find_weights(ref.checkpoint)
        if ref.architecture == ONNX:
            return _of_graph(ref, path, find_config(ref, path, files), files)
        stored = read_headers(path, files.admitted).tensors
        name = ref.architecture
        if ref.module is not None or name is None or registry.declared(name).foreign:
            return None
        config = find_config(ref, path, files)
        with Unfilled():
            module, _ = _build(ref, config, files)
        rule = registry.load(name).canonical_key
        exact = {key: one for key, one in stored.items() if one.kind in EXACT_AS_FLOAT32}
        others = {key: one.kind for key, one in stored.items() if key not in exact}
        checkpoint = Checkpoint(path, "", StoredTensors(exact, {}), others)
        keys = _matched(module, checkpoint, rule, copies=False)
        if ref.served is not None and not is_onnx(ref.served):
            _served(ref, module, config, keys, files, headers_only=True)
        return Model(module, checkpoint, config, keys, None, True, files, True)


def _build(
    ref: ModelRef, config: dict[str, Any], files: Artefacts
) -> tuple[nn.Module, WeightLoader]:
    if ref.module is not None:
        return _recorded_factory(ref.module, config, files), _loader(lambda key: key)
    name, known = ref.architecture or "", registry.names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise refuse(
            codes.UNKNOWN_ARCHITECTURE,
            f"unknown architecture {ref.architecture!r}; known: {', '.join(known)}",
            help=f"did you mean {near[0]!r}?" if near else "or give module: package.module:factory",
        )
    found = registry.load(name)
    try:
        foreign = registry.declared(name).foreign
        loader = found.load_weights if foreign else _loader(found.canonical_key)
        return found.build(config), loader
    except (RuntimeError, MemoryError) as error:
        raise refuse(
            codes.MODEL_CONFIG,
            f"no model can be built from the configuration: {error}",
            help="compare config.json with that of the published model: sizes must fit "
            "together and into memory",
        ) from error


def _recorded_factory(target: str, config: dict[str, Any], files: Artefacts) -> nn.Module:
    """Call a factory; record the digest of its source, which must not change during the call."""
    name = companion("module")
    imported = target.partition(":")[0]
    source = find_module(imported, [str(files.base), *filter(None, sys.path)])
    if source is not None:
        files.record(name, file_digest(source))
    own_code.record_imports(imported, source, files.base)
    with own_code.importing(files.base):
        module = _from_factory(target, config, files.base)
    if source is not None:
        files.record(name, file_digest(source))
        files.record(name, own_code.compiled_digest(source) or file_digest(source))
    own_code.imported_code(files)  # a later import of a changed file is refused
    return module


def _from_factory(target: str, config: dict[str, Any], base: Path) -> nn.Module:
    """Call `package.module:factory`; the contract's folder is searched for the package as well."""
    name, _, attribute = target.partition(":")
    if not attribute:
        raise refuse(
            codes.MODEL_FACTORY,
            f"{target!r} is not of the form package.module:factory",
            help="name a function of a module, such as models.mine:build",
        )
    _forget_namesake(name.partition(".")[0], base)
    sys.path.insert(0, str(base))
    try:
        factory = getattr(import_module(name), attribute)
        module = factory(config)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise refuse(
            codes.MODEL_FACTORY,
            f"{target} failed: {type(error).__name__}: {error}",
            help="call it by itself with the configuration as a dictionary to see where it fails",
        ) from error
    finally:
        sys.path.remove(str(base))
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        found = f"the class {module.__name__}" if isinstance(module, type) else kind
        raise refuse(
            codes.MODEL_FACTORY,
            f"{target} returned {found}, not a torch.nn.Module",
            help="build the module from the configuration, and return it",
        )
    return module


def _forget_namesake(package: str, base: Path) -> None:
    """Unload an imported package of the same name that is not in the folder `base`.

    Otherwise two contracts in one process, each with its own `network.py`, would share the first.
    """
    spec = PathFinder.find_spec(package, [str(base)])
    loaded = sys.modules.get(package)
    if spec is None or loaded is None or package in sys.stdlib_module_names:
        return
    if getattr(getattr(loaded, "__spec__", None), "origin", None) != spec.origin:
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]


def _loader(rule: KeyRule) -> WeightLoader:
    return lambda module, checkpoint: (module, _take_weights(module, checkpoint, rule))


def _take_weights(module: nn.Module, checkpoint: Checkpoint, rule: KeyRule) -> dict[str, str]:
    """Copy the tensors of the checkpoint into the module; return the key of each parameter.

    Tensors of integers and truth values are copied too; they have no key.
    """
    keys = _matched(module, checkpoint, rule)
    stored, turned = module.state_dict(keep_vars=True), transposed_names(module)
    plain = {n: t for n, t in stored.items() if not t.is_floating_point()}
    whole = {own: key for key in _every_key(checkpoint) if (own := rule(key)) in plain and own}
    for name, key in whole.items():
        kind = checkpoint.others.get(key, "a float")
        if TYPES.get(kind) != plain[name].dtype:
            raise refuse(
                codes.CHECKPOINT_DTYPE,
                f"{key} is stored as {kind}, the module holds it as {plain[name].dtype}",
                help="save the checkpoint again with the module that the contract names",
            )
        if checkpoint.stored(key).shape != plain[name].shape:
            has, wants = tuple(checkpoint.stored(key).shape), tuple(plain[name].shape)
            raise refuse(
                codes.CHECKPOINT_SHAPE,
                f"{key} has shape {has}; the module demands {wants}",
                help="save the checkpoint again with the module that the contract names",
            )
    with torch.no_grad():
        for name, key in keys.items():
            if not stored[name].is_meta:
                tensor = checkpoint.tensors[key]
                stored[name].copy_(tensor.T if name in turned else tensor)
        for name, key in whole.items():
            plain[name].copy_(checkpoint.stored(key))
    return keys


def _every_key(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (*checkpoint.tensors, *checkpoint.others)


def _matched(
    module: nn.Module, checkpoint: Checkpoint, rule: KeyRule, *, copies: bool = True
) -> dict[str, str]:
    """Return the key of each parameter; without `copies`, tied tensors are not compared."""
    module.float()
    stored = {n: t for n, t in module.state_dict(keep_vars=True).items() if t.is_floating_point()}
    first: dict[int, str] = {}
    optional: dict[str, str] = {}
    for name, tensor in stored.items():
        if first.setdefault(id(tensor), name) != name:
            optional[name] = first[id(tensor)]
    turned = transposed_names(module)
    expected = {
        n: tuple(reversed(t.shape)) if n in turned else tuple(t.shape)
        for n, t in stored.items()
        if n not in optional
    }
    unread = {n for n in module.state_dict() if n not in stored}
    if not copies:
        unread |= optional.keys()
    names: dict[str, str | None] = {}
    for key in _every_key(checkpoint):
        own = rule(key)
        names[key] = None if own in unread else own
    return match_tensors(checkpoint, names, expected, optional)
