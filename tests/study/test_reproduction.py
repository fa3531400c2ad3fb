"""Reproductions: conditions at the paper's ε, paired seeds, nothing run twice, and intervals that hold."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sfumato.cli.reproduce import command
from sfumato.cli.study_runs import sweep as sweep_command
from sfumato.errors import ConfigError, DataError, RunError
from sfumato.ledger.ledger import Ledger
from sfumato.models import create_model
from sfumato.privacy import statement
from sfumato.recipes.families import Family, list_families, load_family
from sfumato.recipes.recipe import with_settings
from sfumato.recipes.reference import ReferenceSettings
from sfumato.run import prepare
from sfumato.study import Condition, Reproduction, conditions_of, reproduction
from sfumato.study.comparison import paired_difference, pairs_of, shared_draws, summary
from sfumato.study.store import Result, Store, stored_settings
from sfumato.study.sweep import sweep, swept_setting
from sfumato.study.tables import table_text
from small_runs import Watcher, small_recipe, small_splits

# A table of two rows on images inside the package, in seconds.
DIGITS = [
    *("--set", "data.name=digits", "--set", "data.image_size=none", "--set", "data.holdout=0"),
    *(
        "--set",
        "training.num_steps=2",
        "--set",
        "training.num_epochs=none",
        "--set",
        "training.batch_size=64",
    ),
    *("--set", "model.options={width=4, groups=2}", "--set", "privacy.delta=1e-4"),
    *("--set", "performance.save_every_seconds=0"),
]
TABLE = ["scalenorm2022/table1", "--only", "*cifar10-*-eps7.42"]


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images in place of whatever a recipe names; without the doctor, and ε for single images only."""
    monkeypatch.setattr(reproduction, "load_splits", lambda settings: small_splits())
    monkeypatch.setattr(prepare, "examine", lambda *_, **__: ())
    monkeypatch.setattr(statement, "_groups", lambda *_: [])


def small_condition(name: str, row: str, **changes: object) -> Condition:
    reference = ReferenceSettings(title=row, value=50.0, further={"training_accuracy": 60.0})
    recipe = dataclasses.replace(small_recipe(training__num_steps=3, **changes), reference=reference)
    return Condition(recipe_name=f"paper/{name}", row=row, column="ε = 8", recipe=recipe)


def small_reproduction(out: Path, *, seeds: int = 2, **changes: object) -> Reproduction:
    family = Family(
        name="de2022/table0",
        title="a small table",
        claim="none",
        compare="first",
        statistic="median",
        members=(),
        mini_note="small",
        needs=None,
    )
    conditions = [
        small_condition("one", "one", **changes),
        small_condition("two", "two", training__ema_decay=0.0),
    ]
    return Reproduction(
        family=family, scale="mini", conditions=conditions, seeds=range(seeds), store=Store(out)
    )


@pytest.mark.parametrize("name", [name for name in list_families() if load_family(name).mini_note])
def test_the_small_form_has_the_papers_epsilon(name: str) -> None:
    family = load_family(name)
    for condition in conditions_of(family, "mini"):
        privacy, training = condition.recipe.privacy, condition.recipe.training
        if privacy.enabled:
            assert privacy.epsilon == condition.recipe.reference.epsilon
            # the noise follows from ε and the steps, or the steps from ε and the noise
            assert (privacy.noise_multiplier is None) == bool(training.num_steps or training.num_epochs)
    assert len(conditions_of(family, "full")) == len(family.members)


def test_a_row_of_the_small_form_is_called_what_it_is() -> None:
    def rows(name: str, scale: str) -> list[str]:
        return list(dict.fromkeys(condition.row for condition in conditions_of(load_family(name), scale)))

    assert rows("de2022/figure6", "full")[0] == "σ = 1.5"
    assert rows("de2022/figure6", "mini")[0] == "σ = 0.402 (theirs 1.5)"
    assert rows("de2022/table2", "mini")[2] == "+ Larger batch size (batch size of 256)"
    for name in list_families():
        if load_family(name).mini_note:
            places = [(c.row, c.column) for c in conditions_of(load_family(name), "mini")]
            assert len(set(places)) == len(places)


