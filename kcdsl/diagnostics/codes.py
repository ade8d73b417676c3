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
"""The subject of each family of codes, by the beginning of their numbers."""


@dataclass(frozen=True, slots=True)
class Code:
    """A stable code and its title; the text of its rule is on its page."""

    id: str
    title: str

    def __str__(self) -> str:
        return self.id

    @property
    def family(self) -> str:
        """Return the beginning of the number, a key of `FAMILIES`."""
        return self.id[:3]

    @property
    def page(self) -> Page:
        """Read and return its page."""
        from kcdsl.diagnostics.pages import page

        return page(self)

    @property
    def explanation(self) -> str:
        """Return its meaning in a few sentences: the first paragraph of its page."""
        return self.page.summary

    @property
    def summary(self) -> str:
        """Return its meaning in one sentence, the first of its page."""
        return self.page.first_sentence

    @property
    def uri(self) -> str | None:
        """Return the path of its page; None if the package is not in a folder."""
        from kcdsl.diagnostics.pages import place

        return place(self)


_REGISTRY: dict[str, Code] = {}


def _declare(id: str, title: str) -> Code:
    if id in _REGISTRY:
        raise ValueError(f"{id} is declared twice")
    code = Code(id, title)
    _REGISTRY[id] = code
    return code


def all_codes() -> tuple[Code, ...]:
    """Return every declared code, by number."""
    return tuple(_REGISTRY[key] for key in sorted(_REGISTRY))


def find(id: str) -> Code | None:
    """Return the code with this number; None where there is none."""
    return _REGISTRY.get(id.upper())


# --- KC0 YAML and lexing -------------------------------------------------------------------------
NOT_YAML = _declare("KC001", "not YAML")
DUPLICATE_KEY = _declare("KC002", "duplicate key")
ANCHOR = _declare("KC003", "anchor or alias")
MERGE_KEY = _declare("KC004", "merge key")
CUSTOM_TAG = _declare("KC005", "custom tag")
SEVERAL_DOCUMENTS = _declare("KC006", "several documents")
AMBIGUOUS_SCALAR = _declare("KC007", "ambiguous scalar")
NOT_UTF8 = _declare("KC008", "not UTF-8")
EXPRESSION_SYNTAX = _declare("KC010", "expression syntax")
TOO_LARGE = _declare("KC011", "too large")
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
UNCOVERED_TRACE = _declare("KC234", "trace fields that replay needs are not required")
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
NO_BACKEND = _declare("KC402", "no backend")
EVIDENCE_OUT_OF_REACH = _declare("KC403", "evidence out of reach")
VACUOUS = _declare("KC404", "vacuous requirement")
TABLE_GAP = _declare("KC405", "table without a value for some request")
UNREACHABLE_ROW = _declare("KC406", "row that no request reaches")
INVERTED_ACTIONS = _declare("KC407", "action milder than at a lower level")
RADIUS_ZERO = _declare("KC408", "ball of radius 0")
CONTRADICTION = _declare("KC410", "contradicting clauses")
NEVER_HOLDS = _declare("KC411", "clause can never hold")
EMPTY_SLICE = _declare("KC412", "empty slice")
ALWAYS_HOLDS = _declare("KC413", "clause that always holds")
SOLVER_UNDECIDED = _declare("KC414", "not decided by the solver")
REDUNDANT_CLAUSE = _declare("KC415", "clause that follows from others")
CONFLICTING_LEVELS = _declare("KC416", "conflicting levels on overlapping slices")
UNUSED_SLICE = _declare("KC417", "slice that no clause uses")
EQUAL_SLICES = _declare("KC418", "slices with the same requests")
DEAD_PART = _declare("KC419", "redundant part of a requirement")

