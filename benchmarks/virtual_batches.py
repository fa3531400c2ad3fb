"""Peak memory and processor time of one private step at several batch sizes, each in a process of its own.

    python benchmarks/virtual_batches.py --model wrn_16_4 --views 4 --batch-sizes 1024,16384

Units are drawn by Poisson sampling from synthetic images, as many for every batch size; the sum
goes through the engine microbatch by microbatch, then the noise is added. The peak is the process's largest
resident set (``ru_maxrss``), read at the end and, to see growth, whenever the number of units has doubled.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import torch

from sfumato.data import ImageSet
from sfumato.gradients.memory import keep_freed_memory
from sfumato.models import create_model
from sfumato.noise import gaussian
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.sampling import PoissonSampling
from sfumato.training.gradient_sums import clipped_total
from sfumato.training.inputs import Microbatch, Units, Views


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def watched(parts: Iterable[Microbatch], stop_after: int | None) -> Iterator[Microbatch]:
    """The same microbatches; says the peak so far each time that the number of units has doubled."""
    done, next_report = 0, 64
    for part in parts:
        if stop_after is not None and done >= stop_after:
            return
        yield part
        done += part.num_units
        if done >= next_report:
            seconds = time.process_time()
            print(
                f"  {done} units: peak {peak_mebibytes():.1f} MiB, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            next_report *= 2


def measure(arguments: argparse.Namespace, batch_size: int) -> dict[str, float | int | str]:
    keep_freed_memory()
    shape = (arguments.num_examples, arguments.channels, arguments.image_size, arguments.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(images)) % 10
    data = ImageSet(images, labels, tuple("0123456789"), content_ids=torch.arange(len(images)))
    source = SeededSource(0)
    rate = batch_size / len(images)
    indices = PoissonSampling(sampling_rate=rate, num_steps=1).batch(len(images), source, 0)
    model = create_model(arguments.model, num_classes=10, in_channels=arguments.channels)
    views = Views(mean=(0.5,), std=(0.25,), count=arguments.views, padding=4, flip=True)
    parts = views.microbatches(
        Units.images(data),
        indices,
        max_rows=arguments.microbatch_size,
        randomness=UnitRandomness(source, purpose="augmentation", step=0),
        device=torch.device("cpu"),
    )
    before = peak_mebibytes()
    began = time.process_time()
    total = clipped_total(model, watched(parts, arguments.stop_after), clip_norm=1.0)
    seconds = time.process_time() - began
    noisy = {
        name: value + gaussian(value.numel(), stddev=1.0, source=source, step=0).view(value.shape)
        for name, value in total.gradients.items()
    }
    done = len(total.norms)
    assert done == len(indices) or arguments.stop_after
    assert all(value.isfinite().all() for value in noisy.values())
    return {
        "model": arguments.model,
        "views": arguments.views,
        "batch_size": batch_size,
        "units": len(indices),
        "units_done": done,
        "microbatch_size": arguments.microbatch_size,
        "num_examples": arguments.num_examples,
        "peak_mebibytes": round(peak_mebibytes(), 1),
        "mebibytes_before_the_step": round(before, 1),
        "processor_ms_per_image": round(1000 * seconds / done, 4),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="wrn_16_4")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--batch-sizes", default="1024,16384")
    parser.add_argument("--num-examples", type=int, default=50_000)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--microbatch-size", type=int, default=64)
    parser.add_argument("--stop-after", type=int, help="units of the batch, where the whole takes too long")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # this batch size, in this process
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps(measure(arguments, arguments.only)), flush=True)
        return
    for batch_size in arguments.batch_sizes.split(","):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", batch_size], check=True)


if __name__ == "__main__":
    main()
