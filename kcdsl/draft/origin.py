"""Drafts from a model, from a recording of rollouts, or from nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.draft.clauses import DraftEvidence, DraftPurpose, clauses_for
from kcdsl.draft.folder import COMPUTE, QUANTISED, ModelFolder, quantisation_of, read_folder
from kcdsl.draft.graph import own_file_kernel
from kcdsl.draft.quantisation import serving_kernel, stored_kernel, training_kernel
from kcdsl.draft.rows import given_rows, own_rows, slices_of
from kcdsl.draft.text import Draft, RecordedKernel, contract_text
from kcdsl.ir.kernels import is_onnx
from kcdsl.ir.terms import ONNX
from kcdsl.model.checkpoint.headers import INDEX, SINGLE, read_headers
from kcdsl.model.configuration import read_config
from kcdsl.model.files import Artefacts
from kcdsl.source.files import excerpt, is_file, missing, shown

CONTRACT, PROMPTS = "contract.yaml", "prompts.jsonl"
_DUMPS = (".jsonl", ".parquet")
_UNREAD = "there are no log-probabilities of both sides in it"


@dataclass(frozen=True, slots=True)
class DraftRecording:
    """A recording: its layout, the roles of its columns, and its rows as fields that slices may
    test."""

    format: str
    roles: frozenset[str]
    fields: tuple[dict[str, Any], ...]


class ReadsRecordings(Protocol):
    """The reader of recordings, a function of the measuring backend."""

    def __call__(self, path: Path) -> tuple[str, frozenset[str], Sequence[dict[str, Any]]] | None:
        """Return layout, roles and fields of rows; None for a file that is no recording."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The input of a draft; every field is optional.

    `source` is the folder of a model, a file of its weights, an ONNX file, or a recording; `data`
    are requests, or a recording in addition to a model; `quantised` is the folder of the served
    weights.
    """

    source: Path | None = None
    data: Path | None = None
    quantised: Path | None = None
    purpose: DraftPurpose | None = None
    output: Path | None = None
    temperature: str = "1"


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft, the path of its contract, and further files to write.

    `allow` are folders that the user must allow before commands can read them.
    """

    draft: Draft
    contract: Path
    more: tuple[tuple[Path, bytes], ...] = ()
    allow: tuple[Path, ...] = ()

    @property
    def recorded(self) -> bool:
        """Return whether a kernel of the draft is a recording."""
        return isinstance(self.draft.infer, RecordedKernel)

    @property
    def text(self) -> str:
        """Return the text of the contract."""
        return contract_text(self.draft)


def draft_of(request: DraftRequest, here: Path, recordings: ReadsRecordings) -> DraftFiles:
    """Return the draft of a contract for a request, in the folder `here`.

    Refuse missing files, quantised weights without unquantised ones, and a recording without
    log-probabilities.
    """
    source = request.source
    if source is None and not is_file(here / "config.json"):
        if request.data is not None:
            return draft_of(replace(request, source=request.data, data=None), here, recordings)
        return _example(request, here)
    path = here if source is None else source
    if not os.path.lexists(path):
        raise missing(path, ("`kcdsl init` alone writes a small model, in an empty folder",))
    if request.quantised is not None and not os.path.lexists(request.quantised):
        raise missing(request.quantised)
    if is_onnx(path.name):
        return _of_graph(request, path, here)
    beside = is_file(path.parent / "config.json") and path.suffix.lower() not in _DUMPS
    if path.is_dir() or beside:
        return _of_model(request, read_folder(path), here, recordings)
    return _of_recording(request, path, here, recordings)


