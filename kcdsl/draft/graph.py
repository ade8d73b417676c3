"""An ONNX file as the model of a draft: its blocks, its numerics, and requests of its length."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.draft.quantisation import DraftKernel
from kcdsl.draft.rows import DraftRows, json_rows, slices_of
from kcdsl.model.adapters import find_adapter
from kcdsl.model.files import Artefacts
from kcdsl.source.files import shown
from kcdsl_grammar.expression_table import KEYWORDS

if TYPE_CHECKING:
    from kcdsl.model.onnx.file_numerics import FileNumerics
    from kcdsl.model.onnx.files import OnnxNode
    from kcdsl.model.onnx.plan import OnnxPlan
    from kcdsl.model.onnx.program import OnnxProgram

_ATTENTION = frozenset({"Softmax", "Attention"})
FILE_ADAPTER = "onnxruntime.file"
_MOST = 16
"""The largest number of tokens of a generated request."""


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The model in an ONNX file, with blocks as [name, first tensor, last tensor]."""

    path: Path
    blocks: tuple[tuple[str, str, str], ...]
    stated: FileNumerics
    program: OnnxProgram

    @property
    def name(self) -> str:
        """Return a name for the contract, from that of the file."""
        words = re.sub(r"[^a-z0-9]+", "-", self.path.stem.lower()).strip("-")
        plain = words[:1].isalpha() and words not in KEYWORDS
        return words if plain else f"model-{words}".strip("-")

    @property
    def width(self) -> int | None:
        """Return the width of the output states; None for logits."""
        if not self.program.encoder_only:
            return None
        plan = self.program.plan
        return int(plan.at(plan.usual_length)[1][self.program.ends[1]].shape[-1])

    def kernels(self) -> tuple[DraftKernel, DraftKernel]:
        """Return the training kernel, in the format of the weights, and the inference kernel: the
        file with its quantisers in ONNX Runtime, if that supports the format."""
        own = self.stated.compute
        plain = {"preset": "torch-eager", "compute": own}
        train = DraftKernel("torch.eager", plain, f"the graph in {own}")
        if own not in find_adapter(FILE_ADAPTER).computes:
            return train, train
        served = {**self.stated.section(), "preset": "onnxruntime-float32", "casts": "any"}
        return train, DraftKernel(FILE_ADAPTER, served, "the file as ONNX Runtime runs it")

    def served(self, file: str) -> tuple[DraftKernel, DraftKernel]:
        """Return the kernels if another file is served, such as a quantised one."""
        return self.kernels()[0], own_file_kernel(file)

    def rows(self, path: str) -> DraftRows:
        """Return random requests of token ids from a seed, of the length that the file takes."""
        from random import Random

        chance, fixed = Random(0), self.program.plan.fixed_length
        rows = []
        for number in range(12):
            length = fixed or 3 + number * (_MOST - 3) // 11
            tokens = [chance.randrange(self.program.vocabulary or 2) for _ in range(length)]
            rows.append({"id": f"ids-{number:02}", "tokens": tokens, "length": length})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        return DraftRows(path, slices_of(rows), len(rows), text)


def own_file_kernel(file: str) -> DraftKernel:
    """Return the kernel that runs an ONNX file in place of the model; it can only be measured."""
    return DraftKernel(FILE_ADAPTER, {}, "another file, as ONNX Runtime runs it", checkpoint=file)


def read_graph(path: Path) -> ModelGraph:
    """Read an ONNX file; nothing is run. Refuse what `read_program` refuses."""
    from kcdsl.model.onnx.program import read_program

    program, _, stated = read_program(path, (), Artefacts.of(path.parent).admitted)
    return ModelGraph(path, _blocks(program), stated, program)


def rows_of_ids(file: Path, path: str) -> DraftRows:
    """Return the requests of a JSONL file. Refuse rows without tokens."""
    rows = json_rows(file)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("tokens"), list):
            raise refuse(
                codes.MALFORMED_REQUEST,
                f"{shown(file)}, line {number}: a row of an ONNX model has `tokens`",
                help='write {"id": "a", "tokens": [1, 2]}',
            )
        row.setdefault("length", len(row["tokens"]))
    return DraftRows(path, slices_of(rows), len(rows))


def _blocks(program: OnnxProgram) -> tuple[tuple[str, str, str], ...]:
    """Return the parts between residual sums, beginning with the input of the first sum; without
    such sums, the part between the first and the last hidden states."""
    plan = program.plan
    cuts = _cuts(plan, program.runs, program)
    sums = [name for name, residual in cuts if residual]
    names = [name for name, _ in cuts]
    if sums:
        before = names[: names.index(sums[0])]
        ends = [*before[-1:], *sums]
    else:
        ends = [names[0], names[-1]] if len(names) > 1 else []
    found: list[tuple[str, str, str]] = []
    counts: dict[str, int] = {}
    for first, last in pairwise(ends):
        kind = _kind(program.runs, plan, first, last)
        found.append((f"{kind}_{counts.setdefault(kind, 0)}", first, last))
        counts[kind] += 1
    return tuple(found)


def _cuts(plan: OnnxPlan, runs: Sequence[OnnxNode], program: OnnxProgram) -> list[tuple[str, bool]]:
    """Return the hidden states that separate the graph (all later nodes depend on the tokens only
    through them), and whether each is a sum of two token-dependent tensors."""
    length, output = plan.usual_length, program.ends[1]
    shapes: Any = plan.at(length)[1]
    made = {name: place for place, node in enumerate(runs) for name in node.outputs if name}
    reads = {name: place for place, node in enumerate(runs) for name in node.inputs}
    reads[output] = len(runs)
    dynamic = {plan.ids}
    found: list[tuple[str, bool]] = []
    for place, node in enumerate(runs):
        entering = [name for name in node.inputs if name in dynamic]
        if entering:
            dynamic.update(filter(None, node.outputs))
        live = [n for n in dynamic if made.get(n, -1) <= place and reads.get(n, -1) > place]
        if live != [node.outputs[0]]:
            continue
        shape = tuple(shapes[live[0]].shape)
        hidden = shape[-3:-1] in ((1, length), (length,)) and len(shape) in (2, 3)
        logits = live[0] == output and not program.encoder_only
        if hidden and not logits and shapes[live[0]].is_floating_point():
            found.append((live[0], node.kind == "Add" and len(set(entering)) == 2))
    return found


def _kind(runs: Sequence[OnnxNode], plan: OnnxPlan, first: str, last: str) -> str:
    """Return a name for a part by its operations."""
    from kcdsl.model.onnx.program import nodes_between

    kinds = {node.kind for node in nodes_between(plan, first, last, "")}
    if kinds & _ATTENTION:
        return "attn"
    return "mlp" if kinds & {"MatMul", "Gemm"} else "part"