def test_a_recipe_of_two_tables_has_one_small_form_so_that_its_runs_serve_both() -> None:
    forms: dict[str, dict[str, object]] = {}
    for name in list_families():
        family = load_family(name)
        for condition in conditions_of(family, "mini") if family.mini_note else ():
            form = dataclasses.replace(condition.recipe, reference=None)
            forms.setdefault(condition.recipe_name, {})[name] = form
    shared = {recipe: found for recipe, found in forms.items() if len(found) > 1}
    assert set(shared["bao2024/scalenorm-order"]) == {"bao2024/scalenorm", "bao2024/methods"}
    for recipe, found in shared.items():
        assert len(set(map(repr, found.values()))) == 1, recipe


def test_every_small_net_takes_its_images() -> None:
    seen = set()
    for name in list_families():
        family = load_family(name)
        for condition in conditions_of(family, "mini") if family.mini_note else ():
            model = condition.recipe.model
            size = condition.recipe.data.image_size or 32
            key = (model.name, size, *sorted(model.options.items()))
            if key in seen:
                continue
            seen.add(key)
            with torch.device("meta"):  # shapes only
                net = create_model(model.name, num_classes=10, **model.options)
                assert net(torch.empty(2, 3, size, size)).shape == (2, 10)
                assert sum(value.numel() for value in net.parameters()) < 2e6, condition.recipe_name
    assert len(seen) > 20


def test_a_table_that_needs_what_cannot_be_had_has_no_small_form() -> None:
    with pytest.raises(ConfigError, match="JFT-300M") as caught:
        conditions_of(load_family("de2022/table7"), "mini")
    assert caught.value.code == "no-mini"
    with pytest.raises(ConfigError) as caught:
        conditions_of(load_family("de2022/table3"), "mini", only="de2022/nothing*")
    assert caught.value.code == "no-condition"


def test_another_table_may_say_something_else_of_the_same_training() -> None:
    best = {c.recipe_name: c for c in conditions_of(load_family("scalenorm2022/table4"), "full")}
    middle = {c.recipe_name: c for c in conditions_of(load_family("scalenorm2022/table1"), "full")}
    name = "scalenorm2022/cifar10-scale-resnet9-eps7.42"
    assert (best[name].published, middle[name].published) == ({"accuracy": 72.4}, {"accuracy": 71.8})
    tiny = "scalenorm2022/tiny-imagenet-resnet9-eps10"
    assert best[tiny].published == {"top5_accuracy": 41.2}
    assert middle[tiny].published == {"accuracy": 18.7, "top5_accuracy": 40.5}
    assert dataclasses.replace(best[name].recipe, reference=None) == dataclasses.replace(
        middle[name].recipe, reference=None
    )


def test_results_alone_are_enough_to_go_on_from_on_another_machine(
    tmp_path: Path,
) -> None:
    here = small_reproduction(tmp_path / "here", seeds=1)
    here.run()
    for place in (tmp_path / "here").rglob("result.json"):  # as they lie in a repository
        there = tmp_path / "there" / place.relative_to(tmp_path / "here")
        there.parent.mkdir(parents=True)
        there.write_bytes(place.read_bytes())
    begun: list[tuple[str, int]] = []
    more = small_reproduction(tmp_path / "there", seeds=2)
    more.run(on_start=lambda condition, seed: begun.append((condition.row, seed)))
    assert begun == [("one", 1), ("two", 1)]  # the first seed is not run again
    one = more.conditions[0]
    assert more.result(one, 0) == here.result(one, 0)


def kept(store: Store, condition: Condition, seed: int, accuracy: float) -> None:
    """A finished run in the store, as training would leave it."""
    result = Result(
        recipe=condition.recipe_name,
        scale="mini",
        seed=seed,
        data="cifar10",
        split="val",
        num_examples=100,
        scores={"accuracy": accuracy},
        epsilon=8.0,
        delta=1e-5,
        noise_multiplier=1.0,
        num_steps=3,
        seconds=1.0,
        hardware="",
        version="",
        settings=stored_settings(condition.recipe),
    )
    place = store.folder(condition, "mini", seed) / "result.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(result))


