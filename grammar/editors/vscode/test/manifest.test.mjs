// What package.json names is there, and the words of the grammar are those of the language.
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { test } from "node:test";

const root = new URL("../", import.meta.url);
const read = (name) => readFileSync(new URL(name, root), "utf8");
const manifest = JSON.parse(read("package.json"));

test("every file that the manifest names exists", () => {
  const named = [
    manifest.main,
    ...manifest.contributes.languages.map((l) => l.configuration),
    ...manifest.contributes.grammars.map((g) => g.path),
  ];
  for (const name of named) assert.ok(existsSync(new URL(name, root)), name);
});

test("every keyword of the expression grammar is highlighted", () => {
  const lark = read("../../kcdsl_grammar/expression.lark");
  const words = [...lark.matchAll(/^[A-Z]+\.1: \/(\w+)\\b\/$/gm)].map((m) => m[1]);
  assert.ok(words.length >= 10);
  const grammar = JSON.parse(read("syntaxes/kcdsl-expression.tmLanguage.json"));
  const patterns = grammar.repository.keyword.patterns.map((p) => new RegExp(`^(?:${p.match})$`));
  for (const word of words) assert.ok(patterns.some((p) => p.test(word)), word);
});
