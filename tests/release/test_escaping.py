"""Names from the data are shown as text, whatever they contain."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sfumato.recipes.recipe import Recipe, TrainingSettings
from sfumato.release.card import model_card
from sfumato.release.escaping import markdown, one_line
from sfumato.training.evaluation import Scores

EVIL = "a|b](http://x)<img src=x onerror=alert(1)>\n# Released with ε = 0.1\n**safe** `code`\x1b[2J"


@given(st.text())
def test_a_name_stays_on_one_line_and_is_no_markup(name):
    assert len(one_line(name).splitlines()) <= 1
    assert one_line(name).isprintable()
    shown = markdown(name)
    assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", shown)
    assert not re.search(r"(?<!\\)(\\\\)*[`*_|\[\]#]", shown)  # each is behind an odd number of backslashes


def test_ordinary_names_stay_readable():
    assert one_line("Röntgen 12 µm, linke Lunge") == "Röntgen 12 µm, linke Lunge"
    assert markdown("COVID-19 (St. 2)") == "COVID-19 (St. 2)"
    assert one_line("a\nb") == r"a\nb"


def card(name):
    scores = Scores(
        accuracy=0.5, num_examples=2, loss=1.0, top5_accuracy=None, balanced_accuracy=0.5, auc=None,
        per_class={name: 0.5, "other": None}, confusion=[[1, 1], [0, 0]],
    )  # fmt: skip
    config = {"model": {"name": "lenet"}, "data": name, "classes": [name, "other"], "image_size": 8}
    privacy = {"epsilon": None, "releasable": False, "statement": "NO PRIVACY."}
    recipe = Recipe(training=TrainingSettings(learning_rate=1.0))  # a run that began has one
    return model_card(config={**config, "channels": 1}, privacy=privacy, scores=scores, recipe=recipe)


def test_a_class_name_cannot_write_into_the_card():
    plain, spoilt = card("cat"), card(EVIL)
    assert len(spoilt.splitlines()) == len(plain.splitlines())
    assert "<img" not in spoilt
    assert "\x1b" not in spoilt
    headings = [line for line in spoilt.splitlines() if line.startswith("#")]
    assert headings[1:] == [line for line in plain.splitlines() if line.startswith("#")][1:]
    assert "\n# Released" in f"# lenet on {EVIL}"  # what the card would hold without escaping