def test_a_sweep_is_the_means_of_its_conditions_in_order(tmp_path: Path) -> None:
    conditions = conditions_of(load_family("de2022/figure2"), "mini")
    for number, condition in enumerate(reversed(conditions)):
        for seed in (0, 1, 2):
            kept(Store(tmp_path), condition, seed, 0.5 - 0.1 * number + 0.01 * seed)
    done = CliRunner().invoke(
        sweep_command, ["de2022/figure2", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--json"]
    )
    document = json.loads(done.output)
    assert document["over"] == "training.batch_size"
    points = document["points"]
    assert [point["batch_size"] for point in points] == sorted(
        c.recipe.training.batch_size for c in conditions
    )
    assert [point["accuracy"] for point in points] == pytest.approx([31.0, 41.0, 51.0])
    half = 4.302653 * 1.0 / 3**0.5  # Student's 97.5 % point at 2 degrees of freedom, deviation 1
    assert points[0]["upper"] - points[0]["accuracy"] == pytest.approx(half, rel=1e-5)
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_settings_that_differ_at_one_place_make_curves_of_their_own(tmp_path: Path) -> None:
    family = load_family("de2022/figure7")
    conditions = conditions_of(family, "mini")
    for condition in conditions:
        kept(Store(tmp_path), condition, 0, 0.3)
    whole = Reproduction(family=family, scale="mini", conditions=conditions, seeds=[0], store=Store(tmp_path))
    assert swept_setting(conditions) == "training.learning_rate"
    points = sweep(whole, "training.learning_rate")
    assert {point.curve for point in points} == {"batch size 64, steps 60", "batch size 256, steps 40"}
    assert len(points) == len(conditions)
    assert points[0].lower is None  # one run has no interval


def test_a_sweep_over_nothing_or_of_nothing_is_refused(tmp_path: Path) -> None:
    conditions = conditions_of(load_family("de2022/figure2"), "mini")
    with pytest.raises(ConfigError, match=r"training\.batch_size") as caught:
        swept_setting(conditions, "privacy.clip_norm")
    assert caught.value.code == "nothing-swept"
    empty = Reproduction(
        family=load_family("de2022/figure2"),
        scale="mini",
        conditions=conditions,
        seeds=[],
        store=Store(tmp_path),
    )
    with pytest.raises(RunError) as failed:
        sweep(empty, "training.batch_size")
    assert failed.value.code == "nothing-finished"


def test_the_interval_of_paired_runs_holds_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held, clear = 0, 0
    for _ in range(2000):
        seeds = random.normal(70, 5, 5)  # seeds differ far more than the conditions
        first = dict(enumerate(seeds + 1 + random.normal(0, 1, 5)))
        second = dict(enumerate(seeds))
        found = paired_difference(first, second)
        held += found.lower <= 1 <= found.upper
        wrong = dict(zip(random.permutation(5).tolist(), second.values(), strict=True))  # seeds mixed up
        clear += paired_difference(first, wrong).is_clear
    assert 0.93 < held / 2000 < 0.97
    assert clear / 2000 < 0.2  # unpaired, the same runs show next to nothing


def test_few_runs_are_not_given_an_interval() -> None:
    assert paired_difference({0: 1.0}, {1: 2.0}) is None
    alone = paired_difference({0: 3.0, 2: 9.0}, {0: 1.0})
    assert (alone.mean, alone.lower, alone.num_pairs, alone.is_clear) == (2.0, None, 1, False)


def test_rows_are_compared_within_their_column() -> None:
    rows = [small_condition(name, name) for name in ("a", "b", "c")]
    names = lambda compare: [(one.row, other.row) for one, other in pairs_of(rows, compare)]  # noqa: E731
    assert names("previous") == [("b", "a"), ("c", "b")]
    assert names("first") == [("b", "a"), ("c", "a")]
    assert names("last") == [("a", "c"), ("b", "c")]
    assert names("none") == []
    apart = [dataclasses.replace(row, column=row.row) for row in rows]
    assert pairs_of(apart, "first") == []
    assert [summary([3.0, 1.0, 5.0, 2.0], kind) for kind in ("median", "mean", "best")] == [2.5, 2.75, 5.0]


def test_what_paired_runs_share_is_what_the_same_seed_draws_alike() -> None:
    one = small_recipe()
    assert shared_draws(one, with_settings(one, {"training.ema_decay": 0.5})) == (
        "batches",
        "first weights",
        "noise",
    )
    assert shared_draws(one, with_settings(one, {"model.name": "resnet9"})) == ("batches",)
    assert shared_draws(one, with_settings(one, {"training.batch_size": 8})) == ("first weights", "noise")


def test_all_conditions_are_trained_with_the_same_seeds_and_none_twice(tmp_path: Path) -> None:
    started = []
    table = small_reproduction(tmp_path)
    table.run(on_start=lambda condition, seed: started.append((condition.row, seed)))
    assert started == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    document = table.document()
    assert [cell["n"] for cell in document["cells"]] == [2, 2, 2, 2]
    assert {cell["score"] for cell in document["cells"]} == {"accuracy", "training_accuracy"}
    assert document["differences"][0]["shared"] == ("batches", "first weights", "noise")
    assert document["differences"][0]["n"] == 2
    for condition in table.conditions:
        assert [table.result(condition, seed)["settings"]["training"]["seed"] for seed in (0, 1)] == [0, 1]
    table.run(on_start=lambda *_: pytest.fail("a finished run was taken again"))
    more = small_reproduction(tmp_path, seeds=3)
    more.run(on_start=lambda condition, seed: started.append((condition.row, seed)))
    assert started[4:] == [("one", 2), ("two", 2)]
    assert not list(tmp_path.rglob("run"))
    with (tmp_path / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2
    assert json.loads((tmp_path / "de2022_table0-mini.json").read_text())["cells"][0]["n"] == 3


def test_a_run_that_was_broken_off_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, broken = (
        small_reproduction(tmp_path / "whole", seeds=1),
        small_reproduction(tmp_path / "broken", seeds=1),
    )
    whole.run()
    with pytest.raises(RuntimeError, match="as if killed"):
        broken.run(on_start=lambda *_: Watcher(crash_after=2))
    assert broken.result(broken.conditions[0], 0) is None
    resumed = Watcher()
    broken.run(on_start=lambda *_: resumed)
    # the rest of the first, whose second step had not been saved; then all of the second
    assert [record.step for record in resumed.records] == [2, 3, 1, 2, 3]
    scores = [[cell["values"] for cell in table.document()["cells"]] for table in (whole, broken)]
    assert scores[0] == scores[1]


def test_a_run_killed_before_its_result_was_written_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = small_reproduction(tmp_path, seeds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "keep", lambda *_: (_ for _ in ()).throw(RuntimeError("as if killed")))
        with pytest.raises(RuntimeError):
            table.run()
    watcher = Watcher()
    table.run(on_start=lambda condition, _: watcher if condition.row == "one" else None)
    assert watcher.records == []
    assert table.result(table.conditions[0], 0)["num_steps"] == 3


def test_runs_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    small_reproduction(tmp_path, seeds=1).run()
    with pytest.raises(RunError, match="learning_rate was") as caught:
        small_reproduction(tmp_path, seeds=1, training__learning_rate=0.5).run()
    assert caught.value.code == "other-settings"
    small_reproduction(tmp_path, seeds=1, performance__microbatch_size=4).run()  # cannot change a run


def test_runs_of_a_recipe_that_has_changed_are_replaced_if_asked(tmp_path: Path) -> None:
    small_reproduction(tmp_path, seeds=1).run()
    changed = dataclasses.replace(
        small_reproduction(tmp_path, seeds=1, training__learning_rate=0.5), replace=True
    )
    assert changed.result(changed.conditions[0], 0) is None
    changed.run()
    again = changed.result(changed.conditions[0], 0)
    assert again is not None
    assert again["settings"]["training"]["learning_rate"] == 0.5
    assert again["processor_seconds"] > 0


def test_equal_settings_under_another_name_are_one_training(tmp_path: Path) -> None:
    first = small_reproduction(tmp_path, seeds=1)
    first.run()
    renamed = dataclasses.replace(first.conditions[0], recipe_name="paper/three")
    other = dataclasses.replace(
        renamed,
        recipe_name="paper/four",
        recipe=with_settings(renamed.recipe, {"training.learning_rate": 0.3}),
    )
    second = dataclasses.replace(first, conditions=[renamed, other])
    trained = []
    second.run(on_start=lambda condition, seed: trained.append((condition.recipe_name, seed)))
    assert trained == [("paper/four", 0)]
    taken = second.result(renamed, 0)
    assert taken is not None
    assert (taken["recipe"], taken["taken_from"]) == ("paper/three", "paper/one")
    assert taken["scores"] == first.result(first.conditions[0], 0)["scores"]


def test_a_condition_whose_data_are_missing_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(settings: object) -> object:
        if settings.name == "absent":
            raise DataError("data-not-found", "absent is not here", fix="get it")
        return small_splits()

    monkeypatch.setattr(reproduction, "load_splits", load)
    skipped = []
    table = small_reproduction(tmp_path, data__name="absent")
    table.run(on_skip=lambda condition, why: skipped.append((condition.row, why)))
    assert skipped == [("one", "absent is not here")]
    assert [cell["n"] for cell in table.document()["cells"]] == [0, 0, 2, 2]
    assert "· (" not in table_text(table.document())


def test_the_table_is_in_the_papers_form_within_the_width(tmp_path: Path) -> None:
    table = small_reproduction(tmp_path)
    table.run()
    for width in (60, 100):
        text = table_text(table.document(), width=width)
        assert max(map(len, text.splitlines())) <= width
    assert "50.0 / " in text
    assert "one" in text
    assert "two − one" in text
    assert "theirs / ours (median, lowest to highest, n)" in text


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, arguments, env={"COLUMNS": "100"}, catch_exceptions=False)
    return done.exit_code, done.stdout


def test_the_list_covers_every_table_and_figure() -> None:
    text = call("--list")[1]
    assert all(name in text for name in list_families())
    rows = json.loads(call("--list", "--json")[1])
    assert [row["name"] for row in rows] == list(list_families())
    assert all(row["mini"] or row["needs"] for row in rows)
    assert max(map(len, text.splitlines())) <= 100


def test_where_the_data_lie_must_be_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cifar10, imagenette, tiny-imagenet") as caught:
        call("scalenorm2022/table1", "--dry-run", "--data", str(tmp_path))
    assert caught.value.code == "unclear-data"
    assert call("scalenorm2022/table1", "--dry-run", "--data", f"imagenette={tmp_path}")[0] == 0
    assert call("de2022/table2", "--dry-run", "--data", str(tmp_path))[0] == 0


def test_the_command_survives_kill_9_and_prints_the_table(tmp_path: Path) -> None:
    """On the digits inside the package: killed in the middle of a run, then called again."""
    start = [
        sys.executable,
        "-m",
        "sfumato",
        "reproduce",
        *TABLE,
        *DIGITS,
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    surroundings = {**os.environ, "SFUMATO_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
    with subprocess.Popen(
        start, env=surroundings, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        for line in process.stderr:
            if b"step 1/2" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL
    assert not list(tmp_path.glob("mini/*/*/result.json"))
    done = subprocess.run([*start, "--json"], env=surroundings, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert [cell["n"] for cell in document["cells"]] == [1, 1]
    assert document["differences"][0]["minus"] == "No ScaleNorm"
    assert document["differences"][0]["published"] == pytest.approx(0.4)
    with (tmp_path / "results.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2
    assert not list(tmp_path.rglob("run"))


def test_runs_on_a_folder_count_in_the_users_ledger_and_those_on_public_sets_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "users.sqlite"))

    def counted(name: str) -> int:
        small_reproduction(tmp_path / Path(name).name, seeds=1, data__name=name).run()
        with Ledger.open() as ledger:
            return sum(len(ledger.records(fingerprint)) for fingerprint in ledger.datasets())

    assert counted("digits") == 1  # the second condition's images are no known set
    assert counted(str(tmp_path / "scans")) == 3