def _of_graph(request: DraftRequest, path: Path, here: Path) -> DraftFiles:
    """Return the draft for an ONNX file, with its blocks and numerics."""
    from kcdsl.draft.graph import read_graph, rows_of_ids

    if request.quantised is not None and not is_onnx(request.quantised.name):
        raise refuse(
            codes.USAGE,
            "--quantised names a folder of Hugging Face, and the model is an ONNX file",
            help="name the quantised ONNX file, or leave it out: quantisers of the file are read",
        )
    model = read_graph(path)
    contract = request.output or _beside(path.parent, here) / CONTRACT
    base = contract.parent
    data = request.data or _prompts_there(base)
    rows = model.rows(PROMPTS) if data is None else rows_of_ids(data, _reference(data, base))
    purpose = request.purpose or DraftPurpose.SERVING
    own_file = request.quantised
    train, infer = model.kernels() if own_file is None else model.served(_reference(own_file, base))
    clauses = clauses_for(
        purpose, DraftEvidence.RUN, width=model.width,
        blocks=tuple(name for name, _, _ in model.blocks)[:2], long=rows.long, named=rows.named,
        requests=rows.count,
    )  # fmt: skip
    if own_file is not None:
        clauses = tuple(clause for clause in clauses if clause.block is None)
    whose = "both kernels" if own_file is None else "the training kernel"
    about = (
        f"The graph is the program of {whose}, and its initializers are the weights"
        f" ({model.stated.compute})."
    )
    draft = Draft(
        model.name, purpose, _reference(path, base), ONNX, about, train, infer, rows.path,
        rows.slices, clauses, model.blocks, infer.unmet,
    )  # fmt: skip
    more = () if rows.text is None else ((base / rows.path, rows.text.encode()),)
    return DraftFiles(draft, contract, more, _outside(base, [path, data, own_file]))


# --- a model --------------------------------------------------------------------------------------


def _of_model(
    request: DraftRequest, model: ModelFolder, here: Path, recordings: ReadsRecordings
) -> DraftFiles:
    _refuse_quantised(model)
    contract = request.output or _beside(model.path, here) / CONTRACT
    base = contract.parent
    request = replace(request, data=request.data or _prompts_there(base))
    if request.data is not None and request.data.suffix.lower() not in (*_DUMPS, ".safetensors"):
        raise refuse(
            codes.MALFORMED_REQUEST,
            f"{shown(request.data)}: requests are a .jsonl file, and recordings a .jsonl, .parquet "
            "or .safetensors file",
            help='write one object a line, such as {"id": "a", "text": "..."}',
        )
    recorded = None if request.data is None else recordings(request.data)
    if recorded is not None and "infer_logs" in recorded[1]:
        return _scored(
            request, model, DraftRecording(recorded[0], recorded[1], tuple(recorded[2])), contract
        )
    rows = (
        own_rows(model, PROMPTS)
        if request.data is None
        else given_rows(request.data, _reference(request.data, base), model)
    )
    purpose = request.purpose or DraftPurpose.SERVING
    train = training_kernel(model.compute, model.architecture)
    quantised = request.quantised
    own_file = quantised if quantised is not None and is_onnx(quantised.name) else None
    folder = request.quantised if own_file is None else None
    config = None if folder is None else _quantisation(folder, model)
    if config is None:
        config = model.quantised
    infer = None
    served: tuple[Path, ...] = ()
    if own_file is not None:
        infer, served = own_file_kernel(_reference(own_file, base)), (own_file,)
    if folder is not None and config is not None and _has_weights(folder):
        named = _reference(folder, base)
        infer = stored_kernel(model.compute, model.architecture, config, named, capped=model.capped)
        served = tuple(read_headers(folder).files)
    if infer is None:
        infer = serving_kernel(
            model.compute, model.architecture, config, model.tensors, capped=model.capped
        )
    notes = [f"not in this contract: {text}" for text in infer.unmet]
    if model.unproved:
        notes.append(f"nothing is proved, only measured: {model.unproved}")
    if not rows.short:
        notes.append(
            "nothing is proved about rows with `messages`, since `kcdsl verify` runs no chat "
            "template, nor about rows of a length that no slice can test"
        )
    clauses = clauses_for(
        purpose,
        DraftEvidence.RUN,
        width=model.width if model.encoder else None,
        blocks=model.blocks if rows.short else (),
        long=rows.long,
        named=rows.named,
        requests=rows.count,
    )
    if own_file is not None:
        clauses = tuple(clause for clause in clauses if clause.block is None)
    draft = Draft(
        model.name,
        purpose,
        _reference(model.checkpoint, base),
        model.architecture,
        _about(model, served=bool(served)),
        train,
        infer,
        rows.path,
        rows.slices,
        clauses,
        notes=tuple(notes),
    )
    more = () if rows.text is None else ((base / rows.path, rows.text.encode()),)
    read = [model.checkpoint, *model.files, model.path / "config.json", model.tokenizer]
    return DraftFiles(draft, contract, more, _outside(base, [*read, request.data, *served]))


