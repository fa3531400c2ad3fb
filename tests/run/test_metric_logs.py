"""Logs of others: public metrics only, read back from real event files and a real store."""

from __future__ import annotations

import json
import traceback

import pytest

from sfumato.cli import main
from sfumato.errors import ConfigError, RunError
from sfumato.release.run_folder import RunFolder
from sfumato.run.metric_logs import MirroredMetrics, MlflowLog, TensorBoardLog, open_logs
from sfumato.run.session import train
from small_runs import Watcher, small_recipe, small_splits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PRIVATE = {"loss", "median_norm", "clipped_share", "units_per_second"}


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def scalars(folder) -> dict[str, dict[int, float]]:
    """The event files, read by TensorBoard's own reader; the times are checked on the way."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    found = {}
    for name in reader.Tags()["scalars"]:
        events = reader.Scalars(name)
        assert all(event.wall_time == event.step for event in events)  # the clock tells the batch size
        assert len({event.step for event in events}) == len(events)
        found[name] = {event.step: event.value for event in events}
    return found


def lines(path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(tmp_path, name: str, **settings) -> tuple[RunFolder, object]:
    """A small run with a log, whose validation scores are private."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    folder = RunFolder(tmp_path / "run")
    mirror = MirroredMetrics(Watcher(), folder, open_logs([name], folder), **settings)
    recipe = small_recipe(data__holdout=0.2, training__evaluate_every=3)
    mirror.finish(train(recipe, out=folder.path, data=small_splits(val=30), observer=mirror))
    return folder, mirror.logs[0]


def test_event_files_hold_the_public_metrics_and_no_other(tmp_path):
    folder, _ = trained(tmp_path, "tensorboard")
    found = scalars(folder.path / "tensorboard")
    assert found.keys() == {"epsilon", "learning_rate"}
    for line in lines(folder.metrics):
        assert found["epsilon"][line["step"]] == pytest.approx(line["epsilon"], rel=1e-6)
    assert lines(folder.sensitive)[0].keys() >= PRIVATE  # the control: there was something to be sent
    assert any("val_accuracy" in line for line in lines(folder.sensitive))


def test_sensitive_metrics_are_sent_if_they_are_asked_for_and_are_called_so(tmp_path):
    folder, _ = trained(tmp_path, "tensorboard", sensitive=True)
    found = scalars(folder.path / "tensorboard")
    assert {f"sensitive/{name}" for name in PRIVATE} <= found.keys()
    assert {name for name in found if not name.startswith("sensitive/")} == {"epsilon", "learning_rate"}


def test_a_store_of_mlflow_holds_the_public_metrics_and_the_guarantee(tmp_path):
    folder, log = trained(tmp_path, "mlflow")
    run = log.client.get_run(log.run_id)
    assert run.data.metrics.keys() == {"epsilon", "learning_rate"}
    history = log.client.get_metric_history(log.run_id, "epsilon")
    assert {metric.step: metric.value for metric in history} == {
        line["step"]: line["epsilon"] for line in lines(folder.metrics)
    }
    assert {metric.timestamp for metric in history} == {1000 * metric.step for metric in history}
    assert (run.info.start_time, run.info.end_time) == (1, 8000)  # no clock: one second a step
    assert run.data.tags["releasable"] == "true"
    assert run.data.tags["statement"].startswith("The model was trained by 8 steps")
    assert run.data.params["num_steps"] == "8"
    assert str(tmp_path) not in json.dumps(run.data.params)


def test_a_resumed_run_repeats_and_loses_no_step(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    folder, recipe = RunFolder(tmp_path / "run"), small_recipe(training__evaluate_every=2)
    names = ["tensorboard", "mlflow"]
    mirror = MirroredMetrics(Watcher(crash_after=5), folder, open_logs(names, folder))
    with pytest.raises(RuntimeError, match="as if killed"):
        train(recipe, out=folder.path, data=small_splits(), observer=mirror)
    mirror = MirroredMetrics(Watcher(), folder, open_logs(names, folder))
    mirror.finish(train(recipe, out=folder.path, resume=True, data=small_splits(), observer=mirror))
    steps = list(range(1, 9))
    assert sorted(scalars(folder.path / "tensorboard")["epsilon"]) == steps
    log = mirror.logs[1]
    assert sorted(metric.step for metric in log.client.get_metric_history(log.run_id, "epsilon")) == steps
    assert "test_accuracy" in log.client.get_run(log.run_id).data.metrics  # test images are public


def test_a_store_far_away_is_told_only_when_the_run_has_ended(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    folder = RunFolder(tmp_path / "run")
    assert MlflowLog(folder).live
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path))
    assert MlflowLog(folder).live
    (tmp_path / "databricks").mkdir()  # a folder of that name changes nothing
    for far in ("https://example.invalid", "databricks", "databricks://profile"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", far)
        assert not MlflowLog(folder).live
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks-uc")  # holds models, no runs
    with pytest.raises(RunError, match="log-not-reached"):
        MlflowLog(folder)
    assert TensorBoardLog(folder).live


def test_a_store_far_away_hears_of_the_run_itself_only_when_it_has_ended(tmp_path):
    pytest.importorskip("mlflow")
    folder = RunFolder(tmp_path / "run")
    (log,) = open_logs(["mlflow"], folder)
    log.live = False  # as a store on another machine
    heard = []
    watcher = Watcher()
    watcher.stepped = lambda record, epsilon: heard.append(log.run_id)
    mirror = MirroredMetrics(watcher, folder, [log])
    mirror.finish(train(small_recipe(), out=folder.path, data=small_splits(), observer=mirror))
    assert set(heard) == {""}
    run = log.client.get_run(log.run_id)
    assert run.data.metrics["epsilon"] > 0
    assert run.data.params["num_steps"] == "8"


def test_an_error_of_the_store_is_told_without_the_password(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:s3cr@t@example.invalid/store")
    log = MlflowLog(RunFolder(tmp_path / "run"))
    with pytest.raises(RunError) as caught, log._answering():
        raise OSError(f"no route to {log.place}")
    told = caught.value
    assert told.code == "log-not-reached"
    assert told.what.count("https://example.invalid/store") == 2
    shown = "".join(traceback.format_exception(told))
    assert not any(word in shown for word in ("ann:", "s3cr"))


def test_an_unknown_or_missing_log_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        open_logs(["wandb"], folder)
    assert caught.value.code == "unknown-log"
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ConfigError) as caught:
        open_logs(["mlflow"], folder)
    assert caught.value.code == "log-not-installed"
    assert "sfumato[mlflow]" in caught.value.fix


def test_the_command_warns_of_sensitive_logs(image_folder, capsys, tmp_path):
    pytest.importorskip("tensorboard")
    small = (
        "--set",
        "model.options.width=4",
        "--set",
        "model.options.groups=2",
        "--set",
        "data.image_size=12",
    )
    words = ["train", str(image_folder(train=6)), "--epsilon", "8", "--delta", "0.01", *small]
    words += ["--set", "training.num_epochs=0.3", "--log", "tensorboard"]
    main([*words, "--out", "public"])
    assert "SENSITIVE" not in capsys.readouterr().err
    main([*words, "--out", "private", "--log-sensitive"])
    assert "SENSITIVE" in capsys.readouterr().err
    assert not any(name.startswith("sensitive") for name in scalars(tmp_path / "public/tensorboard"))
    assert any(name.startswith("sensitive") for name in scalars(tmp_path / "private/tensorboard"))
