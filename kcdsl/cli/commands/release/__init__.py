"""Commands about signed statements: check, sign, attach, promote, gate."""