def _refuse_quantised(model: ModelFolder) -> None:
    if model.quantised is None:
        return
    if model.stored in COMPUTE:
        stated = next((key for key in QUANTISED if key in model.config), None)
        if stated is None or model.architecture == "hf":
            return
        raise refuse(
            codes.MODEL_CONFIG,
            f"the config.json of {shown(model.path)} has a {stated}, and its weights are not "
            f"quantised ({model.stored})",
            help=f"move {stated} into the config.json of another folder, and name that folder: "
            f"kcdsl init {shown(model.path)} --quantised FOLDER",
        )
    raise refuse(
        codes.CHECKPOINT_DTYPE,
        f"{shown(model.path)} holds quantised weights ({model.stored}) and not those that were "
        "trained",
        help="name the trained model, and these as what is served: "
        f"kcdsl init TRAINED --quantised {shown(model.path)}",
    )


_OF_THE_MODEL = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings"),
)
"""Keys of config.json that quantisation leaves as they are."""


def _quantisation(folder: Path, model: ModelFolder) -> Any:
    """Return the quantisation configuration of the folder of served weights; refuse if missing, and
    the folder of another model."""
    if not is_file(folder / "config.json"):
        raise refuse(
            codes.HF_FOLDER,
            f"{shown(folder)} has no config.json",
            help="name the folder of the quantised model",
        )
    config = read_config(folder / "config.json")
    for key in _OF_THE_MODEL:
        own, other = model.config.get(key), config.get(key)
        if own is not None and other is not None and own != other:
            raise refuse(
                codes.MODEL_CONFIG,
                f"{shown(folder)} has {key} {excerpt(repr(other))}, {shown(model.path)} has "
                f"{excerpt(repr(own))}: it is not the same model",
                help=f"name the folder with the quantised weights of {shown(model.path)}",
            )
    found = quantisation_of(folder, config)
    if found is None:
        raise refuse(
            codes.MODEL_CONFIG,
            f"the config.json of {shown(folder)} has no quantization_config",
            help="leave --quantised out where the weights are served as they were trained",
        )
    return found


def _has_weights(folder: Path) -> bool:
    return any(is_file(folder / name) for name in (SINGLE, INDEX))


def _about(model: ModelFolder, *, served: bool = False) -> str:
    """Return a comment on the weights. `served`: the inference kernel reads others."""
    count = sum(_size(one.shape) for one in model.tensors.values())
    beside = "config.json and the tokenizer lie beside them."
    if not is_file(model.path / "tokenizer.json"):
        beside = "config.json lies beside them."
    which = "trained weights" if served else "weights that both kernels read"
    return (
        f"The {which}: {_millions(count)} parameters in "
        f"{len(model.tensors)} tensors, stored as {model.stored}. The architecture says which "
        f"program they belong to; {beside}"
    )


def _size(shape: Sequence[int]) -> int:
    from math import prod

    return prod(shape)


