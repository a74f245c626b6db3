"""The table of options is consistent."""

from shoal.domain.options import (
    CHAT_OPTIONS,
    COMPLETION_OPTIONS,
    OPTIONS,
    Feature,
    OptionType,
    needed_features,
    unknown_options,
)


def test_names_are_unique_in_each_kind_of_request() -> None:
    for options in (CHAT_OPTIONS, COMPLETION_OPTIONS):
        names = [each.name for each in options]

        assert len(set(names)) == len(names)


def test_option_belongs_to_some_kind_of_request() -> None:
    assert {*CHAT_OPTIONS, *COMPLETION_OPTIONS} == {*OPTIONS}


def test_numbers_have_ordered_bounds() -> None:
    bounded = {OptionType.NUMBER, OptionType.INTEGER, OptionType.NUMBERS}
    for option in OPTIONS:
        if option.type in bounded:
            assert option.minimum is not None, option.name
            assert option.maximum is not None, option.name
            assert option.minimum < option.maximum, option.name


def test_neutral_values_and_null_request_nothing() -> None:
    for option in OPTIONS:
        for value in (None, *option.neutral):
            assert not option.is_requested(value), option.name


def test_number_that_equals_a_neutral_flag_is_requested() -> None:
    logprobs = next(each for each in COMPLETION_OPTIONS if each.name == "logprobs")

    assert logprobs.is_requested(0)
    assert not logprobs.is_requested(False)


def test_requested_options_need_their_features() -> None:
    options = {"n": 2, "logit_bias": {"1": 1}, "stop": [], "top_p": 0.5, "unknown": 1}

    needs = {Feature.CHOICES, Feature.OPTIONS, Feature.FIELDS}
    assert needed_features(options) == needs
    assert unknown_options({**options, "metadata": 1}) == ["unknown"]
