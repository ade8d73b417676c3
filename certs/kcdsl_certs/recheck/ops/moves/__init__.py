"""Leaves, and operations that only move elements."""
