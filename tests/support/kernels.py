"""Simulate block graphs as kernels run them, with every rounding that a numerics record admits.

A run draws its roundings from a random generator: real float32 or format arithmetic, free relative
errors of ±u, or errors that all have one sign. Written against the numerics record and the graph
record alone; the only import is the rule by which the kernel stores parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf
from typing import Any

import ml_dtypes
import numpy as np

Floats = np.ndarray
ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "tfloat32": 2.0**-11, "float16": 2.0**-11,
    "bfloat16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3,
}  # fmt: skip
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
_LARGEST |= {"fp8_e4m3fnuz": 240.0, "fp8_e5m2fnuz": 57344.0}
_DIVISOR = {"int8_full": 127.5, "fp8_e4m3fnuz": 224.0}
_CACHE_TYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
_MX = {"fp8_e4m3": 8, "fp8_e5m2": 15}
_GROUPS = {"mx": 32, "group_128": 128}


def cast(v: Floats, form: str) -> Floats:
    """Return the nearest numbers of a format, by way of float32."""
    if form == "float64":
        return v
    if form == "tfloat32":  # float32 with 11 significant bits, ties to even
        single = v.astype(np.float32)
        bits = single.view(np.uint32).astype(np.uint64)
        bits = (bits + np.uint64(0xFFF) + ((bits >> np.uint64(13)) & np.uint64(1))) >> np.uint64(13)
        return (bits << np.uint64(13)).astype(np.uint32).view(np.float32).astype(np.float64)
    return v.astype(np.float32).astype(DTYPES[form]).astype(np.float64)


def overriding(patterns: Any, name: str) -> list[str]:
    """Return the override patterns that match the name of a linear, the exact name first."""
    words = {"*": ".*", "?": "."}
    fitting = [
        pattern
        for pattern in patterns
        if re.fullmatch("".join(words.get(c, re.escape(c)) for c in pattern), name, re.DOTALL)
    ]
    return [pattern for pattern in fitting if pattern == name] or fitting


def _limit(record: Mapping[str, Any], name: str, default: float = 0.0) -> np.float32:
    return np.float32(float.fromhex(record[name]) if name in record else default)


def cut(v: Floats, form: str) -> Floats:
    """Return the neighbours of v in a format toward zero.

    This is the nearest number, less one step where that is greater in magnitude.
    """
    if form == "float64":
        return v
    if form == "tfloat32":
        single = _next_inward(v.astype(np.float32), v).astype(np.float32)
        bits = single.view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)
    return _next_inward(v.astype(DTYPES[form]), v)


def _next_inward(rounded: Any, v: Floats) -> Floats:
    kind = np.dtype(f"u{rounded.dtype.itemsize}")
    beyond = np.abs(rounded.astype(np.float64)) > np.abs(v)
    return (rounded.view(kind) - beyond.astype(kind)).view(rounded.dtype).astype(np.float64)


@dataclass
class Run:
    """One run of one kernel. `mode` is "random", "signs", "up" or "down"."""

    numerics: Mapping[str, Any]
    rng: np.random.Generator
    mode: str

    @property
    def inner(self) -> str:
        return "float64" if self.numerics["compute"] == "float64" else "float32"

    @property
    def coarse(self) -> bool:
        return ROUNDOFF[self.numerics["compute"]] > 2.0**-24

    def lean(self, shape: tuple[int, ...]) -> Floats:
        """Return numbers in [-1, 1]."""
        match self.mode:
            case "random":
                return self.rng.uniform(-1, 1, shape)
            case "signs":
                return self.rng.choice([-1.0, 1.0], shape)
            case "up":
                return np.ones(shape)
        return -np.ones(shape)

    def wobble(self, v: Floats | float, form: str, times: float = 1.0) -> Floats:
        """Return v with a relative error of at most `times` roundoffs of a format."""
        v = np.asarray(v)
        return v * (1 + times * ROUNDOFF[form] * (1 - 2.0**-20) * self.lean(v.shape))

    def step(self, v: Floats | float) -> Floats:
        """Return v after one operation of the inner format."""
        if self.mode == "random" and self.inner == "float32":
            return np.asarray(v).astype(np.float32).astype(np.float64)
        return self.wobble(v, self.inner)

    def store(self, v: Floats, form: str, inner: str = "float32") -> Floats:
        """Return v as stored; arithmetic in a format as coarse as float32 has rounded already."""
        match self.numerics["casts"]:
            case "any":
                return self.wobble(v, form)
            case "any_direction":
                return self.wobble(v, form, 2.0)
            case "any_toward_zero":
                share = 1 + (1 - 2.0**-20) * self.lean(v.shape)
                return np.asarray(v * (1 - ROUNDOFF[form] * share))
        if ROUNDOFF[form] <= min(ROUNDOFF["float32"], ROUNDOFF[inner]):
            return v
        return cut(v, form) if self.numerics["casts"] == "toward_zero" else cast(v, form)

    def dot(self, a: Floats, b: Floats) -> Floats:
        """Return a @ b, accumulated in some order with a rounding at every step.

        Truncation in a tensor core and saturation of pairs of bytes are not simulated; such runs
        have smaller errors.
        """
        if "tensor_core" in self.numerics:
            return np.asarray(a @ b)
        if self.numerics.get("products") == "tfloat32":
            shorten = cast if self.rng.random() < 0.5 else cut
            a, b = shorten(a, "tfloat32"), shorten(b, "tfloat32")
        n, form = a.shape[-1], self.numerics["accumulate"]
        order = self.rng.permutation(n)
        total = np.zeros(
            (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        )
        real = self.mode == "random" and form == "float32"
        for k in order:
            term = a[..., :, k, None] * b[..., None, k, :]
            if real:
                total = (total.astype(np.float32) + term.astype(np.float32)).astype(np.float64)
            else:
                term = self.wobble(term, form)
                total = term if k == order[0] else self.wobble(total + term, form)
        return total

    # --- operations ---

    def linear(self, x: Floats, weight: Floats, bias: Floats | None, key: str = "") -> Floats:
        served = self.serving(key)
        if served is not self:
            return served.linear(x, weight, bias, key)
        read = self.quantised(x, key)
        if (count := self.numerics.get("shards", 1)) > 1:
            return self.sharded(read, weight, bias, count)
        y = self.dot(read, weight.T)
        if bias is not None:
            if self.coarse and self.numerics["casts"].startswith("any") and self.rng.random() < 0.5:
                y = self.store(y, self.numerics["compute"])
            y = self.wobble(y + bias, self.numerics["accumulate"])
        return y

    def serving(self, key: str) -> Run:
        """Return the run with the numerics overrides of a linear, if it has any."""
        name = key.removesuffix(".weight")
        for pattern in overriding(self.numerics.get("overrides", {}), name):
            section = self.numerics["overrides"][pattern]
            rest = {k: v for k, v in self.numerics.items() if k != "overrides"}
            return Run({**rest, **section}, self.rng, self.mode)
        return self

    def sharded(self, x: Floats, weight: Floats, bias: Floats | None, count: int) -> Floats:
        """Return a linear whose inputs are sharded: partial results are stored and then added."""
        form = self.numerics["compute"]
        parts = np.array_split(self.rng.permutation(x.shape[-1]), count)
        terms = [self.store(self.dot(x[:, p], weight[:, p].T), form) for p in parts if p.size]
        if bias is not None:
            terms.append(np.broadcast_to(bias, terms[0].shape))
        total = terms[0]
        for term in terms[1:]:
            total = self.store(total + term, form)
        return total

    def static(self, x: Floats, key: str) -> Floats:
        """Return the values of codes with static scales, divided or multiplied at random."""
        record, name = self.numerics["activations"], key.removesuffix(".weight")
        kind, scales = record["format"], record["input_scale"]
        given = scales.get(name, scales.get("*"))
        s = np.array([float.fromhex(value) for value in given], dtype=np.float32)
        v = x.astype(np.float32)
        ratio = v / s if self.rng.random() < 0.5 else v * (np.float32(1) / s)
        if kind in DTYPES:
            top = np.float32(_LARGEST[kind])
            code = np.clip(ratio, -top, top).astype(DTYPES[kind]).astype(np.float32)
        else:
            zeros = record.get("input_zero_point", {})
            zero = zeros.get(name, zeros.get("*", 0))
            ends = {"int8": (-127, 127), "int8_full": (-128, 127), "uint8": (-zero, 255 - zero)}
            code = np.clip(np.rint(ratio), *ends[kind]).astype(np.float32)
        return (code * s).astype(np.float64)

    def quantised(self, x: Floats, key: str = "") -> Floats:
        """Return the quantised input of a linear, in float32 arithmetic."""
        record = self.numerics["activations"]
        kind, scale = record["format"], record["scale"]
        if kind == "none":
            return x
        if scale == "static":
            return self.static(x, key)
        v = x.astype(np.float32)
        blocks = v.reshape(1, -1) if scale in ("per_tensor", "per_batch") else v
        if scale in _GROUPS:
            # the last block may be short: padding with zeros changes no maximum
            pad = -v.shape[-1] % _GROUPS[scale]
            blocks = np.pad(v, [(0, 0), (0, pad)]).reshape(-1, _GROUPS[scale])
        size = np.abs(blocks).max(axis=-1, keepdims=True)
        if scale == "per_batch":  # the maximum of other sequences, up to the admitted limit
            size = size + np.float32(self.rng.random()) * (_limit(record, "batch_amax") - size)
        size = np.minimum(size, _limit(record, "amax_limit", np.inf))
        least = _limit(record, "least_scale")
        size = np.where(size == 0, np.float32(0 if least else 1), size)
        if scale == "none":
            s = np.ones_like(size)
        elif scale == "mx":
            exponent = np.floor(np.log2(size.astype(np.float64)))
            s = np.exp2(exponent - _MX[kind]).astype(np.float32)
        elif kind == "uint8":
            low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
            high = np.maximum(blocks.max(axis=-1, keepdims=True), 0)
            s = ((high - low) / np.float32(255)).astype(np.float32)
            s = np.where(s == 0, np.float32(1), s)
            zero = np.rint(-low / s)
            code = np.clip(np.rint(blocks / s) + zero, 0, 255) - zero
            return self._back(code.astype(np.float32) * s, x, scale)
        elif kind == "int8_full":
            s = np.maximum(size / np.float32(127.5), max(least, np.float32(2.0**-23)))
            code = np.clip(np.rint(blocks * (np.float32(1) / s)), -128, 127).astype(np.float32)
            return self._back(code * s, x, scale)
        else:
            s = np.maximum(size / np.float32(_LARGEST[kind]), least)
        ratio = np.clip(blocks / s, -np.float32(_LARGEST[kind]), np.float32(_LARGEST[kind]))
        code = np.rint(ratio) if kind == "int8" else ratio.astype(DTYPES[kind]).astype(np.float32)
        return self._back(code * s, x, scale)

    def requantised(self, x: Floats, scale: str, zero: int) -> Floats:
        """Return a tensor after quantisation to codes 0 to 255 and back, in float32 arithmetic."""
        s, v = np.float32(float.fromhex(scale)), x.astype(np.float32)
        ratio = v * (np.float32(1) / s) if self.rng.random() < 0.5 else v / s
        code = np.clip(np.rint(ratio) + np.float32(zero), 0, 255)
        return ((code - np.float32(zero)) * s).astype(np.float32).astype(np.float64)

    def cached(self, x: Floats, part: str, source: str) -> Floats:
        """Return keys [.., d, T] or values [.., T, d] as a cache returns them, in float32.

        Where casts are free, a code may be off by one step where a ratio is near its edge.
        """
        record = self.numerics["kv_cache"]
        kind, scale = record["format"], record["scale"]
        v = (np.swapaxes(x, -1, -2) if part == "keys" else x).astype(np.float32)
        heads = v.reshape(-1, *v.shape[-2:])
        if scale == "static":
            given = record["key_scale" if part == "keys" else "value_scale"]
            own = given.get(source.removesuffix(".weight"), given.get("*"))
            s = np.array([float.fromhex(value) for value in own], np.float32).reshape(-1, 1, 1)
        else:
            axes = {"per_tensor": (0, 1, 2), "per_head": (1, 2), "per_token_head": (2,)}
            divisor = np.float32(_DIVISOR.get(kind, _LARGEST.get(kind)))
            size = np.abs(heads).max(axis=axes.get(scale, ()), keepdims=True)
            s = np.maximum(size / divisor, _limit(record, "least_scale"))
            s = np.maximum(s, np.float32(2.0**-23 if kind == "int8_full" else 0))
            s = np.where(s == 0, np.float32(1), s) if scale != "none" else np.ones_like(size[:1])
        times = kind == "int8_full" if scale != "static" else self.rng.random() < 0.5
        ratio = heads * (np.float32(1) / s) if times else heads / s
        if kind in _CACHE_TYPES:
            top = np.float32(_LARGEST[kind])
            code = np.clip(ratio, -top, top).astype(_CACHE_TYPES[kind]).astype(np.float32)
        else:
            code = np.clip(np.rint(ratio), -128 if kind == "int8_full" else -127, 127)
        value = (code.astype(np.float32) * s).reshape(v.shape).astype(np.float64)
        value = np.swapaxes(value, -1, -2) if part == "keys" else value
        return self.store(value, self.numerics["compute"])

    def _back(self, found: Floats, x: Floats, scale: str) -> Floats:
        if scale in _GROUPS:
            found = found.reshape(x.shape[0], -1)[:, : x.shape[-1]]
        return found.reshape(x.shape).astype(np.float64)

    def rope(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        h = x.shape[-1] // 2
        turned = np.concatenate([-x[..., h:], x[..., :h]], axis=-1)
        one, two = self.step(x * cos), self.step(turned * sin)
        if self.coarse and self.rng.random() < 0.7:
            form = self.numerics["compute"]
            one, two = self.store(one, form), self.store(two, form)
        return self.step(one + two)

    def norm(self, x: Floats, eps: float, weight: Floats, bias: Floats, centred: bool) -> Floats:
        n = x.shape[-1]
        c = x
        if centred:
            mean = self.step(self.sum(x) / n)
            c = self.step(x - mean)
        if centred and self.rng.random() < 0.3:  # E[x²] - mean², in one pass
            squares = self.step(self.sum(self.step(x * x)) / n)
            v = np.maximum(self.step(squares - self.step(mean * mean)), 0.0)
        else:
            v = self.step(self.sum(self.step(c * c)) / n)
        v = self.step(v + self.wobble(np.float64(eps), self.inner))
        r = self.step(1 / self.step(np.sqrt(v)))
        y = self.step(c * r)
        if self.coarse and self.rng.random() < 0.7:
            y = self.store(y, self.numerics["compute"])
        return self.step(self.step(y * weight) + bias)

    def relu(self, x: Floats) -> Floats:
        return np.maximum(x, 0.0)

    def function(self, op: str, x: Floats) -> Floats:
        """Return an activation function with the admitted error."""
        match op:
            case "gelu":
                y = x * 0.5 * (1 + np.frompyfunc(erf, 1, 1)(x / np.sqrt(2)).astype(float))
            case "gelu by tanh":
                y = x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            case "silu":
                y = x / (1 + np.exp(-x))
            case _:
                y = np.tanh(x)
        return self.wobble(y, self.inner, 8)

    def sum(self, x: Floats) -> Floats:
        total = np.zeros((*x.shape[:-1], 1))
        for k in self.rng.permutation(x.shape[-1]):
            total = self.step(total + x[..., k, None])
        return total

    def exp(self, x: Floats) -> Floats:
        # one ulp is at most 2u of the value
        ulps = self.numerics["attention"]["exp_ulps"]
        return self.wobble(np.exp(self.step(x)), self.inner, 2 * ulps)

    def softmax(self, scores: Floats, mask: Floats, form: str) -> Floats:
        s = np.where(mask, scores, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        e = np.where(mask, self.exp(np.where(mask, s - top, 0.0)), 0.0)
        p = self.step(e / self.sum(e))
        return self.store(p, form)

    def online(self, scores: Floats, mask: Floats, v: Floats) -> Floats:
        """Return the context of a fused kernel: online softmax over tiles of keys."""
        attention = self.numerics["attention"]
        form, tile, acc_form = (
            attention["probabilities"],
            attention["tile"],
            self.numerics["accumulate"],
        )
        rounded_sums = self.rng.random() < 0.5
        top = np.full((*scores.shape[:-1], 1), -np.inf)
        total = np.zeros(top.shape)
        out = np.zeros((*scores.shape[:-1], v.shape[-1]))
        for start in range(0, scores.shape[-1], tile):
            part = np.where(
                mask[..., start : start + tile], scores[..., start : start + tile], -np.inf
            )
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            some = np.isfinite(new)
            base = np.where(some, new, 0.0)
            seen = np.isfinite(top)
            factor = np.where(seen, self.exp(np.where(seen, top - base, 0.0)), 0.0)
            held = np.isfinite(part)
            p = np.where(held, self.exp(np.where(held, part - base, 0.0)), 0.0)
            q = self.store(p, form)
            total = self.step(self.step(total * factor) + self.sum(q if rounded_sums else p))
            out = self.wobble(out * factor, acc_form)
            values = np.broadcast_to(v, (*scores.shape[:-2], *v.shape[-2:]))
            for k in range(part.shape[-1]):
                term = self.wobble(q[..., :, k, None] * values[..., None, start + k, :], acc_form)
                out = self.wobble(out + term, acc_form)
            top = new
        if self.rng.random() < 0.5:
            return self.wobble(out / total, acc_form)
        return self.wobble(out * self.wobble(1 / total, acc_form), acc_form)


def simulate(graph: Any, run: Run, x: Floats | None, plain: Any, linear: Any) -> dict[str, Floats]:
    """Return the value of every node of a run.

    `plain(key)` and `linear(key)` return the stored parameter.
    """
    values: dict[str, Floats] = {}
    scores_of: dict[str, tuple[Floats, Floats]] = {}
    keys: dict[str, str] = {}
    for node in graph.nodes:
        attrs: dict[str, Any] = {
            k: float.fromhex(v) if _hex(k) else v for k, v in node["attrs"].items()
        }
        args = [values[name] for name in node["inputs"]]
        compute = run.numerics["compute"]
        form = stored_format(run.numerics, node["op"], node["role"])
        settled = True
        op = node["op"]
        match op:
            case "input":
                assert x is not None
                y, settled = (run.store(x, form) if ROUNDOFF[form] > 2.0**-24 else x), False
            case "param":
                y, settled = plain(attrs["key"]), False
                keys[node["name"]] = attrs["key"]
                if weights_alone(graph, node["name"]):
                    y = linear(attrs["key"])
            case "constant":
                value = graph.constants[attrs["key"]]
                inward = run.numerics["weights"].get("rounding") == "toward_zero"
                held = cut if inward else cast
                y = value if value.dtype == bool else held(value.astype(np.float64), compute)
                settled = False
            case "embedding":
                y, settled = args[0][attrs["ids"]], False
            case "linear":
                key = keys[node["inputs"][1]]
                y = run.linear(args[0], linear(key), args[2] if len(args) > 2 else None, key)
            case "matmul" if node["role"] == "context" and node["inputs"][0] in scores_of:
                fused = run.numerics["attention"]["style"] == "fused"
                before = scores_of[node["inputs"][0]]
                y = run.online(*before, args[1]) if fused else run.dot(args[0], args[1])
            case "matmul":
                y = run.dot(args[0], args[1])
            case "add":
                y = run.step(args[0] + args[1])
            case "sub":
                y = run.step(args[0] - args[1])
            case "mul":
                y = run.step(args[0] * args[1])
            case "scale":
                y = run.step(args[0] * run.step(np.float64(attrs["factor"])))
            case "divide":
                y = run.step(args[0] / run.step(np.float64(attrs["divisor"])))
            case "shift":
                y = run.step(args[0] + run.step(np.float64(attrs["offset"])))
            case "neg":
                y, settled = -args[0], False
            case "relu":
                y, settled = run.relu(args[0]), False
            case "gelu" | "silu" | "tanh":
                y = run.function("gelu by tanh" if "approximate" in attrs else op, args[0])
            case "view":
                y, settled = view(args[0], attrs, node["shape"]), False
            case "cache":
                y, settled = args[0], False
                if "kv_cache" in run.numerics:
                    y = run.cached(args[0], attrs["part"], attrs["source"])
            case "quantise":
                y, settled = args[0], False
                by = run.numerics.get("quantisers", {}).get(attrs["tensor"])
                if by is not None:
                    y = run.requantised(args[0], by["scale"], by["zero_point"])
            case "concat":
                y, settled = np.concatenate(args, axis=attrs["dim"]), False
            case "softmax":
                mask = np.ones(args[0].shape, dtype=bool)
                if len(args) > 1:
                    mask = np.broadcast_to(args[1], args[0].shape)
                y, settled = run.softmax(args[0], mask, form), False
                if node["role"] == "probabilities":
                    scores_of[node["name"]] = args[0], mask
            case "rms_norm" | "layer_norm":
                gain = args[1] if len(args) > 1 else np.ones(())
                bias = args[2] if len(args) > 2 else np.zeros(())
                y = run.norm(args[0], attrs["eps"], gain, bias, op == "layer_norm")
            case "rope":
                y = run.rope(*args)
            case _:
                raise AssertionError(op)
        inner = run.numerics["accumulate"] if op in ("linear", "matmul") else run.inner
        values[node["name"]] = run.store(y, form, inner) if settled else y
    return values


def stored_format(record: Mapping[str, Any], op: str, role: str) -> str:
    """Return the format in which a numerics record stores the result of an operation."""
    if role in ("scores", "probabilities"):
        return str(record["attention"][role])
    named = record.get("results", {})
    return str(named.get(role) or named.get(op) or record["compute"])


def view(x: Floats, attrs: Mapping[str, Any], shape: Sequence[int]) -> Floats:
    """Return the elements that a view selects, by flat index."""
    split = attrs["split"]
    ranges = attrs.get("ranges", [[0, size, 1] for size in split])
    order = attrs.get("order", range(len(split)))
    taken = [range(*ranges[axis]) for axis in order]
    sizes = attrs.get("sizes", [len(each) for each in taken])
    places = np.zeros(sizes, dtype=np.int64)
    for at in np.ndindex(*sizes):
        for i, axis in enumerate(order):
            stride = int(np.prod(split[axis + 1 :]))
            places[at] += taken[i][at[i] if len(taken[i]) > 1 else 0] * stride
    return x.reshape(-1)[places].reshape(shape)


def weights_alone(graph: Any, name: str) -> bool:
    """Return whether a node is read only as the weight of linears."""
    reads = [
        node["op"] == "linear" and place == 1
        for node in graph.nodes
        for place, read in enumerate(node["inputs"])
        if read == name
    ]
    return bool(reads) and all(reads)


def _hex(name: str) -> bool:
    return name in ("eps", "factor", "divisor", "offset")
