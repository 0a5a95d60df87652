"""Runs whose figures README.md and docs/benchmarks.md quote; each is a command of a checkout."""
