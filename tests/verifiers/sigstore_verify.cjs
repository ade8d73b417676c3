// Verifies Sigstore bundles by a public key with @sigstore/verify. Each line of the input is
// {"key": PEM, "bundle": text}; each line of the output {"accepted", "payload", "detail"}.
const crypto = require('node:crypto');
const readline = require('node:readline');
const { bundleFromJSON } = require('@sigstore/bundle');
const { Verifier, toSignedEntity } = require('@sigstore/verify');

function verify({ key, bundle }) {
  const publicKey = crypto.createPublicKey(key);
  const trusted = {
    certificateAuthorities: [],
    timestampAuthorities: [],
    tlogs: [],
    ctlogs: [],
    publicKey: () => ({ publicKey, validFor: () => true }),
  };
  const none = { ctlogThreshold: 0, tlogThreshold: 0, timestampThreshold: 0 };
  const parsed = bundleFromJSON(JSON.parse(bundle));
  new Verifier(trusted, none).verify(toSignedEntity(parsed));
  const envelope = parsed.content.dsseEnvelope;
  return { payload: envelope.payload.toString('base64'), type: envelope.payloadType };
}

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  let answer;
  try {
    answer = { accepted: true, ...verify(JSON.parse(line)), detail: '' };
  } catch (error) {
    answer = { accepted: false, detail: `${error.name}: ${error.message}`.slice(0, 200) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
});
