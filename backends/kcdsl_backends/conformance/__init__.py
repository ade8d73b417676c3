"""Goals with known answers, and random ones, that every backend for drift is asked."""
