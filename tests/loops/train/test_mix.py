"""The mixes that a configuration can name: hyper-parameters, their ranges, weightings."""

import math
import re

import jaxtyping
import pytest
import torch
from burnish.loops.recipes.kto import FEEDBACK_LOSSES
from burnish.loops.rl.policy_gradient import POLICY_LOSSES
from burnish.loops.train.losses import CHOSEN, tensor_parameters, tensors_needed, units_of
from burnish.loops.train.mix import PAIR_LOSSES, TOKEN_LOSSES, hyper_parameters, parse_losses
from burnish.objectives import value_loss

LOSSES = {**PAIR_LOSSES, **FEEDBACK_LOSSES, **POLICY_LOSSES, "value_loss": value_loss}


def test_a_mix_binds_shared_and_own_hyper_parameters():
    mix = {
        "dpo": {"coefficient": 0.8, "beta": 0.5},
        "ipo": 0.2,
        "nll": {"weighting": "length_normalized", "of": "rejected"},
    }
    terms = parse_losses(mix, {"beta": 0.1, "label_smoothing": 0.0}, PAIR_LOSSES, of=CHOSEN)
    assert terms["dpo"].function.keywords == {"beta": 0.5, "label_smoothing": 0.0}
    assert terms["ipo"].function.keywords == {"beta": 0.1}
    assert [terms[name].coefficient for name in mix] == [0.8, 0.2, 1.0]
    assert terms["nll"].of == 1
    assert tensors_needed(terms) == {"chosen", "rejected", "ref_chosen", "ref_rejected", "logp"}


@pytest.mark.parametrize(
    ("mix", "known", "message"),
    [
        ("dpp", PAIR_LOSSES, "loss: 'dpp' is not one of .* did you mean 'dpo'"),
        (
            {"dpo": {"gamma": 1.0}},
            PAIR_LOSSES,
            "loss: dpo has no 'gamma'; it has beta, label_smoothing",
        ),
        ("{dpo:1}", PAIR_LOSSES, "is no mapping: YAML wants a space after each colon"),
        ("simpo", PAIR_LOSSES, "loss: simpo needs gamma; give it with --loss_kwargs"),
        ({"dpo": {"beta": -1.0}}, PAIR_LOSSES, "dpo: beta must be > 0, got -1.0"),
        (
            {"kto": {"beta": 0.1, "desirable_weight": 0.0}},
            FEEDBACK_LOSSES,
            "kto: desirable_weight must be > 0",
        ),
        (
            {"nll": {"weighting": "fixed_length"}},
            TOKEN_LOSSES,
            "weighting fixed_length needs its length",
        ),
        (
            {"nll": {"weighting": "mean"}},
            TOKEN_LOSSES,
            "weighting='mean' does not fit; wanted token_mean",
        ),
        (
            {"dpo": {"weighting": "token_mean"}},
            PAIR_LOSSES,
            "dpo has one entry per pair, weighting='token_mean' does",
        ),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused_before_anything_is_loaded(mix, known, message):
    with pytest.raises(ValueError, match=message):
        parse_losses(mix, {"beta": 0.1}, known)


NUMBERS = (-math.inf, -1.0, -1e-9, 0.0, 1e-9, 0.3, 0.5, 0.7, 1.0, 1.3, 9.0, math.inf, math.nan)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if hyper_parameters(loss)])
def test_the_ranges_of_a_signature_are_those_that_the_objective_checks(name, request):
    # it would refuse a wrong `kind` before the objective does
    jaxtyping.config.update("jaxtyping_disable", True)
    request.addfinalizer(lambda: jaxtyping.config.update("jaxtyping_disable", False))
    function = LOSSES[name]
    yes = torch.tensor([True])
    one = {"sequence": torch.zeros(1).long(), "desirable": yes, "penalized": yes}
    tensors = [one.get(p.name, torch.tensor([-1.0])) for p in tensor_parameters(function)]
    tensors = [
        x[0] if not unit else x
        for x, unit in zip(tensors, units_of(function).values(), strict=True)
    ]

    def complaint(check):
        try:
            check()
        except ValueError as error:
            # 1 + clip_high = 1.2
            return re.sub(r" = .*?,", ",", str(error)).replace("clipped_surrogate", name)
        return None

    proper = {
        "beta": 0.1,
        "label_smoothing": 0.1,
        "gamma": 0.5,
        "alpha": 0.25,
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    proper |= {"penalty": 1.0}
    refused = 0
    for parameter in hyper_parameters(function):
        choices = ("k1", "k2", "k3", "k4") if parameter == "kind" else NUMBERS
        for value in choices:
            settings = {k: v for k, v in proper.items() if k in hyper_parameters(function)} | {
                parameter: value
            }
            early = complaint(lambda settings=settings: parse_losses({name: settings}, {}, LOSSES))
            assert early == complaint(lambda settings=settings: function(*tensors, **settings)), (
                parameter,
                value,
            )
            refused += early is not None
    assert refused >= len(hyper_parameters(function))  # every one has a range


@pytest.mark.parametrize("value", ["much", None])
def test_a_hyper_parameter_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=f"dpo: beta must be > 0, got {value}"):
        parse_losses({"dpo": {"beta": value}}, {}, PAIR_LOSSES)


def test_a_hyper_parameter_that_no_loss_has_is_refused():
    with pytest.raises(
        ValueError, match="no loss of this mix has 'tau'; they have beta, label_smoothing"
    ):
        parse_losses("dpo", {"beta": 0.1, "tau": 0.1}, PAIR_LOSSES, given=["tau"])


KNOWN = {**PAIR_LOSSES, **FEEDBACK_LOSSES, **POLICY_LOSSES}
HYPER = [
    (name, parameter)
    for name in KNOWN
    for parameter in hyper_parameters(KNOWN[name])
    if parameter != "ratio_cap"
]


def one_unit(parameter):
    """A tensor of one unit that any loss accepts."""
    dimensions, dtypes = parameter.annotation.dim_str, parameter.annotation.dtypes
    value = True if "bool" in dtypes else 0 if "int64" in dtypes else -1.0
    return torch.tensor([value] if dimensions else 0.0)


@pytest.mark.parametrize(("name", "parameter"), HYPER)
def test_the_range_of_a_hyper_parameter_is_that_of_the_objective_itself(name, parameter):
    """Refused before a model is loaded is exactly what the objective would refuse in the first
    step.
    """
    function, refused = KNOWN[name], []
    required = {p.name: 0.25 for p in hyper_parameters(function).values() if p.default is p.empty}
    for value in (
        ("k1", "k2", "k3") if parameter == "kind" else (-0.1, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    ):
        settings = {**required, parameter: value}
        try:
            function(*map(one_unit, tensor_parameters(function)), **settings)
            refused.append(False)
        except ValueError as error:
            assert parameter in str(error)
            refused.append(True)
        if refused[-1]:
            with pytest.raises(ValueError, match=f"^{name}: {parameter} must be"):
                parse_losses({name: settings}, {}, KNOWN)
        else:
            assert parse_losses({name: settings}, {}, KNOWN)
    assert not all(refused)
