// A language server that can do nothing: it answers each request and writes down what it heard.
const fs = require("node:fs");
const heard = process.argv[2];
let waiting = Buffer.alloc(0);

function answer(id, result) {
  const body = JSON.stringify({ jsonrpc: "2.0", id, result });
  process.stdout.write(`Content-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
}

process.stdin.on("data", (data) => {
  waiting = Buffer.concat([waiting, data]);
  for (;;) {
    const head = waiting.indexOf("\r\n\r\n");
    if (head < 0) return;
    const length = Number(/Content-Length: (\d+)/i.exec(waiting.subarray(0, head).toString())[1]);
    if (waiting.length < head + 4 + length) return;
    const message = JSON.parse(waiting.subarray(head + 4, head + 4 + length).toString());
    waiting = waiting.subarray(head + 4 + length);
    fs.appendFileSync(heard, `${message.method}\n`);
    if (message.id !== undefined) answer(message.id, { capabilities: {} });
    if (message.method === "exit") process.exit(0);
  }
});
