"""Your own model, optimizer and loop under differential privacy: the digits inside the package, ε = 3.

python examples/own_loop.py     (some 10 seconds on 2 idle cores, about 93 % of the test images)
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

import sfumato

data = sfumato.load_data("digits")
train, test = data.train, data.test
first = [nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)]
second = [nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten()]
model = nn.Sequential(*first, *second, nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
plan = sfumato.Plan.calibrate(epsilon=3, delta=1e-5, num_examples=len(train), batch_size=256, num_steps=50)
sfumato.doctor.check_model(model, torch.randn(4, 1, 8, 8))  # no image may see another

source = sfumato.SecureSource()
folder = Path(mkdtemp())  # keep it: a resumed run goes on with its account
ledger = sfumato.Ledger.open(folder / "ledger.sqlite")
account = ledger.begin(
    fingerprint=train.fingerprint, name=train.name, image_ids=train.content_ids, plan=plan, folder=folder
)
for step, batch in enumerate(plan.sampler().batches(len(train), source)):  # Poisson, exactly as accounted
    images, labels = train.images[batch] / 255, train.labels[batch]
    total = sfumato.clipped_sum(model, images, labels, clip_norm=plan.clip_norm)
    noisy = plan.noise(total, source=source, step=step)
    account.spend(step + 1)  # durable before it is used
    for name, parameter in model.named_parameters():
        parameter.grad = noisy[name].to(parameter) / plan.batch_size  # expected size: the true one is private
    optimizer.step()
correct = model(test.images / 255).argmax(dim=1) == test.labels
epsilon = sfumato.privacy.round_up(plan.epsilon)  # never below what was spent
print(f"accuracy {correct.double().mean():.3f}, epsilon {epsilon} at delta {plan.delta}")
