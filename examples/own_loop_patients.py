"""A loop of your own that protects patients, and a release out of it: several images of each, ε = 3.

python examples/own_loop_patients.py     (some seconds on 2 idle cores)
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

import sfumato

train = sfumato.load_data("digits").train
images, labels = train.images / 255, train.labels
patient_of = torch.arange(len(train)) // 4  # whose image each one is, 0, 1, 2, …: four of each patient here
num_patients = int(patient_of.max()) + 1

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
settings = {"num_examples": num_patients, "batch_size": 128, "num_steps": 20}
plan = sfumato.Plan.calibrate(epsilon=3, delta=1e-4, unit="patient", **settings)
source, folder = sfumato.SecureSource(), Path(mkdtemp())
account = sfumato.Ledger.open(folder / "ledger.sqlite").begin(
    fingerprint=train.fingerprint, name=train.name, image_ids=train.content_ids, plan=plan, folder=folder
)
for step, patients in enumerate(plan.sampler().batches(num_patients, source)):  # patients, not images
    rows = torch.isin(patient_of, patients).nonzero()[:, 0]  # all images of the patients that were drawn
    _, unit_index = patient_of[rows].unique(return_inverse=True)
    total = sfumato.clipped_sum(  # a patient, with the mean over all their images, moves it by the clip norm
        model, images[rows], labels[rows], unit_index=unit_index, clip_norm=plan.clip_norm
    )
    noisy = plan.noise(total, source=source, step=step)
    account.spend(step + 1)  # durable before it is used
    for name, value in noisy.items():
        model.get_parameter(name).data -= 2.0 * value / plan.batch_size  # expected number of patients
release = sfumato.write_release(
    folder / "release", model=model, plan=plan, account=account, source=source, data="digits",
    classes=train.classes, image_size=8, channels=1, units_from="every four images are one patient's",
)  # fmt: skip
print(sfumato.load(release, model=model).privacy["statement"])