def _millions(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return str(count)


# --- recordings -----------------------------------------------------------------------------------


def _scored(
    request: DraftRequest, model: ModelFolder, recording: DraftRecording, contract: Path
) -> DraftFiles:
    """Return the draft in which the training kernel scores recorded tokens."""
    assert request.data is not None
    base = contract.parent
    train = training_kernel(model.compute, model.architecture)
    infer, note = _recorded(request, recording)
    slices = slices_of(recording.fields, lengths=False)
    named = tuple(s.name for s in slices if s.name != "all")
    clauses = clauses_for(
        request.purpose or DraftPurpose.RL, DraftEvidence.SCORED, width=None,
        blocks=(), long=False, named=named, replayed=False,
    )  # fmt: skip
    draft = Draft(
        model.name, request.purpose or DraftPurpose.RL, _reference(model.checkpoint, base),
        model.architecture, _about(model), train, infer, _reference(request.data, base), slices,
        clauses, notes=(note,),
    )  # fmt: skip
    named_files = [model.checkpoint, *model.files, model.path / "config.json", request.data]
    return DraftFiles(draft, contract, (), _outside(base, named_files))


def _of_recording(
    request: DraftRequest, path: Path, here: Path, recordings: ReadsRecordings
) -> DraftFiles:
    """Return the draft in which both kernels are recorded."""
    found = recordings(path)
    if found is None or not {"tokens", "train_logs", "infer_logs"} <= found[1]:
        lacking = sorted({"tokens", "train_logs", "infer_logs"} - (found[1] if found else set()))
        raise refuse(
            codes.ROLLOUT_COLUMN,
            f"{shown(path)} has no column for {', '.join(lacking)}, so {_UNREAD}",
            help="record both (`kcdsl explain rollouts`), or let the training kernel score the "
            f"tokens: kcdsl init MODEL_FOLDER --data {shown(path)}",
        )
    recording = DraftRecording(found[0], found[1], tuple(found[2]))
    contract = request.output or _beside(path.parent, here) / CONTRACT
    infer, note = _recorded(request, recording)
    slices = slices_of(recording.fields, lengths=False)
    named = tuple(s.name for s in slices if s.name != "all")
    purpose = request.purpose or DraftPurpose.RL
    clauses = clauses_for(
        purpose, DraftEvidence.RECORDED, width=None, blocks=(), long=False, named=named,
        replayed=False,
    )  # fmt: skip
    draft = Draft(
        "rollouts", purpose, "model.safetensors", "llama",
        "The weights are not read where both kernels are recorded; name yours, so that later "
        "contracts can run the training kernel.",
        infer, infer, _reference(path, contract.parent), slices, clauses, notes=(note,),
    )  # fmt: skip
    return DraftFiles(draft, contract, (), _outside(contract.parent, [path]))


def _recorded(request: DraftRequest, recording: DraftRecording) -> tuple[RecordedKernel, str]:
    values = "raw" if recording.format == "rows" else "processed"
    kernel = RecordedKernel(recording.format, values, request.temperature)
    note = (
        f"assumed: log-probabilities are {values}, at temperature {request.temperature}; no file "
        "states that, so compare it with the settings of your sampler"
    )
    return kernel, note


# --- nothing --------------------------------------------------------------------------------------


def _example(request: DraftRequest, here: Path) -> DraftFiles:
    """Return a draft with a small random model, whose files are written too."""
    from tempfile import TemporaryDirectory

    from kcdsl.draft import example

    contract = request.output or here / CONTRACT
    base = contract.parent
    prompts = _prompts_there(base)
    brought = (
        ("config.json", example.config_text().encode()),
        ("model.safetensors", example.weights()),
    )
    with TemporaryDirectory(prefix="kcdsl-init-") as name:
        folder = Path(name) / "example"
        folder.mkdir()
        for file, data in brought:
            (folder / file).write_bytes(data)
        inner = replace(request, source=folder, output=folder / CONTRACT, data=prompts)
        made = draft_of(inner, folder, lambda path: None)
    files = tuple((base / file, data) for file, data in brought)
    more = tuple((base / path.name, data) for path, data in made.more)
    return DraftFiles(replace(made.draft, data=PROMPTS), contract, (*files, *more))


# --- places ---------------------------------------------------------------------------------------


def _beside(folder: Path, here: Path) -> Path:
    """Return the folder of the contract: `here` if the files lie below it, else their folder."""
    return here if folder.resolve().is_relative_to(here.resolve()) else folder


def _prompts_there(base: Path) -> Path | None:
    """Return an existing requests file beside the contract, which a draft uses as its data."""
    return base / PROMPTS if is_file(base / PROMPTS) else None


def _reference(path: Path, base: Path) -> str:
    """Return the path of a file as written in a contract in the folder `base`."""
    whole = Path(os.path.abspath(path))
    return Path(os.path.relpath(whole, Path(os.path.abspath(base)))).as_posix()


def _outside(base: Path, paths: Sequence[Path | None]) -> tuple[Path, ...]:
    """Return the folders of files that a contract in `base` may not read yet."""
    files = Artefacts.of(base)
    found: dict[Path, None] = {}
    for path in paths:
        if path is None:
            continue
        try:
            files.admitted(path)
        except Refusal:
            found[Path(os.path.realpath(path)).parent] = None
    return tuple(found)
