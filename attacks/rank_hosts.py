"""Two hosts on one machine: network namespaces joined by a cable that is then cut in the middle of a run.

    sudo python attacks/rank_hosts.py

Each namespace has its own network, its own cache of features and its own torchrun; they share a disk and
nothing else. First a seeded run on both hosts is compared with one without torchrun. Then a run is begun on
both and the cable is cut: both must end by themselves in time, without being told, and the run goes on with
one host. Needs Linux, iproute2 and the right to make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

HOSTS = ("sfumato-a", "sfumato-b")
ADDRESSES = ("10.77.31.1", "10.77.31.2")
CABLES = ("cable-a", "cable-b")
TIMEOUT = 20  # seconds of silence after which a rank is given up
PATIENCE = 300  # for everything, on a busy machine
SETTINGS = ["training.batch_size=128", "training.evaluate_every=2", "performance.save_every_seconds=1"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def build() -> None:
    ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
    for host, cable, address in zip(HOSTS, CABLES, ADDRESSES, strict=True):
        ip("netns", "add", host)
        ip("link", "set", cable, "netns", host)
        ip("-n", host, "address", "add", f"{address}/24", "dev", cable)
        ip("-n", host, "link", "set", cable, "up")
        ip("-n", host, "link", "set", "lo", "up")


def remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)


def command(out: Path, *, steps: int, seed: bool, resume: bool = False) -> list[str]:
    if resume:
        return ["-m", "sfumato", "train", "--resume", "--out", str(out)]
    words = ["-m", "sfumato", "train", "--recipe", "demo/digits", "--out", str(out)]
    for each in (*SETTINGS, f"training.num_steps={steps}"):
        words += ["--set", each]
    return [*words, "--seed", "3"] if seed else words


def start(number: int, place: Path, words: list[str], port: int) -> subprocess.Popen[str]:
    """torchrun on one of the hosts."""
    environment = {
        **os.environ,
        "SFUMATO_LEDGER": str(place / "ledger.sqlite"),
        "SFUMATO_CACHE": str(place / f"cache{number}"),
        "SFUMATO_RANK_TIMEOUT": str(TIMEOUT),
        "GLOO_SOCKET_IFNAME": CABLES[number],
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"]
    launcher += [f"--master-addr={ADDRESSES[0]}", f"--master-port={port}"]
    with (place / f"host{number}.log").open("a") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", HOSTS[number], sys.executable, *launcher, *words],
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )


def finished(processes: list[subprocess.Popen[str]], place: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise SystemExit(f"FAILED: a host did not end\n{(place / 'host0.log').read_text()[-3000:]}") from None


def both_hosts(place: Path, words: list[str], port: int) -> list[subprocess.Popen[str]]:
    return [start(number, place, words, port) for number in range(2)]


def whole_run(place: Path) -> None:
    """The same weights on two hosts as on one."""
    ends = finished(both_hosts(place, command(place / "hosts", steps=6, seed=True), 29611), place)
    if ends != [0, 0]:
        raise SystemExit(f"FAILED: the hosts ended with {ends}\n{(place / 'host0.log').read_text()[-3000:]}")
    alone = {**os.environ, "SFUMATO_LEDGER": str(place / "ledger.sqlite"), "OMP_NUM_THREADS": "1"}
    words = command(place / "alone", steps=6, seed=True)
    subprocess.run([sys.executable, *words], env=alone, check=True, capture_output=True)
    one, other = (load_file(place / name / "release" / "model.safetensors") for name in ("hosts", "alone"))
    apart = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    if apart > 1e-5:
        raise SystemExit(f"FAILED: weights differ by {apart}")
    print(f"two hosts and one have the same weights, to {apart:.1g}")


def cut_run(place: Path) -> None:
    """The cable is cut: both hosts give up in time, and one of them goes on."""
    folder = place / "cut"
    processes = both_hosts(place, command(folder, steps=400, seed=False), 29612)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    ip("-n", HOSTS[1], "link", "set", CABLES[1], "down")
    began = time.monotonic()
    ends = finished(processes, place)
    took = time.monotonic() - began
    log = (place / "host0.log").read_text()
    if 0 in ends or "[rank-lost]" not in log:
        raise SystemExit(f"FAILED: the hosts ended with {ends}\n{log[-3000:]}")
    print(f"both hosts ended {took:.0f} s after the cable was cut; silence is endured for {TIMEOUT} s")
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    resumed = {**os.environ, "SFUMATO_LEDGER": str(place / "ledger.sqlite"), "OMP_NUM_THREADS": "1"}
    words = command(folder, steps=400, seed=False, resume=True)
    subprocess.run([sys.executable, *words], env=resumed, check=True, capture_output=True)
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if lines != list(range(1, 401)):
        raise SystemExit("FAILED: steps were lost or repeated")
    print(f"one host went on after step {steps} and finished all 400")


def main() -> None:
    remove()
    try:
        build()
        with tempfile.TemporaryDirectory() as place:
            whole_run(Path(place))
            cut_run(Path(place))
    finally:
        remove()


if __name__ == "__main__":
    main()
