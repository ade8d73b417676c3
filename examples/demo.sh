#!/bin/sh
# Run the main road on one example folder and say what every command answered.
#   sh examples/demo.sh examples/tiny_lm
# Needs no terminal and no input. A command that could not run (exit code 2) or a refused
# certificate (4) ends the demo at once; violated (1) and inconclusive (3) clauses are reported, the
# demo goes on, and its own exit code is that of the most serious answer. Nothing is hidden.
set -u

if [ "$#" -ne 1 ] || [ ! -d "$1" ]; then
  echo "usage: sh examples/demo.sh FOLDER" >&2
  exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
PATH="$here/.venv/bin:$PATH"
KCDSL_VERIFY_CACHE=off
export PATH KCDSL_VERIFY_CACHE
cd -- "$1" || exit 2

worst=0

step() {
  printf '\n$ kcdsl %s\n' "$*"
  kcdsl "$@" < /dev/null
  code=$?
  case "$code" in
    0) return ;;
    1) echo "(exit code 1: a clause is violated)" >&2; worst=1 ;;
    3) echo "(exit code 3: a clause is inconclusive)" >&2; [ "$worst" -ne 0 ] || worst=3 ;;
    *) echo "(exit code $code: the demo stops here)" >&2; exit "$code" ;;
  esac
}

rm -rf out
mkdir out
printf '$ cd %s\n' "$1"
. ./demo.steps
printf '\n'
exit "$worst"
