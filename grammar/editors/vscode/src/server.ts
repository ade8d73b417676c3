/** How the language server is started: a program and its arguments, from the user's settings. */
export interface ServerCommand {
  readonly command: string;
  readonly args: string[];
}

export const DEFAULT_COMMAND: readonly string[] = ["kcdsl", "lsp"];

/** Return the command of a setting; throws an Error that says what the setting should be. */
export function serverCommand(setting: unknown): ServerCommand {
  const words = setting ?? DEFAULT_COMMAND;
  if (!Array.isArray(words) || words.length === 0 || !words.every((w) => typeof w === "string")) {
    throw new Error('kcdsl.command is a list of words, such as ["kcdsl", "lsp"]');
  }
  const [command, ...args] = words as string[];
  if (command === undefined || command.trim() === "") {
    throw new Error("kcdsl.command names no program");
  }
  return { command, args };
}
