"""Every diagnostic code, declared once. A number is never reused.

Families: KC0 YAML and lexing · KC1 structure · KC2 names and types · KC3 shapes, formats, units ·
KC4 fragments, routing, vacuity, model and kernel support · KC5 statistics · KC6 evidence, files
and certificates · KC7 style · KC9 the tool itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """A stable code with the rule it stands for."""

    id: str
    title: str
    explanation: str

    def __str__(self) -> str:
        return self.id


_REGISTRY: dict[str, Code] = {}


def _declare(id: str, title: str, explanation: str) -> Code:
    if id in _REGISTRY:
        raise ValueError(f"{id} is declared twice")
    code = Code(id, title, " ".join(explanation.split()))
    _REGISTRY[id] = code
    return code


def all_codes() -> tuple[Code, ...]:
    """Return every declared code, by number."""
    return tuple(_REGISTRY[key] for key in sorted(_REGISTRY))


def find(id: str) -> Code | None:
    """Return the code with this number, or None."""
    return _REGISTRY.get(id.upper())


# --- KC0 YAML and lexing -------------------------------------------------------------------------
NOT_YAML = _declare("KC001", "not YAML", "The document is not well-formed YAML.")
DUPLICATE_KEY = _declare(
    "KC002",
    "duplicate key",
    """A mapping names the same key twice. YAML readers silently keep the last one, so a clause
    could vanish; kcdsl refuses the document. Remove or rename one of them.""",
)
ANCHOR = _declare(
    "KC003",
    "anchor or alias",
    """YAML anchors (&name) and aliases (*name) make a document that cannot be read top-down and
    can expand without bound. Write the value out where it is used.""",
)
MERGE_KEY = _declare(
    "KC004",
    "merge key",
    "The merge key `<<` copies entries from elsewhere. Write the entries out.",
)
CUSTOM_TAG = _declare(
    "KC005",
    "custom tag",
    "Explicit YAML tags (!name, !!set ...) are not part of the contract language. Remove the tag.",
)
SEVERAL_DOCUMENTS = _declare(
    "KC006",
    "several documents",
    "A contract file holds exactly one YAML document. Split the file at `---`.",
)
AMBIGUOUS_SCALAR = _declare(
    "KC007",
    "ambiguous scalar",
    """A plain scalar that YAML 1.1 and YAML 1.2 read differently: `on`, `off`, `yes`, `no` (a
    truth value or a text), `12:30:45` (a number in base 60 or a text), `2026-05-26` (a date or
    a text), `010` (eight or ten), `1_000`. Write it in quotation marks, or in an unambiguous
    form.""",
)
NOT_UTF8 = _declare(
    "KC008",
    "not UTF-8",
    "A contract is a UTF-8 text.",
)
EXPRESSION_SYNTAX = _declare(
    "KC010",
    "expression syntax",
    """An expression does not follow the grammar. The message names what could stand at the marked
    place.""",
)
TOO_LARGE = _declare(
    "KC011",
    "too large",
    """The document is larger than any contract that a person could review. The limit guards the
    tool against hostile input.""",
)
TOO_DEEP = _declare(
    "KC012",
    "nested too deeply",
    """The document or expression is nested deeper than the limit, which guards the tool against
    hostile input. Split the clause into several.""",
)
EMPTY_DOCUMENT = _declare(
    "KC013",
    "empty document",
    "The file holds no document, so it states no contract.",
)
BAD_NUMBER = _declare(
    "KC014",
    "unusable number",
    "A number that is not finite, or too large or too small to be meant.",
)
UNQUOTED_EXPRESSION = _declare(
    "KC015",
    "expression without quotation marks",
    """An expression holds `: `, or in a flow mapping a comma or square brackets, and stands
    without quotation marks. kcdsl reads it as it is meant; other YAML readers do not. Put it in
    quotation marks, or in a block scalar after `>-`, for their sake.""",
)

# --- KC1 structure -------------------------------------------------------------------------------
UNKNOWN_FIELD = _declare(
    "KC101",
    "unknown field",
    "The mapping has no such field. A misspelt field would otherwise be ignored silently.",
)
MISSING_FIELD = _declare(
    "KC102",
    "missing field",
    "A field that the contract needs is absent.",
)
WRONG_KIND = _declare(
    "KC103",
    "wrong kind of value",
    "The field takes another kind of YAML value (a mapping, a list, a text, a number).",
)
NOT_ALLOWED = _declare(
    "KC104",
    "value not allowed",
    "The field takes one of a fixed set of values.",
)
UNSUPPORTED_VERSION = _declare(
    "KC105",
    "unsupported language version",
    "The field `kcdsl` names the version of the contract language. This release reads version 1.",
)
CONFLICTING_FIELDS = _declare(
    "KC106",
    "conflicting fields",
    "Two fields that exclude each other are both given.",
)
BAD_IDENTIFIER = _declare(
    "KC107",
    "unusable identifier",
    """Identifiers of clauses, slices and contracts start with a letter and continue with letters,
    digits, `_`, `-` or `.`; slice names take no `-` or `.`, because expressions use them.""",
)
DUPLICATE_IDENTIFIER = _declare(
    "KC108",
    "identifier used twice",
    "Two clauses or slices have the same identifier; reports could not tell them apart.",
)
EMPTY_SECTION = _declare(
    "KC109",
    "empty section",
    "A section that must have entries has none; a contract without clauses requires nothing.",
)

IMPORT_FILE = _declare(
    "KC120",
    "unusable import",
    """The file of an import is no library that can be read: its path is not relative, the file is
    missing, it holds something else, or it has errors of its own.""",
)
IMPORT_DIGEST = _declare(
    "KC121",
    "import without its digest",
    """An import states the digest of what the library means, so that nobody can change a contract
    by changing a file that it imports.""",
)
IMPORT_CHANGED = _declare(
    "KC122",
    "import differs from its digest",
    """The library means something else than when its digest was written down. Look at what changed
    before the new digest is accepted.""",
)
IMPORT_CYCLE = _declare(
    "KC123",
    "import cycle",
    "A library imports itself, directly or through others.",
)
NOT_A_CONTRACT = _declare(
    "KC125",
    "library instead of a contract",
    """A command needs a contract and was given a library, which has slices, kernels and tables but
    no clauses.""",
)
UNUSED_IMPORT = _declare(
    "KC124",
    "unused import",
    "A name is imported and no clause speaks of it, so the import brings nothing.",
)

# --- KC2 names and types -------------------------------------------------------------------------
UNKNOWN_NAME = _declare(
    "KC201",
    "unknown name",
    "A name is neither a bound variable nor anything the language defines at this place.",
)
UNKNOWN_SLICE = _declare(
    "KC202",
    "unknown slice",
    "The slice is not declared in the section `slices`.",
)
UNKNOWN_METRIC = _declare(
    "KC203",
    "unknown metric",
    "The metric is not registered. The registry is listed in the language reference.",
)
BLOCK_NAME = _declare(
    "KC204",
    "unknown block",
    "Blocks are named attn_0, mlp_0, norm_0, layer_0 and so on, head, or model.",
)
UNKNOWN_FUNCTION = _declare(
    "KC205",
    "unknown function",
    "No function of the language has this name.",
)
WRONG_ARGUMENTS = _declare(
    "KC206",
    "wrong arguments",
    "A function is called with too few, too many or unsuitable arguments.",
)
WRONG_SORT = _declare(
    "KC207",
    "wrong sort",
    """An expression of one sort stands where another is needed, such as a number where a statement
    is needed.""",
)
DOUBTFUL_NAME = _declare(
    "KC208",
    "doubtful name",
    "A free name (a trace field) is so close to a well-known one that it is probably misspelt.",
)
UNKNOWN_ACTION = _declare(
    "KC209",
    "unknown action",
    "The action is not one that the escalation policy knows, so nothing would be done.",
)
UNKNOWN_ADAPTER = _declare(
    "KC210",
    "unknown kernel adapter",
    "The field `run` names the program that runs the kernel; this name is not a known adapter.",
)
SHADOWED_NAME = _declare(
    "KC211",
    "shadowed name",
    "A quantifier binds a name that already means something else.",
)
UNUSED_VARIABLE = _declare(
    "KC212",
    "unused variable",
    "A quantified variable does not occur in the statement, so the quantifier says nothing.",
)
AGAINST_DIRECTION = _declare(
    "KC213",
    "comparison against the metric's direction",
    """The metric is better when lower (or higher), and the comparison bounds it from the harmless
    side, so that a bad kernel passes. Turn the comparison round, or state `override: direction`
    in the clause if it is really meant.""",
)
WRONG_FAMILY = _declare(
    "KC214",
    "wrong family",
    """The clause is declared in a family to which its metric does not belong, or its parts belong
    to different families and it declares none.""",
)
WEAKENED_ESCALATION = _declare(
    "KC215",
    "weakened escalation",
    """A row of the escalation policy replaces a more severe default action of a family, or a
    higher level has a milder action than a lower one.""",
)

NOT_IN_LIBRARY = _declare(
    "KC230",
    "not in the library",
    "An import names something that the library does not declare.",
)
UNKNOWN_TABLE = _declare(
    "KC231",
    "unknown table",
    "The table is not declared in the section `tables`, nor imported.",
)
UNUSED_TABLE = _declare(
    "KC232",
    "unused table",
    "No clause speaks of the table, so its thresholds apply to nothing.",
)
MILD_ACTION = _declare(
    "KC233",
    "action milder than the policy",
    """A clause replaces the action of the escalation policy for its family and level by one of a
    milder kind, such as a log entry where the policy falls back to a safe kernel.""",
)
MIXED_DIRECTION = _declare(
    "KC216",
    "direction that cannot be judged",
    """A comparison of measured quantities with each other that a worse value of one of them makes
    easier to satisfy, or of which that cannot be shown. It bounds no drift by itself. Bound that
    quantity by a number in another clause, and state `override: direction` in this one.""",
)
FIELD_OF_TWO_SORTS = _declare(
    "KC217",
    "field of two sorts",
    """The same field of the same data is compared with a text here and with a number or a truth
    value there, so at least one of the two selects nothing, or stops the evaluation.""",
)
METRIC_DECLARATION = _declare(
    "KC218",
    "unusable metric declaration",
    """A declaration `@metric(...)` in a Python file cannot be read: contracts are compiled without
    running any Python, so every argument is a literal, and it must be one that has a meaning.""",
)
METRIC_NAME_TAKEN = _declare(
    "KC219",
    "name of a metric taken",
    """Two metrics have the same name, or a metric has a name that already means something in the
    language. Contracts could not say which one they mean.""",
)
METRIC_MODULE = _declare(
    "KC220",
    "metric module not found",
    """A module that the configuration or an installed package names for its metrics cannot be found
    as a Python source file.""",
)

# --- KC3 shapes, formats, units ------------------------------------------------------------------
DIMENSION = _declare(
    "KC301",
    "dimensions differ",
    """The two sides have different dimensions, such as a time and a number of bytes. Bare numbers
    may stand for nats, ratios and plain numbers, but never for times, sizes or rates.""",
)
UNKNOWN_UNIT = _declare(
    "KC302",
    "unknown unit",
    """The unit is not defined. Units: ns us ms s min h, B KB MB GB TB KiB MiB GiB TiB, tok,
    tok/s, nats, %, ratio.""",
)
OUT_OF_RANGE = _declare(
    "KC303",
    "out of range",
    """A number lies outside the range that makes sense at its place, such as a quantile above 1 or
    a negative radius.""",
)
DIVISION_BY_ZERO = _declare(
    "KC304",
    "division by zero",
    "A constant is divided by zero.",
)

# --- KC4 fragments, routing, vacuity, model and kernel support -----------------------------------
OUTSIDE_FRAGMENTS = _declare(
    "KC401",
    "outside every fragment",
    """The requirement belongs to no fragment that a backend decides; the marked sub-expression is
    the reason. Split or reformulate the clause.""",
)
NO_BACKEND = _declare(
    "KC402",
    "no backend",
    "The fragment of a clause is known, but no installed backend decides it.",
)
EVIDENCE_OUT_OF_REACH = _declare(
    "KC403",
    "evidence out of reach",
    "The clause demands a kind of evidence that no backend produces for its fragment.",
)
VACUOUS = _declare(
    "KC404",
    "vacuous requirement",
    "The requirement holds, or fails, whatever the kernels do, so it says nothing.",
)
TABLE_GAP = _declare(
    "KC405",
    "table without a value for some request",
    """The rows of a table leave some requests out and there is no `otherwise`, so a clause with the
    table would say nothing about them.""",
)
UNREACHABLE_ROW = _declare(
    "KC406",
    "row that no request reaches",
    """The rows above take every request that a row could have, or no request can satisfy it. Its
    bucket would be empty, and nothing can be shown on an empty bucket.""",
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
    "redundant clause",
    """The requirement follows from the ranges of its metrics alone, so no kernel can violate
    it.""",
)
SOLVER_UNDECIDED = _declare(
    "KC414",
    "not decided by the solver",
    """The solver gave no answer in the time allowed. The clauses named were not shown to be
    consistent; nor were they shown to contradict each other.""",
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
UNKNOWN_CLAUSE = _declare("KC471", "unknown clause", "The contract has no clause of this name.")
NO_DEVICE = _declare("KC472", "device missing", "The device asked for is not available.")
REGION_OF_TOKENS = _declare(
    "KC473",
    "region of tokens",
    """Token ids have no neighbourhood: the block `model` can be verified at points only. Blocks on
    hidden states take balls and hulls.""",
)

# --- KC5 statistics ------------------------------------------------------------------------------
PERCENTILE_WITH_BUDGET = _declare(
    "KC501",
    "percentile with a sample budget",
    """A percentile already allows a share of samples to exceed the threshold; a budget of requests
    on top allows a share a second time. Drop one of them, or count the budget in windows.""",
)
BUDGET_UNIT = _declare(
    "KC502",
    "budget without a unit",
    "A budget must say what it counts: `of requests` or `of windows`.",
)
NO_SLICE = _declare(
    "KC503",
    "no slice",
    """The clause names no slice and the contract declares no slice `all`, or a quantified clause,
    whose quantifier names the slice, lists slices again.""",
)
BUDGET_ON_PROOF = _declare(
    "KC504",
    "budget on a universal clause",
    "A clause that speaks of every input, or of every trace record, allows no exceedance.",
)
STATISTIC_NOT_ALLOWED = _declare(
    "KC505",
    "statistic does not fit the metric",
    """Pointwise metrics need a statistic (mean, p99, max ...); aggregate metrics are a single
    number per window and take only those that the registry lists.""",
)
SIGNED_METRIC = _declare(
    "KC506",
    "signed metric without a magnitude",
    """The metric takes both signs, so large deviations cancel or pass below the bound. Bound its
    magnitude with abs(...).""",
)
WRONG_TAIL = _declare(
    "KC507",
    "statistic of the harmless tail",
    """For a metric that is better when higher, a high percentile looks at the best requests; for
    one that is better when lower, a low percentile does. Use the percentile of the bad tail.""",
)

# --- KC6 evidence, files, certificates -----------------------------------------------------------
FILE_MISSING = _declare(
    "KC601",
    "file missing",
    "A file that the command needs does not exist or cannot be read.",
)
INPUT_OUTPUT = _declare(
    "KC602",
    "input or output error",
    "The operating system refused to read or write a file.",
)
NO_CONTRACT = _declare(
    "KC603",
    "no contract found",
    """No contract was given and none was found: [tool.kcdsl] contract in the nearest
    pyproject.toml or kcdsl.toml, else the only contract.yaml or *.kc.yaml in the folder.""",
)
SEVERAL_CONTRACTS = _declare(
    "KC604",
    "several contracts",
    "The folder holds several contracts; name the one that is meant.",
)
BAD_CONFIGURATION = _declare(
    "KC605",
    "unusable configuration",
    "A configuration file is not valid TOML, or its kcdsl section is not usable.",
)
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
METRIC_FUNCTION = _declare(
    "KC626",
    "metric function not usable",
    """A metric of the user is not declared any more as it was when the contract was compiled, or the
    module that holds its function cannot be imported. Its values would be about something else.""",
)
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
DATA_ABSENT = _declare(
    "KC606",
    "file not here yet",
    """The contract names a file that does not exist at present, or a slice without data.
    Compiling does not need it; verifying and evaluating do.""",
)

# --- KC7 style -----------------------------------------------------------------------------------
FORMAT_REFUSED = _declare(
    "KC701",
    "layout not changed",
    """The formatter reads again what it wrote, and found that the layout could not be changed
    without changing what the document says. Nothing was written. This is a defect of kcdsl.""",
)

# --- KC9 the tool --------------------------------------------------------------------------------
USAGE = _declare("KC901", "usage", "The command line is not usable as given.")
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
INTERNAL = _declare(
    "KC999",
    "internal error",
    "A defect of kcdsl itself; please report it with the text shown.",
)
