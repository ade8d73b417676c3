"""Random spellings of one contract: block and flow, every scalar style, comments anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

EXPRESSIONS = (
    "p99(kl) <= 0.02",
    "mean( abs( log_ratio ) )<=1e-3 nats",
    "quantile(0.999,kl) <= .1",
    "p95(latency) <= 250 ms and max(tv) <= 5 %",
    "mean(top1_overlap) >= 99.5%",
    "throughput >= 4000 tok/s",
    "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 0.05",
    "forall x in points(all):no_flip(model,x,5)",
    "has(trace, [rng_seed, build_fingerprint])",
    "not (p99(kl) > 0.02) or mean(kl) <= 1 - 0.5*(2)",
    "(p99(kl) <= 0.02 and mean(kl) <= 0.01) or (p99(tv) <= 0.5 and mean(tv) <= 0.25) or "
    "( max(kl)<=1 and max(tv)<=0.75 )",
)
PREDICATES = (
    "length>128",
    'category == "safety"',
    "language in ['de', \"fr\"] and not flagged == true",
)
NOTES = ("# why", "#no space", "# a: b, {c} [d]", '# "quoted', "# été 🚀", "#")


class Writer:
    """Writes one contract at random; `notes` lists the comments it wrote."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.notes: list[str] = []
        self.lines: list[str] = []

    def text(self) -> str:
        """Return the document."""
        self.above(0)
        for line in ("kcdsl: 1", "contract:   styles", "version: 1.0.0"):
            self.put(line)
        self.mapping("model", [("checkpoint", "m.safetensors"), ("architecture", "llama")], 0)
        self.put("kernels:")
        step = self.random.choice([1, 2, 3, 4])
        self.mapping("train", [("run", "torch.eager")], step)
        self.mapping("infer", [("run", "torch.sdpa")], step)
        self.put("data: d.jsonl")
        self.slices()
        self.clauses()
        if self.random.random() < 0.5:
            self.mapping("escalation", [("L1", "log"), ("L3", "fallback")], 0)
        self.above(0)
        newline = self.random.choice(["\n", "\n", "\r\n"])
        return newline.join(self.lines) + self.random.choice(["", newline, newline * 3])

    def note(self) -> str:
        """Return a comment, and record it in `notes`."""
        note = f"{self.random.choice(NOTES)} {len(self.notes)}"
        self.notes.append(note)
        return note

    def above(self, indent: int) -> None:
        """Write empty lines and comment lines, now and then."""
        for _ in range(self.random.choice([0, 0, 0, 1, 2])):
            if self.random.random() < 0.4:
                self.lines.append(" " * self.random.choice([0, 0, 3]))
            else:
                self.lines.append(" " * indent + self.note())

    def put(self, line: str) -> None:
        """Write a line, with a comment behind it now and then."""
        if self.random.random() < 0.15:
            line += " " * self.random.randint(1, 4) + self.note()
        elif self.random.random() < 0.1:
            line += "   "
        self.lines.append(line)

    def flow(self, fields: Sequence[tuple[str, str]]) -> str:
        """Return a flow mapping on one line."""
        comma, pad = self.random.choice([", ", ",  "]), self.random.choice(["", " "])
        return "{" + pad + comma.join(f"{k}: {v}" for k, v in fields) + pad + "}"

    def mapping(self, key: str, fields: Sequence[tuple[str, str]], indent: int) -> None:
        """Write a mapping under a key in one of its forms."""
        lead = " " * indent
        self.above(indent)
        form = self.random.choice(["block", "flow", "flow lines"])
        if form == "flow":
            self.put(f"{lead}{key}: {self.flow(fields)}")
        elif form == "flow lines":
            self.put(f"{lead}{key}: {{")
            for name, value in fields:
                self.put(f"{lead}    {name}: {value},")
            self.put(f"{lead}  }}")
        else:
            self.put(f"{lead}{key}:")
            step = self.random.choice([1, 2, 4])
            for name, value in fields:
                self.above(indent + step)
                self.broken(f"{lead}{' ' * step}{name}: ", value)

    def broken(self, lead: str, value: str) -> None:
        """Write a value; break an expression at some of its spaces, now and then."""
        if " " not in value or value.startswith("[") or self.random.random() < 0.7:
            self.put(lead + value)
            return
        first, *rest = value.split(" ")
        deeper = " " * (len(lead) - len(lead.lstrip()) + self.random.choice([1, 2, 5]))
        line = lead + first
        for word in rest:
            if self.random.random() < 0.3:
                self.lines.append(line + self.random.choice(["", "  "]))
                self.lines += [""] * self.random.choice([0, 0, 0, 1])
                line = deeper + word
            else:
                line += f" {word}"
        self.put(line)

    def quoted(self, text: str, flow: bool) -> str:
        """Return an expression in a style that any YAML reader accepts for it."""
        plain = not any(sign in text for sign in (": ", ":n", "[", '"', "'"))
        styles = ["'", '"'] + (["plain"] * 2 if plain and not (flow and "," in text) else [])
        match self.random.choice(styles):
            case "plain":
                return text
            case "'":
                return "'" + text.replace("'", "''") + "'"
            case _:
                return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def slices(self) -> None:
        """Write the slices."""
        self.put("slices:")
        step = self.random.choice([1, 2, 4])
        self.put(f"{' ' * step}all: {{}}")
        for number, predicate in enumerate(PREDICATES):
            self.mapping(f"s{number}", [("where", self.quoted(predicate, flow=True))], step)

    def clauses(self) -> None:
        """Write the clauses, as a mapping or as a list of records."""
        self.put("clauses:")
        if self.random.random() < 0.2:
            self.records()
            return
        step = self.random.choice([1, 2, 3])
        for number, expression in enumerate(EXPRESSIONS):
            family = [] if " ms and " not in expression else [("family", "runtime")]
            rest = [("level", self.random.choice(["L1", "L2"])), *family]
            if self.random.random() < 0.3:
                self.block_scalar(f"C-{number}", expression, rest, step)
                continue
            fields = [("require", self.quoted(expression, flow=True)), *rest]
            self.random.shuffle(fields)
            self.mapping(f"C-{number}", fields, step)

    def records(self) -> None:
        """Write clauses in the record form."""
        step = self.random.choice([0, 2])
        for number in range(3):
            fields = [("id", f"R-{number}"), ("metric", "p99_kl"), ("threshold", "0.020")]
            fields += [("slices", "[all,  s0]"), ("level", "L1")]
            lead = " " * step + "- "
            if self.random.random() < 0.5:
                self.put(lead + self.flow(fields))
                continue
            for name, value in fields:
                self.put(f"{lead}{name}: {value}")
                lead = " " * (step + 2)

    def block_scalar(
        self, key: str, expression: str, rest: Sequence[tuple[str, str]], indent: int
    ) -> None:
        """Write a clause whose requirement is a block scalar, broken at spaces."""
        lead, inner = " " * indent, " " * (indent + 2)
        self.put(f"{lead}{key}:")
        header = self.random.choice(["|", ">", "|-", ">-", "|+", ">+"])
        comment = f"  {self.note()}" if self.random.random() < 0.3 else ""
        self.lines.append(f"{inner}require: {header}{comment}")
        words = expression.split(" ")
        at = self.random.randint(0, len(words))
        body = " " * (indent + 2 + self.random.choice([1, 2, 4]))
        for part in (words[:at], words[at:]):
            if part:
                self.lines.append(body + " ".join(part))
        for name, value in rest:
            self.put(f"{inner}{name}: {value}")
