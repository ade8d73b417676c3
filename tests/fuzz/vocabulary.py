"""Words that have broken YAML readers, parsers and printers, and words of the language."""

from __future__ import annotations

YAML = (
    "", " ", "\n", "\t", "\r", "\r\n", "\n\n", ":", ": ", "- ", "? ", "-", "---\n", "...\n",
    "--- |\n", "{", "}", "[", "]", "{}", "[]", ",", ", ", "'", '"', "''", '""', "'\n", '"\n', "#",
    " #", " # note", "\n# note\n", "# kcdsl: ignore KC201", "  # kcdsl: ignore[KC201] because",
    "&a ", "*a", "!!str ", "!x ", "! ", "!!", "<<: ", "<<", "|", ">", "|-\n", ">+\n", "|2\n",
    "|9\n", "|0\n", "%YAML 1.1\n", "%", "@", "`", "~", "null", "true", "on", "No", "0o17", "0x1f",
    "1_000", "12:30:45", "2024-01-01", ".inf", ".nan", "=",
)  # fmt: skip
CHARACTERS = (
    "\0", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u200b", "\u2028", "\u2029", "\u202e",
    "\ufeff", "\ufffd", "\ufffe", "\ue000", "é", "e\u0301", "𝒳", "שלום", "\U0001f600",
    "\U0010ffff", "\\", "\\u0000", "\\x", "\\ud800", "\\U0011ffff", "\\n", "\\\n",
)  # fmt: skip
NUMBERS = (
    "0", "1", "-1", "00", "1e-3", "1e999999999", "1e-999999999", "1e308", "1e101", ".5", "5.",
    "0.1e", "1e", "99999999999999999999999999999999", "9" * 80, "0." + "3" * 80, "1/0", "- 1",
    "--1", "+1", "½", "१", "1.000000000000000000001", "100%", "-0", "0.0", "1_0",
)  # fmt: skip
EXPRESSIONS = (
    "(", ")", "[", "]", ",", ":", "and", "or", "not ", "implies", "in ", "of", "forall x in ",
    "exists y in points(all): ", "forall x in ball(all, 1e-3): ", "forall x in points(all): ",
    "ball(all, 0)", "points(all)", "norm_inf(drift(attn_0, x))", "norm_2(", "no_flip(model, x)",
    "no_flip(model, x, 0)", "drift(attn_0, x)", "measured_drift(attn_0, x)", "mean(", "p99(",
    "p99(kl)", "p0(kl)", "quantile(0.5, kl)", "quantile(2, kl)", "max(tv)", "min(", "abs(",
    "log_ratio", "kl", "throughput", "p95(latency)", "has(trace, [rng_seed])", "table(limits)",
    "<=", ">=", "==", "!=", "<", ">", "=", "=>", "&&", "||", "^", "**", "+", "-", "*", "/", "%",
    "ms", "250 ms", "80 GiB", "tok/s", "nats", "1% of requests", "5% of windows", "of tokens",
    "true", "false", "length", 'category == "safety"', "x", "all", "'a'", '"a', "\\'",
)  # fmt: skip
FIELDS = (
    "kcdsl", "contract", "library", "version", "model", "kernels", "data", "imports", "slices",
    "tables", "clauses", "escalation", "constants", "require", "budget", "metric", "threshold",
    "op", "delta", "over", "then", "remediation", "action", "family", "level", "evidence",
    "override", "holdout", "id", "where", "unit", "rows", "value", "otherwise", "file", "digest",
    "train", "infer", "run", "numerics", "preset", "compute", "weights", "checkpoint",
    "architecture", "module", "config", "tokenizer", "L1", "L2", "L3", "numerical", "runtime",
)  # fmt: skip
EVERYTHING = YAML + CHARACTERS + NUMBERS + EXPRESSIONS + FIELDS
