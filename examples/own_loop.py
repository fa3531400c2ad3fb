"""Your own model, optimizer and loop, under differential privacy: the digits inside the package, at ε = 3.

python examples/own_loop.py     (some 10 seconds, about 94 % of the test images)
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

import sfumato
from sfumato.ledger import Ledger
from sfumato.randomness import SecureSource

data = sfumato.load_data("digits")
train, test = data.train, data.test
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
plan = sfumato.Plan.calibrate(epsilon=3.0, delta=1e-5, num_examples=len(train), batch_size=256, num_steps=60)
sfumato.doctor.check_model(model, train.images[:4] / 255)  # no image may see another

folder, source = (
    Path(mkdtemp()),
    SecureSource(),
)  # keep the folder: a run that resumes goes on with its account
account = Ledger.open(folder / "ledger.sqlite").begin(
    fingerprint=train.fingerprint, name=train.name, plan=plan, folder=folder
)
for step, batch in enumerate(plan.sampler().batches(len(train), source)):  # Poisson, exactly as accounted
    total = sfumato.clipped_sum(
        model, train.images[batch] / 255, train.labels[batch], clip_norm=plan.clip_norm
    )
    noisy = plan.noise(total, source=source, step=step)
    account.spend(step + 1)  # durable before it is used
    for name, parameter in model.named_parameters():
        parameter.grad = (
            noisy[name].to(parameter) / plan.batch_size
        )  # the expected size: the true one is private
    optimizer.step()
correct = model(test.images / 255).argmax(dim=1) == test.labels
print(f"accuracy {correct.double().mean():.3f}, epsilon {plan.epsilon:.3f} at delta {plan.delta}")
