"""How clauses are decided. Importing this package imports no backend."""

from kcdsl.route.catalogue import BackendSpec, Fragment

CATALOGUE: tuple[BackendSpec, ...] = (
    BackendSpec(
        name="smt",
        target="kcdsl_backends.smt:BACKEND",
        fragments=frozenset({Fragment.IMPLIED}),
        needs=("z3",),
        summary="z3: contract consistency, and clauses implied by a proved drift clause",
        rank=0,
    ),
    BackendSpec(
        name="interval",
        target="kcdsl_backends.certifier.backend:BACKEND",
        fragments=frozenset({Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP}),
        needs=("torch", "numpy"),
        summary="relational intervals with structural caps, sound in floating point",
        rank=10,
        around_weights=True,
        domains=("interval", "affine", "planes"),
    ),
    BackendSpec(
        name="empirical",
        target="kcdsl_backends.empirical.backend:BACKEND",
        fragments=frozenset({Fragment.STATISTICAL, Fragment.TRACE_FIELDS}),
        needs=("torch", "numpy", "scipy"),
        summary="runs both kernels on the slices and measures",
        rank=20,
        planner="kcdsl_backends.empirical.questions.plan:plan",
        planner_needs=("numpy", "scipy"),
        attributor="kcdsl_backends.empirical.attribution.backend:attribute",
    ),
    BackendSpec(
        name="lirpa",
        target="kcdsl_backends.lirpa.backend:BACKEND",
        fragments=frozenset({Fragment.UNIVERSAL_DRIFT}),
        needs=("torch", "numpy", "auto_LiRPA"),
        summary="auto_LiRPA on the drift network: a second opinion in real arithmetic",
        rank=80,
        real_arithmetic=True,
        domains=("ibp", "crown", "alpha-crown"),
    ),
    BackendSpec(
        name="z3",
        target="kcdsl_backends.smt.drift.backend:BACKEND",
        fragments=frozenset({Fragment.UNIVERSAL_DRIFT}),
        needs=("torch", "numpy", "z3"),
        summary="z3 on small blocks: case splits of ReLU, other functions enclosed",
        rank=90,
        real_arithmetic=True,
        sizer="kcdsl_backends.smt.drift.backend:sizes",
    ),
    BackendSpec(
        name="marabou",
        target="kcdsl_backends.smt.drift.marabou:BACKEND",
        fragments=frozenset({Fragment.UNIVERSAL_DRIFT}),
        needs=("torch", "numpy", "z3", "maraboupy"),
        summary="Marabou on the questions that z3 is asked, in float64",
        rank=85,
        real_arithmetic=True,
    ),
)
