"""The paper's audit: table 8 is covered, a kill loses no more than a stack, and table 9 is honest."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sfumato.audit import paper_settings
from sfumato.audit.paper import PaperAudit
from sfumato.audit.paper_results import plot_audit, table_row, table_text
from sfumato.audit.paper_settings import PROBLEMS, Problem, Setting, all_settings, parse_setting
from sfumato.audit.paper_store import Header, Store
from sfumato.data import DataSplits, ImageSet
from sfumato.errors import ConfigError, RunError

SMALL = Problem(num_examples=12, batch_size=6, num_steps=(2,), models_at_once=2)
BLANK = Setting(canary="blank", learning_rate=0.5, clip_norm=1.0, num_steps=2)


def header(**changes) -> Header:
    return Header(**{"num_examples": 12, "views": 0, "seed": 1, "init_seed": 0, **changes})


@pytest.fixture
def splits(monkeypatch) -> DataSplits:
    """Twelve images instead of MNIST."""
    images = torch.randint(0, 256, (12, 1, 28, 28), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    data = ImageSet(images, torch.arange(12) % 10, tuple("0123456789"), name="digits")
    made = DataSplits(train=data, test=data)
    monkeypatch.setattr(paper_settings, "load_data", lambda name: made)
    return made


def audit_in(folder, *, workers: int = 1, **changes) -> PaperAudit:
    given = header(**changes)
    return PaperAudit(
        problem=SMALL,
        views=given["views"],
        store=Store.open(folder, given),
        seed=given["seed"],
        num_workers=workers,
    )


def gaussian_scores(shift: float, count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(shift, 1, count), random.normal(0, 1, count)


def test_phase_one_covers_all_of_table_8() -> None:
    for size, steps in ((100, {50, 100}), (60_000, {500, 1000})):
        settings = all_settings(PROBLEMS[size])
        assert len(set(settings)) == 5 * 3 * 3 * 2
        assert {setting.num_steps for setting in settings} == steps
    plan = paper_settings.setting_plan(PROBLEMS[100], 4.0, all_settings(PROBLEMS[100])[0])
    assert plan.delta == 0.01
    assert plan.sampling_rate == 0.64
    assert 3.9 < plan.epsilon <= 4.0


def test_an_interrupted_audit_goes_on_to_the_same_scores(splits, tmp_path, monkeypatch) -> None:
    whole = audit_in(tmp_path / "whole").phase_two(8.0, BLANK, 4)

    class Killed(BaseException):
        pass

    def kill(group: str, done: int, total: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        audit_in(tmp_path / "cut").phase_two(8.0, BLANK, 4, progress=kill)
    with open(tmp_path / "cut" / "scores.jsonl", "a") as file:
        file.write('{"group": "phase 2 | cut o')  # as kill -9 may leave it
    resumed = audit_in(tmp_path / "cut", workers=2).phase_two(8.0, BLANK, 4)
    for one, other in zip(whole, resumed, strict=True):
        assert len(one) == 4
        np.testing.assert_allclose(one, other, rtol=1e-5)
    other = audit_in(tmp_path / "other", seed=2).phase_two(8.0, BLANK, 4)
    assert not np.allclose(whole[0], other[0], rtol=1e-5)  # the comparison can tell


def test_scores_of_another_audit_are_not_mixed_in(tmp_path) -> None:
    Store.open(tmp_path, header())
    with pytest.raises(RunError, match="views"):
        Store.open(tmp_path, header(views=16))


def test_a_setting_is_a_row_of_table_8_or_refused() -> None:
    for size in PROBLEMS:
        assert [parse_setting(PROBLEMS[size], str(each)) for each in all_settings(PROBLEMS[size])] == (
            all_settings(PROBLEMS[size])
        )
    assert parse_setting(SMALL, "blank,0.5,1,2") == BLANK
    for text in ("blank,0.5,1,3", "blank,0.2,1,2", "8-as-9,0.5,1,2", "blank,0.5,1", ""):
        with pytest.raises(ConfigError, match="table 8"):
            parse_setting(SMALL, text)


def test_phase_one_shares_randomness_between_the_sides(splits, tmp_path) -> None:
    audit = audit_in(tmp_path)
    ranked = audit.phase_one(8.0, rounds=((90, 2), (3, 4)))
    assert len(ranked) == 3
    assert ranked == sorted(ranked, key=lambda each: -each[1])
    inner, outer = audit.scores(1, 8.0, ranked[0][0])
    assert len(inner) == len(outer) == 4
    fresh = audit.phase_two(8.0, ranked[0][0], 4)
    assert np.corrcoef(inner, outer)[0, 1] > 0.5
    assert not np.allclose(fresh[1], outer)  # phase II judges with models of its own


def test_table_9_is_a_bound_and_sees_a_violation() -> None:
    honest = table_row(PROBLEMS[100], 8.0, BLANK, gaussian_scores(1.9))
    assert 1.0 < honest.lower_bound < 8.0
    assert honest.ceiling > honest.lower_bound
    assert 1.0 < honest.lower_bound_of_all < 8.0
    assert 0.88 < honest.auc < 0.94
    assert 0.6 < honest.advantage < 0.7
    assert honest.advantage_upper_bound == pytest.approx(0.9993, abs=1e-3)
    assert honest.paper == (4.327, 0.91, 0.67)
    assert not honest.violates
    assert table_row(PROBLEMS[100], 1.0, BLANK, gaussian_scores(5.0)).violates  # scores no ε = 1 can have
    assert table_row(PROBLEMS[100], 1.0, BLANK, gaussian_scores(0.0)).lower_bound == 0.0
    assert table_row(PROBLEMS[100], 1.0, BLANK, gaussian_scores(1.0, 5)) is None


def test_rows_of_one_table_share_the_failures_of_its_verdict() -> None:
    scores = gaussian_scores(1.9)
    bound = table_row(PROBLEMS[100], 8.0, BLANK, scores).lower_bound
    promised = bound - 0.01  # one audit on its own is just sure enough
    alone, of_four = (table_row(PROBLEMS[100], promised, BLANK, scores, num_rows=rows) for rows in (1, 4))
    assert alone.lower_bound == of_four.lower_bound == bound
    assert (alone.violates, of_four.violates) == (True, False)


def test_the_threshold_is_not_chosen_on_the_models_that_judge_it() -> None:
    inner, outer = gaussian_scores(1.9)
    row = table_row(PROBLEMS[100], 8.0, BLANK, (inner, outer))
    judged = slice(800, None)
    inner[judged], outer[judged] = np.sort(inner[judged]), np.sort(outer[judged])
    again = table_row(PROBLEMS[100], 8.0, BLANK, (inner, outer))
    assert (again.lower_bound, again.advantage) == (row.lower_bound, row.advantage)
    inner[:800] -= 3  # another choice, another bound
    assert table_row(PROBLEMS[100], 8.0, BLANK, (inner, outer)).lower_bound != row.lower_bound


def test_the_table_and_the_plots_are_written(tmp_path) -> None:
    scores = gaussian_scores(1.9, 200)
    row = table_row(PROBLEMS[100], 8.0, BLANK, scores)
    assert "4.327" in table_text([row])
    plot_audit([row], {8.0: scores}, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_prints_json(splits, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(paper_settings.PROBLEMS, 100, SMALL)
    monkeypatch.setitem(paper_settings.PAPER_BOUNDS, 12, {})
    monkeypatch.setattr(PaperAudit.phase_one, "__kwdefaults__", {"rounds": ((90, 2),), "progress": None})
    from sfumato.cli import cli

    arguments = [
        "audit",
        "paper",
        "--epsilon",
        "8",
        "--epsilon",
        "4",
        "--models",
        "10",
        "--workers",
        "2",
        "--seed",
        "0",
        "--json",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["epsilon"] for row in found["table"]] == [8, 4]
    assert [row["num_models"] for row in found["table"]] == [10, 10]
    assert not any(row["violates"] for row in found["table"])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found["table"]

    monkeypatch.setattr(PaperAudit, "phase_one", None)  # a given setting needs none
    given = CliRunner().invoke(cli, [*arguments, "--setting", str(BLANK), "--out", str(tmp_path / "given")])
    assert given.exit_code == 0, given.output
    assert [row["setting"] for row in json.loads(given.stdout)["table"]] == 2 * [BLANK.as_dict()]
    assert CliRunner().invoke(cli, [*arguments, "--setting", str(BLANK), "--phase", "1"]).exit_code == 2
