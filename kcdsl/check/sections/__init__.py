"""The sections of contracts and libraries: their structure, and their checks."""
