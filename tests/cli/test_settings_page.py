"""The page of all settings: it is the one that the classes give."""

from cli.settings_page import PAGE, page


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make settings`"
