"""Runs whose figures README.md and benchmarks/README.md quote; each is a command of a checkout."""
