"""The peak of the memory of a run, on one of several ranks."""

from burnish.benchmarks.experiments.memory import configured, measured_peak


def be_rank(recipe, fields):
    print("measured", measured_peak(*configured(recipe, fields)))
