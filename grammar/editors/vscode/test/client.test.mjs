// The bundled extension starts the language server it is told to, and says so when it cannot.
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import Module from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const require = createRequire(import.meta.url);
const shown = [];
const commands = new Map();
let setting;

/** As much of the editor as the client touches before a server answers. */
class Emitter {
  constructor() {
    this.event = () => ({ dispose() {} });
  }
  fire() {}
  dispose() {}
}
const anything = new Proxy(class {}, {
  get: (target, name) => (name === "prototype" ? target.prototype : anything),
  apply: () => anything,
});
const stub = (known) =>
  new Proxy(known, { get: (target, name) => (name in target ? target[name] : anything) });
const vscode = stub({
    EventEmitter: Emitter,
    commands: {
      registerCommand(name, action) {
        commands.set(name, action);
        return { dispose() {} };
      },
    },
    env: stub({ language: "en", appName: "test" }),
    version: "1.91.0",
    workspace: stub({
      getConfiguration: () => ({ get: (name) => (name === "command" ? setting : undefined) }),
      workspaceFolders: undefined,
      textDocuments: [],
    }),
    window: stub({
      showErrorMessage(text) {
        shown.push(text);
        return Promise.resolve(undefined);
      },
      visibleTextEditors: [],
      tabGroups: stub({ all: [] }),
    }),
});

const load = Module._load;
Module._load = function (name, ...rest) {
  return name === "vscode" ? vscode : load.call(this, name, ...rest);
};
const extension = require("../out/extension.js");

test("a setting that is no command is reported, and nothing is thrown", async () => {
  for (const wrong of ["kcdsl lsp", [], [1], [""]]) {
    setting = wrong;
    shown.length = 0;
    await extension.activate({ subscriptions: [] });
    assert.equal(shown.length, 1);
    assert.match(shown[0], /kcdsl\.command/);
  }
});

test("the restart command is there", () => {
  assert.ok(commands.has("kcdsl.restart"));
});

test("the server of the setting is started, greeted, restarted and stopped", async () => {
  const heard = join(mkdtempSync(join(tmpdir(), "kcdsl-")), "heard");
  setting = [process.execPath, fileURLToPath(new URL("fake-server.cjs", import.meta.url)), heard];
  shown.length = 0;
  await extension.activate({ subscriptions: [] });
  await commands.get("kcdsl.restart")();
  await extension.deactivate();
  assert.deepEqual(shown, []);
  const once = ["initialize", "initialized", "shutdown", "exit"];
  const methods = () =>
    readFileSync(heard, "utf8").trim().split("\n").filter((name) => once.includes(name));
  for (let i = 0; i < 100 && methods().length < 8; i += 1) {
    await new Promise((done) => setTimeout(done, 50));
  }
  assert.deepEqual(methods(), [...once, ...once]);
});