CHECKPOINT_FORMAT = _declare("KC450", "not a checkpoint")
CHECKPOINT_DTYPE = _declare("KC451", "tensor type not supported")
CHECKPOINT_NOT_FINITE = _declare("KC452", "weights not finite")
CHECKPOINT_TENSORS = _declare("KC453", "tensors do not match the architecture")
CHECKPOINT_SHAPE = _declare("KC454", "tensor of the wrong shape")
MODEL_CONFIG = _declare("KC455", "model configuration not usable")
UNKNOWN_ARCHITECTURE = _declare("KC456", "unknown architecture")
MODEL_FACTORY = _declare("KC457", "model factory not usable")
TOKENIZER = _declare("KC458", "tokenizer not usable")
UNKNOWN_BLOCK = _declare("KC459", "block not in the model")
SEQUENCE = _declare("KC460", "sequence not usable")
OPERATION_UNSUPPORTED = _declare("KC461", "operation not supported")
EXPORT_FAILED = _declare("KC462", "block cannot be exported")
NUMERICS = _declare("KC463", "numerics specification not usable")
KERNEL_NUMERICS = _declare("KC465", "kernel cannot serve the numerics")
KERNEL_FAILED = _declare("KC466", "kernel failed")
ONNX_FILE = _declare("KC468", "ONNX file not usable")
WEIGHT_OVERFLOW = _declare("KC467", "weight outside the range of its format")
NO_GOAL = _declare("KC470", "nothing to verify")
UNKNOWN_CLAUSE = _declare("KC471", "unknown clause")
NO_DEVICE = _declare("KC472", "device missing")
REGION_OF_TOKENS = _declare("KC473", "region of tokens")
FIXED_LENGTH = _declare("KC474", "block of a fixed length")
WEIGHTS_REGION = _declare("KC475", "unusable region of weights or states")
NO_DOMAIN = _declare("KC476", "unknown domain of bounds")
NO_PROBABILITY = _declare("KC477", "unusable failure probability")
GRAPH_DIFFERS = _declare("KC478", "graph differs from the module")
BACKENDS_DISAGREE = _declare("KC479", "backends contradict each other")
VNNLIB_QUERY = _declare("KC485", "VNN-LIB query not usable")
VNNLIB_NETWORK = _declare("KC486", "network not that of the query")
VNNLIB_SOLVER = _declare("KC487", "answer of a VNN-LIB solver not usable")

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
INPUT_OUTPUT = _declare("KC602", "input or output error")
NO_CONTRACT = _declare("KC603", "no contract found")
SEVERAL_CONTRACTS = _declare("KC604", "several contracts")
BAD_CONFIGURATION = _declare("KC605", "unusable configuration")
CHANGED_MEANWHILE = _declare("KC608", "changed while the command ran")
FOREIGN_CODE = _declare("KC609", "code not allowed")
OUTSIDE_FOLDER = _declare("KC610", "file outside the contract's folder")
MALFORMED_REQUEST = _declare("KC620", "malformed request")
DUPLICATE_REQUEST = _declare("KC621", "duplicate request")
REQUEST_FIELD = _declare("KC622", "request field missing")
NOTHING_TO_EVALUATE = _declare("KC623", "nothing to evaluate")
METRIC_OUT_OF_REACH = _declare("KC624", "metric out of reach")
ABOVE_CERTIFIED = _declare("KC625", "measured above certified")
METRIC_FUNCTION = _declare("KC626", "metric function not usable")
TRACE_FILE = _declare("KC630", "unusable trace")
TRACE_CHANGED = _declare("KC631", "trace changed")
NOT_IN_TRACE = _declare("KC632", "not in the trace")
NOT_REPRODUCED = _declare("KC633", "report not reproduced")
UNREADABLE_KEY = _declare("KC640", "unreadable key")
NO_TRUSTED_KEY = _declare("KC641", "no trusted key")
KEY_EXISTS = _declare("KC642", "key exists")
TRUST_POLICY = _declare("KC643", "unusable trust policy")
NO_PASSWORD = _declare("KC644", "password variable not set")
CANNOT_CERTIFY = _declare("KC645", "result cannot be certified")
KERNELS_FILE = _declare("KC646", "unusable kernel fingerprints")
BAD_TIME = _declare("KC647", "unusable time")
ARTEFACT_REFUSED = _declare("KC648", "artefact refused")
CANNOT_SIGN = _declare("KC649", "cannot be signed")
FOREIGN_KERNEL_FIELD = _declare("KC650", "field of another adapter")
SERVER_ADDRESS = _declare("KC651", "unusable address of a server")
NO_SAMPLES = _declare("KC652", "tokens are no samples")
TWO_TEMPERATURES = _declare("KC653", "two temperatures")
SERVER_UNREACHABLE = _declare("KC654", "server does not answer")
SERVER_REPLY = _declare("KC655", "answer of a server not usable")
SERVER_SEMANTICS = _declare("KC656", "server contradicts the contract")
TOKENS_NOT_ALIGNED = _declare("KC657", "tokens cannot be aligned")
SERVER_CHANGED = _declare("KC658", "server changed")
HF_FOLDER = _declare("KC659", "Hugging Face model not usable")
COUNTEREXAMPLE_FILE = _declare("KC660", "unusable counterexample")
COUNTEREXAMPLE_ELSEWHERE = _declare("KC661", "counterexample of something else")
COUNTEREXAMPLE_RUN = _declare("KC662", "counterexample not reproduced")
ROLLOUT_FILE = _declare("KC663", "unusable recording")
MALFORMED_ROLLOUT = _declare("KC664", "malformed rollout")
RECORDING = _declare("KC666", "recorded kernel not usable")
ROLLOUT_COLUMN = _declare("KC667", "recording lacks a column")
CANNOT_TRANSFER = _declare("KC665", "certificate cannot be transferred")
BELOW_NOISE = _declare("KC670", "threshold below the noise floor")
CLAUSE_VIOLATED = _declare("KC671", "clause violated")
CLAUSE_INVALID = _declare("KC672", "clause without valid evidence")
CLAUSE_OPEN = _declare("KC673", "clause not decided")
REPORT_FILE = _declare("KC674", "unusable report")
ATTRIBUTION_FILE = _declare("KC675", "unusable attribution")
TOKEN_TABLE = _declare("KC680", "unusable token table")
WORKER_LOST = _declare("KC684", "worker lost")
EXPERIMENT = _declare("KC683", "experiment cannot run")
AGGREGATION_ENGINE = _declare("KC682", "aggregation engine not trusted")
AGGREGATION_MEMORY = _declare("KC681", "too little memory to aggregate")
NO_ATTRIBUTION = _declare("KC690", "nothing to attribute")
NOT_ATTRIBUTABLE = _declare("KC691", "metric cannot be attributed")
REGISTER_MISSING = _declare("KC692", "no register")
REGISTER_SCHEMA = _declare("KC693", "register of another version")
REGISTER_BUSY = _declare("KC694", "register busy")
REGISTER_DAMAGED = _declare("KC695", "register damaged")
STALE_SLOT = _declare("KC696", "slot changed meanwhile")
NOT_RECORDED = _declare("KC697", "entry not recorded")
PROMOTION_EVIDENCE = _declare("KC698", "unusable evidence of a stage")
PROMOTION_STAGE = _declare("KC699", "stage not entered")
STORED_PROGRAM = _declare("KC607", "unusable stored program")
DATA_ABSENT = _declare("KC606", "file not present")

# --- KC7 style -----------------------------------------------------------------------------------
FORMAT_REFUSED = _declare("KC701", "layout not changed")

# --- KC9 the tool --------------------------------------------------------------------------------
UNUSED_SUPPRESSION = _declare("KC900", "unused suppression")
USAGE = _declare("KC901", "usage")
UNKNOWN_CODE = _declare("KC902", "unknown code")
NO_PACKAGE = _declare("KC903", "package missing")
BAD_SUPPRESSION = _declare("KC904", "unusable suppression")
SUPPRESSED_ERROR = _declare("KC905", "suppression of an error")
REFUSED_SUPPRESSION = _declare("KC906", "refused suppression")
INTERNAL = _declare("KC999", "internal error")
