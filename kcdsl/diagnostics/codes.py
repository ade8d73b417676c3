"""Every diagnostic code, declared once. A number is never reused. Texts are in `pages/`.

Families: KC0 YAML and lexing · KC1 structure · KC2 names and types · KC3 shapes, formats, units ·
KC4 fragments, routing, vacuity, model and kernel support · KC5 statistics · KC6 evidence, files
and certificates · KC7 style · KC9 the tool itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcdsl.diagnostics.pages import Page


FAMILIES = {
    "KC0": "YAML and lexing",
    "KC1": "structure",
    "KC2": "names and types",
    "KC3": "shapes, formats, units",
    "KC4": "fragments, routing, vacuity, model and kernel support",
    "KC5": "statistics",
    "KC6": "evidence, files and certificates",
    "KC7": "style",
    "KC9": "the tool itself",
}
"""What the codes are about, by the beginning of their numbers."""


@dataclass(frozen=True, slots=True)
class Code:
    """A stable code with the rule it stands for; all that is said of it is on its page."""

    id: str
    title: str
    text: str = ""
    """What it means, of a code that has no page in `pages/`."""

    def __str__(self) -> str:
        return self.id

    @property
    def family(self) -> str:
        """Return the beginning of the number, a key of `FAMILIES`."""
        return self.id[:3]

    @property
    def page(self) -> Page:
        """Return its page, read now."""
        from kcdsl.diagnostics.pages import page, parse

        return page(self) or parse(f"# {self.id}: {self.title}\n\n{self.text or self.title}\n")

    @property
    def explanation(self) -> str:
        """Return what it means in a few sentences: the first paragraph of its page."""
        return self.page.summary

    @property
    def summary(self) -> str:
        """Return what it means in one sentence: the first of its page."""
        from kcdsl.diagnostics.pages import first_sentence

        return first_sentence(self.explanation)

    @property
    def uri(self) -> str | None:
        """Return where its page lies; None where the package is not in a folder."""
        from kcdsl.diagnostics.pages import place

        return place(self)


_REGISTRY: dict[str, Code] = {}


def _declare(id: str, title: str, text: str = "") -> Code:
    if id in _REGISTRY:
        raise ValueError(f"{id} is declared twice")
    code = Code(id, title, " ".join(text.split()))
    _REGISTRY[id] = code
    return code


def all_codes() -> tuple[Code, ...]:
    """Return every declared code, by number."""
    return tuple(_REGISTRY[key] for key in sorted(_REGISTRY))


def find(id: str) -> Code | None:
    """Return the code with this number, or None."""
    return _REGISTRY.get(id.upper())


# --- KC0 YAML and lexing -------------------------------------------------------------------------
NOT_YAML = _declare("KC001", "not YAML")
DUPLICATE_KEY = _declare("KC002", "duplicate key")
ANCHOR = _declare("KC003", "anchor or alias")
MERGE_KEY = _declare("KC004", "merge key")
CUSTOM_TAG = _declare("KC005", "custom tag")
SEVERAL_DOCUMENTS = _declare("KC006", "several documents")
AMBIGUOUS_SCALAR = _declare("KC007", "ambiguous scalar")
NOT_UTF8 = _declare(
    "KC008",
    "not UTF-8",
    "A contract is a UTF-8 text.",
)
EXPRESSION_SYNTAX = _declare("KC010", "expression syntax")
TOO_LARGE = _declare(
    "KC011",
    "too large",
    """The document is larger than any contract that a person could review. The limit guards the
    tool against hostile input.""",
)
TOO_DEEP = _declare("KC012", "nested too deeply")
EMPTY_DOCUMENT = _declare("KC013", "empty document")
BAD_NUMBER = _declare("KC014", "unusable number")
UNQUOTED_EXPRESSION = _declare("KC015", "expression without quotation marks")

# --- KC1 structure -------------------------------------------------------------------------------
UNKNOWN_FIELD = _declare("KC101", "unknown field")
MISSING_FIELD = _declare("KC102", "missing field")
WRONG_KIND = _declare("KC103", "wrong kind of value")
NOT_ALLOWED = _declare("KC104", "value not allowed")
UNSUPPORTED_VERSION = _declare("KC105", "unsupported language version")
CONFLICTING_FIELDS = _declare("KC106", "conflicting fields")
BAD_IDENTIFIER = _declare("KC107", "unusable identifier")
DUPLICATE_IDENTIFIER = _declare("KC108", "identifier used twice")
EMPTY_SECTION = _declare("KC109", "empty section")

IMPORT_FILE = _declare("KC120", "unusable import")
IMPORT_DIGEST = _declare("KC121", "import without its digest")
IMPORT_CHANGED = _declare("KC122", "import differs from its digest")
IMPORT_CYCLE = _declare("KC123", "import cycle")
NOT_A_CONTRACT = _declare("KC125", "library instead of a contract")
UNUSED_IMPORT = _declare("KC124", "unused import")

# --- KC2 names and types -------------------------------------------------------------------------
UNKNOWN_NAME = _declare("KC201", "unknown name")
UNKNOWN_SLICE = _declare("KC202", "unknown slice")
UNKNOWN_METRIC = _declare("KC203", "unknown metric")
BLOCK_NAME = _declare("KC204", "unknown block")
UNKNOWN_FUNCTION = _declare("KC205", "unknown function")
WRONG_ARGUMENTS = _declare("KC206", "wrong arguments")
WRONG_SORT = _declare("KC207", "wrong sort")
DOUBTFUL_NAME = _declare("KC208", "doubtful name")
UNKNOWN_ACTION = _declare("KC209", "unknown action")
UNKNOWN_ADAPTER = _declare("KC210", "unknown kernel adapter")
SHADOWED_NAME = _declare("KC211", "shadowed name")
UNUSED_VARIABLE = _declare("KC212", "unused variable")
AGAINST_DIRECTION = _declare("KC213", "comparison against the metric's direction")
WRONG_FAMILY = _declare("KC214", "wrong family")
WEAKENED_ESCALATION = _declare("KC215", "weakened escalation")

NOT_IN_LIBRARY = _declare("KC230", "not in the library")
UNKNOWN_TABLE = _declare("KC231", "unknown table")
UNUSED_TABLE = _declare("KC232", "unused table")
MILD_ACTION = _declare("KC233", "action milder than the policy")
MIXED_DIRECTION = _declare("KC216", "direction that cannot be judged")
FIELD_OF_TWO_SORTS = _declare("KC217", "field of two sorts")
METRIC_DECLARATION = _declare("KC218", "unusable metric declaration")
METRIC_NAME_TAKEN = _declare("KC219", "name of a metric taken")
METRIC_MODULE = _declare("KC220", "metric module not found")

# --- KC3 shapes, formats, units ------------------------------------------------------------------
DIMENSION = _declare("KC301", "dimensions differ")
UNKNOWN_UNIT = _declare("KC302", "unknown unit")
OUT_OF_RANGE = _declare("KC303", "out of range")
DIVISION_BY_ZERO = _declare("KC304", "division by zero")

# --- KC4 fragments, routing, vacuity, model and kernel support -----------------------------------
OUTSIDE_FRAGMENTS = _declare("KC401", "outside every fragment")
NO_BACKEND = _declare(
    "KC402",
    "no backend",
    "The fragment of a clause is known, but no installed backend decides it.",
)
EVIDENCE_OUT_OF_REACH = _declare("KC403", "evidence out of reach")
VACUOUS = _declare("KC404", "vacuous requirement")
TABLE_GAP = _declare("KC405", "table without a value for some request")
UNREACHABLE_ROW = _declare("KC406", "row that no request reaches")
INVERTED_ACTIONS = _declare(
    "KC407",
    "action milder than that of a lower level",
    """The action of a clause is milder than that of another clause of the same family at a lower
    level, so something more serious would be answered by something milder.""",
)
RADIUS_ZERO = _declare(
    "KC408",
    "ball of radius 0",
    """A ball of radius 0 holds its centre alone. Write `points(...)`, which says the same.""",
)
CONTRADICTION = _declare(
    "KC410",
    "contradicting clauses",
    """The named clauses cannot hold together on the same slice, whatever the kernels do. The set is
    the smallest one found: without any of its members the rest can hold.""",
)
NEVER_HOLDS = _declare(
    "KC411",
    "clause can never hold",
    """No values of its quantities satisfy the requirement: its parts contradict each other or the
    ranges of its metrics.""",
)
EMPTY_SLICE = _declare(
    "KC412",
    "empty slice",
    "No request can satisfy the `where` of the slice, so every clause on it would be vacuous.",
)
ALWAYS_HOLDS = _declare(
    "KC413",
    "clause that always holds",
    """The requirement follows from the ranges of its metrics and from what holds of any two
    kernels, so no kernel can violate it.""",
)
SOLVER_UNDECIDED = _declare(
    "KC414",
    "not decided by the solver",
    """The solver gave no answer in the time allowed. What was asked was not shown to be
    consistent; nor was it shown to be contradictory.""",
)
REDUNDANT_CLAUSE = _declare(
    "KC415",
    "clause that follows from others",
    """The clause follows from others, which the message names, with the facts that it follows by,
    and asks for nothing more. It can go, or be tightened.""",
)
CONFLICTING_LEVELS = _declare(
    "KC416",
    "conflicting levels on overlapping slices",
    """Two clauses ask for the same on slices that share requests, and the looser one has the
    higher level, or their levels differ. The message gives a request that belongs to both
    slices.""",
)
UNUSED_SLICE = _declare(
    "KC417",
    "slice that no clause uses",
    """No clause speaks of the slice.""",
)
EQUAL_SLICES = _declare(
    "KC418",
    "slices with the same requests",
    """Two slices hold the same requests under different names.""",
)
DEAD_PART = _declare(
    "KC419",
    "part of a requirement that says nothing",
    """A part of the requirement can never hold, or always holds, given the rest and what is true
    of any two kernels, so it says nothing.""",
)

CHECKPOINT_FORMAT = _declare(
    "KC450",
    "not a checkpoint",
    "The checkpoint is not a readable safetensors file: damaged, cut off, or another format.",
)
CHECKPOINT_DTYPE = _declare(
    "KC451",
    "tensor type not supported",
    """A tensor that the architecture needs is stored in a type other than float32, bfloat16 or
    float16, so it cannot be taken over exactly as float32.""",
)
CHECKPOINT_NOT_FINITE = _declare(
    "KC452",
    "weights not finite",
    "A tensor of the checkpoint holds a NaN or an infinity. Nothing can be certified about it.",
)
CHECKPOINT_TENSORS = _declare(
    "KC453",
    "tensors do not match the architecture",
    "The checkpoint lacks tensors of the architecture, or holds tensors that it does not know.",
)
CHECKPOINT_SHAPE = _declare(
    "KC454",
    "tensor of the wrong shape",
    "A tensor of the checkpoint has another shape than the configuration demands.",
)
MODEL_CONFIG = _declare(
    "KC455",
    "model configuration not usable",
    """The configuration (config.json) lacks a field, holds a value of the wrong kind, or asks for
    something that the architecture does not implement.""",
)
UNKNOWN_ARCHITECTURE = _declare(
    "KC456",
    "unknown architecture",
    "The architecture is none of kcdsl.model. Give your own as `module: package.module:factory`.",
)
MODEL_FACTORY = _declare(
    "KC457",
    "model factory not usable",
    """`package.module:factory` could not be imported, or did not return a torch.nn.Module when
    called with the configuration.""",
)
TOKENIZER = _declare(
    "KC458",
    "tokenizer not usable",
    """The tokenizer file cannot be read, the text cannot be encoded with it, or a token lies
    outside the vocabulary of the model.""",
)
UNKNOWN_BLOCK = _declare(
    "KC459",
    "unknown block",
    "The model has no block of this name.",
)
SEQUENCE = _declare(
    "KC460",
    "sequence not usable",
    "A token sequence is empty, longer than the model allows, or has tokens out of the vocabulary.",
)
OPERATION_UNSUPPORTED = _declare(
    "KC461",
    "operation not supported",
    """The block uses an operation that block graphs do not have, so nothing can be proved about
    it. The message names the operation and the module that calls it.""",
)
EXPORT_FAILED = _declare(
    "KC462",
    "block cannot be exported",
    """torch.export could not turn the block into a graph, most often because its control flow
    depends on tensor values.""",
)
NUMERICS = _declare(
    "KC463",
    "numerics specification not usable",
    """The numerics of a kernel name an unknown preset, format, scale or key, or combine them in a
    way
    that has no meaning.""",
)
UNKNOWN_KERNEL = _declare(
    "KC464",
    "unknown kernel adapter",
    "The `run` of a kernel is no adapter that is known.",
)
KERNEL_NUMERICS = _declare(
    "KC465",
    "kernel cannot serve the numerics",
    """The adapter named by `run` computes in another way than the numerics claim, so measurements
    of
    it would say nothing about the specification.""",
)
KERNEL_FAILED = _declare(
    "KC466",
    "kernel failed",
    "The kernel could not run on this device or on this sequence.",
)
WEIGHT_OVERFLOW = _declare(
    "KC467",
    "weight out of the range of its format",
    "A weight is larger than the largest finite number of the format it is to be stored in.",
)
NO_GOAL = _declare(
    "KC470",
    "nothing to verify",
    "No clause of the contract states a drift for all inputs of a region on the selected block.",
)
UNKNOWN_CLAUSE = _declare("KC471", "unknown clause")
NO_DEVICE = _declare("KC472", "device missing", "The device asked for is not available.")
REGION_OF_TOKENS = _declare(
    "KC473",
    "region of tokens",
    """Token ids have no neighbourhood: the block `model` can be verified at points only. Blocks on
    hidden states take balls and hulls.""",
)

# --- KC5 statistics ------------------------------------------------------------------------------
PERCENTILE_WITH_BUDGET = _declare("KC501", "percentile with a sample budget")
BUDGET_UNIT = _declare("KC502", "budget without a unit")
NO_SLICE = _declare("KC503", "no slice")
BUDGET_ON_PROOF = _declare("KC504", "budget on a universal clause")
STATISTIC_NOT_ALLOWED = _declare("KC505", "statistic does not fit the metric")
SIGNED_METRIC = _declare("KC506", "signed metric without a magnitude")
WRONG_TAIL = _declare("KC507", "statistic of the harmless tail")

# --- KC6 evidence, files, certificates -----------------------------------------------------------
FILE_MISSING = _declare("KC601", "file missing")
INPUT_OUTPUT = _declare(
    "KC602",
    "input or output error",
    "The operating system refused to read or write a file.",
)
NO_CONTRACT = _declare("KC603", "no contract found")
SEVERAL_CONTRACTS = _declare("KC604", "several contracts")
BAD_CONFIGURATION = _declare("KC605", "unusable configuration")
MALFORMED_REQUEST = _declare(
    "KC620",
    "malformed request",
    """A line of a request file is not a JSON object with an `id` and a non-empty `text` (or
    `tokens`), or it does not suit the model.""",
)
DUPLICATE_REQUEST = _declare(
    "KC621",
    "duplicate request",
    "Two rows of a request file have the same id, so one of them would be counted twice.",
)
REQUEST_FIELD = _declare(
    "KC622",
    "request field missing",
    """A row lacks a field that the predicate of a slice names, or holds another kind of value
    there. Whether the row belongs to the slice is then unknown, so nothing is counted.""",
)
NOTHING_TO_EVALUATE = _declare(
    "KC623",
    "nothing to evaluate",
    "The contract, or what was selected of it, has no clause that running kernels could decide.",
)
METRIC_OUT_OF_REACH = _declare(
    "KC624",
    "metric out of reach",
    """The model, the data or the constants of the contract cannot supply what the metric is
    computed from; an encoder, for one, has no logits.""",
)
ABOVE_CERTIFIED = _declare(
    "KC625",
    "measured above certified",
    """A measured drift lies above the bound certified for the numerics that the kernels claim, or
    is not a number. Either a kernel does not compute as it claims or the bound is wrong; nothing
    is reported as held.""",
)
METRIC_FUNCTION = _declare("KC626", "metric function not usable")
UNREADABLE_KEY = _declare(
    "KC640",
    "unreadable key",
    """A key file is missing, damaged, protected by a password that was not given, or of a kind
    that is not supported (ECDSA on P-256 and Ed25519 are).""",
)
NO_TRUSTED_KEY = _declare(
    "KC641",
    "no trusted key",
    """A certificate is worth what its signer is worth, so checking needs a public key to trust:
    --key, [tool.kcdsl] trusted_keys, or kcdsl.key.pub beside the contract.""",
)
KEY_EXISTS = _declare(
    "KC642",
    "key exists",
    "A key file is already there. Replacing it would orphan every certificate it signed.",
)
TRUST_POLICY = _declare(
    "KC643",
    "unusable trust policy",
    """The threshold is below one or above the number of distinct trusted keys, or a key is listed
    twice. Such a policy would accept anything or nothing.""",
)
NO_PASSWORD = _declare(
    "KC644",
    "password variable not set",
    "The environment variable that should hold the password of a key is not set or is empty.",
)
CANNOT_CERTIFY = _declare(
    "KC645",
    "result cannot be certified",
    """A clause result contradicts itself, is not finite, or names no evidence, so no certificate
    is written about it.""",
)
KERNELS_FILE = _declare(
    "KC646",
    "unusable kernel fingerprints",
    """The file of kernel fingerprints is no document of the schema kcdsl.kernels/1, with the
    entries `train` and `infer`, or a fingerprint has no canonical form.""",
)
BAD_TIME = _declare(
    "KC647",
    "unusable time",
    "A time is written in UTC and to the second, such as 2026-11-30T12:00:00Z.",
)
ARTEFACT_REFUSED = _declare(
    "KC648",
    "artefact refused",
    """A checkpoint is a symbolic link, a special file, empty, or changed while it was read. Its
    digest would not bind what is loaded.""",
)
STORED_PROGRAM = _declare(
    "KC607",
    "unusable stored program",
    """A stored intermediate representation is not JSON of the schema kcdsl.ir/1, or its digest
    does not belong to it. Compile the contract again.""",
)
DATA_ABSENT = _declare("KC606", "file not here yet")

# --- KC7 style -----------------------------------------------------------------------------------
FORMAT_REFUSED = _declare(
    "KC701",
    "layout not changed",
    """The formatter reads again what it wrote, and found that the layout could not be changed
    without changing what the document says. Nothing was written. This is a defect of kcdsl.""",
)

# --- KC9 the tool --------------------------------------------------------------------------------
UNUSED_SUPPRESSION = _declare("KC900", "unused suppression")
USAGE = _declare("KC901", "usage")
UNKNOWN_CODE = _declare(
    "KC902",
    "unknown code",
    "No diagnostic has this code.",
)
NO_PACKAGE = _declare(
    "KC903",
    "package missing",
    """A Python package that kcdsl depends on is not installed. `kcdsl doctor` names the command
    that installs it.""",
)
BAD_SUPPRESSION = _declare("KC904", "unusable suppression")
SUPPRESSED_ERROR = _declare("KC905", "suppression of an error")
INTERNAL = _declare(
    "KC999",
    "internal error",
    "A defect of kcdsl itself; please report it with the text shown.",
)
