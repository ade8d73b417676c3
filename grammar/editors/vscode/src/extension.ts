import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";
import { serverCommand } from "./server";

let client: LanguageClient | undefined;

/** Start the language server for contracts. */
export async function activate(context: vscode.ExtensionContext): Promise<void> {
  context.subscriptions.push(vscode.commands.registerCommand("kcdsl.restart", restart));
  await start();
}

/** Stop the language server. */
export async function deactivate(): Promise<void> {
  const running = client;
  client = undefined;
  await running?.stop();
}

async function restart(): Promise<void> {
  await deactivate();
  await start();
}

async function start(): Promise<void> {
  try {
    const setting = vscode.workspace.getConfiguration("kcdsl").get("command");
    const { command, args } = serverCommand(setting);
    client = new LanguageClient(
      "kcdsl",
      "kcdsl",
      { command, args },
      {
        documentSelector: [
          { language: "kernel-contract" },
          { pattern: "**/*.kc.{yaml,yml}" },
          { pattern: "**/contract.yaml" },
        ],
      },
    );
    await client.start();
  } catch (error) {
    client = undefined;
    const reason = error instanceof Error ? error.message : String(error);
    void vscode.window.showErrorMessage(
      `The kcdsl language server did not start: ${reason}. Install it with pip install "kcdsl[lsp]", ` +
        "or name it in the setting kcdsl.command.",
    );
  }
}
